"""IMPALA: an actor-critic that learns from slightly old policies, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018, https://arxiv.org/abs/1802.01561. Any action head, any network with or without
memory; V-trace unrolls it over all `T + 1` time steps, from the core that acting began with.

The loss of a step, with the advantage `A` and the target `G` of `returns.vtrace`, both constants:

    -A log π(a|s) + value_cost (v(s) - G)² / 2 - entropy_cost H(π(·|s))

Losses are means over the global batch; the paper sums them over N transitions. Divide published
values of `max_grad_norm` and `optimizer_epsilon` by N (by N squared with the epsilon inside the
root); the steps of the optimizer are then the same.

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agents.networks import popart
from agents.parts import actor_critic, minibatches, optimization, options, returns
from podracers import environment, errors, types

_OPTIMIZERS = ("adam", "rmsprop")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IMPALA(actor_critic.ActorCritic):
    """Importance-weighted actor-learner with V-trace targets.

    `actor_critic.ActorCritic` describes the options that are not listed here.

    Attributes:
      num_minibatches: gradient steps of each rollout, on a part of the streams each; every step
        computes its targets with the newest parameters.
      optimizer: name of the optimizer, "rmsprop" or "adam"; or see `options.Optimized`.
      optimizer_epsilon: epsilon of the optimizer.
      rmsprop_decay: decay of the running mean of squared gradients.
      rmsprop_epsilon_in_sqrt: whether the epsilon is added to the mean of squares, as in
        TensorFlow, or to its root, as in PyTorch.
      vtrace_lambda: trace parameter of the targets; 1 in the paper.
      clip_rho: largest importance weight of a temporal-difference error.
      clip_pg_rho: largest importance weight of a policy gradient.
    """

    learning_rate: float = 6e-4
    max_grad_norm: float | None = 0.5
    entropy_cost: float = options.number(0.01)
    # pyrefly: ignore[bad-override]  # or the name of one of its own
    optimizer: str | Callable[..., optax.GradientTransformation] = "rmsprop"
    optimizer_epsilon: float = options.positive(1e-5, most=1e3)
    rmsprop_decay: float = options.fraction(0.99)
    rmsprop_epsilon_in_sqrt: bool = False
    vtrace_lambda: float = options.fraction(1.0)
    clip_rho: float = options.positive(1.0)
    clip_pg_rho: float = options.positive(1.0)

    def __post_init__(self):
        if not callable(self.optimizer):
            errors.require_known("IMPALA.optimizer: got", self.optimizer, _OPTIMIZERS)
        super().__post_init__()

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        if self.optimizer == "adam":
            scaling = optax.scale_by_adam(eps=self.optimizer_epsilon)
        else:
            scaling = optax.scale_by_rms(
                decay=self.rmsprop_decay,
                eps=self.optimizer_epsilon,
                eps_in_sqrt=self.rmsprop_epsilon_in_sqrt,
            )
        return optimization.Optimizer.of(self, scaling)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes `num_minibatches` gradient steps, on whole streams each."""
        learner = state.learner
        timestep = self._learning_inputs(learner.normalizer, rollout)
        # Targets of the acting policy: those of the loss follow the parameters of each minibatch.
        values = jnp.concatenate([rollout.extras.value, rollout.extras.value[-1:]])
        target, _ = self.targets(timestep, values, jnp.zeros_like(rollout.extras.value))
        params = self._renormalized(learner.params, target, returns.weights(timestep))
        steps, core = (timestep, rollout.extras), rollout.actor_state.core

        def deal(key):
            return minibatches.over_streams(steps, core, key, self.num_minibatches)

        learner, metrics = self._learn_epochs(learner.with_params(params), deal, key[None])
        return types.AgentState(learner.observe(rollout, self.preprocess), ()), metrics

    def targets(
        self, timestep: types.TimeStep, values: jax.Array, log_ratio: jax.Array
    ) -> returns.Targets:
        """Returns the targets and advantages `[T, B]` of V-trace.

        Args:
          timestep: `[T + 1, B]`, with rewards to learn from.
          values: `[T + 1, B]` of the same time steps; no gradient passes through it.
          log_ratio: `[T, B]`, `log pi(a|s) - log mu(a|s)` of the learning and the acting policy.
        """
        clip = self.clip_rho, self.clip_pg_rho
        return returns.vtrace(timestep, values, log_ratio, self.gamma, self.vtrace_lambda, *clip)

    def loss(
        self,
        params: types.PyTree,
        minibatch: tuple[tuple[types.TimeStep, actor_critic.Extras], Any],
        context: optimization.Context,
    ) -> optimization.LossOutput:
        """Returns the loss of time steps `[T + 1, B]` and extras `[T, B]`, from cores `[B]` on."""
        (timestep, extras), core = minibatch
        output, _ = self.net.unroll(params, core, timestep)  # [T + 1, B]
        outputs, mask = jax.tree.map(
            lambda x: x[:-1], (output.policy, environment.action_mask(timestep.observation))
        )
        head = self.action_head
        log_prob = head.log_prob(outputs, mask, extras.raw)
        log_ratio = log_prob - extras.log_prob
        constants = jax.lax.stop_gradient((output.value, log_ratio))
        target, advantage = self.targets(timestep, *constants)
        values, weight = output.value[:-1], returns.weights(timestep)
        std = popart.std(params)
        policy_loss = -log_prob * advantage / std
        value_loss = optax.losses.l2_loss(values, target) / std**2
        entropy = head.entropy(outputs, mask)
        total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        mean = functools.partial(types.Mean.of, weights=weight)
        metrics = {
            "loss/policy": mean(policy_loss),
            "loss/value": mean(value_loss),
            "policy/entropy": mean(entropy),
            "policy/kl": mean(returns.kl_estimate(log_ratio)),
            # Not the clipped fraction: on-policy, rounding would decide it.
            "policy/rho": mean(jnp.minimum(jnp.exp(log_ratio), self.clip_rho)),
            "value/mean": mean(values),
            "value/target": mean(target),
        }
        return optimization.LossOutput(mean(total), metrics, outputs=output)
