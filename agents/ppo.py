"""Proximal policy optimisation.

Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347,
with generalised advantage estimation. Any action head, any network with or without memory.

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import actor_critic, losses, minibatches, returns
from agents.networks import encoders
from podracers import parallel, types


class _Batch(NamedTuple):
    """One rollout, or one minibatch, as the loss sees it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    extras: actor_critic.Extras
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PPO(actor_critic.ActorCritic):
    """The agent; see `ActorCritic` for the options that it shares.

    Attributes:
      learning_rate: of Adam.
      adam_epsilon: of Adam.
      gae_lambda: trace parameter of the advantages.
      epochs: passes over each rollout.
      num_minibatches: gradient steps of each pass.
      clip_epsilon: how far the ratio of policies may go from 1.
      value_clip_epsilon: how far a value may go from that of acting; None for no limit.
      normalize_advantages: to mean 0 and variance 1 over the global batch.
    """

    adam_epsilon: float = 1e-5
    gae_lambda: float = 0.95
    epochs: int = 4
    num_minibatches: int = 4
    clip_epsilon: float = 0.2
    value_clip_epsilon: float | None = None
    normalize_advantages: bool = True

    _COUNTS: ClassVar = ("epochs", *actor_critic.ActorCritic._COUNTS)
    _PORTIONS: ClassVar = ("gae_lambda", *actor_critic.ActorCritic._PORTIONS)
    _POSITIVE: ClassVar = ("clip_epsilon", *actor_critic.ActorCritic._POSITIVE)

    def _direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(eps=self.adam_epsilon)

    def _learn(self, learner, rollout, key, descend):
        """Takes `epochs * num_minibatches` gradient steps."""
        batch, metrics = self._prepare(learner.params, rollout)

        def epoch(descent, epoch_key):
            return descend(descent, *self._minibatches(batch, rollout.actor_state, epoch_key))

        descent, learning = jax.lax.scan(
            epoch,
            actor_critic.Descent(learner.params, learner.optimizer_state),
            jax.random.split(key, self.epochs),
        )
        return descent, metrics | learning

    def _values(self, params: types.PyTree, rollout: types.Rollout) -> jax.Array:
        """Returns the values `[T + 1, B]` of every time step, the bootstrapping one included."""
        if self._network.is_recurrent:
            output, _ = self._network.unroll(params, rollout.actor_state, rollout.timestep)
            return output.value
        timestep = rollout.timestep
        stream = jnp.arange(timestep.reward.shape[1])
        end = jnp.full_like(stream, timestep.reward.shape[0] - 1)
        core = self._network.core_before(rollout.actor_state, timestep, end, stream)
        output, _ = self._network.step(params, core, jax.tree.map(lambda x: x[-1], timestep))
        return jnp.concatenate([rollout.extras.value, output.value[None]])

    def _prepare(self, params: types.PyTree, rollout: types.Rollout):
        """Returns the rollout with advantages and targets, and metrics of it."""
        timestep = rollout.timestep
        values = self._values(params, rollout)
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

    def _minibatches(self, batch: _Batch, core: Any, key: jax.Array) -> tuple:
        """Returns draws and how a minibatch is selected by one of them; see `Descend`."""
        if self._network.is_recurrent:
            return (minibatches.over_streams(batch, core, key, self.num_minibatches),)
        length, streams = batch.weight.shape
        items = jnp.arange(length * streams).reshape(length, streams)
        draws = minibatches.over_time(items, key, self.num_minibatches)
        return draws, functools.partial(self._transitions, batch, core)

    def _transitions(self, batch: _Batch, core: Any, items: jax.Array) -> actor_critic.Minibatch:
        """Returns the transitions that were drawn, and the cores before them.

        Args:
          batch: the whole rollout; frames are stacked for the transitions that are drawn alone.
          core: `[B, ...]` before it.
          items: `[T / M, B]` int32, the numbers `time * B + stream` of the transitions.
        """
        if self._network.memory_length:
            items = items.reshape(1, -1)  # streams of one time step, each with a core of its own
        time, stream = jnp.divmod(items, batch.weight.shape[1])
        core = self._network.core_before(core, batch.timestep, time.ravel(), stream.ravel())
        return jax.tree.map(lambda x: x[time, stream], batch), core

    def _loss(self, params, minibatch):
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
        metrics = self._means(policy_loss, value_loss, entropy, log_ratio, batch.weight)
        clipped = jnp.abs(jnp.exp(log_ratio) - 1.0) > self.clip_epsilon
        metrics["policy/clip_fraction"] = types.Mean.of(clipped, batch.weight)
        return metrics


def _standardized(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `x` with mean 0 and variance 1 over the global batch where `weight` is not 0."""
    mean = parallel.global_sum(parallel.share(types.Mean.of(x, weight)))
    variance = parallel.global_sum(parallel.share(types.Mean.of(jnp.square(x - mean), weight)))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-8)
