"""Gradient steps against optax and a slow gradient of the global mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agents import optimization
from podracers import parallel, types
from tests.agents import experience

P = jax.sharding.PartitionSpec
PARAMS = {"x": jnp.array([1.0, -2.0])}
MINIBATCH = (jnp.arange(8.0).reshape(4, 2), jnp.array([1.0, 0.0, 1.0, 1.0]))


def _loss(params, minibatch):
    rows, weight = minibatch
    error = rows @ params["x"] - 1.0
    return optimization.LossOutput({"loss/total": types.Mean.of(jnp.square(error), weight)}, error)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_step_is_that_of_optax_on_the_mean_over_the_global_minibatch(num_devices, max_grad_norm):
    rms = optax.scale_by_rms(decay=0.5)
    optimizer = optimization.Optimizer(rms, learning_rate=0.1, max_grad_norm=max_grad_norm)

    def run(minibatch):
        state, output = optimizer.gradient_step(_loss, optimizer.init(PARAMS), minibatch, 0.1)
        return state.params, output.metrics["gradient_norm"].result(), output.priority

    split = P(parallel.AXIS)
    mapped = experience.on_devices(run, num_devices, (split,), (P(), P(), split))
    params, norm, priority = jax.jit(mapped)(MINIBATCH)

    def mean(params):
        return jnp.sum(jnp.square(MINIBATCH[0] @ params["x"] - 1.0) * MINIBATCH[1]) / 3.0

    gradient = jax.grad(mean)(PARAMS)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    chain = optax.chain(clip, optax.rmsprop(0.1, decay=0.5))
    updates, _ = chain.update(gradient, chain.init(PARAMS), PARAMS)
    np.testing.assert_allclose(params["x"], optax.apply_updates(PARAMS, updates)["x"], rtol=1e-5)
    np.testing.assert_allclose(norm, optax.tree.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(priority, MINIBATCH[0] @ PARAMS["x"] - 1.0)


@pytest.mark.parametrize(("final", "at_30"), [(0.0, 0.7), (2.0, 1.3), (None, 1.0)])
def test_numbers_change_linearly_to_a_final_value_and_stay_there(final, at_30):
    def value(steps):
        return optimization.annealed(1.0, final, 100.0, jnp.int32(steps))

    assert value(0) == 1.0
    np.testing.assert_allclose(value(30), at_30, rtol=1e-6)
    assert value(100) == value(2**30) == (1.0 if final is None else final)
