"""Pendulum against Gymnasium's, step for step."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from environments import pendulum
from podracers import types


def test_single_steps_equal_gymnasium():
    """Torques beyond the bounds included."""
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


def test_never_terminates_and_the_limit_truncates():
    state = pendulum.State(jnp.zeros(2), jnp.full(2, 8.0), jnp.zeros(2), jnp.array([198, 199]))
    _, timestep = jax.vmap(pendulum.Pendulum().step)(state, jnp.zeros((2, 1)))
    assert timestep.step_type.tolist() == [types.MID, types.LAST]
    assert timestep.discount.tolist() == [1.0, 1.0]


def test_starts_anywhere_slowly():
    state, _ = jax.vmap(pendulum.Pendulum().reset)(jax.random.split(jax.random.key(0), 1000))
    angle, speed = np.asarray(state.angle), np.asarray(state.speed)
    assert angle.min() < -3.1 and angle.max() > 3.1
    assert -1.0 <= speed.min() < -0.98 and 0.98 < speed.max() <= 1.0
    assert abs(np.corrcoef(angle, speed)[0, 1]) < 0.1
