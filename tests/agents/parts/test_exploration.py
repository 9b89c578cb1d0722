"""Random actions: how often, which, and the ladder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import heads
from agents.parts import exploration
from tests import streams

MASK = np.array([[True, False, True, True]])
VALUES = np.float32([[1.0, 9.0, 3.0, -2.0]])


def _actions(epsilon, mask, count=20_000):
    keys = jax.random.split(jax.random.key(0), count)
    values = np.broadcast_to(VALUES, (count, 4))
    observation = {} if mask is None else {"action_mask": np.broadcast_to(mask, (count, 4))}
    return streams.evaluate(exploration.epsilon_greedy, values, observation, epsilon, keys)


@pytest.mark.parametrize(
    ("epsilon", "mask", "expected"),
    [
        (0.0, None, [0, 1, 0, 0]),
        (0.0, MASK, [0, 0, 1, 0]),
        (1.0, MASK, [1 / 3, 0, 1 / 3, 1 / 3]),
        (0.4, None, [0.1, 0.7, 0.1, 0.1]),
    ],
)
def test_random_actions_are_uniform_over_the_legal_ones(epsilon, mask, expected):
    portion = np.bincount(_actions(epsilon, mask), minlength=4) / 20_000
    np.testing.assert_allclose(portion, expected, atol=0.015)
    assert np.all(portion[np.array(expected) == 0.0] == 0.0)


def test_each_stream_explores_by_itself():
    actions = _actions(np.where(np.arange(100) < 50, 0.0, 1.0).astype(np.float32), None, 100)
    assert np.all(actions[:50] == 1)
    assert len(set(actions[50:])) == 4


def test_where_nothing_is_legal_everything_counts():
    """Some environments mask all actions of a final state; its value must stay finite."""
    nothing = jnp.zeros((1, 4), bool)
    legal = heads.legal_values(VALUES, nothing)
    np.testing.assert_array_equal(legal, VALUES)
    assert heads.legal_argmax(VALUES, nothing) == 1
