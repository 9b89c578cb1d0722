"""Tests of the command that checks environments and agents."""

import jax.numpy as jnp
import pytest

from environments import catch, gymnasium
from tests import documented, processes

HERE = "tests.scripts.test_check"
_OWN = """
from environments import catch

class Own(catch.Catch):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(discount=timestep.discount * 5.0)
"""


class Faulty(catch.Catch):
    """Two of its numbers have the wrong dtype."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(reward=jnp.int32(0), discount=jnp.int32(1))


class Good(catch.Catch):
    """Has no faults."""


def walk():
    return gymnasium.Gymnasium("tests.environments.own_games:Own/Walk-v0")


def mistyped():
    return catch.Catch(rows=10, columns="wide")


FAULTS = {
    "Good": [],
    "Faulty": ["step: leaf 'reward'", "step: leaf 'discount'"],
    "walk": ["it runs on the host"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_listed_one_a_line(run, name):
    result = run("check", f"{HERE}.{name}")
    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (2 if FAULTS[name] else 0, "")
    assert len(lines) == len(FAULTS[name])
    for line, fault in zip(lines, FAULTS[name]):
        assert line.startswith(f"{HERE}.{name}: {fault}")


MISTAKES = {
    "Catch": "expected MODULE.Class",
    "environments.catch.Cach": "'Catch'",
    "environments.cach.Catch": "'environments.catch'",
    "environmets.catch.Catch": "PYTHONPATH",
    f"{HERE}.FAULTS": "not callable",
    "environments.gymnasium.Gymnasium": "missing 1 required positional argument: 'env_id'",
    f"{HERE}.mistyped": "Catch.columns",
    "agents.ppo.PPO": "--environment",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(run, name):
    processes.assert_mistake(run("check", name), MISTAKES[name])


def test_the_script_finds_modules_of_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(_OWN)
    result = processes.run("check", "mine.Own", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout.startswith("mine.Own: a time step other than LAST has a discount")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("check", "broken.Own")
    processes.assert_mistake(result, "No module named 'nothing_of_this_name'")


@pytest.mark.slow
def test_agents_are_checked_on_two_devices(tmp_path):
    documented.write_files(tmp_path)
    source = (tmp_path / "actor_critic.py").read_text()
    local = source.replace("parallel.global_mean(types.Mean(gradient, mean.count))", "gradient")
    (tmp_path / "local.py").write_text(local)
    task = "--environment", "environments.catch.Catch"
    # Without the fake devices of the tests.
    options = {"cwd": tmp_path, "environment": {"XLA_FLAGS": ""}}
    result = processes.run("check", "actor_critic.ActorCritic", *task, **options)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    result = processes.run("check", "local.ActorCritic", *task, **options)
    processes.assert_mistake(result, "local.ActorCritic: copies of 'learner/params/params/Dense_0")
    result = processes.run("check", "environments.catch.Catch", *task, **options)
    processes.assert_mistake(result, "environments.catch.Catch")
