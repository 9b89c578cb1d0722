"""Replay against a slow model of a ring: what is drawn, how often, and with which weight.

Everything that is stored says when it was stored and in which stream, so that a sequence that was
put together wrongly shows it.

Axis legend: `C` time steps in the ring, `T` of a rollout, `L` transitions of a sequence, `K` new
sequences of a stream, `B` streams, `N` drawn sequences.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import replay
from podracers import errors, parallel, types
from tests import streams

P = jax.sharding.PartitionSpec
COLUMNS = P(None, parallel.AXIS)
ALPHA, BETA = 0.7, 0.6


class Case(NamedTuple):
    """What is stored, and where."""

    steps: int  # T
    length: int  # L
    rollouts: int  # C / T
    num_streams: int = 4
    num_devices: int = 1
    recurrent: bool = False
    prioritized: bool = False
    drawn: int = 2048  # N
    spare: int = 0  # capacity beyond whole rollouts

    @property
    def capacity(self) -> int:
        """C"""
        return self.steps * self.rollouts

    @property
    def replay(self) -> replay.Replay:
        capacity = self.capacity * self.num_streams + self.spare
        exponents = (ALPHA, BETA) if self.prioritized else ()
        return replay.Replay(capacity, self.length, 8, *exponents)


CASES = [
    Case(steps=3, length=1, rollouts=5),
    Case(steps=4, length=5, rollouts=3, num_devices=2, spare=15),  # not a step to spare
    Case(steps=2, length=5, rollouts=7, num_streams=3),
    Case(steps=4, length=4, rollouts=2, recurrent=True),
    Case(steps=3, length=7, rollouts=6, num_devices=4, recurrent=True),
    Case(steps=1, length=3, rollouts=8, recurrent=True),
    Case(steps=3, length=4, rollouts=5, prioritized=True),
    Case(steps=4, length=6, rollouts=4, num_devices=4, recurrent=True, prioritized=True),
]


def _name(case: Case) -> str:
    kinds = ["states"] * case.recurrent + ["priorities"] * case.prioritized
    sizes = f"T={case.steps} L={case.length} C={case.capacity} D={case.num_devices}"
    return " ".join([sizes, *kinds])


def _rollout(case: Case, number: int) -> types.Rollout:
    """Returns the rollout of this number; times and streams are all that it holds."""
    time = (number * case.steps + np.arange(case.steps + 1))[:, None]
    time = np.broadcast_to(time, (case.steps + 1, case.num_streams))
    stream = np.broadcast_to(np.arange(case.num_streams), time.shape)
    timestep = types.TimeStep(
        observation={"frame": np.stack([time // 256, time % 256, stream], -1).astype(np.uint8)},
        reward=_mark(time, stream).astype(np.float32),
        discount=(time % 3 > 0).astype(np.float32),
        step_type=(time % 3).astype(np.int8),
    )
    mark = _mark(time, stream)
    return types.Rollout(
        timestep=timestep,
        action=mark[:-1].astype(np.int32),
        extras={"seen": mark[:-1].astype(np.float32)},
        actor_state=mark[0].astype(np.int32) if case.recurrent else (),
    )


def _mark(time, stream):
    return 100 * time + stream


def _first_priority(mark):
    """Returns the priority that a sequence starts with, from the mark of its first step."""
    return 0.1 + mark % 7


def _second_priority(mark):
    """Returns the priority that it has once it was drawn; some are not to be drawn any more."""
    return (0.5 + mark % 5) * (1.0 - 2.0 * (mark % 11 == 3))


def _value(priorities):
    """Returns what draws are in proportion to."""
    priorities = np.array(list(priorities))
    return np.where(priorities < 0.0, 0.0, np.abs(priorities) ** ALPHA)


class Outcome(NamedTuple):
    """What one rollout led to."""

    ready: jax.Array
    size: jax.Array
    new: jax.Array  # [K, B] which sequences are new, by the mark of their first step
    exists: jax.Array  # [K, B]
    recent: types.Rollout  # [L + K - 1, B, ...]
    sample: replay.Sample


@functools.cache
def _compiled(case: Case):
    """Returns `init(rollout)` and `step(memory, rollout, key)`, over the devices of a case."""
    buffer = case.replay
    # More than the ring holds: a batch of such a size would be refused.
    many = dataclasses.replace(buffer, batch_size=case.drawn)

    def step(memory, rollout, key):
        memory = buffer.add(memory, rollout)
        item, exists = buffer.new_items(memory, case.steps)
        latest = []

        def priority_fn(recent):
            latest.append((recent, recent.action[: item.index.shape[0]]))
            return _first_priority(latest[0][1])

        memory = buffer.prioritize_new(memory, rollout, priority_fn)
        recent, new = latest[0] if case.prioritized else (rollout, rollout.action)
        sample = many.sample(memory, key)
        ready = buffer.ready(memory)
        if case.prioritized:
            second = _second_priority(sample.rollout.action[0])
            written = buffer.update_priorities(memory, sample.item, second)
            memory = jax.tree.map(lambda x, y: jnp.where(ready, x, y), written, memory)
        sample = sample._replace(key=jax.random.key_data(sample.key))
        return memory, Outcome(ready, buffer.size(memory), new, exists, recent, sample)

    rollout = types.Rollout(COLUMNS, COLUMNS, COLUMNS, P(parallel.AXIS))
    memory = rows = P(parallel.AXIS)
    sample = replay.Sample(rollout, rows, rows, rows)
    outcome = Outcome(P(), P(), COLUMNS, COLUMNS, rollout, sample)
    mesh = parallel.make_mesh(jax.devices()[: case.num_devices])
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    init = mapped(buffer.init, in_specs=(rollout,), out_specs=memory)
    step = mapped(step, in_specs=(memory, rollout, P()), out_specs=(memory, outcome))
    return jax.jit(init), jax.jit(step, donate_argnums=0)


class Model:
    """A ring in plain Python, which looks for what may be drawn step by step."""

    def __init__(self, case: Case):
        self.case = case
        self.slots = [None] * case.capacity
        self.head = 0
        self.priorities: dict[int, float] = {}

    def add(self) -> list[int]:
        """Writes a rollout, and returns the starts that were not there before."""
        before = set(self.starts())
        for time in range(self.head, self.head + self.case.steps + 1):
            self.slots[time % self.case.capacity] = time
        self.head += self.case.steps
        starts = self.starts()
        kept = set(self.marks())
        self.priorities = {m: p for m, p in self.priorities.items() if m in kept}
        return [start for start in starts if start not in before]

    def starts(self) -> list[int]:
        """Returns the times at which whole sequences begin, of which nothing was overwritten."""
        period = self.case.steps if self.case.recurrent else 1
        return [
            start
            for start in range(0, self.head + 1, period)
            if all(
                self.slots[time % self.case.capacity] == time
                for time in range(start, start + self.case.length + 1)
            )
        ]

    def marks(self) -> list[int]:
        """Returns the marks of all sequences that may be drawn."""
        return [_mark(t, b) for t in self.starts() for b in range(self.case.num_streams)]


class Moment(NamedTuple):
    """A rollout after which something can be drawn."""

    outcome: Outcome
    marks: list[int]  # what may be drawn
    new: list[int]  # which starts are new
    priorities: dict[int, float]  # at the draw
    total: Any  # of the priorities after it, by the tree and by the model


@functools.cache
def _history(case: Case) -> list[Moment]:
    """Stores rollouts until the ring has gone round three times, and draws after each."""
    init, step = _compiled(case)
    memory = init(_rollout(case, 0))
    model, moments = Model(case), []
    for number in range(3 * case.rollouts + 1):
        key = jax.random.fold_in(jax.random.key(0), number)
        memory, outcome = step(memory, _rollout(case, number), key)
        outcome = jax.device_get(outcome)
        new = model.add()
        for mark in (_mark(t, b) for t in new for b in range(case.num_streams)):
            model.priorities[mark] = _first_priority(mark)
        assert outcome.ready == bool(model.marks())
        assert outcome.size == min(model.head, case.capacity - 1)
        if not outcome.ready:
            assert not outcome.exists.any()
            continue
        priorities = dict(model.priorities)
        total = None
        if case.prioritized:
            for mark in outcome.sample.rollout.action[0]:
                model.priorities[int(mark)] = _second_priority(int(mark))
            expected = np.sum(_value(model.priorities.values()))
            total = np.sum(memory.priorities.total()), expected
        moments.append(Moment(outcome, model.marks(), new, priorities, total))
    assert len(moments) > 2 * case.rollouts
    return moments


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_sequences_are_whole_and_of_one_stream(case):
    """No time is missing or repeated: none straddles the place where the ring is written."""
    for outcome, *_ in _history(case):
        rollout = outcome.sample.rollout
        frame = rollout.timestep.observation["frame"]
        assert frame.dtype == np.uint8
        high, low, stream = np.moveaxis(frame.astype(int), -1, 0)
        time = 256 * high + low  # [L + 1, N]
        assert time.shape == (case.length + 1, case.drawn)
        np.testing.assert_array_equal(time, time[0] + np.arange(case.length + 1)[:, None])
        np.testing.assert_array_equal(stream, np.broadcast_to(stream[0], stream.shape))
        mark = _mark(time, stream)
        np.testing.assert_array_equal(rollout.timestep.reward, mark)
        np.testing.assert_array_equal(rollout.timestep.step_type, time % 3)
        np.testing.assert_array_equal(rollout.timestep.discount, time % 3 > 0)
        np.testing.assert_array_equal(rollout.action, mark[:-1])
        np.testing.assert_array_equal(rollout.extras["seen"], mark[:-1])
        if case.recurrent:
            np.testing.assert_array_equal(rollout.actor_state, mark[0])


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_every_whole_sequence_is_drawn_and_nothing_else(case):
    for outcome, marks, _, priorities, _ in _history(case):
        counts = np.bincount(outcome.sample.rollout.action[0], minlength=max(marks) + 1)
        assert counts.sum() == case.drawn
        probability = np.full(len(marks), 1.0 / len(marks))
        if case.prioritized:
            probability = _probability(case, marks, priorities)
        alive = np.array(marks)[probability > 0.0]
        assert set(np.flatnonzero(counts)) == set(alive)
        expected = case.drawn * probability[probability > 0.0]
        chi_square = np.sum((counts[alive] - expected) ** 2 / expected)
        freedom = max(len(alive) - 1, 1)
        # Each shard gives an equal part, which only makes the counts more even.
        assert chi_square < freedom + 5.0 * np.sqrt(2.0 * freedom)


def _probability(case: Case, marks, priorities):
    """Returns how likely sequences are: in proportion within a shard, shards equally."""
    shards = np.gcd.reduce([case.num_streams, case.drawn, 8])
    value = _value(priorities[mark] for mark in marks)
    shard = np.array(marks) % 100 // (case.num_streams // shards)
    return value / np.bincount(shard, value)[shard] / shards


@pytest.mark.parametrize("case", [case for case in CASES if case.prioritized], ids=_name)
def test_new_sequences_are_those_that_the_latest_rollout_completed(case):
    for outcome, _, new, _, _ in _history(case):
        exists = outcome.exists
        np.testing.assert_array_equal(exists, np.broadcast_to(exists[:, :1], exists.shape))
        expected = [[_mark(t, b) for b in range(case.num_streams)] for t in new]
        np.testing.assert_array_equal(outcome.new[exists[:, 0]], expected)
        # The piece that they all lie in ends with the latest whole one.
        reward = outcome.recent.timestep.reward[-1]
        newest = new[-1] + case.length
        np.testing.assert_array_equal(reward, _mark(newest, np.arange(case.num_streams)))
        if case.recurrent:
            np.testing.assert_array_equal(outcome.recent.actor_state, expected[-1])


@pytest.mark.parametrize("case", [case for case in CASES if case.prioritized], ids=_name)
def test_importance_weights_are_exact(case):
    for outcome, marks, _, priorities, _ in _history(case):
        probability = _probability(case, marks, priorities)
        alive = probability > 0.0
        weight = (len(marks) * probability[alive]) ** -BETA
        weight = dict(zip(np.array(marks)[alive], weight))
        expected = np.array([weight[mark] for mark in outcome.sample.rollout.action[0]])
        np.testing.assert_allclose(outcome.sample.weight, expected / expected.max(), rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.prioritized], ids=_name)
def test_priorities_of_what_was_overwritten_are_gone(case):
    for moment in _history(case):
        actual, expected = moment.total
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_without_priorities_all_weights_are_one():
    for moment in _history(CASES[0]):
        np.testing.assert_array_equal(moment.outcome.sample.weight, 1.0)


@pytest.mark.parametrize(("prioritized", "counts"), [(False, [4]), (True, [2, 4])])
def test_any_number_of_devices_draws_the_same(prioritized, counts):
    case = Case(3, 4, 5, num_streams=8, prioritized=prioritized, drawn=64)
    expected = _history(case)
    for num_devices in counts:
        for ours, theirs in zip(_history(case._replace(num_devices=num_devices)), expected):
            sample, other = ours.outcome.sample, theirs.outcome.sample
            streams.assert_same(sample.rollout, other.rollout)
            streams.assert_same(sample.key, other.key)
            np.testing.assert_allclose(sample.weight, other.weight, rtol=1e-6)
            assert len(np.unique(sample.key, axis=0)) == 64


@pytest.mark.parametrize("earlier", [1, 4])  # the second rollout of the ring, and again the first
def test_episodes_that_a_resumed_run_left_behind_are_truncated(earlier):
    """Simulators begin anew there: no transition leads from the old episode into the new one."""
    case = Case(steps=3, length=1, rollouts=4)
    rollout = _rollout(case, 1)
    step_type = np.full_like(rollout.timestep.step_type, types.MID)
    step_type[-1, 1::2] = types.LAST  # unlike the time step before it
    begun = step_type.copy()
    begun[0, ::2] = types.FIRST  # in every second stream
    begun[0, 1::2] = types.LAST

    def run():
        memory = buffer.init(rollout)
        for each in (*[step_type] * earlier, begun):
            timestep = rollout.timestep._replace(step_type=jnp.asarray(each))
            memory = buffer.add(memory, rollout._replace(timestep=timestep))
        rows = memory.ring.timestep
        stream, time = jnp.indices((case.num_streams, 2 * case.steps))
        slot = (time + (earlier - 1) * case.steps) % (case.rollouts * case.steps)
        return rows.step_type.read(stream, slot), rows.discount.read(stream, slot)

    buffer = case.replay
    mesh = parallel.make_mesh(jax.devices()[:1])
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    stored, discount = jax.jit(mapped)()
    expected = np.full(stored.shape, types.MID)
    expected[::2, case.steps - 1 : case.steps + 1] = types.LAST, types.FIRST
    expected[1::2, case.steps] = types.LAST
    np.testing.assert_array_equal(stored, expected)
    kept = np.moveaxis(rollout.timestep.discount[:-1], 0, 1)
    np.testing.assert_array_equal(discount, np.concatenate([kept, kept], 1))


def test_what_has_no_priority_yet_gets_the_highest_so_far():
    case = Case(steps=2, length=2, rollouts=8, num_streams=1, prioritized=True, drawn=8)
    buffer = case.replay

    def run():
        memory = buffer.init(_rollout(case, 0))
        for number in range(2):
            memory = buffer.add(memory, _rollout(case, number))
        first = memory.priorities.levels[0][0, :8]
        item = replay.Item(jnp.zeros(2, jnp.int32), jnp.array([0, 1]))
        memory = buffer.update_priorities(memory, item, jnp.array([0.0, 1e9]))
        memory = buffer.add(memory, _rollout(case, 2))
        return first, memory.priorities.levels[0][0, :8]

    mesh = parallel.make_mesh(jax.devices()[:1])
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    first, then = jax.jit(mapped)()
    np.testing.assert_array_equal(first, [1, 1, 1, 0, 0, 0, 0, 0])
    # Nothing is forgotten for good, and nothing is all that there is.
    least, most = 1e-6**ALPHA, 1e6**ALPHA
    np.testing.assert_allclose(then, [least, most, 1, most, most, 0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 31}, "needs at least 32"),
        ({"capacity": 4000, "batch_size": 1001}, "smaller than one batch: 1001 sequences of 4"),
        ({"capacity": 4000, "batch_size": 6}, "batch_size = 6 does not divide over 4 learner"),
        ({"capacity": 0}, "needs at least 32"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(options, message):
    options = {"sequence_length": 4, "batch_size": 8} | options
    buffer = replay.Replay(**options)
    case = Case(steps=4, length=4, rollouts=2)
    mesh = parallel.make_mesh(jax.devices()[:4])
    mapped = jax.shard_map(
        buffer.init,
        mesh=mesh,
        in_specs=(types.Rollout(COLUMNS, COLUMNS, COLUMNS, P()),),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(errors.UserError, match=message):
        jax.eval_shape(mapped, _rollout(case, 0))
    with pytest.raises(AttributeError):
        buffer.capacity = 1


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_donated_ring_is_written_in_place(prioritized):
    """The compiled program has no room for a second one."""
    case = Case(8, 4, 64, num_streams=16, prioritized=prioritized, drawn=32)
    buffer = case.replay

    def template(number):
        rollout = _rollout(case, number)
        frame = jnp.zeros((case.steps + 1, case.num_streams, 32, 32), jnp.uint8)
        return rollout._replace(timestep=rollout.timestep._replace(observation=frame))

    def step(memory, rollout, key):
        memory = buffer.add(memory, rollout)
        sample = buffer.sample(memory, key)
        total = jnp.sum(sample.rollout.timestep.observation, dtype=jnp.int32)
        if prioritized:
            memory = buffer.update_priorities(memory, sample.item, sample.weight)
        return memory, total

    mesh = parallel.make_mesh(jax.devices()[:1])
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    memory = jax.eval_shape(mapped(buffer.init, in_specs=(P(),)), template(0))
    size = parallel.num_bytes(memory.ring)
    assert size > 8 * 2**20
    jitted = jax.jit(mapped(step, in_specs=(P(), P(), P())), donate_argnums=0)
    analysis = jitted.lower(memory, template(0), jax.random.key(0)).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= size
    assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < size / 16
    assert analysis.temp_size_in_bytes < size / 4
