"""Replay against a slow model of a ring: the draws, their frequencies and their weights.

Everything that is stored encodes its time and stream, so wrong places are visible.

Axis legend: `C` time steps in the ring, `T` of a rollout, `L` transitions of a sequence, `B`
streams, `N` drawn sequences.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.replay import replay, ring_buffer
from podracers import errors, parallel, types
from tests import contract, streams
from tests.agents import experience

P = jax.sharding.PartitionSpec
COLUMNS = P(None, parallel.AXIS)
ALPHA, BETA = 0.7, 0.6
# Scalars, odd images, whole lanes, images that are padded, nothing at all.
SHAPES = ((), (5, 7), (128,), (37, 31), (0,))


class Case(NamedTuple):
    steps: int  # T
    length: int  # L
    rollouts: int  # C / T
    num_streams: int = 4
    num_devices: int = 1
    recurrent: bool = False
    prioritized: bool = False
    drawn: int = 2048  # N
    spare: int = 0  # capacity beyond whole rollouts
    shapes: tuple[tuple[int, ...], ...] = ()  # of the observation and of the actor state
    platform: str = "cpu"

    @property
    def capacity(self) -> int:
        """C"""
        return self.steps * self.rollouts

    @property
    def replay(self) -> replay.Replay:
        capacity = self.capacity * self.num_streams + self.spare
        exponent = ALPHA if self.prioritized else 0.0
        return replay.Replay(capacity, self.length, self.drawn, exponent)


CASES = {
    "short": Case(steps=3, length=1, rollouts=5),
    "nothing_to_spare": Case(steps=4, length=5, rollouts=3, num_devices=2, spare=15),
    "three_streams": Case(steps=2, length=5, rollouts=7, num_streams=3),
    "states": Case(steps=3, length=7, rollouts=6, num_devices=4, recurrent=True),
    "priorities": Case(steps=3, length=4, rollouts=5, prioritized=True),
    "states_priorities": Case(4, 6, 4, num_devices=4, recurrent=True, prioritized=True),
    "shapes": Case(3, 7, 5, shapes=SHAPES, drawn=512),
    "shapes_on_a_tpu": Case(3, 7, 5, shapes=SHAPES, drawn=512, recurrent=True, platform="tpu"),
}


def _mark(time, stream):
    return 100 * time + stream


def _rollout(case: Case, number: int) -> types.Rollout:
    time = number * case.steps + np.arange(case.steps + 1)[:, None]
    return _written(case, *np.broadcast_arrays(time, np.arange(case.num_streams)))


def _written(case: Case, time: np.ndarray, stream: np.ndarray) -> types.Rollout:
    """Returns the rollout of time steps `[T + 1, ...]`, which holds only times and streams."""
    mark = _mark(time, stream)

    def elements(shape):
        place = 13 * np.arange(math.prod(shape)).reshape(shape)
        return (101 * mark.reshape(*mark.shape, *[1] * len(shape)) + place) % 251

    shapes = {str(shape): elements(shape) for shape in case.shapes}
    observation = {"frame": np.stack([time // 256, time % 256, stream], -1), **shapes}
    timestep = types.TimeStep(
        observation=jax.tree.map(lambda x: x.astype(np.uint8), observation),
        reward=mark.astype(np.float32),
        discount=(time % 3 > 0).astype(np.float32),
        step_type=(time % 3).astype(np.int8),
    )
    states = {"mark": mark, **shapes} if case.recurrent else ()
    states = jax.tree.map(lambda x: x[0].astype(np.float32), states)
    extras = {"seen": mark[:-1].astype(np.float32)}
    return types.Rollout(timestep, mark[:-1].astype(np.int32), extras, states)


def _first_priority(mark):
    """Returns the initial priority of a sequence, from the mark of its first step."""
    return 0.1 + mark % 7


def _second_priority(mark):
    """Returns its priority after a draw; negative for some, which are not drawn again."""
    return (0.5 + mark % 5) * (1.0 - 2.0 * (mark % 11 == 3))


def _value(priorities):
    """Returns the numbers that draws are proportional to."""
    priorities = np.array(list(priorities))
    return np.where(priorities < 0.0, 0.0, np.abs(priorities) ** ALPHA)


class Outcome(NamedTuple):
    ready: jax.Array
    size: jax.Array
    sample: replay.Sample
    total: Any  # of the priorities, [S]; () for uniform draws


@functools.cache
def _compiled(case: Case):
    """Returns `init(rollout)` and `step(memory, rollout, key)`, over the devices of a case."""
    buffer = case.replay

    def priority_fn(recent):
        arrived = recent.timestep.reward[case.length :]  # at the ends of the sequences
        first = recent.action[: len(arrived)]
        return _first_priority(first) + abs(arrived - _mark(case.length, first))

    def step(memory, rollout, key):
        memory = buffer.add(memory, rollout, priority_fn)
        sample, ready = buffer.sample(memory, key, BETA), buffer.ready(memory)
        second = _second_priority(sample.rollout.action[0])
        written = buffer.update_priorities(memory, sample.item, second)
        memory = jax.tree.map(lambda x, y: jnp.where(ready, x, y), written, memory)
        sample = sample._replace(key=jax.random.key_data(sample.key))
        total = memory.priorities.total() if case.prioritized else ()
        return memory, Outcome(ready, buffer.size(memory), sample, total)

    rollout = types.Rollout(COLUMNS, COLUMNS, COLUMNS, P(parallel.AXIS))
    memory = rows = P(parallel.AXIS)
    outcome = Outcome(P(), P(), replay.Sample(rollout, *[rows] * 3), rows)
    init = experience.on_devices(buffer.init, case.num_devices, (rollout,), memory)
    step = experience.on_devices(step, case.num_devices, (memory, rollout, P()), (memory, outcome))
    return jax.jit(init), jax.jit(step, donate_argnums=0)


def _probabilities(case: Case, priorities: dict[int, float]) -> dict[int, float]:
    """Returns those of all marks: proportional within a shard, and shards are equal."""
    marks = np.array(list(priorities))
    if not case.prioritized:
        return dict.fromkeys(priorities, 1.0 / len(marks))
    shards = np.gcd.reduce([case.num_streams, case.drawn, 8])
    value = _value(priorities.values())
    shard = marks % 100 // (case.num_streams // shards)
    portions = value / np.bincount(shard, value)[shard] / shards
    return {m: p for m, p in zip(marks.tolist(), portions) if p > 0.0}


@functools.cache
def _outcomes(case: Case) -> list[Outcome]:
    """Stores rollouts for three rounds of the ring, and draws after each."""
    init, step = _compiled(case)
    memory, outcomes = init(_rollout(case, 0)), []
    with mock.patch.object(parallel, "platform", lambda: case.platform):
        for number in range(3 * case.rollouts + 1):
            key = jax.random.fold_in(jax.random.key(0), number)
            memory, outcome = step(memory, _rollout(case, number), key)
            outcomes.append(jax.device_get(outcome))
    return outcomes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * x.startswith(("nothing", "three", "shapes_on")))
        for x in CASES
    ],
)
def test_draws_are_those_of_a_slow_model(name):
    """Whole sequences of one stream, as often as they should be, with exact weights."""
    case = CASES[name]
    period = case.steps if case.recurrent else 1
    head, moments, priorities = 0, 0, {}  # the priorities of all sequences, by mark
    for outcome in _outcomes(case):
        head += case.steps
        stored = range(max(head + 1 - case.capacity, 0), head + 1)
        starts = [t for t in stored if t % period == 0 and t + case.length in stored]
        marks = [_mark(t, b) for t in starts for b in range(case.num_streams)]
        priorities = {m: priorities.get(m, _first_priority(m)) for m in marks}
        assert outcome.ready == bool(priorities)
        assert outcome.size == min(head, case.capacity - 1)
        if not outcome.ready:
            continue
        moments += 1
        rollout = outcome.sample.rollout
        high, low, stream = rollout.timestep.observation["frame"][0].astype(int).T
        time = 256 * high + low + np.arange(case.length + 1)[:, None]
        streams.assert_same(rollout, _written(case, *np.broadcast_arrays(time, stream)))
        assert len(np.unique(outcome.sample.key, axis=0)) == case.drawn
        marks = rollout.action[0]
        probabilities = _probabilities(case, priorities)
        alive = np.array(list(probabilities))
        counts = np.bincount(marks, minlength=alive.max() + 1)
        assert set(np.flatnonzero(counts)) == set(alive)
        expected = case.drawn * np.array(list(probabilities.values()))
        freedom = max(len(alive) - 1, 1)
        # Each shard gives an equal part, which only makes the counts more even.
        chi_square = np.sum((counts[alive] - expected) ** 2 / expected)
        assert chi_square < freedom + 5.0 * np.sqrt(2.0 * freedom)
        if not case.prioritized:
            np.testing.assert_array_equal(outcome.sample.weight, 1.0)
            continue
        size = len(priorities)
        weight = np.array([(size * probabilities[mark]) ** -BETA for mark in marks])
        largest = (size * min(probabilities.values())) ** -BETA
        np.testing.assert_allclose(outcome.sample.weight, weight / largest, rtol=1e-5)
        priorities |= {int(mark): _second_priority(int(mark)) for mark in marks}
        expected = np.sum(_value(priorities.values()))
        np.testing.assert_allclose(np.sum(outcome.total), expected, rtol=1e-5)
    assert moments > 2 * case.rollouts


@pytest.mark.parametrize(
    ("capacity", "shape", "axes"),
    [
        (15, (3,), (45,)),
        (15, (2, 64), (15, 128)),
        (15, (37, 31), (15, 1152)),
        (2**26, (31,), (31 * 2**26,)),
        (2**26, (33,), (2**26, 128)),  # end to end, places would not fit into int32
    ],
)
def test_only_elements_of_nearly_whole_lanes_are_padded(capacity, shape, axes):
    rows = jax.eval_shape(lambda: ring_buffer.Rows.zeros(2, capacity, shape, jnp.uint8))
    assert rows.data.shape == (2, *axes)


@pytest.mark.parametrize("earlier", [1, 4])  # the second rollout of the ring, and again the first
def test_unfinished_episodes_of_a_resumed_run_are_truncated(earlier):
    """Simulators begin anew there: no transition leads from the old episode into the new one."""
    case = Case(steps=3, length=1, rollouts=4)
    rollout, buffer = _rollout(case, 1), case.replay
    step_type = np.full_like(rollout.timestep.step_type, types.MID)
    step_type[-1, 1::2] = types.LAST  # unlike the time step before it
    begun = step_type.copy()
    begun[0, ::2] = types.FIRST  # in every second stream
    begun[0, 1::2] = types.LAST

    def run():
        memory = buffer.init(rollout)
        for types_in_turn in (*[step_type] * earlier, begun):
            timestep = rollout.timestep._replace(step_type=jnp.asarray(types_in_turn))
            memory = buffer.add(memory, rollout._replace(timestep=timestep))
        rows = memory.ring.timestep
        stream, time = jnp.indices((case.num_streams, 2 * case.steps))
        slot = (time + (earlier - 1) * case.steps) % (case.rollouts * case.steps)
        return rows.step_type.read(stream, slot), rows.discount.read(stream, slot)

    stored, discount = jax.jit(experience.on_devices(run))()
    expected = np.full(stored.shape, types.MID)
    expected[::2, case.steps - 1 : case.steps + 1] = types.LAST, types.FIRST
    expected[1::2, case.steps] = types.LAST
    np.testing.assert_array_equal(stored, expected)
    kept = np.moveaxis(rollout.timestep.discount[:-1], 0, 1)
    np.testing.assert_array_equal(discount, np.concatenate([kept, kept], 1))


def test_new_sequences_get_the_highest_priority_so_far():
    """Never zero, so that each may be drawn again, nor infinite; negative ones are not drawn."""
    case = Case(steps=2, length=2, rollouts=4, num_streams=1, prioritized=True)

    def run(priority):
        memory, priorities = case.replay.init(_rollout(case, 0)), []
        for number in range(3):
            memory = case.replay.add(memory, _rollout(case, number))
            priorities.append(memory.priorities.levels[0][0, :8])
            if number == 1:
                item = replay.Item(jnp.zeros(2, jnp.int32), jnp.array([0, 1]))
                memory = case.replay.update_priorities(memory, item, priority)
        return priorities

    run = jax.jit(experience.on_devices(run, 1, P()))
    for low, high in ((0.0, 1e9), (-1.0, 0.5), (3.0, 2.0)):
        _, before, after = run(np.array([low, high], np.float32))
        np.testing.assert_array_equal(before, [1, 1, 1, 0, 0, 0, 0, 0])
        values = [0.0 if p < 0.0 else np.clip(p, 1e-6, 1e6) ** ALPHA for p in (low, high)]
        highest = max(1.0, *values)
        np.testing.assert_allclose(after, [*values, 1, highest, highest, 0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("name", ["short", "states_priorities"])
def test_a_ring_draws_the_same_after_two_billion_steps(name):
    case = CASES[name]._replace(num_devices=1)
    init, step = _compiled(case)
    early = init(_rollout(case, 0))
    for number in range(2 * case.rollouts):
        early, _ = step(early, _rollout(case, number), jax.random.key(number))
    rounds = (errors.INT32_MAX - np.asarray(early.head)) // case.capacity
    late = jax.tree.map(jnp.copy, early)._replace(head=early.head + rounds * case.capacity)
    for number in range(2 * case.rollouts, 4 * case.rollouts):
        key = jax.random.key(number)
        early, expected = step(early, _rollout(case, number), key)
        late, actual = step(late, _rollout(case, number), key)
        streams.assert_same(actual, expected)
        assert actual.ready and actual.size == case.capacity - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r2d2", "sac_gru", "muzero"])
def test_the_replay_ratio_counts_the_states_that_are_learnt_from(name):
    """Every agent takes the mean of its values over exactly the states of its loss."""
    agent, candidate = contract.AGENTS[name]()
    candidate = dataclasses.replace(candidate, end=0.0)  # no state is an ending
    agent = dataclasses.replace(agent, replay_ratio=2.0)
    subject = contract.RUNNERS["anakin"].make(agent, candidate, 1)
    state, _ = subject.step(subject.init(0), 3)  # until every stream has a sequence
    _, report = subject.step(state, 4)
    assert report.means["value/mean"].count == 2.0 * 4 * subject.steps_per_update
