"""Catch, move by move."""

import jax
import jax.numpy as jnp
import numpy as np

from environments import catch
from podracers import types
from tests import streams

# Ball row, ball column, paddle, action -> paddle, reward, discount, step type.
TABLE = [
    (0, 2, 2, 0, 1, 0.0, 1.0, types.MID),
    (0, 2, 2, 1, 2, 0.0, 1.0, types.MID),
    (0, 2, 2, 2, 3, 0.0, 1.0, types.MID),
    (3, 0, 0, 0, 0, 0.0, 1.0, types.MID),  # the left edge
    (3, 0, 4, 2, 4, 0.0, 1.0, types.MID),  # the right edge
    (7, 4, 4, 1, 4, 0.0, 1.0, types.MID),
    (8, 4, 4, 1, 4, 1.0, 0.0, types.LAST),  # caught
    (8, 4, 3, 2, 4, 1.0, 0.0, types.LAST),  # caught with the last move
    (8, 4, 4, 0, 3, -1.0, 0.0, types.LAST),  # lost with the last move
    (8, 0, 4, 1, 4, -1.0, 0.0, types.LAST),  # missed
]


def test_step_table():
    step = jax.jit(catch.Catch().step)
    for ball_row, ball_column, paddle, action, new_paddle, *expected in TABLE:
        numbers = (ball_row, ball_column, paddle)
        state, timestep = step(catch.State(*map(jnp.int32, numbers)), jnp.int32(action))
        assert tuple(map(int, state)) == (ball_row + 1, ball_column, new_paddle)
        assert [timestep.reward, timestep.discount, timestep.step_type] == expected
        image = np.zeros((10, 5, 1), np.float32)
        image[ball_row + 1, ball_column] = image[9, new_paddle] = 1.0
        np.testing.assert_array_equal(timestep.observation, image)


def test_reset_draws_every_column():
    keys = jax.random.split(jax.random.key(0), 100)
    _, timestep = streams.evaluate(jax.vmap(catch.Catch().reset), keys)
    observation = np.asarray(timestep.observation)[..., 0]
    assert np.all(observation[:, 9, 2] == 1.0)  # the paddle starts in the middle
    assert np.all(observation.sum((1, 2)) == 2.0)
    assert np.all(observation[:, 0].any(axis=0))
