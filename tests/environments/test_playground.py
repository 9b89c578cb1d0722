"""MuJoCo Playground's dm_control suite under the contract."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import playground
from podracers import contract, errors, types

package = pytest.importorskip("mujoco_playground")


@pytest.mark.slow
def test_keeps_the_contract():
    reacher = playground.Playground("ReacherEasy", episode_length=5)  # with a random target
    contract.check_environment(reacher, num_steps=12)


@pytest.mark.slow
def test_steps_are_those_of_the_package():
    env = playground.Playground("CartpoleBalance", {"ctrl_dt": 0.02}, 6, action_repeat=2)
    assert env.spec.action.shape == (1,) and env._built.n_substeps == 2
    actions = jnp.linspace(-1.0, 1.0, 6)[:, None]
    suite = package.dm_control_suite
    inner = suite.load("CartpoleBalance", config_overrides={"ctrl_dt": 0.02, "impl": "jax"})

    def theirs(state, action):
        state = inner.step(state, action)
        return state, (state.obs, state.reward)

    key = jax.random.key(0)
    timestep = jax.jit(lambda: jax.lax.scan(env.step, env.reset(key)[0], actions)[1])()
    twice = jnp.repeat(actions, 2, axis=0)
    observation, reward = jax.jit(lambda: jax.lax.scan(theirs, inner.reset(key), twice)[1])()
    np.testing.assert_allclose(timestep.observation, observation[1::2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(timestep.reward, reward.reshape(-1, 2).sum(-1), rtol=1e-5)
    assert timestep.step_type.tolist() == [types.MID] * 5 + [types.LAST]
    assert timestep.discount.tolist() == [1.0] * 6


class Counting:
    """Observes the number of its steps, in a dict; NaN after an action of 1."""

    action_size, n_substeps = 1, 1

    def __init__(self, config, config_overrides):
        assert config_overrides["impl"] == "jax"
        self._reward = config_overrides["ctrl_dt"]

    def reset(self, key):
        del key
        zero = jnp.zeros(())
        metrics = {"total": zero, "left": zero}
        return package.State((), {"state": {"count": zero}}, zero, zero, metrics, {})

    def step(self, state, action):
        count = state.obs["state"]["count"] + jnp.where(action[0] == 1.0, jnp.nan, 1.0)
        state.metrics["total"] += self._reward  # as the package's environments do
        state.metrics["left"] -= self._reward
        return state.replace(obs={"state": {"count": count}}, reward=self._reward + 0.0 * count)


@pytest.fixture
def counting(monkeypatch):
    for table in ("_envs", "_cfgs"):
        monkeypatch.setattr(package.dm_control_suite, table, {}, raising=True)
    config = package.registry.ml_collections.config_dict.create(ctrl_dt=0.5)
    package.dm_control_suite.register_environment("Counting", Counting, lambda: config)


@pytest.mark.parametrize(
    ("metric", "reduction", "values"),
    [
        ("total", "last", [0.75, 1.5]),
        ("total", "sum", [0.75, 2.25]),
        ("total", "mean", [0.75, 1.125]),
        ("left", "max", [-0.75, -0.75]),
    ],
)
def test_ends_rewards_and_metrics(counting, metric, reduction, values):
    metrics = {metric: reduction}
    env = playground.Playground("Counting", {"ctrl_dt": 0.25}, 2, 3, metrics=metrics)
    assert env.spec.observation["state"]["count"].shape == () and env.spec.max_episode_steps == 2

    def stream(action):
        state, _ = env.reset(jax.random.key(0))
        return jax.lax.scan(env.step, state, jnp.broadcast_to(action, (2, 1)))[1]

    timestep = jax.jit(jax.vmap(stream))(jnp.array([0.0, 1.0]))
    assert timestep.step_type.tolist() == [[types.MID, types.LAST], [types.LAST, types.LAST]]
    assert timestep.discount.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert timestep.observation["state"]["count"].tolist() == [[3.0, 6.0], [0.0, 0.0]]
    assert timestep.reward.tolist() == [[0.75, 0.75], [0.0, 0.0]]  # the sum of three steps
    assert timestep.metrics[metric][0].tolist() == values


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"totl": "sum"}, "Counting has no metric 'totl'; did you mean 'total'?"),
        ({"total": "man"}, "Playground.metrics['total']: got 'man'"),
    ],
)
def test_metrics_that_do_not_exist(counting, metrics, words):
    with pytest.raises(errors.UserError, match=re.escape(words)):
        _ = playground.Playground("Counting", {"ctrl_dt": 0.25}, metrics=metrics).spec


def test_envpool_has_the_names_that_are_refused():
    envpool = pytest.importorskip("envpool")
    names = package.locomotion.ALL_ENVS + package.manipulation.ALL_ENVS
    assert {f"{name}-v1" for name in names} <= set(envpool.list_all_envs())
