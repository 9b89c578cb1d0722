"""CartPole and Pendulum against Gymnasium's, step for step."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import cartpole, pendulum
from podracers import types
from tests import streams

ROWS = 300


def _uniform(seed, *ranges):
    """Returns numbers `[len(ranges), ROWS]`, each within plus or minus its range."""
    noise = np.random.default_rng(seed).uniform(-1.0, 1.0, (ROWS, len(ranges)))
    return (noise * ranges).T


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_single_steps_equal_gymnasium(name):
    """Torques of Pendulum are also beyond the bounds."""
    reference = gymnasium.make(name).unwrapped
    reference.reset(seed=0)
    time = jnp.zeros(ROWS, jnp.int32)
    if name == "CartPole-v1":
        subject, numbers = cartpole.CartPole(), _uniform(0, 2.5, 3.0, 0.22, 3.0)
        batch = cartpole.State(*jnp.asarray(numbers, jnp.float32), time)
        actions = np.random.default_rng(1).integers(2, size=ROWS)
    else:
        subject, numbers = pendulum.Pendulum(), _uniform(0, 9.0, 8.0)
        batch = pendulum.State(*jnp.asarray(numbers, jnp.float32), jnp.zeros(ROWS), time)
        actions = _uniform(1, 3.0).T
    _, timestep = streams.evaluate(jax.vmap(subject.step), batch, actions)
    for row in range(ROWS):
        reference.state, reference.steps_beyond_terminated = numbers[:, row], None
        expected, reward, terminated, _, _ = reference.step(actions[row])
        np.testing.assert_allclose(timestep.observation[row], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(timestep.reward[row], reward, rtol=1e-5, atol=1e-4)
        assert bool(timestep.terminated()[row]) == bool(timestep.last()[row]) == terminated


def test_the_limit_of_cartpole_truncates_unless_the_pole_falls_then():
    zero, angle = jnp.zeros(3), jnp.array([0.0, 0.0, 0.2])
    state = cartpole.State(zero, zero, angle, 15.0 * angle, jnp.array([498, 499, 499]))
    _, timestep = jax.jit(jax.vmap(cartpole.CartPole().step))(state, np.zeros(3, np.int32))
    assert timestep.step_type.tolist() == [types.MID, types.LAST, types.LAST]
    assert timestep.discount.tolist() == [1.0, 1.0, 0.0]


def test_pendulum_never_terminates_and_its_limit_truncates():
    state = pendulum.State(jnp.zeros(2), jnp.full(2, 8.0), jnp.zeros(2), jnp.array([198, 199]))
    _, timestep = jax.jit(jax.vmap(pendulum.Pendulum().step))(state, np.zeros((2, 1), "f"))
    assert timestep.step_type.tolist() == [types.MID, types.LAST]
    assert timestep.discount.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("subject", "ranges"),
    [(cartpole.CartPole(), [0.05] * 4), (pendulum.Pendulum(), [np.pi, 1.0])],
    ids=["cartpole", "pendulum"],
)
def test_starts_are_uniform_and_independent(subject, ranges):
    keys = jax.random.split(jax.random.key(0), 1000)
    state, _ = streams.evaluate(jax.vmap(subject.reset), keys)
    numbers = np.stack(state[: len(ranges)], axis=1) / ranges
    assert np.all(np.abs(numbers) <= 1.0 + 1e-6)
    np.testing.assert_allclose(numbers.std(axis=0), 1.0 / np.sqrt(3.0), rtol=0.1)
    assert np.all(np.abs(numbers.mean(axis=0)) < 0.1)
    assert np.all(np.abs(np.corrcoef(numbers.T) - np.eye(len(ranges))) < 0.15)


@pytest.mark.parametrize(
    ("game", "kept"),
    [(cartpole.CartPole, np.array([0, 2])), (pendulum.Pendulum, np.array([0, 1]))],
)
def test_without_velocities_only_the_observation_differs(game, kept):
    whole, masked = game(), game(velocities=False)
    assert masked.spec.observation.shape == kept.shape < whole.spec.observation.shape
    action = np.ones(whole.spec.action.shape, whole.spec.action.dtype)

    def stepped(game):
        return streams.evaluate(lambda: game.step(game.reset(jax.random.key(0))[0], action))

    (state, seen), (other, shown) = stepped(whole), stepped(masked)
    streams.assert_same(other, state)
    np.testing.assert_array_equal(shown.observation, seen.observation[kept])
