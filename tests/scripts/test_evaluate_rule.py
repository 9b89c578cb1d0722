"""From meta-training to an agent that its rule teaches: real processes."""

import json

import jax
import pytest

from agents.meta.lpg import rule as rule_lib
from agents.meta.lpg import rule_file
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
_HELD_OUT = "include 'gin/experiments/lpg_small_held_out.gin'"


def _trained(folder, *arguments):
    result = processes.run("train", "--run_dir", folder, *arguments)
    assert result.returncode == 0, result.stderr
    return folder


def _metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in processes.TIMES} for line in lines]


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rule")
    config = folder / "tiny.gin"
    config.write_text(_TINY)
    return _trained(folder / "run", "--gin_file", config)


@pytest.mark.slow
def test_rules_are_judged_saved_and_teach(run_dir, run):
    file, judged = run_dir.parent / "rule.npz", run_dir.parent / "judged.json"
    short = ("--lifetimes", 16, "--gin_bindings", "Lifetimes.max_periods = 10")
    saved = run("evaluate_rule", "--run_dir", run_dir, "--save", file)
    assert saved.returncode == 0, saved.stderr
    # The same rule twice, from a run and from its file, and in other tasks, too.
    words = ["--run_dir", run_dir, "--rule", file, *short, "--json", judged]
    for name in (run_dir / "config.gin", run_dir.parent / "tiny_held_out.gin"):
        words += ["--gin_file", name]
    (run_dir.parent / "tiny_held_out.gin").write_text(
        _TINY.replace("include 'gin/experiments/lpg_small.gin'", _HELD_OUT)
    )
    found = run("evaluate_rule", *words)
    assert found.returncode == 0, found.stderr
    assert "| `small` of `config` |" in found.stdout
    assert "| `small_held_out` of `tiny_held_out` |" in found.stdout
    tasks = json.loads(judged.read_text())["tasks"]
    names = ["small", "short_chain", "small_held_out", "short_chain"]
    assert [task["name"] for task in tasks] == names
    assert {len(curves) for task in tasks for curves in task["shares"].values()} == {2}
    taught = run_dir.parent / "taught"
    bindings = [f"RULE = '{file}'", "TOTAL_STEPS = 2560", "Experiment.evaluation_episodes = 4"]
    arguments = [x for binding in bindings for x in ("--gin_bindings", binding)]
    _trained(taught, "--gin_file", "gin/experiments/catch_lpg_rule.gin", *arguments)
    refused = processes.run("evaluate_rule", "--run_dir", taught)
    processes.assert_mistake(refused, "expected the agent LPG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("evaluate_rule", [], "expected rules"),
        ("evaluate_rule", ["--rule", "OTHER"], "name an experiment"),
        ("evaluate_rule", ["--rule", "OTHER", "--gin_file", "TINY"], "expected the rule"),
        ("evaluate_rule", ["--rule", "OTHER", "--gin_file", "CATCH"], "expected the agent LPG"),
        ("evaluate_rule", ["--run_dir", "RUN", "--lifetimes", "1"], "none of 1 was in task"),
        ("train", ["--gin_file", "TINY", "--gin_file", "gin/environments/catch.gin"], "parameters"),
        ("train", ["--resume", "--gin_bindings", "LPG.hidden_size = 16"], "checkpoint"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_2(run_dir, run, script, words, message):
    other = run_dir.parent / "other.npz"
    larger = rule_lib.Rule(hidden_size=16, prediction_size=8)
    rule_file.save(other, larger, larger.init(jax.random.key(0)))
    places = {
        "OTHER": other,
        "RUN": run_dir,
        "TINY": run_dir.parent / "tiny.gin",
        "CATCH": "gin/experiments/catch_lpg_rule.gin",
    }
    words = [places.get(word, word) for word in words]
    if script == "train":
        words += ["--gin_bindings", "TOTAL_STEPS = 384"]
        words += ["--run_dir", run_dir if "--resume" in words else run_dir.parent / "refused"]
    refused = (run if script == "evaluate_rule" else processes.run)(script, *words)
    processes.assert_mistake(refused, message)


@pytest.mark.slow
def test_meta_training_resumes_bit_for_bit(run_dir):
    other = run_dir.parent / "resumed"
    config = run_dir.parent / "tiny.gin"
    _trained(other, "--gin_file", config, "--gin_bindings", "TOTAL_STEPS = 96")
    _trained(other, "--resume", "--gin_bindings", "TOTAL_STEPS = 192")
    whole, parts = _metrics(run_dir), _metrics(other)
    assert [line["step"] for line in whole] == [48, 96, 144, 192]
    assert parts == whole
