"""Tests of the command that checks an environment."""

import jax.numpy as jnp
import pytest

from environments import catch, gymnasium
from tests import processes

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
    "environments.cach.Catch": "'catch'",
    "environmets.catch.Catch": "'environments'",
    f"{HERE}.FAULTS": "no class 'FAULTS'",
    "environments.gymnasium.Gymnasium": "without arguments: missing a required argument: 'env_id'",
    f"{HERE}.mistyped": "Catch.columns",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(run, name):
    processes.assert_mistake(run("check", name), MISTAKES[name])


def test_the_script_finds_modules_of_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text(_OWN)
    result = processes.run("check", "mine.Own", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout.startswith("mine.Own: a time step other than LAST has a discount")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    result = processes.run("check", "broken.Own", cwd=tmp_path)
    processes.assert_mistake(result, "No module named 'nothing_of_this_name'")
