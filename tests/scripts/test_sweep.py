"""Tests of searches over settings: spaces, one study in a journal, workers on PostgreSQL."""

import json

import pytest

from podracers.training import experiment
from tests import processes

SPACE = """
PPO.learning_rate = {log = [1e-4, 1e-1]}
PPO.epochs = {choice = [1, 2]}
"""


@pytest.fixture
def study(tmp_path):
    """The words of a study of a run that takes a second."""
    (tmp_path / "space.toml").write_text(SPACE)
    config = processes.config_file(tmp_path)
    return (config, "--space", tmp_path / "space.toml", "--study", tmp_path / "study")


def _values(folder, file="config.gin"):
    agent = experiment.load([str(folder / file)]).build().agent
    return agent.learning_rate, agent.epochs


def test_a_study_ends_in_a_table_and_an_experiment(tmp_path, study, run):
    words = ("--trials", 2, "--seeds", 2, "--sampler", "random", "--sampler_seed", 0)
    result = run("sweep", *study, *words)
    assert result.returncode == 0, result.stderr
    assert "2 complete" in result.stdout
    files = {path.name for path in (tmp_path / "study").iterdir()}
    pictures = {"history.png", "slices.png", "importances.png"}
    assert files == {"journal.log", "workers", "trial-0000", "trial-0001", "best.gin"} | pictures
    # The first trial has the experiment's own values.
    values = [_values(tmp_path / "study" / f"trial-000{index}") for index in range(2)]
    assert values[0] == _values(tmp_path, "tiny.gin") != values[1]
    # The objective is the mean over members of the last values, the final evaluation included.
    rows = processes.log(tmp_path / "study" / "trial-0000")
    last = [row["evaluation/return"] for row in rows if row.get("evaluation/return") is not None]
    summary = json.loads((tmp_path / "study" / "trial-0000" / "summary.json").read_text())
    last.append(summary["evaluation"]["return"])
    assert len(summary["evaluation"]["return_by_seed"]) == 2
    assert f"trial 0: evaluation/return {sum(last[-3:]) / 3:g} (" in result.stdout
    assert _values(tmp_path / "study", "best.gin") in values
    # The same command finds nothing left to do.
    again = run("sweep", *study, *words)
    assert (again.returncode, again.stdout.count("trial 0:")) == (0, 0), again.stderr
