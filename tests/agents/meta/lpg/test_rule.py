"""The rule: dependence of its targets on the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta.lpg import rule as rule_lib

LENGTH, STREAMS, SIZE = 6, 4, 5
RULE = rule_lib.Rule(hidden_size=8, prediction_size=SIZE)


def _window(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (LENGTH, STREAMS)
    return rule_lib.Window(
        reward=jax.random.normal(keys[0], shape),
        discount=jnp.ones(shape),
        last=jnp.zeros(shape, bool),
        action_prob=jax.random.uniform(keys[1], shape),
        prediction=jax.nn.softmax(jax.random.normal(keys[2], (*shape, SIZE))),
        next_prediction=jax.nn.softmax(jax.random.normal(keys[3], (*shape, SIZE))),
    )


@pytest.fixture(scope="module", name="targets")
def _targets():
    params = RULE.init(jax.random.key(1))
    return jax.jit(lambda window: RULE.targets(params, window))


def _changed(targets, window, **fields):
    """Returns which transitions' targets change with the window, `[T, N]` bool."""
    before, after = targets(window), targets(window._replace(**fields))
    policy = np.asarray(before.policy != after.policy)
    np.testing.assert_array_equal(
        policy, np.any(np.asarray(before.log_prediction != after.log_prediction), -1)
    )
    return policy


def test_targets_depend_on_the_future_of_their_episode_and_stream(targets):
    window = _window()
    window = window._replace(last=window.last.at[2, 1].set(True))
    changed = _changed(targets, window, reward=window.reward.at[3:, 1].add(1.0))
    assert not changed[:3].any() and changed[3:, 1].all()
    changed = _changed(targets, window, reward=window.reward.at[2, 1].add(1.0))
    assert changed[:3, 1].all() and changed.sum() == 3


def test_the_last_state_is_an_input_after_a_truncation_alone(targets):
    window = _window()
    window = window._replace(last=window.last.at[2].set(True))
    window = window._replace(discount=window.discount.at[2, 0].set(0.0))
    other = window.next_prediction.at[2].set(1.0 / SIZE)
    changed = _changed(targets, window, next_prediction=other)
    assert not changed[:, 0].any() and changed[:3, 1:].all() and not changed[3:].any()


def test_a_rule_without_predictions_ignores_them():
    blind = rule_lib.Rule(hidden_size=8, prediction_size=SIZE, sees_predictions=False)
    params, window = blind.init(jax.random.key(0)), _window()
    uniform = jnp.full_like(window.prediction, 1.0 / SIZE)
    targets = jax.jit(blind.targets)
    before = targets(params, window)
    after = targets(params, window._replace(prediction=uniform, next_prediction=uniform))
    np.testing.assert_array_equal(before.policy, after.policy)
