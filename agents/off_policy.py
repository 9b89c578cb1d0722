"""What all agents that learn from replay have in common.

The rhythm of learning, target networks, rewards, normalisation and the way from a loss to new
parameters stand here once. An algorithm adds its network, how it acts, what of a rollout it keeps,
its loss, and the priorities of what it learnt from.

Axis legend: `T` time, `L` transitions of a sequence, `B` streams and `N` drawn sequences of one
device.
"""

import dataclasses
import fractions
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import options, preprocessing, replay
from podracers import environment, errors, parallel, types


class Learner(NamedTuple):
    """What is learnt; identical on every device."""

    params: types.PyTree
    target: types.PyTree  # older parameters, that targets are computed with; () where none
    optimizer_state: optax.OptState
    normalizer: Any  # statistics of the observations; () where they are not normalised
    update: jax.Array  # int32, how many rollouts were stored
    agent_steps: jax.Array  # int32, over all streams; it stops at the largest there is
    gradient_steps: jax.Array  # int32


class Descent(NamedTuple):
    """What a gradient step changes."""

    params: types.PyTree
    target: types.PyTree
    optimizer_state: optax.OptState
    gradient_steps: jax.Array


class Learnt(NamedTuple):
    """What a loss returns.

    "loss/total" is the mean that is to be made small; each metric is a mean over this device's part
    of the batch.
    """

    metrics: dict[str, types.Mean]
    priority: jax.Array | None  # [N], not negative; None where draws are uniform


@dataclasses.dataclass(frozen=True, eq=False)
class OffPolicy:
    """All of an agent but its algorithm.

    After each rollout, once the replay holds `min_replay` transitions, so many gradient steps are
    taken that each state is learnt from `replay_ratio` times on average: that is the number of
    learnt states in all draws, over the number of agent steps collected. States that a draw reads
    for burn-in or for targets alone are not learnt from, nor is what a model imagines (see
    `_learnt_states`). One gradient step of a batch of `n` single transitions for each agent step is
    a replay ratio of `n`.

    Attributes:
      spec: of the environment.
      learning_rate: of the optimizer.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      adam_epsilon: of Adam.
      max_grad_norm: the gradient of the global batch is scaled down to this norm; None for none.
      gamma: discount.
      batch_size: sequences of each gradient step, over all devices.
      replay_capacity: transitions over all streams of all devices.
      min_replay: transitions over all streams before anything is learnt from them.
      replay_ratio: how often a state is learnt from, on average.
      priority_exponent: of prioritised replay; 0 for uniform draws.
      importance_exponent: how far losses are corrected for the priorities, in `[0, 1]`.
      target_period: gradient steps between updates of the target parameters.
      target_rate: how much of the new parameters an update of the targets takes over, in `[0, 1]`.
      normalize_observations: to mean 0 and variance 1 over all that was seen, clipped at 10.
      reward_scale: multiplies the rewards that are learnt from.
      reward_clip: bounds the absolute value of scaled rewards; None for no bound.
    """

    spec: environment.EnvironmentSpec
    learning_rate: float = 1e-3
    anneal_steps: float | None = None
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = None
    gamma: float = 0.99
    batch_size: int = 64
    replay_capacity: int = 100_000
    min_replay: int = 1_000
    replay_ratio: float = 8.0
    priority_exponent: float = 0.0
    importance_exponent: float = 0.0
    target_period: int = 1
    target_rate: float = 1.0
    normalize_observations: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None

    # The options that are counts, portions (in [0, 1]) and positive numbers or None.
    _COUNTS: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "replay_capacity",
        "min_replay",
        "target_period",
    )
    _PORTIONS: ClassVar[tuple[str, ...]] = (
        "gamma",
        "priority_exponent",
        "importance_exponent",
        "target_rate",
    )
    _POSITIVE: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "anneal_steps",
        "adam_epsilon",
        "max_grad_norm",
        "replay_ratio",
    )

    def __post_init__(self):
        """Refuses impossible options."""
        options.check(self, self._COUNTS, self._PORTIONS, self._POSITIVE)

    @property
    def _burn_in(self) -> int:
        """How many first steps of a sequence only warm up the memory of a network."""
        return 0

    @property
    def _unroll(self) -> int:
        """How many transitions of a sequence follow the burn-in."""
        return 1

    @property
    def _learnt_states(self) -> int:
        """How many states of a sequence are learnt from, which `replay_ratio` counts."""
        return self._unroll

    def _init_params(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters."""
        raise NotImplementedError

    def _init_target(self, params: types.PyTree) -> types.PyTree:
        """Returns what part of the parameters there are older copies of; all by default."""
        return params

    def _kept(self, rollout: types.Rollout) -> types.Rollout:
        """Returns what replay stores of a rollout; by default neither extras nor actor states."""
        return rollout._replace(extras=(), actor_state=())

    def _first_priority(self, recent: types.Rollout, num_items: int) -> jax.Array | None:
        """Returns the priorities `[K, B]` of new sequences; None for the highest so far.

        Args:
          recent: `[L + K - 1, B, ...]` as it was stored, but for rewards and observations: sequence
            `k` is the `L` transitions from `k` on.
          num_items: `K`.
        """
        return None

    def _loss(
        self,
        params: types.PyTree,
        target: types.PyTree,
        sample: replay.Sample,
    ) -> Learnt:
        """Returns the loss of sequences, with observations and rewards as they are learnt from."""
        raise NotImplementedError

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        clip = optax.identity()
        if self.max_grad_norm is not None:
            clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.scale_by_adam(eps=self.adam_epsilon))

    @functools.cached_property
    def _replay(self) -> replay.Replay:
        return replay.Replay(
            self.replay_capacity,
            self._burn_in + self._unroll,
            self.batch_size,
            self.priority_exponent,
            self.importance_exponent,
            replay_ratio=self.replay_ratio,
            learnt_states=self._learnt_states,
        )

    def init_learner(self, key: jax.Array) -> Learner:
        """Returns fresh parameters."""
        params = self._init_params(key)
        # Copies: the learner's state is donated, and a buffer only once.
        target = jax.tree.map(jnp.copy, self._init_target(params))
        zero = jnp.zeros((), jnp.int32)
        normalizer = ()
        if self.normalize_observations:
            normalizer = preprocessing.init(self.spec.observation)
        return Learner(
            params=params,
            target=target,
            optimizer_state=self._optimizer.init(params),
            normalizer=normalizer,
            update=zero,
            agent_steps=jnp.copy(zero),
            gradient_steps=jnp.copy(zero),
        )

    def init_memory(self, rollout: types.Rollout) -> replay.Memory:
        """Returns an empty replay of this device's streams."""
        memory = self._replay.init(self._kept(rollout))
        streams, steps = memory.ring.timestep.reward.shape
        most = (steps - 1) * streams * parallel.axis_size()
        options.expect(
            self, "min_replay", self.min_replay <= most, f"at most {most}, which the replay holds"
        )
        return memory

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Stores one rollout, and takes the gradient steps that it allows."""
        learner = state.learner
        with jax.named_scope("replay"):
            memory = self._replay.add(state.memory, self._kept(rollout))
        learner = self._seen(learner, rollout)
        memory = self._prioritized(learner, memory, rollout)
        steps = self._num_steps(learner, memory, rollout)
        descent = Descent(
            learner.params, learner.target, learner.optimizer_state, learner.gradient_steps
        )

        @functools.partial(jax.jit, inline=True)  # traced once, for its shapes and for the loop
        def step(descent, priorities, index):
            current = memory._replace(**priorities)
            return self._gradient_step(learner, descent, current, jax.random.fold_in(key, index))

        # Only what changes is carried; the ring is read where it lies.
        priorities = {"priorities": memory.priorities, "highest": memory.highest}
        shapes = jax.eval_shape(step, descent, priorities, jnp.int32(0))[2]
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def body(index, carry):
            descent, priorities, metrics = carry
            descent, priorities, means = step(descent, priorities, index)
            metrics = {name: mean.merge(means[name]) for name, mean in metrics.items()}
            return descent, priorities, metrics

        descent, priorities, metrics = jax.lax.fori_loop(
            0, steps, body, (descent, priorities, metrics)
        )
        metrics["replay/gradient_steps"] = types.Mean.of(steps)
        metrics["replay/size"] = types.Mean.of(self._transitions(memory))
        learner = learner._replace(update=learner.update + 1, **descent._asdict())
        return types.AgentState(learner, memory._replace(**priorities)), metrics

    def _seen(self, learner: Learner, rollout: types.Rollout) -> Learner:
        """Counts the steps of a rollout, and its observations."""
        weights = jnp.ones_like(rollout.timestep.reward[1:])
        if self.normalize_observations:
            observation = jax.tree.map(lambda x: x[:-1], rollout.timestep.observation)
            learner = learner._replace(
                normalizer=preprocessing.update(learner.normalizer, observation, weights)
            )
        added = weights.size * parallel.axis_size()
        most = jnp.iinfo(jnp.int32).max - added
        return learner._replace(agent_steps=jnp.minimum(learner.agent_steps, most) + added)

    def _transitions(self, memory: replay.Memory) -> jax.Array:
        """Returns how many transitions of all streams are there, float32."""
        streams = memory.ring.timestep.reward.shape[0] * parallel.axis_size()
        return self._replay.size(memory).astype(jnp.float32) * streams

    def _num_steps(
        self, learner: Learner, memory: replay.Memory, rollout: types.Rollout
    ) -> jax.Array:
        """Returns how many gradient steps follow this rollout, int32, equal on all devices."""
        collected = rollout.timestep.reward[1:].size * parallel.axis_size()
        # A fraction whose products below are exact in int32.
        each = self._steps_after(collected).limit_denominator(30_000)
        if not each:
            raise errors.UserError(
                f"{type(self).__name__}.replay_ratio = {self.replay_ratio}: with rollouts of "
                f"{collected} agent steps there would never be a gradient step"
            )
        whole, rest = divmod(each.numerator, each.denominator)
        phase = learner.update % each.denominator
        steps = whole + (phase + 1) * rest // each.denominator - phase * rest // each.denominator
        enough = self._transitions(memory) >= self.min_replay
        return jnp.where(enough & self._replay.ready(memory), steps, 0)

    def _steps_after(self, collected: int) -> fractions.Fraction:
        """Returns how many gradient steps follow so many agent steps, on average."""
        learnt = self.batch_size * self._learnt_states
        return fractions.Fraction(self.replay_ratio) * collected / learnt

    def _prioritized(self, learner: Learner, memory: replay.Memory, rollout: types.Rollout):
        """Gives the new sequences their first priorities, where the algorithm has any."""
        if not self.priority_exponent:
            return memory
        steps = rollout.timestep.reward.shape[0] - 1
        item, exists = self._replay.new_items(memory, steps)
        recent = self._learnt_from(learner.normalizer, self._replay.recent(memory, steps))
        priority = self._first_priority(recent, exists.shape[0])
        if priority is None:
            return memory
        return self._replay.update_priorities(memory, item, priority, exists)

    def _learnt_from(self, normalizer: Any, rollout: types.Rollout) -> types.Rollout:
        """Returns a rollout with observations and rewards as they are learnt from."""
        return rollout._replace(timestep=self._perceived(normalizer, rollout.timestep))

    def _perceived(self, normalizer: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns time steps with observations and rewards as they are learnt from."""
        timestep = self._normalized(normalizer, timestep)
        reward = self.reward_scale * timestep.reward
        if self.reward_clip is not None:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        return timestep._replace(reward=reward)

    def _normalized(self, normalizer: Any, timestep: types.TimeStep) -> types.TimeStep:
        if not self.normalize_observations:
            return timestep
        observation = preprocessing.normalize(normalizer, timestep.observation)
        return timestep._replace(observation=observation)

    def _learning_rate(self, agent_steps: jax.Array) -> jax.Array:
        portion = 0.0
        if self.anneal_steps is not None:
            portion = jnp.minimum(agent_steps.astype(jnp.float32) / float(self.anneal_steps), 1.0)
        return jnp.float32(self.learning_rate * (1.0 - portion))

    def _gradient_step(self, learner, descent, memory, key):
        """Draws, learns, and gives what was drawn new priorities."""
        with jax.named_scope("replay"):
            sample = self._replay.sample(memory, key)
        sample = sample._replace(rollout=self._learnt_from(learner.normalizer, sample.rollout))
        learning_rate = self._learning_rate(learner.agent_steps)

        def share(params):
            learnt = self._loss(params, descent.target, sample)
            return parallel.share(learnt.metrics["loss/total"]), learnt

        params, optimizer_state, norm, learnt = parallel.gradient_step(
            share, descent.params, descent.optimizer_state, self._optimizer, learning_rate
        )
        steps = descent.gradient_steps + 1
        rate = jnp.where(steps % self.target_period == 0, self.target_rate, 0.0)
        target = optax.incremental_update(self._init_target(params), descent.target, rate)
        if self.priority_exponent:
            with jax.named_scope("replay"):
                memory = self._replay.update_priorities(memory, sample.item, learnt.priority)
        metrics = learnt.metrics | {"gradient_norm": types.Mean.of(norm)}
        priorities = {"priorities": memory.priorities, "highest": memory.highest}
        return Descent(params, target, optimizer_state, steps), priorities, metrics
