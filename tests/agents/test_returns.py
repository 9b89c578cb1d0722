"""Returns against a slow loop that walks every episode by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import returns
from podracers import types

GAMMA = 0.9


def _rollout(seed=0, length=40, batch=6):
    """Returns time steps `[T + 1, B]` of many short episodes, some cut, some terminated."""
    rng = np.random.default_rng(seed)
    step_type = np.zeros((length + 1, batch), np.int8)
    discount = np.ones((length + 1, batch), np.float32)
    reward = rng.normal(size=(length + 1, batch)).astype(np.float32)
    for b in range(batch):
        previous = rng.choice([types.FIRST, types.MID, types.LAST])
        for t in range(length + 1):
            if previous == types.LAST:
                step_type[t, b], reward[t, b] = types.FIRST, 0.0
            elif rng.random() < 0.3:
                step_type[t, b], discount[t, b] = types.LAST, rng.choice([0.0, 1.0])
            else:
                step_type[t, b] = types.MID
            previous = step_type[t, b]
    values = rng.normal(size=(length + 1, batch)).astype(np.float32)
    return types.TimeStep(values, reward, discount, step_type), values


def _loop(timestep, values, lambda_):
    """The forward view: a weighted sum of n-step returns, each ending where its episode does."""
    length, batch = values.shape[0] - 1, values.shape[1]
    result = np.zeros((length, batch))
    for b in range(batch):
        for t in range(length):
            n_step, total, discount, weight = [], 0.0, 1.0, 1.0
            for s in range(t + 1, length + 1):
                total += discount * timestep.reward[s, b]
                discount *= GAMMA * timestep.discount[s, b]
                n_step.append(total + discount * values[s, b])
                if timestep.step_type[s, b] == types.LAST:
                    break
            for n_step_return in n_step[:-1]:
                result[t, b] += weight * (1.0 - lambda_) * n_step_return
                weight *= lambda_
            result[t, b] += weight * n_step[-1]
    return result


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_lambda_returns_equal_a_slow_loop(lambda_):
    timestep, values = _rollout()
    assert (timestep.step_type[1:-1] == types.LAST).any(axis=0).all()
    expected = _loop(timestep, values, lambda_)
    with jax.numpy_rank_promotion("raise"):
        actual = jax.jit(returns.lambda_returns)(timestep, values, GAMMA, lambda_)
        advantage = jax.jit(returns.gae)(timestep, values, GAMMA, lambda_)
        weights = jax.jit(returns.weights)(timestep)
    kept = np.asarray(weights) > 0.0
    np.testing.assert_array_equal(kept, timestep.step_type[:-1] != types.LAST)
    np.testing.assert_allclose(actual[kept], expected[kept], atol=2e-6)
    np.testing.assert_allclose(advantage[kept], (expected - values[:-1])[kept], atol=2e-6)


def test_one_step_returns_are_temporal_differences():
    timestep, values = _rollout(seed=1)
    actual = returns.lambda_returns(timestep, values, GAMMA, 0.0)
    expected = timestep.reward[1:] + GAMMA * timestep.discount[1:] * values[1:]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_truncation_bootstraps_and_a_termination_does_not():
    timestep = types.TimeStep(
        observation=jnp.zeros((4, 2)),
        reward=jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]),
        discount=jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
        step_type=jnp.array([[0, 0], [1, 1], [2, 2], [0, 0]], jnp.int8),
    )
    values = jnp.full((4, 2), 10.0)
    actual = returns.lambda_returns(timestep, values, 0.5, 1.0)
    np.testing.assert_allclose(actual[:2], [[1.0 + 0.5 * 7.0, 1.0 + 0.5 * 2.0], [7.0, 2.0]])
    np.testing.assert_array_equal(returns.weights(timestep), [[1, 1], [1, 1], [0, 0]])
