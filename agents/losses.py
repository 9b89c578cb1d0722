"""Losses per step, unreduced: the caller weights them and takes one mean over the global batch.

Axis legend: `...` any axes, the same for every argument: `[T, B]` or a shuffled `[N]`.
"""

import chex
import jax
import jax.numpy as jnp


def policy_gradient(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """Returns the policy gradient's loss `[...]`.

    Sutton et al., "Policy Gradient Methods for Reinforcement Learning with Function Approximation",
    1999.

    Args:
      log_prob: of the actions, under the policy that learns.
      advantage: a constant: no gradient passes through it.
    """
    chex.assert_equal_shape([log_prob, advantage])
    return -log_prob * jax.lax.stop_gradient(advantage)


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, epsilon: float) -> jax.Array:
    """Returns PPO's clipped policy loss `[...]`.

    Schulman et al., "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347.

    Args:
      log_ratio: `log pi(a|s) - log mu(a|s)`, of the policy that learns and of that which acted.
      advantage: a constant: no gradient passes through it.
      epsilon: how far from 1 the ratio may go.
    """
    chex.assert_equal_shape([log_ratio, advantage])
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Returns half the squared error `[...]`; no gradient passes through the target."""
    chex.assert_equal_shape([prediction, target])
    return 0.5 * jnp.square(prediction - jax.lax.stop_gradient(target))


def clipped_value(
    prediction: jax.Array, target: jax.Array, behaviour: jax.Array, epsilon: float
) -> jax.Array:
    """Returns the worse of the value losses with and without clipping, `[...]`.

    Args:
      prediction: the value that learns.
      target: a constant, the return.
      behaviour: a constant, the value at the time of acting.
      epsilon: how far from `behaviour` a value may go before its gradient stops.
    """
    chex.assert_equal_shape([prediction, target, behaviour])
    behaviour = jax.lax.stop_gradient(behaviour)
    clipped = behaviour + jnp.clip(prediction - behaviour, -epsilon, epsilon)
    return jnp.maximum(value(prediction, target), value(clipped, target))


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """Returns an unbiased estimate of `KL(mu || pi)` that is never negative, `[...]`.

    It is `k3` of Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    Args:
      log_ratio: `log pi(a|s) - log mu(a|s)` of actions that `mu` sampled.
    """
    return jnp.exp(log_ratio) - 1.0 - log_ratio
