"""Random actions: how often, which, and the ladder."""

import jax
import jax.numpy as jnp
import numpy as np

from agents import exploration
from podracers import environment

MASK = jnp.array([[True, False, True, True]])
VALUES = jnp.array([[1.0, 9.0, 3.0, -2.0]])


def _observation(mask):
    return {} if mask is None else {environment.ACTION_MASK: mask}


def _actions(epsilon, mask, count=20_000):
    keys = jax.random.split(jax.random.key(0), count)
    values = jnp.broadcast_to(VALUES, (count, 4))
    mask = None if mask is None else jnp.broadcast_to(mask, (count, 4))
    actions = exploration.epsilon_greedy(values, _observation(mask), epsilon, keys)
    return np.bincount(actions, minlength=4) / count


def test_without_exploration_the_best_legal_action_is_taken():
    np.testing.assert_array_equal(_actions(0.0, None, 50), [0, 1, 0, 0])
    np.testing.assert_array_equal(_actions(0.0, MASK, 50), [0, 0, 1, 0])


def test_random_actions_are_uniform_over_the_legal_ones():
    np.testing.assert_allclose(_actions(1.0, MASK), [1 / 3, 0, 1 / 3, 1 / 3], atol=0.015)
    np.testing.assert_allclose(_actions(0.4, None), [0.1, 0.7, 0.1, 0.1], atol=0.015)
    assert _actions(1.0, MASK)[1] == 0.0


def test_each_stream_explores_by_itself():
    epsilon = jnp.where(jnp.arange(100) < 50, 0.0, 1.0)
    keys = jax.random.split(jax.random.key(0), 100)
    actions = exploration.epsilon_greedy(jnp.tile(VALUES, (100, 1)), {}, epsilon, keys)
    assert np.all(actions[:50] == 1)
    assert len(set(np.asarray(actions[50:]))) == 4


def test_where_nothing_is_legal_everything_counts():
    """Some environments mask all actions of a final state; its value must stay finite."""
    nothing = jnp.zeros((1, 4), bool)
    legal = exploration.legal_q_values(VALUES, _observation(nothing))
    np.testing.assert_array_equal(legal, VALUES)
    assert exploration.legal_argmax(VALUES, nothing) == 1
