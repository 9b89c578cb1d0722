"""IMPALA: an actor-critic that learns from slightly old policies, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018, https://arxiv.org/abs/1802.01561. Any action head, any network with or without
memory; V-trace unrolls it over all `T + 1` time steps, from the core that acting began with.

Losses are means over the global batch, where the paper sums them over a batch of N transitions: an
optimizer that divides by the size of the gradient does not notice, but `max_grad_norm` and
`optimizer_epsilon` are those of a sum divided by N (by N squared where the epsilon stands inside
the root).

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from agents import actor_critic, losses, minibatches, returns
from agents.networks import encoders
from podracers import errors, types

_OPTIMIZERS = ("adam", "rmsprop")


@dataclasses.dataclass(frozen=True, eq=False)
class IMPALA(actor_critic.ActorCritic):
    """The agent; see `ActorCritic` for the options that it shares.

    Attributes:
      num_minibatches: 1 to learn from all streams at once; else each gradient step learns from some
        of the streams, one after the other, with targets of their own from the newest parameters.
      optimizer: "rmsprop" or "adam".
      optimizer_epsilon: added to what the optimizer divides by.
      rmsprop_decay: of the running mean of squared gradients; it begins at 0.
      rmsprop_epsilon_in_sqrt: whether the epsilon is added to the mean of squares, as TensorFlow
        does it, or to its root, as PyTorch does it.
      vtrace_lambda: trace parameter of the targets; 1 is the paper's.
      clip_rho: the largest importance weight of a temporal-difference error.
      clip_pg_rho: the largest importance weight of a policy gradient.
    """

    learning_rate: float = 6e-4
    max_grad_norm: float = 0.5
    optimizer: str = "rmsprop"
    optimizer_epsilon: float = 1e-5
    rmsprop_decay: float = 0.99
    rmsprop_epsilon_in_sqrt: bool = False
    vtrace_lambda: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0

    _PORTIONS: ClassVar = (
        "vtrace_lambda",
        "rmsprop_decay",
        *actor_critic.ActorCritic._PORTIONS,
    )
    _POSITIVE: ClassVar = (
        "optimizer_epsilon",
        "clip_rho",
        "clip_pg_rho",
        *actor_critic.ActorCritic._POSITIVE,
    )

    def __post_init__(self):
        """Refuses impossible options."""
        if self.optimizer not in _OPTIMIZERS:
            near = errors.nearest(str(self.optimizer), _OPTIMIZERS)
            raise errors.UserError(f"IMPALA.optimizer: no optimizer {self.optimizer!r}{near}")
        super().__post_init__()

    def _direction(self) -> optax.GradientTransformation:
        if self.optimizer == "adam":
            return optax.scale_by_adam(eps=self.optimizer_epsilon)
        return optax.scale_by_rms(
            decay=self.rmsprop_decay,
            eps=self.optimizer_epsilon,
            eps_in_sqrt=self.rmsprop_epsilon_in_sqrt,
        )

    def _learn(self, learner, rollout, key, descend):
        """Takes `num_minibatches` gradient steps, on whole streams each."""
        streams = (rollout.timestep, rollout.extras)
        return descend(
            actor_critic.Descent(learner.params, learner.optimizer_state),
            minibatches.over_streams(streams, rollout.actor_state, key, self.num_minibatches),
        )

    def _loss(self, params, minibatch):
        (timestep, extras), core = minibatch
        output, _ = self._network.unroll(params, core, timestep)  # [T + 1, B]
        outputs, mask = jax.tree.map(
            lambda x: x[:-1], (output.policy, encoders.action_mask(timestep.observation))
        )
        log_prob = self._head.log_prob(outputs, mask, extras.raw)
        log_ratio = log_prob - extras.log_prob
        vtrace = returns.vtrace(
            timestep,
            *jax.lax.stop_gradient((output.value, log_ratio)),
            self.gamma,
            self.vtrace_lambda,
            self.clip_rho,
            self.clip_pg_rho,
        )
        values = output.value[:-1]
        policy_loss = losses.policy_gradient(log_prob, vtrace.advantage)
        value_loss = losses.value(values, vtrace.target)
        entropy = self._head.entropy(outputs, mask)
        weight = returns.weights(timestep)
        metrics = self._means(policy_loss, value_loss, entropy, log_ratio, weight)
        # Not how many are clipped: on-policy that would be decided by rounding.
        rho = jnp.minimum(jnp.exp(log_ratio), self.clip_rho)
        metrics["policy/rho"] = types.Mean.of(rho, weight)
        metrics["value/mean"] = types.Mean.of(values, weight)
        metrics["value/target"] = types.Mean.of(vtrace.target, weight)
        return metrics
