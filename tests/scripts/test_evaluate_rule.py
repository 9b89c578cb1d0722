"""From meta-training to an agent that its rule teaches: real processes."""

import json

import pytest

from tests import processes

_TINY = """
from __gin__ import dynamic_registration

from agents import lpg
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
def test_a_rule_is_judged_saved_and_teaches(run_dir):
    file = run_dir.parent / "rule.npz"
    judged = processes.run("evaluate_rule", "--run_dir", run_dir, "--lifetimes", 4, "--save", file)
    assert judged.returncode == 0, judged.stderr
    for name in ("the rule", "a random rule", "without predictions"):
        assert f"\n{name}, " in judged.stdout
    taught = run_dir.parent / "taught"
    bindings = [f"RULE = '{file}'", "TOTAL_STEPS = 2560", "Experiment.evaluation_episodes = 4"]
    arguments = [x for binding in bindings for x in ("--gin_bindings", binding)]
    _trained(taught, "--gin_file", "gin/experiments/catch_lpg_rule.gin", *arguments)
    refused = processes.run("evaluate_rule", "--run_dir", taught)
    assert refused.returncode == 2
    assert "LPG alone learns a rule" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_meta_training_resumes_bit_for_bit(run_dir):
    other = run_dir.parent / "resumed"
    config = run_dir.parent / "tiny.gin"
    _trained(other, "--gin_file", config, "--gin_bindings", "TOTAL_STEPS = 96")
    _trained(other, "--resume", "--gin_bindings", "TOTAL_STEPS = 192")
    whole, parts = _metrics(run_dir), _metrics(other)
    assert [line["step"] for line in whole] == [48, 96, 144, 192]
    assert parts == whole
