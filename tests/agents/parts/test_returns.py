"""Returns against a slow loop over every episode, and losses against literals."""

import itertools

import jax
import numpy as np
import pytest

from agents.parts import returns
from podracers import parallel, types
from tests import streams
from tests.agents import experience

GAMMA, LENGTH, BATCH = 0.9, 20, 6


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def _rollout(seed=7):
    """Returns time steps and values `[T + 1, B]`, and the transitions `[T, B]` that count."""
    values = np.random.default_rng(seed).normal(size=(LENGTH + 1, BATCH)).astype(np.float32)
    timestep = experience.with_exits(seed, experience.random_episodes(seed, values.shape))
    is_out = ~timestep.observation["active"][:-1]
    assert np.sum(is_out) > 10
    return timestep, values, (timestep.step_type[:-1] != types.LAST) & ~is_out


def _slow(timestep, values, mean):
    """Returns `mean` of the n-step returns of every step up to its episode's end, `[T, B]`."""
    result = np.zeros((LENGTH, BATCH))
    for t, b in itertools.product(range(LENGTH), range(BATCH)):
        n_step_returns, total, discount = [], 0.0, 1.0
        for s in range(t + 1, len(values)):
            total += discount * timestep.reward[s, b]
            discount *= GAMMA * timestep.discount[s, b]
            n_step_returns.append(total + discount * values[s, b])
            if timestep.step_type[s, b] == types.LAST:
                break
        result[t, b] = mean(n_step_returns)
    return result


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_advantages_and_lambda_returns_equal_a_slow_loop(lambda_, platform):
    def mean(n_step_returns):  # the forward view: a weighted sum of n-step returns
        weights = (1.0 - lambda_) * lambda_ ** np.arange(len(n_step_returns))
        weights[-1] = lambda_ ** (len(n_step_returns) - 1)
        return np.sum(weights * n_step_returns)

    timestep, values, kept = _rollout()
    expected = _slow(timestep, values, mean)
    with parallel.compiling_for(platform):  # a loop, or an associative scan
        advantage = jax.jit(returns.gae)(timestep, values, GAMMA, lambda_)
        lambda_returns = jax.jit(returns.lambda_returns)(timestep, values, GAMMA, lambda_)
    np.testing.assert_array_equal(kept, returns.weights(timestep))
    np.testing.assert_allclose(advantage[kept], (expected - values[:-1])[kept], atol=5e-6)
    np.testing.assert_allclose(lambda_returns[kept], expected[kept], atol=5e-6)


@pytest.mark.parametrize("n", [1, 3, LENGTH - 1, LENGTH, 30])
def test_n_step_returns_equal_a_slow_loop(n):
    timestep, values, kept = _rollout()
    actual = jax.jit(returns.n_step, static_argnums=3)(timestep, values, GAMMA, n)
    expected = _slow(timestep, values, lambda n_step_returns: n_step_returns[:n][-1])
    np.testing.assert_allclose(actual[kept], expected[kept], atol=5e-6)


def _slow_vtrace(timestep, values, log_ratio, lambda_, clip_rho, clip_pg_rho):
    """The paper's equation 1 as it stands: for every start, a sum over the rest of the episode."""
    length, batch = log_ratio.shape
    ratio = np.exp(np.asarray(log_ratio, np.float64))
    reward, discount = timestep.reward[1:], GAMMA * timestep.discount[1:]
    last = timestep.step_type[1:] == types.LAST
    last[-1] = True
    error = np.minimum(clip_rho, ratio) * (reward + discount * values[1:] - values[:-1])
    target = values.astype(np.float64)
    for b, t in itertools.product(range(batch), range(length)):
        trace = 1.0
        for s in range(t, length):
            target[t, b] += trace * error[s, b]
            trace *= discount[s, b] * lambda_ * min(1.0, ratio[s, b])
            if last[s, b]:
                break
    arrival = np.where(last, values[1:], target[1:])
    advantage = np.minimum(clip_pg_rho, ratio) * (reward + discount * arrival - values[:-1])
    return target[:-1], advantage


@pytest.mark.parametrize("clips", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_vtrace_equals_a_slow_loop(lambda_, clips):
    timestep, values, kept = _rollout()
    log_ratio = np.random.default_rng(8).normal(size=kept.shape).astype(np.float32)
    vtrace = jax.jit(returns.vtrace)
    actual = vtrace(timestep, values, log_ratio, GAMMA, lambda_, *clips)
    # The importance weights of ignored actions change nothing.
    log_ratio = np.where(kept, log_ratio, np.float32(50.0))
    changed = vtrace(timestep, values, log_ratio, GAMMA, lambda_, *clips)
    expected = _slow_vtrace(timestep, values, log_ratio, lambda_, *clips)
    for ours, same, theirs in zip(actual, changed, expected, strict=True):
        np.testing.assert_array_equal(ours[kept], same[kept])
        np.testing.assert_allclose(ours[kept], theirs[kept], atol=1e-5)


def test_the_clipped_surrogate_stops_where_the_ratio_went_too_far():
    log_ratio = np.log(np.float32([1.0, 1.5, 0.5, 1.5, 0.5]))
    advantage = np.float32([2.0, 2.0, 2.0, -2.0, -2.0])
    clipped = jax.vmap(jax.value_and_grad(returns.clipped_surrogate, (0, 1)), (0, 0, None))
    loss, gradients = streams.evaluate(clipped, log_ratio, advantage, 0.2)
    np.testing.assert_allclose(loss, [-2.0, -2.4, -1.0, 3.0, 1.6], rtol=1e-6)
    np.testing.assert_allclose(gradients[0], [-2.0, 0.0, -1.0, 3.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(gradients[1], 0.0)


def test_the_clipped_value_is_the_larger_of_both_losses():
    prediction, target = np.float32([1.0, 1.0, 2.0]), np.float32([0.0, 3.0, 2.0])
    clipped = jax.vmap(jax.value_and_grad(returns.clipped_value, (1, 2)), (0, 0, 0, None))
    # Clipped to within 0.5 of 0, predictions are 0.5.
    loss, gradients = streams.evaluate(clipped, prediction, target, np.zeros(3, np.float32), 0.5)
    np.testing.assert_allclose(loss, [0.5, 3.125, 1.125])
    np.testing.assert_array_equal(gradients, 0.0)


def test_the_divergence_estimate_of_schulman():
    log_ratio = np.log(np.float32([0.5, 1.0, 2.0]))
    expected = [np.log(2.0) - 0.5, 0.0, 1.0 - np.log(2.0)]
    np.testing.assert_allclose(returns.kl_estimate(log_ratio), expected, rtol=1e-5, atol=1e-7)
