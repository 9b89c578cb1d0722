"""Replay: past rollouts on the learner devices, from which sequences are drawn.

Each device keeps its streams in one ring `[B, C, ...]`, which is written in place, and cuts
sequences `[L + 1]` out of it: consecutive time steps of one stream that never cross the write
position. Sequences begin at any step; where the stored rollouts have an actor state (a recurrent
core), which is that before the first step, they begin where rollouts begin.

Streams are dealt out to shards, each of which gives an equal part of every batch. With up to eight
devices the number of shards does not depend on the number of devices (as far as streams and batches
divide), so neither do the draws.

Prioritised replay is the proportional form of Schaul et al., "Prioritized Experience Replay", 2015,
https://arxiv.org/abs/1511.05952; a sequence has one priority, as in Kapturowski et al., "Recurrent
Experience Replay in Distributed Reinforcement Learning", 2019,
https://openreview.net/forum?id=r1lyTjAqYX.

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

from agents import networks
from agents.parts import optimization, options
from agents.replay import ring_buffer, sum_tree
from podracers import errors, parallel, types

_SHARDS = 8
_scope = functools.partial(jax.named_call, name="replay")  # the name in profiles


class Memory(NamedTuple):
    """The replay of one device."""

    ring: ring_buffer.Ring  # `[B, C, ...]`; actor states are [B, C / T, ...]
    head: jax.Array  # [B] int32, all equal: number of the newest time step; see `Replay.add`
    priorities: Any  # a `SumTree` with a row for each shard; () where draws are uniform
    highest: jax.Array  # [B] float32, all equal: the highest priority so far

    is_replay = True  # checkpoints may leave it out


class Item(NamedTuple):
    """Places of sequences; both fields have one shape."""

    stream: jax.Array  # int32, number on this device
    start: jax.Array  # int32, number in the ring of the places where sequences can begin


class Sample(NamedTuple):
    """A batch of sequences."""

    rollout: types.Rollout  # [L, N, ...], time steps [L + 1, N, ...]
    item: Item  # [N], for `update_priorities`
    weight: jax.Array  # [N] float32 importance weights of the losses; at most 1
    key: jax.Array  # [N] typed keys, the same on any number of devices


# `step(carry, memory, key) -> (carry, memory, metrics)`.
Step = Callable[[Any, Memory, jax.Array], tuple[Any, Memory, dict[str, types.Mean]]]


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer: pure functions of a `Memory`, under the mapped axis.

    After each rollout, once `min_size` transitions are stored, as many batches are drawn as
    train on each state `replay_ratio` times on average: the number of learnt states in all draws
    over the number of agent steps collected. States read only for burn-in or targets do not count,
    nor do imagined ones. With single transitions, one batch of `n` for each agent step is a replay
    ratio of `n`.

    Attributes:
      capacity: `replay_capacity` of `ReplayAgent`, rounded down to whole rollouts.
      sequence_length: `L`, transitions, of which the first `burn_in` only give the later ones their
        core or stack of frames.
      batch_size: see `ReplayAgent`, as `priority_exponent` and `replay_ratio`.
      min_size: `min_replay` of `ReplayAgent`.
      learnt_states: states of each sequence that are trained on.
    """

    capacity: int
    sequence_length: int
    batch_size: int
    priority_exponent: float = 0.0
    min_size: int = 1
    replay_ratio: float = 1.0
    learnt_states: int = 1
    burn_in: int = 0

    @classmethod
    def of(
        cls, agent: "ReplayAgent", length: int, learnt_states: int = 1, burn_in: int = 0
    ) -> "Replay":
        """Returns the replay of an agent, of sequences of `length` after the burn-in."""
        return cls(
            capacity=agent.replay_capacity,
            sequence_length=burn_in + length,
            batch_size=agent.batch_size,
            priority_exponent=agent.priority_exponent,
            min_size=agent.min_replay,
            replay_ratio=agent.replay_ratio,
            learnt_states=learnt_states,
            burn_in=burn_in,
        )

    def init(self, rollout: types.Rollout) -> Memory:
        """Returns an empty memory; of `rollout` `[T, B, ...]`, only shapes and dtypes are used.

        Raises:
          errors.UserError: the capacity is too small or too large, or the batch does not divide.
        """
        errors.require_count(self, "capacity", most=errors.INT32_MAX // 2)
        steps, streams = _steps(rollout), rollout.timestep.reward.shape[1]
        devices = parallel.axis_size()
        chunks = self.capacity // (streams * devices * steps)
        needed = -(-self.sequence_length // steps) + 1
        if chunks < needed:
            raise errors.UserError(
                f"replay_capacity = {self.capacity} transitions is too small: a sequence of "
                f"{self.sequence_length} steps from each of {streams * devices} environments, in "
                f"rollouts of {steps}, needs at least {needed * steps * streams * devices}"
            )
        largest = (chunks * steps - 1) * streams * devices
        if self.min_size > largest:
            raise errors.UserError(
                f"min_replay = {self.min_size}: expected at most {largest}, the size of the replay"
            )
        if self.batch_size % devices:
            raise errors.UserError(
                f"batch_size = {self.batch_size} does not divide over {devices} learner devices: "
                f"use {errors.nearest_multiples(self.batch_size, devices)}"
            )
        ring = ring_buffer.zeros(rollout, chunks)
        priorities: Any = ()
        if self.priority_exponent:
            shards, local = self._deal(streams)
            starts = chunks * steps // ring_buffer.period(ring)  # starts a stream
            priorities = sum_tree.init(shards, starts * local)
        return Memory(
            ring, jnp.zeros(streams, jnp.int32), priorities, jnp.ones(streams, jnp.float32)
        )

    @_scope
    def add(
        self,
        memory: Memory,
        rollout: types.Rollout,
        priority_fn: Callable[[types.Rollout], jax.Array | None] | None = None,
    ) -> Memory:
        """Stores a rollout `[T, B, ...]`, in place where `memory` is donated.

        From the second round of the ring on, time steps are numbered from `C` to `2 * C`, so the
        head stays an int32 however long a run is.

        After a Sebulba run is resumed, simulators begin new episodes. The unfinished episode of
        each stream is then marked as truncated at its last stored time step but one, because the
        first time step of the new episode overwrites the last one.

        Args:
          memory: the replay of this device.
          rollout: the latest one.
          priority_fn: returns the priorities `[K, B]` of the sequences that the rollout completes,
            given stored transitions `[L + K - 1, B, ...]`: sequence `k` is the `L` transitions from
            `k` on. `K` is `T`, or 1 where sequences begin where rollouts do. Steps from before the
            start of the run have no meaning. None, also as its result, gives the highest priority
            so far.
        """
        steps = _steps(rollout)
        size = ring_buffer.capacity(memory.ring)
        slot = memory.head[0] % size  # the slot of the first time step
        begun = rollout.timestep.first()[0]
        ring = ring_buffer.end_episodes(memory.ring, (slot - 1) % size, begun)
        ring = ring_buffer.write(ring, rollout, slot)
        begin = jnp.where(memory.head < size, memory.head, size + slot)
        memory = memory._replace(ring=ring, head=begin + steps)
        if not self.priority_exponent:
            return memory
        period = ring_buffer.period(ring)
        # Sequences that began in the slots just written are overwritten: priority 0.
        overwritten = self._items(memory, memory.head[0] - period * jnp.arange(steps // period))
        memory = self._set(memory, overwritten, jnp.zeros(overwritten.start.shape))
        newest = (memory.head[0] - self.sequence_length) // period * period
        starts = newest - period * jnp.arange(steps // period - 1, -1, -1)  # [K] times
        items, has_begun = self._items(memory, starts), starts[:, None] >= 0
        priority = None
        if priority_fn is not None:
            first = jnp.broadcast_to(starts[0], begun.shape)
            length = self.sequence_length + len(starts) - 1
            priority = priority_fn(ring_buffer.cut(ring, first, jnp.arange(begun.size), length))
        if priority is None:
            value = jnp.where(has_begun, memory.highest[None], 0.0)
            return self._set(memory, items, value)
        return self.update_priorities(memory, items, jnp.where(has_begun, priority, -1.0))

    def num_gradient_steps(
        self, memory: Memory, rollout: types.Rollout, update: jax.Array
    ) -> jax.Array:
        """Returns the number of gradient steps after a rollout, int32, equal on all devices.

        A mean that is no whole number is spread evenly over rollouts, in integer arithmetic.
        `memory` has the rollout, and `update` is the number of rollouts before it.
        """
        mean = self.mean_gradient_steps(rollout.timestep.reward[1:].size * parallel.axis_size())
        whole, rest = divmod(mean.numerator, mean.denominator)
        phase = update % mean.denominator
        steps = whole + (phase + 1) * rest // mean.denominator - phase * rest // mean.denominator
        streams = ring_buffer.num_streams(memory.ring) * parallel.axis_size()
        enough = self.size(memory) >= -(-self.min_size // streams)
        return jnp.where(enough & self.ready(memory), steps, 0)

    def mean_gradient_steps(self, agent_steps: int) -> fractions.Fraction:
        """Returns the mean number of gradient steps for `agent_steps` steps of an update."""
        learnt = self.batch_size * self.learnt_states
        mean = fractions.Fraction(self.replay_ratio) * agent_steps / learnt
        # A denominator whose products in `num_gradient_steps` are exact in int32.
        mean = mean.limit_denominator(30_000)
        if not 0 < mean <= errors.INT32_MAX:
            number = "too many gradient steps" if mean else "never a gradient step"
            raise errors.UserError(
                f"replay_ratio = {self.replay_ratio}: with rollouts of {agent_steps} agent steps "
                f"there would be {number}"
            )
        return mean

    def check_run(
        self, agent: options.Optimized, num_envs: int, rollout_length: int, num_updates: int
    ) -> None:
        """Raises a `UserError` if a run has no gradient step with a learning rate above 0.

        `agent` is the one whose replay this is; see `agent.Agent` for the other arguments.
        """
        name, collected = type(agent).__name__, num_envs * rollout_length
        steps = max(self.sequence_length, -(-self.min_size // num_envs))  # agent steps of a stream
        filled = -(-steps // rollout_length)  # updates
        mean = self.mean_gradient_steps(collected)
        # `floor(each * n)` gradient steps would follow `n` updates, without a wait.
        due = math.ceil((math.floor(mean * (filled - 1)) + 1) / mean)
        begin = collected * max(filled, due)  # agent steps before the first gradient step
        for option, value, least in (
            ("Experiment.total_steps", num_updates * collected, begin),
            (f"{name}.anneal_steps", agent.anneal_steps, begin + 1),
        ):
            if value is not None and value < least:
                raise errors.UserError(
                    f"{option}: expected at least {least:,}, got {value:,}; the first gradient "
                    f"step follows {begin:,} agent steps, by {name}.min_replay = {self.min_size}, "
                    f"{name}.replay_ratio = {self.replay_ratio} and sequences of "
                    f"{self.sequence_length}"
                )

    def repeat(
        self, step: Step, num_steps: jax.Array, carry: Any, memory: Memory, key: jax.Array
    ) -> tuple[Any, Memory, dict[str, types.Mean]]:
        """Takes a traced number of gradient steps.

        The loop carries all of the memory but the ring, which it only reads: XLA would copy a ring
        that is carried.

        Args:
          step: takes one gradient step; it must not change the ring.
          num_steps: int32, equal on all devices.
          carry: state of the loop, beside the memory.
          memory: the replay of this device.
          key: one typed key, equal on all devices.

        Returns:
          The last carry and memory, and the merged metrics of all steps (with counts of 0 after no
          step) and of the replay.
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
        streams = ring_buffer.num_streams(memory.ring) * parallel.axis_size()
        metrics |= {
            "replay/gradient_steps": types.Mean.of(num_steps),
            "replay/size": types.Mean.of(self.size(memory).astype(jnp.float32) * streams),
        }
        return carry, memory, metrics

    def ready(self, memory: Memory) -> jax.Array:
        """Returns a bool, equal on all devices: whether every stream has a sequence to draw."""
        return self._starts(memory)[1] > 0

    def size(self, memory: Memory) -> jax.Array:
        """Returns the number of stored transitions of each stream, int32."""
        return jnp.minimum(memory.head[0], ring_buffer.capacity(memory.ring) - 1)

    @_scope
    def sample(
        self, memory: Memory, key: jax.Array, importance_exponent: jax.Array | float = 0.0
    ) -> Sample:
        """Draws sequences, with replacement, by one key for all devices; only where `ready`.

        `importance_exponent` is that of the importance weights; 1 corrects fully for priorities.
        """
        shards, local = self._deal(ring_buffer.num_streams(memory.ring))
        per_shard = self.batch_size // parallel.axis_size() // shards  # sequences of a shard
        number = parallel.axis_index() * shards + jnp.arange(shards)  # [S] over all devices
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
        keys = jax.vmap(lambda k: jax.random.split(k, (2, per_shard)), out_axes=1)(keys)
        draw_keys, sample_keys = keys.reshape(2, -1)  # [N] each, shard after shard
        shard = jnp.repeat(jnp.arange(shards), per_shard)  # [N]
        if self.priority_exponent:
            index, probability = sum_tree.draw(memory.priorities, shard, draw_keys)
            count = self._starts(memory)[1].astype(jnp.float32)
            weight = (count * (probability * local)) ** -importance_exponent
            # Weights of at most 1 in the global batch.
            weight /= jax.lax.pmax(jnp.max(weight), parallel.AXIS)
            item = Item(shard * local + index % local, index // local)  # `_set` does the same
        else:
            item = jax.vmap(lambda s, k: self._uniform(memory, s, local, k))(shard, draw_keys)
            weight = jnp.ones(shard.shape)
        slot = item.start * ring_buffer.period(memory.ring)
        rollout = ring_buffer.cut(memory.ring, slot, item.stream, self.sequence_length)
        return Sample(rollout, item, weight, sample_keys)

    @_scope
    def update_priorities(self, memory: Memory, item: Item, priority: jax.Array | None) -> Memory:
        """Gives sequences new priorities; does nothing where draws are uniform.

        Priorities, in the shape of the items, are usually absolute TD errors; negative for
        sequences without anything to learn, which are not drawn again: their importance weights
        would be the largest, and scale down all others. None where draws are uniform.
        """
        if not self.priority_exponent:
            return memory
        if priority is None:
            raise errors.UserError("prioritised replay: expected LossOutput.priority [N], got None")
        # Above zero, so that it can be drawn again; finite, so that others can be drawn.
        value = jnp.clip(priority, 1e-6, 1e6) ** self.priority_exponent
        value = jnp.where(priority >= 0.0, value, 0.0)
        highest = jax.lax.pmax(jnp.max(value), parallel.AXIS)
        memory = memory._replace(highest=jnp.maximum(memory.highest, highest))
        return self._set(memory, item, value)

    def _deal(self, streams: int) -> tuple[int, int]:
        """Returns the number of shards of this device, and of streams in each."""
        devices = parallel.axis_size()
        shards = math.gcd(streams * devices, self.batch_size, _SHARDS)
        shards = shards // devices if shards % devices == 0 else 1
        return shards, streams // shards

    def _starts(self, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Returns the time of the oldest possible start, and the number of starts."""
        period = ring_buffer.period(memory.ring)
        capacity = ring_buffer.capacity(memory.ring)
        oldest = jnp.maximum(memory.head[0] - capacity + 1, 0)  # stored time step
        oldest = -(-oldest // period)  # rounded up to a start, counted in periods
        newest = (memory.head[0] - self.sequence_length) // period  # it ends at the head
        return oldest * period, jnp.maximum(newest - oldest + 1, 0)

    def _items(self, memory: Memory, times: jax.Array) -> Item:
        """Returns the items `[K, B]` that begin at times `[K]`."""
        slot = times[:, None] % ring_buffer.capacity(memory.ring)
        stream = jnp.arange(ring_buffer.num_streams(memory.ring))[None]
        return Item(*jnp.broadcast_arrays(stream, slot // ring_buffer.period(memory.ring)))

    def _uniform(self, memory: Memory, shard: jax.Array, local: int, key: jax.Array) -> Item:
        """Draws any start of any of the `local` streams of a shard."""
        stream_key, start_key = jax.random.split(key)
        oldest, count = self._starts(memory)
        period = ring_buffer.period(memory.ring)
        time = oldest + period * jax.random.randint(start_key, (), 0, count)
        stream = shard * local + jax.random.randint(stream_key, (), 0, local)
        return Item(stream, time % ring_buffer.capacity(memory.ring) // period)

    def _set(self, memory: Memory, item: Item, value: jax.Array) -> Memory:
        stream, start, value = (x.reshape(-1) for x in (*item, value))
        _, local = self._deal(ring_buffer.num_streams(memory.ring))
        # Shard `s` has the streams from `s * local` on.
        tree = sum_tree.write(
            memory.priorities, stream // local, start * local + stream % local, value
        )
        return memory._replace(priorities=tree)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReplayAgent(optimization.GradientAgent, options.Learning, options.Adam):
    """Options and update of agents that learn from replay by Adam.

    A subclass has `net`, its network; `buffer`, a `Replay`; and `loss(params, sample, context)`,
    whose output has the priorities. It may replace the methods `init_params`, `sample`, `stored`,
    `target_params` and `initial_priorities`.

    Attributes:
      batch_size: sequences of each gradient step, over all devices.
      replay_capacity: transitions over all streams of all devices.
      min_replay: transitions over all streams before the first gradient step.
      replay_ratio: average number of times that a state is trained on.
      priority_exponent: exponent of prioritised replay; 0 for uniform draws.
      importance_exponent: exponent of the importance weights, in `[0, 1]`.
    """

    batch_size: int = options.count(64)
    replay_capacity: int = options.count(100_000)
    min_replay: int = options.count(1_000)
    replay_ratio: float = options.positive(8.0, most=1e6)
    priority_exponent: float = options.fraction(0.0)
    importance_exponent: float = options.fraction(0.0)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        return optimization.adam_of(self)

    @property
    def net(self) -> Any:
        """The network."""
        raise NotImplementedError

    @property
    def buffer(self) -> Replay:
        """The replay."""
        raise NotImplementedError

    def init_params(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters of the network."""
        return self.net.init(key, networks.zero_timestep(self.spec))

    def check_run(self, num_envs: int, rollout_length: int, num_updates: int) -> None:
        """Raises a `UserError` if a run is too short to learn from replay; see `agent.Agent`."""
        self.buffer.check_run(self, num_envs, rollout_length, num_updates)

    def init_memory(self, rollout: types.Rollout) -> Memory:
        """Returns an empty replay of this device's streams."""
        template, steps, buffer = self.stored(rollout), _steps(rollout), self.buffer
        if jax.tree.leaves(template.actor_state) and buffer.learnt_states < steps:
            least = buffer.burn_in + steps
            raise errors.UserError(
                f"{type(self).__name__}.sequence_length: expected at least {least} with rollouts "
                f"of {steps} steps and a burn-in of {buffer.burn_in}, so that every step is learnt "
                f"from; got {buffer.sequence_length}"
            )
        return buffer.init(template)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Stores one rollout, and takes the gradient steps that the replay ratio allows."""
        stored = self.stored(rollout)
        learner = state.learner.observe(stored, self.preprocess)
        priorities = functools.partial(self.initial_priorities, learner.normalizer)
        memory = self.buffer.add(state.memory, stored, priorities)
        num_steps = self.buffer.num_gradient_steps(memory, rollout, state.learner.update)
        learning_rate = self._optimizer.learning_rate_at(learner.agent_steps)

        def step(learner, memory, step_key):
            sample = self.sample(learner, memory, step_key)
            learner, output = self._step(learner, sample, learning_rate)
            memory = self.buffer.update_priorities(memory, sample.item, output.priority)
            return learner, memory, output.metrics

        learner, memory, metrics = self.buffer.repeat(step, num_steps, learner, memory, key)
        return types.AgentState(learner, memory), metrics

    def stored(self, rollout: types.Rollout) -> types.Rollout:
        """Returns the part of a rollout that replay stores."""
        return rollout._replace(extras=(), actor_state=())

    def initial_priorities(self, normalizer: Any, recent: types.Rollout) -> jax.Array | None:
        """Returns the priorities of new sequences, see `Replay.add`."""
        return None

    def sample(self, learner: optimization.Learner, memory: Memory, key: jax.Array) -> Sample:
        """Returns a batch to learn from, with preprocessed time steps."""
        sample = self.buffer.sample(memory, key, self.importance_exponent_at(learner.agent_steps))
        timestep = self.preprocess.apply(learner.normalizer, sample.rollout.timestep)
        return sample._replace(rollout=sample.rollout._replace(timestep=timestep))

    def importance_exponent_at(self, agent_steps: jax.Array) -> jax.Array | float:
        """Returns the exponent of the importance weights after `agent_steps`."""
        return self.importance_exponent

    def target_params(self, params: types.PyTree) -> types.PyTree:
        """Returns the part of the parameters that has target parameters."""
        return params


def sequence_priority(error: jax.Array, weight: jax.Array, mix: float) -> jax.Array:
    """Returns the priorities `[B]` of sequences, those of Kapturowski et al. 2019.

    They mix the largest error `[T, B]`, with weight `mix`, and the mean. Steps of `weight` 0 are
    excluded.
    """
    size = jnp.abs(error) * weight
    mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(weight, axis=0), 1.0)
    return mix * jnp.max(size, axis=0) + (1.0 - mix) * mean


def _steps(rollout: types.Rollout) -> int:
    """Returns `T`."""
    return rollout.timestep.reward.shape[0] - 1
