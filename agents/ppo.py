"""Proximal policy optimisation.

Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347,
with generalised advantage estimation. Any action head, any network with or without memory.

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import distributions, encoders, losses, minibatches, networks, normalization, returns
from podracers import environment, errors, parallel, types


class Learner(NamedTuple):
    """What PPO learns; identical on every device."""

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
    value: jax.Array  # [T, B]


class _Batch(NamedTuple):
    """One rollout, or one minibatch, as the loss sees it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    extras: Extras
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PPO:
    """The agent.

    Attributes:
      spec: of the environment.
      network: `network(spec, head)` returns a network that puts out `ActorCriticOutput`.
      head: the kind of action head, None for the usual one of the action's specification.
      learning_rate: of Adam.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      adam_epsilon: of Adam.
      max_grad_norm: the gradient of the global batch is scaled down to this norm.
      gamma: discount.
      gae_lambda: trace parameter of the advantages.
      epochs: passes over each rollout.
      num_minibatches: gradient steps of each pass.
      clip_epsilon: how far the ratio of policies may go from 1.
      value_clip_epsilon: how far a value may go from that of acting; None for no limit.
      value_cost: weight of the value loss.
      entropy_cost: weight of the entropy bonus.
      normalize_advantages: to mean 0 and variance 1 over the global batch.
      normalize_observations: to mean 0 and variance 1 over all that was seen, clipped at 10.
      reward_scale: multiplies the rewards that are learnt from.
      reward_clip: bounds the absolute value of scaled rewards; None for no bound.
    """

    spec: environment.EnvironmentSpec
    network: Callable[..., networks.Network] = networks.actor_critic
    head: str | None = None
    learning_rate: float = 2.5e-4
    anneal_steps: int | None = None
    adam_epsilon: float = 1e-5
    max_grad_norm: float = 0.5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    epochs: int = 4
    num_minibatches: int = 4
    clip_epsilon: float = 0.2
    value_clip_epsilon: float | None = None
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    normalize_advantages: bool = True
    normalize_observations: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None

    def __post_init__(self):
        for name in ("epochs", "num_minibatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise errors.UserError(f"PPO.{name}: expected a positive int, got {value!r}")
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise errors.UserError(
                    f"PPO.{name}: expected a number in [0, 1], got {getattr(self, name)!r}"
                )
        for name in ("learning_rate", "anneal_steps", "max_grad_norm", "clip_epsilon"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise errors.UserError(f"PPO.{name}: expected a positive number, got {value!r}")
        # Made now: gin's bindings may be others by the time that the network is first used.
        _ = self._network

    @functools.cached_property
    def _head(self) -> distributions.ActionHead:
        return distributions.from_spec(self.spec.action, self.head)

    @functools.cached_property
    def _network(self) -> networks.Network:
        return self.network(self.spec, self._head)

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.scale_by_adam(eps=self.adam_epsilon),
        )

    def init_learner(self, key: jax.Array) -> Learner:
        """Returns fresh parameters."""
        zero = jax.tree.map(lambda x: x[None], self.spec.zero_observation())
        timestep = types.TimeStep(
            zero, jnp.zeros((1,)), jnp.ones((1,)), jnp.full((1,), types.FIRST, jnp.int8)
        )
        params = self._network.init(key, timestep)
        return Learner(
            params=params,
            optimizer_state=self._optimizer.init(params),
            normalizer=(
                normalization.init(self.spec.observation) if self.normalize_observations else ()
            ),
            update=jnp.zeros((), jnp.int32),
        )

    def init_memory(self, rollout: types.Rollout) -> tuple[()]:
        """PPO forgets each rollout after it."""
        return ()

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the cores of `B` streams."""
        return self._network.initial_core(env_id.shape[0])

    def actor_params(self, learner: Learner) -> ActorParams:
        """Returns the parameters and the statistics of the observations."""
        return ActorParams(learner.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream; takes the likeliest in evaluation."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self._normalized(params.normalizer, timestep)
        output, actor_state = self._network.step(params.params, actor_state, timestep)
        if evaluation:
            raw = self._head.mode(output.policy, mask)
        else:
            raw = self._head.sample(output.policy, mask, key)
        log_prob = self._head.log_prob(output.policy, mask, raw)
        return self._head.to_action(raw), actor_state, Extras(raw, log_prob, output.value)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Learns from one rollout, `epochs * num_minibatches` gradient steps."""
        learner = state.learner
        # Time steps are normalised as they were when acted on: the first epoch's ratios are 1.
        batch, metrics = self._prepare(learner, rollout)
        learning_rate = self._learning_rate(learner.update, batch.weight.size)

        def epoch(carry, epoch_key):
            return jax.lax.scan(
                functools.partial(self._gradient_step, learning_rate=learning_rate),
                carry,
                self._minibatches(batch, rollout.actor_state, epoch_key),
            )

        (params, optimizer_state), learning = jax.lax.scan(
            epoch,
            (learner.params, learner.optimizer_state),
            jax.random.split(key, self.epochs),
        )
        metrics |= jax.tree.map(jnp.sum, learning)
        metrics["learning_rate"] = types.Mean.of(learning_rate)
        normalizer = learner.normalizer
        if self.normalize_observations:
            normalizer = normalization.update(
                normalizer,
                jax.tree.map(lambda x: x[:-1], rollout.timestep.observation),
                jnp.ones_like(batch.weight),
            )
        learner = Learner(params, optimizer_state, normalizer, learner.update + 1)
        return types.AgentState(learner, state.memory), metrics

    def _normalized(self, normalizer: Any, timestep: types.TimeStep) -> types.TimeStep:
        if not self.normalize_observations:
            return timestep
        return timestep._replace(
            observation=normalization.normalize(normalizer, timestep.observation)
        )

    def _learning_rate(self, update: jax.Array, local_steps: int) -> jax.Array:
        if self.anneal_steps is None:
            return jnp.float32(self.learning_rate)
        steps = update.astype(jnp.float32) * (local_steps * parallel.axis_size())
        return self.learning_rate * jnp.clip(1.0 - steps / self.anneal_steps, 0.0, 1.0)

    def _values(self, params, rollout: types.Rollout, timestep: types.TimeStep) -> jax.Array:
        """Returns the values `[T + 1, B]` of every time step, the bootstrapping one included."""
        if self._network.is_recurrent:
            output, _ = self._network.unroll(params, rollout.actor_state, timestep)
            return output.value
        final = jax.tree.map(lambda x: x[-1], timestep)
        output, _ = self._network.step(params, (), final)
        return jnp.concatenate([rollout.extras.value, output.value[None]])

    def _prepare(self, learner: Learner, rollout: types.Rollout):
        """Returns the rollout with advantages and targets, and metrics of it."""
        timestep = self._normalized(learner.normalizer, rollout.timestep)
        reward = self.reward_scale * timestep.reward
        if self.reward_clip is not None:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        timestep = timestep._replace(reward=reward)
        values = self._values(learner.params, rollout, timestep)
        advantage = returns.gae(timestep, values, self.gamma, self.gae_lambda)
        target = advantage + values[:-1]
        weight = returns.weights(timestep)
        metrics = {
            "value/mean": types.Mean.of(values[:-1], weight),
            "value/target": types.Mean.of(target, weight),
        }
        if self.normalize_advantages:
            advantage = _standardized(advantage, weight)
        current = jax.tree.map(lambda x: x[:-1], timestep)
        return _Batch(current, rollout.extras, advantage, target, weight), metrics

    def _minibatches(self, batch: _Batch, core: Any, key: jax.Array) -> tuple[_Batch, Any]:
        if self._network.is_recurrent:
            return minibatches.over_streams(batch, core, key, self.num_minibatches)
        return minibatches.over_time(batch, key, self.num_minibatches), core

    def _gradient_step(self, carry, minibatch, *, learning_rate):
        params, optimizer_state, norm, metrics = parallel.gradient_step(
            functools.partial(self._loss, minibatch=minibatch),
            *carry,
            self._optimizer,
            learning_rate,
        )
        metrics["gradient_norm"] = types.Mean.of(norm)
        return (params, optimizer_state), metrics

    def _loss(self, params: types.PyTree, minibatch: tuple[_Batch, Any]):
        """Returns this device's share of the loss, and metrics."""
        batch, core = minibatch
        mask = encoders.action_mask(batch.timestep.observation)
        output, _ = self._network.unroll(params, core, batch.timestep)
        log_prob = self._head.log_prob(output.policy, mask, batch.extras.raw)
        log_ratio = log_prob - batch.extras.log_prob
        entropy = self._head.entropy(output.policy, mask)
        if self.value_clip_epsilon is None:
            value_loss = losses.value(output.value, batch.target)
        else:
            value_loss = losses.clipped_value(
                output.value, batch.target, batch.extras.value, self.value_clip_epsilon
            )
        policy_loss = losses.clipped_surrogate(log_ratio, batch.advantage, self.clip_epsilon)
        total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        mean = functools.partial(types.Mean.of, weights=batch.weight)
        ratio = jnp.exp(log_ratio)
        metrics = {
            "loss/total": mean(total),
            "loss/policy": mean(policy_loss),
            "loss/value": mean(value_loss),
            "policy/entropy": mean(entropy),
            "policy/kl": mean(ratio - 1.0 - log_ratio),
            "policy/clip_fraction": mean(jnp.abs(ratio - 1.0) > self.clip_epsilon),
        }
        return parallel.share(metrics["loss/total"]), metrics


def _standardized(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `x` with mean 0 and variance 1 over the global batch where `weight` is not 0."""
    mean = parallel.global_sum(parallel.share(types.Mean.of(x, weight)))
    variance = parallel.global_sum(parallel.share(types.Mean.of(jnp.square(x - mean), weight)))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-8)
