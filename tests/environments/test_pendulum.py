"""Pendulum against Gymnasium's, step for step."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import pendulum
from podracers import types


@pytest.fixture(scope="module", name="step")
def _step():
    return jax.jit(pendulum.Pendulum().step)


def _state(angle, speed, time=0):
    return pendulum.State(jnp.float32(angle), jnp.float32(speed), jnp.float32(0.0), jnp.int32(time))


def test_single_steps_equal_gymnasium():
    """Whatever the angle, speed and torque, those beyond the bounds included."""
    reference = gymnasium.make("Pendulum-v1").unwrapped
    reference.reset(seed=0)
    generator = np.random.default_rng(0)
    angle, speed, torque = generator.uniform(-1.0, 1.0, (3, 300)) * [[9.0], [8.0], [3.0]]
    batch = pendulum.State(
        jnp.asarray(angle, jnp.float32),
        jnp.asarray(speed, jnp.float32),
        jnp.zeros((300,)),
        jnp.zeros((300,), jnp.int32),
    )
    action = jnp.asarray(torque[:, None], jnp.float32)
    _, timestep = jax.jit(jax.vmap(pendulum.Pendulum().step))(batch, action)
    for row in range(300):
        reference.state = np.array([angle[row], speed[row]])
        expected, reward, _, _, _ = reference.step(torque[row : row + 1])
        np.testing.assert_allclose(timestep.observation[row], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(timestep.reward[row], reward, rtol=1e-5, atol=1e-4)


def test_an_episode_equals_gymnasium(step):
    """200 steps of a torque that swings the pendulum all the way round, at both speed limits."""
    reference = gymnasium.make("Pendulum-v1")
    reference.reset(seed=0)
    reference.unwrapped.state = np.array([np.pi - 0.1, 0.0])
    state = _state(np.pi - 0.1, 0.0)
    truncated = False
    returns = np.zeros(2)
    while not truncated:
        torque = np.array([2.0 * np.sign(state.speed)], np.float32)
        expected, reward, _, truncated, _ = reference.step(torque)
        state, timestep = step(state, jnp.asarray(torque))
        # Two precisions drift apart on a trajectory that is not stable; by little in 200 steps.
        np.testing.assert_allclose(timestep.observation, expected, atol=2e-2)
        returns += [reward, float(timestep.reward)]
        assert bool(timestep.last()) == truncated
        assert timestep.discount == 1.0
    np.testing.assert_allclose(*returns, rtol=1e-3)


def test_never_terminates(step):
    _, timestep = step(_state(0.0, 8.0, time=199), jnp.zeros((1,)))
    assert (timestep.step_type, timestep.discount) == (types.LAST, 1.0)


def test_starts_anywhere_slowly():
    state, _ = jax.vmap(pendulum.Pendulum().reset)(jax.random.split(jax.random.key(0), 1000))
    angle, speed = np.asarray(state.angle), np.asarray(state.speed)
    assert angle.min() < -3.1 and angle.max() > 3.1
    assert -1.0 <= speed.min() < -0.98 and 0.98 < speed.max() <= 1.0
    assert abs(np.corrcoef(angle, speed)[0, 1]) < 0.1
