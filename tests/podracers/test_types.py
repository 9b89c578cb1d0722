"""Tests of time steps and means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import types


@pytest.mark.parametrize(
    ("timestep", "reward", "discount", "step_type", "kinds"),
    [
        (types.restart(0.0), 0.0, 1.0, types.FIRST, [True, False, False, False]),
        (types.transition(0.0, 3), 3.0, 1.0, types.MID, [False] * 4),
        (types.transition(0.0, 3, True), 3.0, 0.0, types.LAST, [False, True, True, False]),
        (types.transition(0.0, 3, False, True), 3.0, 1.0, types.LAST, [False, True, False, True]),
        (types.transition(0.0, 3, True, True), 3.0, 0.0, types.LAST, [False, True, True, False]),
    ],
)
def test_time_steps(timestep, reward, discount, step_type, kinds):
    assert (timestep.reward, timestep.discount) == (reward, discount)
    assert timestep.reward.dtype == timestep.discount.dtype == jnp.float32
    assert timestep.step_type == step_type and timestep.step_type.dtype == jnp.int8
    flags = timestep.first(), timestep.last(), timestep.terminated(), timestep.truncated()
    assert [bool(flag) for flag in flags] == kinds


def test_metrics_are_scalars_and_absent_by_default():
    """A time step of four fields has four leaves, as in checkpoints of earlier versions."""
    assert jax.tree.leaves(types.TimeStep(1, 2, 3, 4)) == [1, 2, 3, 4]
    for make in (types.restart, functools.partial(types.transition, reward=0.0)):
        assert make(0.0).metrics == {}
        metrics = make(0.0, metrics={"success": True, "x": 2}).metrics
        assert metrics == {"success": 1.0, "x": 2.0}
        assert [(x.dtype, x.shape) for x in metrics.values()] == [(jnp.float32, ())] * 2


def test_means_merge():
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4))
    merged = types.Mean.of(jnp.asarray(x)).merge(types.Mean.of(jnp.asarray(y[0])))
    assert merged.count == 16.0
    expected = np.mean(np.append(x.ravel(), y[0]))
    np.testing.assert_allclose(merged.result(), expected, rtol=1e-5)


def test_weights_broadcast_and_a_weight_of_zero_hides_the_value():
    values, weights = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0], [3.0]])
    mean = types.Mean.of(values, weights)
    assert mean.count == 8.0
    np.testing.assert_allclose(mean.result(), (1 + 2 + 9 + 12) / 8.0)
    values = jnp.array([1.0, jnp.nan, jnp.inf, 3.0])
    assert types.Mean.of(values, jnp.array([1.0, 0.0, 0.0, 1.0])).result() == 2.0
    assert jnp.isnan(types.Mean.of(values, jnp.ones(4)).result())
    assert jnp.isnan(types.Mean.of(values, jnp.zeros(4)).result())
