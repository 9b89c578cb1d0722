"""Tests of time steps and means."""

import jax.numpy as jnp
import numpy as np
import pytest

from podracers import types


def test_restart():
    timestep = types.restart({"x": jnp.arange(3)})
    assert timestep.first() and not timestep.last()
    assert (timestep.reward, timestep.discount) == (0.0, 1.0)
    assert timestep.step_type.dtype == jnp.int8
    assert timestep.reward.dtype == timestep.discount.dtype == jnp.float32


@pytest.mark.parametrize(
    ("terminated", "truncated", "step_type", "discount"),
    [
        (False, False, types.MID, 1.0),
        (True, False, types.LAST, 0.0),
        (False, True, types.LAST, 1.0),
        (True, True, types.LAST, 0.0),
    ],
)
def test_transition(terminated, truncated, step_type, discount):
    timestep = types.transition(jnp.zeros(2), 3, terminated, jnp.asarray(truncated))
    assert timestep.step_type == step_type and timestep.step_type.dtype == jnp.int8
    assert timestep.discount == discount and timestep.discount.dtype == jnp.float32
    assert timestep.reward == 3.0 and timestep.reward.dtype == jnp.float32
    assert timestep.last() == (terminated or truncated)
    assert timestep.terminated() == terminated
    assert timestep.truncated() == (truncated and not terminated)
    assert not timestep.first()


def test_means_merge():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)), rng.normal(size=7)
    merged = types.Mean.of(jnp.asarray(x)).merge(types.Mean.of(jnp.asarray(y)))
    assert merged.count == 19.0
    expected = np.mean(np.append(x.ravel(), y))
    np.testing.assert_allclose(merged.result(), expected, rtol=1e-5)


def test_weighted_mean_broadcasts_its_weights():
    values, weights = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0], [3.0]])
    mean = types.Mean.of(values, weights)
    assert mean.count == 8.0
    np.testing.assert_allclose(mean.result(), (1 + 2 + 9 + 12) / 8.0)


def test_a_weight_of_zero_hides_anything():
    values = jnp.array([1.0, jnp.nan, jnp.inf, 3.0])
    assert types.Mean.of(values, jnp.array([1.0, 0.0, 0.0, 1.0])).result() == 2.0
    assert jnp.isnan(types.Mean.of(values, jnp.ones(4)).result())


def test_the_mean_of_nothing_is_nan():
    nothing = types.Mean.of(jnp.ones(3), jnp.zeros(3))
    assert jnp.isnan(nothing.result())
    assert nothing.merge(types.Mean.of(jnp.ones(2))).result() == 1.0
