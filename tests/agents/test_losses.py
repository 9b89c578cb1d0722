"""Losses per step, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from agents import losses


def test_clipped_surrogate_stops_where_the_ratio_went_too_far():
    log_ratio = jnp.log(jnp.array([1.0, 1.5, 0.5, 1.5, 0.5]))
    advantage = jnp.array([2.0, 2.0, 2.0, -2.0, -2.0])
    loss = losses.clipped_surrogate(log_ratio, advantage, 0.2)
    np.testing.assert_allclose(loss, [-2.0, -2.4, -1.0, 3.0, 1.6], rtol=1e-6)
    gradient = jax.grad(lambda x: losses.clipped_surrogate(x, advantage, 0.2).sum())(log_ratio)
    np.testing.assert_allclose(gradient, [-2.0, 0.0, -1.0, 3.0, 0.0], rtol=1e-6)


def test_no_gradient_passes_through_advantages_and_targets():
    x = jnp.array([0.5, -0.5])
    constant = [
        jax.grad(lambda a: losses.clipped_surrogate(x, a, 0.2).sum())(x),
        jax.grad(lambda a: losses.clipped_value(x, a, a, 0.2).sum())(x + 1.0),
    ]
    np.testing.assert_array_equal(constant, jnp.zeros((2, 2)))


def test_clipped_value():
    prediction, target = jnp.array([1.0, 1.0, 2.0]), jnp.array([0.0, 3.0, 2.0])
    # Clipped to within 0.5 of 0, predictions are 0.5; the larger of both losses counts.
    clipped = losses.clipped_value(prediction, target, jnp.zeros(3), 0.5)
    np.testing.assert_allclose(clipped, [0.5, 3.125, 1.125])
