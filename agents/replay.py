"""Replay: past rollouts on the learner devices, from which sequences are drawn.

Each device keeps the streams that it learns from in one ring `[B, C, ...]`, which is written in
place: every time step is stored once, in the dtype that it came in, and a sequence `[L + 1]` is cut
out of the ring when it is drawn. A sequence is consecutive time steps of one stream, and it never
reaches over the place where the ring is being written: no draw mixes what is old with what is new.

Where what is stored has an actor state (a recurrent core), it is that before the first step of a
rollout, and sequences begin where rollouts begin; else they begin anywhere.

Streams are dealt out to shards, and each of them gives an equal part of every batch. With up to
eight devices the number of shards does not depend on that of devices (as far as streams and batches
divide), so neither does what is drawn.

Prioritised replay is that of Schaul et al., "Prioritized Experience Replay", 2015,
https://arxiv.org/abs/1511.05952, in its proportional form; a sequence has one priority, as in
Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019,
https://openreview.net/forum?id=r1lyTjAqYX. `docs/replay.md` says why this is not flashbax.

Axis legend: `C` time steps in the ring, `T` of a rollout, `L` transitions of a sequence, `K` new
sequences of a stream, `B` streams, `S` shards and `N` drawn sequences of this device.
"""

import dataclasses
import fractions
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import ring_buffer, sum_tree
from podracers import errors, parallel, types

_SHARDS = 8
_scope = functools.partial(jax.named_call, name="replay")  # the name in profiles


class Memory(NamedTuple):
    """The replay of one device."""

    ring: types.Rollout  # of `ring_buffer.Rows` `[B, C, ...]`; actor states are [B, C / T, ...]
    head: jax.Array  # [B] int32, all equal: time of the newest time step; grows for ever
    priorities: Any  # a `SumTree` with a row for each shard; () where draws are uniform
    highest: jax.Array  # [B] float32, all equal: the highest priority so far

    is_replay = True  # which checkpoints may leave out


class Item(NamedTuple):
    """Places of sequences; both fields have one shape."""

    shard: jax.Array  # int32, of this device
    index: jax.Array  # int32, of the sequence in its shard


class Sample(NamedTuple):
    """A batch of sequences."""

    rollout: types.Rollout  # [L, N, ...], time steps [L + 1, N, ...], as a runner shows them
    item: Item  # [N], for `update_priorities`
    weight: jax.Array  # [N] float32 importance weights of the losses; at most 1
    key: jax.Array  # [N] typed keys, the same on any number of devices

    def with_timestep(self, timestep: types.TimeStep) -> "Sample":
        """Returns the sample with other time steps, such as preprocessed ones."""
        return self._replace(rollout=self.rollout._replace(timestep=timestep))


# `step(carry, memory, key) -> (carry, memory, metrics)`; it changes nothing of the ring.
Step = Callable[[Any, Memory, jax.Array], tuple[Any, Memory, dict[str, types.Mean]]]


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer: pure functions of a `Memory`, under the mapped axis.

    After each rollout, once there are `min_size` transitions, so many batches are drawn that each
    state is learnt from `replay_ratio` times on average: that is the number of learnt states in all
    draws, over the number of agent steps collected. States that a draw reads for burn-in or for
    targets alone are not learnt from, nor is what a model imagines. With single transitions, one
    batch of `n` for each agent step is a replay ratio of `n`.

    Attributes:
      capacity: transitions over all streams of all devices; rounded down to whole rollouts.
      sequence_length: `L`, transitions.
      batch_size: sequences of one draw, over all devices.
      priority_exponent: exponent of the priorities; 0 for uniform draws.
      importance_exponent: exponent of the importance weights; 1 undoes the priorities in full.
      min_size: transitions over all streams before the first draw.
      replay_ratio: number of times that a state is learnt from, on average.
      learnt_states: states of each sequence that are learnt from, which `replay_ratio` counts.
    """

    capacity: int
    sequence_length: int
    batch_size: int
    priority_exponent: float = 0.0
    importance_exponent: float = 0.0
    min_size: int = 1
    replay_ratio: float = 1.0
    learnt_states: int = 1

    def init(self, rollout: types.Rollout) -> Memory:
        """Returns an empty memory.

        Args:
          rollout: a template `[T, B, ...]` of what is to be stored; only shapes and dtypes count.

        Raises:
          errors.UserError: the capacity is too small, or the batch does not divide.
        """
        steps, streams = rollout.timestep.reward.shape
        steps -= 1
        chunks = self.capacity // (streams * parallel.axis_size() * steps)
        self._check(chunks, steps, streams)

        ring = ring_buffer.zeros(rollout, chunks)
        priorities: Any = ()
        if self.priority_exponent:
            shards = self._shards(streams)
            starts = chunks * steps // ring_buffer.period(ring)  # of each stream
            priorities = sum_tree.init(shards, starts * (streams // shards))
        return Memory(
            ring, jnp.zeros(streams, jnp.int32), priorities, jnp.ones(streams, jnp.float32)
        )

    def _check(self, chunks: int, steps: int, streams: int) -> None:
        """Raises where no sequence, or no batch, could be drawn."""
        devices = parallel.axis_size()
        needed = -(-self.sequence_length // steps) + 1
        if chunks < needed:
            raise errors.UserError(
                f"replay_capacity = {self.capacity} transitions is too small: a sequence of "
                f"{self.sequence_length} steps from each of {streams * devices} environments, in "
                f"rollouts of {steps}, needs at least {needed * steps * streams * devices}"
            )
        if self.capacity < self.batch_size * self.sequence_length:
            raise errors.UserError(
                f"replay_capacity = {self.capacity} transitions is smaller than one batch: "
                f"{self.batch_size} sequences of {self.sequence_length} steps"
            )
        most = (chunks * steps - 1) * streams * devices
        if self.min_size > most:
            raise errors.UserError(
                f"min_replay = {self.min_size}: expected at most {most}, which the replay holds"
            )
        if self.batch_size % devices:
            raise errors.UserError(
                f"batch_size = {self.batch_size} does not divide over {devices} learner devices"
            )

    def _shards(self, streams: int) -> int:
        """Returns how many shards this device has."""
        devices = parallel.axis_size()
        shards = math.gcd(streams * devices, self.batch_size, _SHARDS)
        return shards // devices if shards % devices == 0 else 1

    @_scope
    def add(self, memory: Memory, rollout: types.Rollout) -> Memory:
        """Stores a rollout `[T, B, ...]`, in place where `memory` is donated.

        New sequences (`new_items`) can be drawn from now on, with the highest priority so far.

        After a Sebulba run is resumed, simulators begin new episodes. The unfinished episode of
        each stream is then marked as truncated at its last stored time step but one: the last one
        is overwritten by the first one of the new episode.
        """
        steps = _steps(rollout)
        size = ring_buffer.capacity(memory.ring)
        slot = memory.head[0] % size  # of the first time step
        begun = rollout.timestep.first()[0]
        ring = ring_buffer.end_episodes(memory.ring, (slot - 1) % size, begun)
        ring = ring_buffer.write(ring, rollout, slot)
        memory = memory._replace(ring=ring, head=memory.head + steps)
        if not self.priority_exponent:
            return memory
        period = ring_buffer.period(ring)
        # Sequences that began at the slots just written are gone: their priorities become 0.
        times = memory.head[0] - period * jnp.arange(steps // period)
        overwritten = self._items(memory, times)
        memory = self._set(memory, overwritten, jnp.zeros(overwritten.index.shape))
        item, exists = self.new_items(memory, steps)
        return self._set(memory, item, jnp.where(exists, memory.highest[0], 0.0))

    def new_items(self, memory: Memory, steps: int) -> tuple[Item, jax.Array]:
        """Returns the sequences that the latest rollout completed.

        Args:
          memory: the replay, with that rollout.
          steps: `T`, of that rollout.

        Returns:
          Items `[K, B]`, oldest first, and a bool `[K, B]`, false where the run is too young for
          them. `K` is `T`, or 1 where sequences begin where rollouts do.
        """
        times = self._new_starts(memory, steps)
        item = self._items(memory, times)
        return item, jnp.broadcast_to(times[:, None] >= 0, item.index.shape)

    def recent(self, memory: Memory, steps: int) -> types.Rollout:
        """Returns the transitions of the sequences of `new_items`, one piece for each stream.

        Args:
          memory: the replay, with the latest rollout.
          steps: `T`, of that rollout.

        Returns:
          `[L + K - 1, B, ...]`; what was before the run began is without meaning.
        """
        starts = self._new_starts(memory, steps)
        stream = jnp.arange(ring_buffer.num_streams(memory.ring))
        length = self.sequence_length + starts.shape[0] - 1
        return ring_buffer.cut(
            memory.ring, jnp.broadcast_to(starts[0], stream.shape), stream, length
        )

    def num_gradient_steps(
        self, memory: Memory, rollout: types.Rollout, update: jax.Array
    ) -> jax.Array:
        """Returns how many gradient steps follow a rollout, int32, equal on all devices.

        Where the mean is no whole number, they are spread evenly over rollouts, in integers.

        Args:
          memory: the replay, with that rollout.
          rollout: `[T, B, ...]`, of this device.
          update: int32, how many rollouts came before it.
        """
        collected = rollout.timestep.reward[1:].size * parallel.axis_size()
        # A fraction whose products below are exact in int32.
        each = self.mean_gradient_steps(collected).limit_denominator(30_000)
        if not each:
            raise errors.UserError(
                f"replay_ratio = {self.replay_ratio}: with rollouts of {collected} agent steps "
                "there would never be a gradient step"
            )
        whole, rest = divmod(each.numerator, each.denominator)
        phase = update % each.denominator
        steps = whole + (phase + 1) * rest // each.denominator - phase * rest // each.denominator
        enough = self._transitions(memory) >= self.min_size
        return jnp.where(enough & self.ready(memory), steps, 0)

    def mean_gradient_steps(self, agent_steps: int) -> fractions.Fraction:
        """Returns how many gradient steps follow so many agent steps, on average."""
        learnt = self.batch_size * self.learnt_states
        return fractions.Fraction(self.replay_ratio) * agent_steps / learnt

    def repeat(
        self, step: Step, num_steps: jax.Array, carry: Any, memory: Memory, key: jax.Array
    ) -> tuple[Any, Memory, dict[str, types.Mean]]:
        """Takes a traced number of gradient steps.

        The loop carries all of the memory but the ring, which it reads where it lies: XLA would
        copy a ring that is carried (`docs/replay.md`).

        Args:
          step: takes one of them.
          num_steps: int32, equal on all devices.
          carry: state of the loop, beside the priorities.
          memory: the replay of this device.
          key: one typed key, equal on all devices.

        Returns:
          The last carry and memory, and the metrics of all steps, merged (of none, they count
          nothing), beside those of the replay.
        """

        @functools.partial(jax.jit, inline=True)  # traced once, for its shapes and for the loop
        def step_at(carry, rest, index):
            now = rest._replace(ring=memory.ring)
            carry, now, metrics = step(carry, now, jax.random.fold_in(key, index))
            return carry, now._replace(ring=()), metrics

        rest = memory._replace(ring=())
        shapes = jax.eval_shape(step_at, carry, rest, jnp.int32(0))[2]
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def body(index, state):
            carry, rest, metrics = state
            carry, rest, means = step_at(carry, rest, index)
            metrics = {name: mean.merge(means[name]) for name, mean in metrics.items()}
            return carry, rest, metrics

        carry, rest, metrics = jax.lax.fori_loop(0, num_steps, body, (carry, rest, metrics))
        memory = rest._replace(ring=memory.ring)
        metrics |= {
            "replay/gradient_steps": types.Mean.of(num_steps),
            "replay/size": types.Mean.of(self._transitions(memory)),
        }
        return carry, memory, metrics

    def _transitions(self, memory: Memory) -> jax.Array:
        """Returns how many transitions of all streams are there, float32."""
        streams = ring_buffer.num_streams(memory.ring) * parallel.axis_size()
        return self.size(memory).astype(jnp.float32) * streams

    def ready(self, memory: Memory) -> jax.Array:
        """Returns a bool, equal on all devices: whether every stream has a sequence to draw."""
        return self._starts(memory)[1] > 0

    def size(self, memory: Memory) -> jax.Array:
        """Returns how many transitions of each stream are there, int32."""
        return jnp.minimum(memory.head[0], ring_buffer.capacity(memory.ring) - 1)

    @_scope
    def sample(
        self, memory: Memory, key: jax.Array, importance_exponent: jax.Array | None = None
    ) -> Sample:
        """Draws sequences, with replacement; only where `ready`.

        Args:
          memory: the replay of this device.
          key: one typed key, equal on all devices.
          importance_exponent: a scalar in the place of the option; None for that.
        """
        shards, local = self._deal(memory)
        each = self.batch_size // parallel.axis_size() // shards  # sequences of a shard
        number = parallel.axis_index() * shards + jnp.arange(shards)  # [S] over all devices
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
        keys = jax.vmap(lambda k: jax.random.split(k, (2, each)), out_axes=1)(keys)
        draw_keys, sample_keys = keys.reshape(2, -1)  # [N] each, shard after shard
        shard = jnp.repeat(jnp.arange(shards), each)  # [N]
        if self.priority_exponent:
            index, probability = sum_tree.draw(memory.priorities, shard, draw_keys)
            weight = self._weight(memory, probability * local, importance_exponent)
        else:
            index = jax.vmap(lambda k: self._uniform(memory, local, k))(draw_keys)
            weight = jnp.ones(index.shape)
        # An item's index in its shard is `start * local + stream`; see `_items`.
        start = index // local * ring_buffer.period(memory.ring)  # slot of its first time step
        stream = shard * local + index % local  # of this device
        rollout = ring_buffer.cut(memory.ring, start, stream, self.sequence_length)
        return Sample(rollout, Item(shard, index), weight, sample_keys)

    @_scope
    def update_priorities(
        self, memory: Memory, item: Item, priority: jax.Array, exists: jax.Array | bool = True
    ) -> Memory:
        """Gives sequences new priorities; does nothing where draws are uniform.

        Args:
          memory: the replay of this device.
          item: items of a `Sample` or of `new_items`.
          priority: float32 of the same shape, usually absolute TD errors; negative for what is not
            to be drawn any more, as there is nothing to learn: its importance weight would be the
            largest, and so scale those of all others down.
          exists: bool, of the same shape; false for what must never be drawn.
        """
        if not self.priority_exponent:
            return memory
        # Not zero, or it would not be drawn again; never infinite, or nothing else would be.
        value = jnp.clip(priority, 1e-6, 1e6) ** self.priority_exponent
        value = jnp.where(exists & (priority >= 0.0), value, 0.0)
        highest = jax.lax.pmax(jnp.max(value), parallel.AXIS)
        memory = memory._replace(highest=jnp.maximum(memory.highest, highest))
        return self._set(memory, item, value)

    def prioritize_new(
        self,
        memory: Memory,
        rollout: types.Rollout,
        priority_fn: Callable[[types.Rollout], jax.Array],
    ) -> Memory:
        """Gives the sequences that a rollout completed their initial priorities.

        Args:
          memory: the replay, with that rollout.
          rollout: `[T, B, ...]`, the latest one.
          priority_fn: returns priorities `[K, B]`, given transitions `[L + K - 1, B, ...]` as they
            were stored: sequence `k` is the `L` transitions from `k` on.
        """
        if not self.priority_exponent:
            return memory
        item, exists = self.new_items(memory, _steps(rollout))
        priority = priority_fn(self.recent(memory, _steps(rollout)))
        return self.update_priorities(memory, item, priority, exists)

    def _deal(self, memory: Memory) -> tuple[int, int]:
        """Returns the number of shards of this device, and of streams in each."""
        streams = ring_buffer.num_streams(memory.ring)
        shards = self._shards(streams)
        return shards, streams // shards

    def _starts(self, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Returns the time of the oldest start there is, and how many there are."""
        period = ring_buffer.period(memory.ring)
        capacity = ring_buffer.capacity(memory.ring)
        oldest = jnp.maximum(memory.head[0] - capacity + 1, 0)  # time step there is
        oldest = -(-oldest // period)  # rounded up to a start, counted in periods
        newest = (memory.head[0] - self.sequence_length) // period  # it ends at the head
        return oldest * period, jnp.maximum(newest - oldest + 1, 0)

    def _new_starts(self, memory: Memory, steps: int) -> jax.Array:
        """Returns the times `[K]` at which the sequences begin that are new."""
        period = ring_buffer.period(memory.ring)
        newest = (memory.head[0] - self.sequence_length) // period * period
        return newest - period * jnp.arange(steps // period - 1, -1, -1)

    def _items(self, memory: Memory, times: jax.Array) -> Item:
        """Returns the items `[K, B]` that begin at times `[K]`."""
        shards, local = self._deal(memory)
        stream = jnp.arange(shards * local)  # [B]; shard `s` has the streams from `s * local` on
        slot = times % ring_buffer.capacity(memory.ring)  # [K]
        start = slot // ring_buffer.period(memory.ring)  # [K] in the ring
        index = start[:, None] * local + stream % local  # [K, B] within the shard
        return Item(jnp.broadcast_to(stream // local, index.shape), index)

    def _uniform(self, memory: Memory, local: int, key: jax.Array) -> jax.Array:
        """Draws an index, of any start and stream of a shard."""
        stream_key, start_key = jax.random.split(key)
        oldest, count = self._starts(memory)
        period = ring_buffer.period(memory.ring)
        time = oldest + period * jax.random.randint(start_key, (), 0, count)
        stream = jax.random.randint(stream_key, (), 0, local)
        start = time % ring_buffer.capacity(memory.ring) // period  # in the ring
        return start * local + stream

    def _weight(
        self, memory: Memory, probability: jax.Array, exponent: jax.Array | None
    ) -> jax.Array:
        """Returns importance weights `[N]`, of which the largest of the global batch is 1.

        Args:
          memory: the replay of this device.
          probability: `[N]`, relative to that of a uniform draw of the stream.
          exponent: that of the weights; None for the option's.
        """
        exponent = self.importance_exponent if exponent is None else exponent
        count = self._starts(memory)[1].astype(jnp.float32)
        weight = (count * probability) ** -exponent
        return weight / jax.lax.pmax(jnp.max(weight), parallel.AXIS)

    def _set(self, memory: Memory, item: Item, value: jax.Array) -> Memory:
        shard, index, value = (x.reshape(-1) for x in (item.shard, item.index, value))
        return memory._replace(priorities=sum_tree.write(memory.priorities, shard, index, value))


def _steps(rollout: types.Rollout) -> int:
    """Returns `T`."""
    return rollout.timestep.reward.shape[0] - 1
