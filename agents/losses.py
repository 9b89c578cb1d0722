"""Losses per step, unreduced: the caller weights them and takes one mean over the global batch.

Axis legend: `...` any axes, the same for every argument: `[T, B]` or a shuffled `[N]`.
"""

import chex
import jax
import jax.numpy as jnp
import rlax


def clipped_surrogate(
    log_ratio: jax.Array, advantage: jax.Array, epsilon: jax.Array | float
) -> jax.Array:
    """Returns PPO's clipped policy loss `[...]`.

    Schulman et al., "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347.
    `rlax.clipped_surrogate_pg_loss` averages over time, which leaves no room for weights.

    Args:
      log_ratio: `log pi(a|s) - log mu(a|s)`, of the policy that learns and of that which acted.
      advantage: a constant: no gradient passes through it.
      epsilon: distance from 1 at which the ratio is clipped.
    """
    chex.assert_equal_shape([log_ratio, advantage])
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def clipped_value(
    prediction: jax.Array, target: jax.Array, behaviour: jax.Array, epsilon: float
) -> jax.Array:
    """Returns the worse of the value losses with and without clipping, `[...]`.

    Args:
      prediction: value by the parameters that learn.
      target: a constant, the return.
      behaviour: a constant, the value at the time of acting.
      epsilon: distance from `behaviour` at which a value is clipped.
    """
    chex.assert_equal_shape([prediction, target, behaviour])
    behaviour = jax.lax.stop_gradient(behaviour)
    clipped = behaviour + jnp.clip(prediction - behaviour, -epsilon, epsilon)
    target = jax.lax.stop_gradient(target)
    return jnp.maximum(rlax.l2_loss(prediction, target), rlax.l2_loss(clipped, target))


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """Returns an unbiased estimate of `KL(mu || pi)` that is never negative, `[...]`.

    It is `k3` of Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    Args:
      log_ratio: `log pi(a|s) - log mu(a|s)` of actions that `mu` sampled.
    """
    return jnp.exp(log_ratio) - 1.0 - log_ratio
