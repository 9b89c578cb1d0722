"""CartPole against Gymnasium's, step for step."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from environments import cartpole
from podracers import types


def _state(numbers, time=0):
    return cartpole.State(*(jnp.float32(x) for x in numbers), jnp.int32(time))


def test_single_steps_equal_gymnasium():
    reference = gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    generator = np.random.default_rng(0)
    states = generator.uniform(-1.0, 1.0, (200, 4)) * [2.5, 3.0, 0.22, 3.0]
    actions = generator.integers(2, size=200)
    batch = cartpole.State(*jnp.asarray(states.T, jnp.float32), jnp.zeros((200,), jnp.int32))
    _, timestep = jax.jit(jax.vmap(cartpole.CartPole().step))(batch, jnp.asarray(actions))
    for row in range(200):
        reference.state = states[row]
        reference.steps_beyond_terminated = None
        expected, reward, terminated, _, _ = reference.step(int(actions[row]))
        np.testing.assert_allclose(timestep.observation[row], expected, rtol=1e-5, atol=1e-6)
        assert bool(timestep.terminated()[row]) == bool(timestep.last()[row]) == terminated
        assert timestep.reward[row] == reward


def test_limit_truncates_unless_the_pole_falls_then():
    step = jax.jit(cartpole.CartPole().step)
    upright = (0.0, 0.0, 0.0, 0.0)
    _, before = step(_state(upright, time=498), jnp.int32(0))
    _, cut = step(_state(upright, time=499), jnp.int32(0))
    _, fallen = step(_state((0.0, 0.0, 0.2, 3.0), time=499), jnp.int32(0))
    assert (before.step_type, before.discount) == (types.MID, 1.0)
    assert (cut.step_type, cut.discount, cut.reward) == (types.LAST, 1.0, 1.0)
    assert (fallen.step_type, fallen.discount) == (types.LAST, 0.0)


def test_starts_are_near_rest():
    _, timestep = jax.vmap(cartpole.CartPole().reset)(jax.random.split(jax.random.key(0), 500))
    observation = np.asarray(timestep.observation)
    assert np.abs(observation).max() <= 0.05
    assert np.all(observation.std(0) > 0.025)  # uniform: 0.0289
    assert np.all(np.abs(np.corrcoef(observation.T) - np.eye(4)) < 0.2)


def test_without_velocities_only_the_observation_differs():
    whole, masked = cartpole.CartPole(), cartpole.CartPole(velocities=False)
    assert (whole.spec.observation.shape, masked.spec.observation.shape) == ((4,), (2,))
    state, _ = whole.reset(jax.random.key(0))
    other, _ = masked.reset(jax.random.key(0))
    state, seen = whole.step(state, jnp.int32(1))
    other, shown = masked.step(other, jnp.int32(1))
    np.testing.assert_array_equal(jnp.stack(other), jnp.stack(state))
    np.testing.assert_array_equal(shown.observation, seen.observation[jnp.array([0, 2])])
