"""Tests of the command that checks environments and agents."""

import re

import jax.numpy as jnp
import pytest

from environments import catch, probes
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


def test_faults_are_listed_one_a_line(run):
    """`test_contract.py` and `test_host_contract.py` have all faults."""
    name = f"{HERE}.Faulty"
    result = run("check", name, code=2)
    lines = [line for line in result.stdout.splitlines() if line.startswith(f"{name}: ")]
    assert "ok" not in result.stdout.splitlines()
    assert re.findall(r"step: leaf '(\w+)'", "".join(lines)) == ["reward", "discount"]
    assert len(lines) == 2


GOOD = {  # words of the description
    "environments.catch.Catch": ["time limit 9", "float32[10, 5, 1], from 0 to 1", "3 values"],
    "tests.environments.own_games:Own/Walk-v0": [
        "observation['action_mask']: bool[3], mask of legal actions",
        "observation['pair']['1']: int32[2], from 0 to 9, not the same for each component, one-hot",
        "no picture: Own/Walk-v0 has no render mode 'rgb_array'",
        "different streams: ",
    ],
    "FrozenLake8x8-v1": ["observation: int32[], 64 values, one-hot"],  # Gymnasium's
    "Freeway-v5": ["Freeway-v5: time limit 27000"],  # EnvPool's
    "jumanji:Snake-v1": ["Snake-v1: time limit 4000"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if i > 1 else ()) for i, name in enumerate(GOOD)],
)
def test_a_good_environment_is_described_and_ends_with_ok(run, name):
    result = run("check", name)
    assert result.stdout.endswith("\nok\n")
    for words in GOOD[name]:
        assert words in result.stdout


def test_metrics_are_described(tools):
    lines = tools("check").check._described(probes.Reporting().spec)
    assert lines[-1] == "  metrics: success, cue"


def test_a_stage_is_printed_before_it_runs(tools, capsys):
    with tools("check").check._stage("the stage"):
        assert capsys.readouterr().out == "the stage ... "
    assert re.fullmatch(r"\d+\.\d s\n", capsys.readouterr().out)


def test_the_script_finds_modules_of_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(_OWN)
    result = processes.run("check", "mine.Own", code=2, cwd=tmp_path)
    assert result.stderr == ""
    assert "\nmine.Own: a time step other than LAST has a discount" in result.stdout
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("check", "broken.Own", code=2)
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
    assert result.stderr == ""
    assert result.stdout.startswith("shapes and dtypes") and result.stdout.endswith("\nok\n")
    result = processes.run("check", "local.ActorCritic", *task, code=2, **options)
    processes.assert_mistake(result, "local.ActorCritic: copies of 'learner/params/params/Dense_0")
