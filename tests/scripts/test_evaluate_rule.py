"""Tests of the evaluation of rules that were meta-trained in this process."""

import dataclasses
import json

import pytest

from agents.meta.lpg import rule_file
from podracers.training import trained
from tests import processes

_TINY = """
from __gin__ import dynamic_registration

from agents.meta import lpg
from podracers.training import experiment

include 'gin/experiments/lpg_small.gin'

TOTAL_STEPS = 192  # lifetime steps: four updates
NUM_ENVS = 4  # lifetimes
ROLLOUT_LENGTH = 12  # lifetime steps

experiment.Experiment.log_period = 1  # updates
experiment.Experiment.evaluation_period = 0  # updates
experiment.Experiment.evaluation_episodes = 2  # lifetimes
experiment.Experiment.checkpoint_period = 2  # updates
lpg.LPG.chunk_length = 4  # agent steps
lpg.LPG.updates = 2
lpg.LPG.hidden_size = 8
"""


@pytest.fixture(scope="module", name="train")
def _train(run):
    def train(folder, *arguments):
        run("train", "--run_dir", folder, *arguments)
        return folder

    return train


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rule")
    (folder / "tiny.gin").write_text(_TINY)
    return train(folder / "run", "--gin_file", folder / "tiny.gin")


@pytest.mark.slow
def test_rules_are_evaluated_and_saved(run_dir, run):
    file, judged = run_dir.parent / "rule.npz", run_dir.parent / "judged.json"
    run("evaluate_rule", "--run_dir", run_dir, "--save", file)
    assert rule_file.load(file)[0].hidden_size == 8
    # The same rule twice, and in other tasks, too.
    held_out = run_dir.parent / "tiny_held_out.gin"
    held_out.write_text(_TINY.replace("lpg_small.gin", "lpg_small_held_out.gin"))
    words = ["--run_dir", run_dir, run_dir, "--lifetimes", 16, "--json", judged]
    words += ["--gin_bindings", "Lifetimes.max_periods = 10"]
    words += ["--gin_file", run_dir / "config.gin", "--gin_file", held_out]
    evaluated = run("evaluate_rule", *words)
    assert "| `small` of `config` |" in evaluated.stdout
    assert "| `small_held_out` of `tiny_held_out` |" in evaluated.stdout
    tasks = json.loads(judged.read_text())["tasks"]
    names = ["small", "short_chain", "small_held_out", "short_chain"]
    assert [task["name"] for task in tasks] == names
    assert {len(curves) for task in tasks for curves in task["shares"].values()} == {2}


@pytest.mark.slow
def test_user_mistakes(run_dir, reference, run, monkeypatch):
    for words, phrase in (
        ((reference,), "expected the agent LPG, got PPO"),
        ((run_dir, "--lifetimes", 1), "--lifetimes"),
        ((run_dir, run_dir, "--save", run_dir / "two.npz"), "expected one rule, got 2"),
    ):
        processes.assert_mistake(run("evaluate_rule", "--run_dir", *words, code=2), phrase)
    policy = trained.load(run_dir)
    larger = dataclasses.replace(policy.parts.agent, hidden_size=16)
    policies = iter([policy, policy._replace(parts=policy.parts._replace(agent=larger))])
    monkeypatch.setattr(trained, "load", lambda path: next(policies))
    result = run("evaluate_rule", "--run_dir", run_dir, run_dir, code=2)
    processes.assert_mistake(result, "hidden_size=8", "got Rule(hidden_size=16")
