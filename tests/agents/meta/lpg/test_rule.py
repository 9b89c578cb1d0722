"""The rule: dependence of its targets on the inputs."""

import jax
import numpy as np
import pytest

from agents.meta.lpg import rule as rule_lib

LENGTH, STREAMS, SIZE = 6, 4, 5
RULE = rule_lib.Rule(hidden_size=8, prediction_size=SIZE)


def _window(seed=0):
    rng, shape = np.random.default_rng(seed), (LENGTH, STREAMS)
    window = rule_lib.Window(
        reward=rng.normal(size=shape),
        discount=np.ones(shape),
        last=np.zeros(shape),
        action_prob=rng.uniform(size=shape),
        prediction=rng.dirichlet(np.ones(SIZE), shape),
        next_prediction=rng.dirichlet(np.ones(SIZE), shape),
    )
    return jax.tree.map(np.float32, window)._replace(last=np.zeros(shape, bool))


@pytest.fixture(scope="module", name="targets")
def _targets():
    params = jax.jit(RULE.init)(jax.random.key(1))
    return jax.jit(lambda window: RULE.targets(params, window))


def _changed(targets, window, **fields):
    """Returns which transitions' targets change with the window, `[T, N]` bool."""
    before, after = jax.device_get((targets(window), targets(window._replace(**fields))))
    policy = before.policy != after.policy
    prediction = np.any(before.log_prediction != after.log_prediction, -1)
    np.testing.assert_array_equal(policy, prediction)
    return policy


def _with(array, index, value):
    """Returns a copy with other values at an index."""
    array = array.copy()
    array[index] = value
    return array


def test_targets_depend_on_the_future_of_their_episode_and_stream(targets):
    window = _window()
    window = window._replace(last=_with(window.last, (2, 1), True))
    reward = window.reward
    changed = _changed(targets, window, reward=_with(reward, np.s_[3:, 1], 9.0))
    assert not changed[:3].any() and changed[3:, 1].all()
    changed = _changed(targets, window, reward=_with(reward, (2, 1), 9.0))
    assert changed[:3, 1].all() and changed.sum() == 3


def test_the_last_state_is_an_input_after_a_truncation_alone(targets):
    window = _window()
    window = window._replace(last=_with(window.last, 2, True))
    window = window._replace(discount=_with(window.discount, (2, 0), 0.0))
    other = _with(window.next_prediction, 2, 1.0 / SIZE)
    changed = _changed(targets, window, next_prediction=other)
    assert not changed[:, 0].any() and changed[:3, 1:].all() and not changed[3:].any()


def test_a_rule_without_predictions_ignores_them():
    blind = rule_lib.Rule(hidden_size=8, prediction_size=SIZE, sees_predictions=False)
    params, window = jax.jit(blind.init)(jax.random.key(0)), _window()
    uniform = np.full_like(window.prediction, 1.0 / SIZE)
    targets = jax.jit(blind.targets)
    before = targets(params, window)
    after = targets(params, window._replace(prediction=uniform, next_prediction=uniform))
    np.testing.assert_array_equal(before.policy, after.policy)
