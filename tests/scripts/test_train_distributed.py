"""Runs of several processes: they learn what one process learns, end together, and resume."""

import functools
import json
import pathlib
import shutil
import signal

import numpy as np
import pytest

from podracers.training import experiment
from podracers.training import run as run_lib
from tests import groups, processes

SEBULBA = (
    *("--gin_file", "gin/runners/sebulba.gin", "--gin_bindings"),
    *("Sebulba.learner_devices = {devices}", "Sebulba.actor_devices = {devices}"),
)
TIMES = ("time/", "idle/", "environment/")  # these metrics depend on the machine
# 24 updates, because sums over fake devices of several processes are slow. A function adds a number
# to each line, and ends the run after the 22nd update.
NUM_LINES = 22
SHORT = f"""
TOTAL_STEPS = 1536  # agent steps
from tests.scripts import test_train_distributed as own
experiment.Experiment.on_log = @own.add_and_end
{processes.REPORTING}
"""


def add_and_end(line):
    line["own/number"] = line["step"] / 2
    return line["step"] == NUM_LINES * 64


def _arguments(config: pathlib.Path, runner: str, num_devices: int) -> tuple[object, ...]:
    arguments = ("--gin_file", config, "--initial_run", config.parent / "initial")
    if runner == "sebulba":
        devices = str(tuple(range(num_devices)))
        arguments += tuple(word.replace("{devices}", devices) for word in SEBULBA)
    return arguments


@pytest.fixture(scope="module", name="reference")
def _reference(tmp_path_factory):
    """Uninterrupted runs of one process with four devices: `reference(runner)` is the directory.

    They begin with the parameters of `initial` beside them.
    """
    folder = tmp_path_factory.mktemp("references")
    config = processes.config_file(folder, SHORT)
    short = ["TOTAL_STEPS = 64", "PPO.learning_rate = 0.1"]
    run_lib.train(experiment.load([str(config)], short), folder / "initial")

    @functools.cache
    def run(runner: str) -> pathlib.Path:
        processes.run(
            "train",
            *_arguments(config, runner, 4),
            *("--run_dir", folder / runner),
            environment=groups.environment(4),
        )
        return folder / runner

    return run


def _assert_same(actual: pathlib.Path, expected: pathlib.Path) -> None:
    """Checks that two runs logged and ended with the same, up to the order of sums."""
    for line, other in zip(processes.log(actual), processes.log(expected), strict=True):
        assert line.keys() == other.keys()
        for name in (name for name in line if not name.startswith(TIMES)):
            ours, theirs = (np.float64(row[name]) for row in (line, other))  # null is NaN
            np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-3, err_msg=name)
    (step, leaves), (other_step, others) = map(processes.final_state, (actual, expected))
    assert step == other_step
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-2, atol=1e-3)


def _wait_for(num_lines: int, run_dir: pathlib.Path, started) -> None:
    def are_written() -> bool:
        assert all(process.poll() is None for process in started), groups.finish(started)
        return processes.num_lines(run_dir) >= num_lines

    processes.wait_for(are_written)


@pytest.mark.slow
def test_several_processes_learn_what_one_learns(reference, tmp_path):
    """The same curve and parameters, the same evaluations; the next test has Anakin."""
    config, run_dir = processes.config_file(tmp_path, SHORT), tmp_path / "run"
    expected = reference("sebulba")
    shutil.copytree(expected.parent / "initial", tmp_path / "initial")
    started = groups.train(2, 2, *_arguments(config, "sebulba", 2), "--run_dir", run_dir)
    lead, other = groups.finish(started, (0, 0))
    assert "Results" in lead.stdout
    assert "4 x cpu" in lead.stdout
    assert "Results" not in other.stdout
    _assert_same(run_dir, expected)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["processes"], summary["updates"]) == (2, NUM_LINES)
    assert [line["own/number"] for line in processes.log(run_dir)][-1] == NUM_LINES * 32
    evaluated = summary["evaluation"]
    assert evaluated["metrics"]["success"] == pytest.approx(evaluated["return"])


@pytest.mark.slow
def test_a_signal_to_any_process_stops_all_and_any_number_resumes(reference, tmp_path, monkeypatch):
    """Two processes are stopped, one of four is killed, and a single one ends the run."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which no process needs
    extra = f"\nexperiment.Experiment.checkpoint_directory = '{tmp_path / 'shared'}'\n"
    config, run_dir = processes.config_file(tmp_path, SHORT + extra), tmp_path / "run"
    begun = ("--run_dir", run_dir, "--resume_if_begun")
    expected = reference("anakin")
    shutil.copytree(expected.parent / "initial", tmp_path / "initial")
    started = groups.train(2, 2, *_arguments(config, "anakin", 2), *begun)
    _wait_for(3, run_dir, started)
    started[1].send_signal(signal.SIGUSR1)
    lead, _ = groups.finish(started, (0, 0))
    assert "continue with --resume" in lead.stdout
    stopped = processes.num_lines(run_dir)
    shutil.rmtree(tmp_path / "initial")  # a resumed run does not read it
    assert stopped < NUM_LINES

    started = groups.train(4, 2, *_arguments(config, "anakin", 2), *begun)
    _wait_for(stopped + 3, run_dir, started)
    started[2].kill()
    results = groups.finish(started)
    assert "resuming from step" in results[0].stdout
    for result in (results[0], results[1], results[3]):
        assert result.returncode == 1, result.stderr
        assert "failed: process 2 was lost" in result.stderr
        assert "Traceback" not in result.stderr
    assert processes.num_lines(run_dir) < NUM_LINES

    processes.run("train", "--run_dir", run_dir, "--resume", environment=groups.environment(1))
    _assert_same(run_dir, expected)
    assert (tmp_path / "shared").exists() and not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_processes_that_do_not_see_the_same_files_are_refused(tmp_path):
    config, folders = processes.config_file(tmp_path, SHORT), [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    words = ("--gin_file", config, "--run_dir", "run")
    for result in groups.finish(groups.train(2, 1, *words, folders=folders), (2, 2)):
        assert result.stderr.count("process 1 does not see the files of process 0") == 1
        assert "Traceback" not in result.stderr
    assert not list((folders[0] / "run").iterdir())  # another attempt can have the name
