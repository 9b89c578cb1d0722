"""What all agents that learn a policy and a value from fresh rollouts have in common.

Acting, normalisation, rewards, the learning rate and the way from a loss to new parameters stand
here once. An algorithm adds its targets, its loss, and how often it passes over a rollout.

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import inputs, networks, options, preprocessing
from agents.networks import encoders, heads
from podracers import environment, parallel, types


class Learner(NamedTuple):
    """What is learnt; identical on every device."""

    params: types.PyTree
    optimizer_state: optax.OptState
    normalizer: Any  # statistics of the observations; () where they are not normalised
    update: jax.Array  # int32, how many rollouts were learnt from


class ActorParams(NamedTuple):
    """What acting needs."""

    params: types.PyTree
    normalizer: Any


class Extras(NamedTuple):
    """What acting remembers of each step."""

    raw: jax.Array  # the action before it was squashed or clipped
    log_prob: jax.Array  # [T, B] of `raw`, under the policy that acted
    value: jax.Array  # [T, B], by the parameters that acted


class Descent(NamedTuple):
    """What a gradient step changes."""

    params: types.PyTree
    optimizer_state: optax.OptState


# A minibatch: its data `[T, B, ...]`, and the cores `[B, ...]` before the first time step of it.
Minibatch = tuple[types.PyTree, Any]
# Takes `(descent, draws, select)`, and one gradient step for each of `M` draws, the leading axis of
# `draws`; `select` makes the minibatch of a draw when its turn comes. Metrics are `[M]` too.
Descend = Callable[..., tuple[Descent, dict[str, types.Mean]]]


@dataclasses.dataclass(frozen=True, eq=False)
class ActorCritic:
    """All of an agent but its algorithm: `_learn`, `_loss` and `_direction`.

    Attributes:
      spec: of the environment.
      network: `network(spec, head)` returns a network that puts out `ActorCriticOutput`.
      head: the kind of action head, None for the usual one of the action's specification.
      learning_rate: of the optimizer.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      max_grad_norm: the gradient of the global batch is scaled down to this norm.
      gamma: discount.
      num_minibatches: gradient steps of each pass over a rollout.
      value_cost: weight of the value loss.
      entropy_cost: weight of the entropy bonus.
      normalize_observations: to mean 0 and variance 1 over all that was seen, clipped at 10.
      reward_scale: multiplies the rewards that are learnt from.
      reward_clip: bounds the absolute value of scaled rewards; None for no bound.
      greedy_evaluation: whether evaluations take the most probable action; they sample otherwise,
        as training does.
      previous_action_and_reward: whether the network sees the previous action and reward beside the
        observation, see `agents.inputs`; None for networks that are recurrent.
    """

    spec: environment.EnvironmentSpec
    network: Callable[..., networks.Network] = networks.actor_critic
    head: str | None = None
    learning_rate: float = 2.5e-4
    anneal_steps: float | None = None
    max_grad_norm: float = 0.5
    gamma: float = 0.99
    num_minibatches: int = 1
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    normalize_observations: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None
    greedy_evaluation: bool = False
    previous_action_and_reward: bool | None = None

    # The options that are counts, portions (in [0, 1]) and positive numbers or None.
    _COUNTS: ClassVar[tuple[str, ...]] = ("num_minibatches",)
    _PORTIONS: ClassVar[tuple[str, ...]] = ("gamma",)
    _POSITIVE: ClassVar[tuple[str, ...]] = ("learning_rate", "anneal_steps", "max_grad_norm")

    def __post_init__(self):
        """Refuses impossible options."""
        options.check(self, self._COUNTS, self._PORTIONS, self._POSITIVE)
        # Made now: gin's bindings may be others by the time that the network is first used.
        _ = self._network

    def _learn(
        self,
        learner: Learner,
        rollout: types.Rollout,
        key: jax.Array,
        descend: Descend,
    ) -> tuple[Descent, dict[str, types.Mean]]:
        """Returns what is learnt from one rollout, and metrics with any axes.

        Args:
          learner: before the rollout.
          rollout: `[T, B, ...]`; observations and rewards as they are to be learnt from, and the
            core of the network as actor state.
          key: one typed key, equal on all devices.
          descend: takes the gradient steps.
        """
        raise NotImplementedError

    def _loss(self, params: types.PyTree, minibatch: Minibatch) -> dict[str, types.Mean]:
        """Returns metrics, "loss/total" among them: the mean that is to be made small.

        Each is a mean over this device's part of the minibatch. Parts of it could be taken one
        after the other: neither totals nor counts depend on anything but their own streams.
        """
        raise NotImplementedError

    def _direction(self) -> optax.GradientTransformation:
        """Returns the optimizer without its learning rate and without clipping."""
        raise NotImplementedError

    @functools.cached_property
    def _head(self) -> heads.ActionHead:
        return heads.from_spec(self.spec.action, self.head)

    @functools.cached_property
    def _network(self) -> networks.Network:
        return self.network(self._network_spec, self._head)

    @functools.cached_property
    def _network_spec(self) -> environment.EnvironmentSpec:
        """The environment's spec, with observations as the network sees them."""
        return inputs.extended_spec(self.spec) if self._sees_previous else self.spec

    @functools.cached_property
    def _sees_previous(self) -> bool:
        if self.previous_action_and_reward is None:
            return self.network(self.spec, self._head).is_recurrent
        return self.previous_action_and_reward

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), self._direction())

    def init_learner(self, key: jax.Array) -> Learner:
        """Returns fresh parameters."""
        params = self._network.init(key, networks.zero_timestep(self._network_spec))
        return Learner(
            params=params,
            optimizer_state=self._optimizer.init(params),
            normalizer=(
                preprocessing.init(self.spec.observation) if self.normalize_observations else ()
            ),
            update=jnp.zeros((), jnp.int32),
        )

    def init_memory(self, rollout: types.Rollout) -> tuple[()]:
        """Returns `()`: each rollout is forgotten after it."""
        return ()

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns what `B` streams remember."""
        count = env_id.shape[0]
        action = inputs.zero_action(self.spec.action, count) if self._sees_previous else ()
        return inputs.ActorState(self._network.initial_core(count), action)

    def actor_params(self, learner: Learner) -> ActorParams:
        """Returns the parameters and the statistics of the observations."""
        return ActorParams(learner.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self._perceived(params.normalizer, timestep)
        if self._sees_previous:
            timestep = inputs.extended(timestep, actor_state.action, self.spec.action)
        output, core = self._network.step(params.params, actor_state.core, timestep)
        if evaluation and self.greedy_evaluation:
            raw = self._head.mode(output.policy, mask)
        else:
            raw = self._head.sample(output.policy, mask, key)
        log_prob = self._head.log_prob(output.policy, mask, raw)
        action = self._head.to_action(raw)
        actor_state = inputs.ActorState(core, action if self._sees_previous else ())
        return action, actor_state, Extras(raw, log_prob, output.value)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Learns from one rollout."""
        learner = state.learner
        learning_rate = self._learning_rate(learner.update, rollout.extras.log_prob.size)
        # Time steps are normalised as they were when acted on: the first ratios are 1.
        timestep = self._perceived(learner.normalizer, rollout.timestep)
        if self._sees_previous:
            perceived = rollout._replace(timestep=timestep)
            timestep = inputs.extended_rollout(perceived, self.spec.action)
        descent, metrics = self._learn(
            learner,
            rollout._replace(timestep=timestep, actor_state=rollout.actor_state.core),
            key,
            functools.partial(self._descend, learning_rate=learning_rate),
        )
        metrics = jax.tree.map(jnp.sum, metrics)
        metrics["learning_rate"] = types.Mean.of(learning_rate)
        normalizer = learner.normalizer
        if self.normalize_observations:
            normalizer = preprocessing.update(
                normalizer,
                jax.tree.map(lambda x: x[:-1], rollout.timestep.observation),
                jnp.ones_like(rollout.extras.log_prob),
            )
        learner = Learner(*descent, normalizer, learner.update + 1)
        return types.AgentState(learner, state.memory), metrics

    def _perceived(self, normalizer: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns time steps with observations and rewards as they are learnt from."""
        observation = timestep.observation
        if self.normalize_observations:
            observation = preprocessing.normalize(normalizer, observation)
        reward = self.reward_scale * timestep.reward
        if self.reward_clip is not None:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        return timestep._replace(observation=observation, reward=reward)

    def _learning_rate(self, update: jax.Array, local_steps: int) -> jax.Array:
        if self.anneal_steps is None:
            return jnp.float32(self.learning_rate)
        steps = update.astype(jnp.float32) * (local_steps * parallel.axis_size())
        return self.learning_rate * jnp.clip(1.0 - steps / float(self.anneal_steps), 0.0, 1.0)

    def _descend(
        self,
        descent: Descent,
        draws: types.PyTree,
        select: Callable[[types.PyTree], Minibatch] = lambda minibatch: minibatch,
        *,
        learning_rate: jax.Array,
    ):
        """Takes one gradient step after the other; see `Descend`."""

        def step(descent: Descent, draw: types.PyTree):
            return self._gradient_step(descent, select(draw), learning_rate=learning_rate)

        return jax.lax.scan(step, descent, draws)

    def _gradient_step(self, descent: Descent, minibatch: Minibatch, *, learning_rate: jax.Array):
        def share(params):
            metrics = self._loss(params, minibatch)
            return parallel.share(metrics["loss/total"]), metrics

        params, optimizer_state, norm, metrics = parallel.gradient_step(
            share, *descent, self._optimizer, learning_rate
        )
        metrics["gradient_norm"] = types.Mean.of(norm)
        return Descent(params, optimizer_state), metrics

    def _means(
        self,
        policy_loss: jax.Array,
        value_loss: jax.Array,
        entropy: jax.Array,
        log_ratio: jax.Array,
        weight: jax.Array,
    ) -> dict[str, types.Mean]:
        """Returns the parts of a loss and their weighted sum, "loss/total"; all are `[T, B]`."""
        total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        mean = functools.partial(types.Mean.of, weights=weight)
        return {
            "loss/total": mean(total),
            "loss/policy": mean(policy_loss),
            "loss/value": mean(value_loss),
            "policy/entropy": mean(entropy),
            "policy/kl": mean(jnp.exp(log_ratio) - 1.0 - log_ratio),
        }
