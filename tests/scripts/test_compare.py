"""Tests of comparing runners: the runs, the numbers, the picture, and how all of it ends."""

import json
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from PIL import Image

from podracers import errors
from tests import processes

EXTRA = """
experiment.Experiment.checkpoint_period = 0
experiment.Experiment.log_period = 5  # updates
experiment.Experiment.evaluation_period = 50  # updates
"""
STEPS = 300 * 64
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}  # what is timed here matters to nobody


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def config(folder):
    return processes.config_file(folder, EXTRA)


def _arguments(config, *runners):
    return ("--gin_file", config, "--runners", *runners, "--total_steps", STEPS)


@pytest.fixture(scope="module")
def compared(folder, config, run):
    """Arguments that have been compared once, and the folder."""
    output = folder / "compared"
    arguments = (
        *_arguments(config, "anakin", f"short={folder / 'short.gin'}"),
        *("--seeds", 1, "--runner_bindings", "short:Anakin.rollout_length = 4"),
        *("--output_dir", output),
    )
    (folder / "short.gin").write_text("include 'gin/runners/anakin.gin'\n")
    result = run("compare", *arguments, environment=CACHED)
    assert result.returncode == 0, result.stderr
    return arguments, output, result


@pytest.mark.slow
def test_trains_each_runner_with_each_seed_and_says_what_they_reached(compared):
    _, output, result = compared
    headlines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [line.split(" (")[0] for line in headlines] == [
        "[1/2] anakin, seed 0: training",
        "[2/2] short, seed 0: training",
    ]
    assert "100%" in result.stderr
    written = json.loads((output / "comparison.json").read_text())
    assert {"commit", "versions", "device", "spread"} <= written.keys()
    for run in written["runs"]:
        summary = json.loads(pathlib.Path(run["run_dir"], "summary.json").read_text())
        assert run["summary"] == summary
        assert (summary["seed"], summary["environment_steps"]) == (run["seed"], STEPS)
        assert f"--run_dir {run['run_dir']}" in run["command"]
        log = processes.log(pathlib.Path(run["run_dir"]))
        assert run["curves"]["episode/return"] == [line["episode/return"] for line in log]
        row = written["runners"][run["runner"]]
        assert row["final_return"] == summary["evaluation"]["return"]
        assert row["steps_per_second"] == [summary["steps_per_second"]]
        assert f"{summary['steps_per_second']:,.0f}" in result.stdout
    with Image.open(output / "comparison.png") as image:
        assert image.width > 1000
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 50


@pytest.mark.slow
def test_a_repeated_command_trains_nothing_twice_and_refuses_what_differs(compared, run):
    arguments, output, _ = compared
    summaries = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/summary.json")}
    assert len(summaries) == 2
    # Fewer runners, read from another file that says the same: what is there serves.
    again = run("compare", *arguments, "--runners", "short=anakin")
    other = run("compare", *arguments, "--gin_bindings", "PPO.gamma = 0.5")
    assert again.returncode == 0, again.stderr
    assert "[1/1] short, seed 0: there already" in again.stdout
    assert summaries == {path: path.stat().st_mtime_ns for path in summaries}
    processes.assert_mistake(other, "another configuration", "name another folder")


def _children(pid: int) -> list[int]:
    try:
        return [
            int(n) for n in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def _is_alive(pid: int) -> bool:
    status = pathlib.Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _start(config, output):
    arguments = (*_arguments(config, "anakin"), "--seeds", 1, "--output_dir", output)
    return arguments, processes.start("compare", *arguments, environment=CACHED)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_child_too_and_the_same_command_goes_on(compared, folder, config, number):
    output = folder / number.name
    arguments, process = _start(config, output)
    run_dir, found = output / "runs" / "anakin-0", []

    def running():
        found[:] = _children(process.pid) or found
        return processes.num_lines(run_dir) >= 3

    stopped = processes.interrupt(process, number, running)
    assert stopped.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert "Traceback" not in stopped.stderr
    (child,) = found
    if number == signal.SIGKILL:  # the kernel asks the child, which leaves in order
        limit = time.monotonic() + 60
        while _is_alive(child) and time.monotonic() < limit:
            time.sleep(0.05)
    assert not _is_alive(child)
    assert not (run_dir / "summary.json").exists()
    assert "stopped at" in (output / "runs" / "anakin-0.log").read_text()
    if number == signal.SIGKILL:
        return
    assert "stopped: the same command goes on" in stopped.stdout
    resumed = processes.run("compare", *arguments, environment=CACHED)
    assert resumed.returncode == 0, resumed.stderr
    assert "[1/1] anakin, seed 0: resuming" in resumed.stdout
    processes.assert_same_end(compared[1] / "runs" / "anakin-0", run_dir)


@pytest.mark.slow
def test_a_child_that_fails_ends_all_with_its_line_and_its_code(folder, config, run):
    def compare(name, binding):
        output = ("--gin_bindings", binding, "--output_dir", folder / name)
        return run("compare", *_arguments(config, "anakin"), *output, environment=CACHED)

    mistake = compare("mistake", "PPO.num_minibatches = 7")  # found out by tracing an update
    processes.assert_mistake(mistake, "error: anakin, seed 0: ", "7 minibatches")
    failed = compare("failure", "PPO.learning_rate = 1e30")
    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("failed: anakin, seed 0: ")
    assert "became NaN or infinite" in last


@pytest.fixture(scope="module")
def modules(tools):
    return tools("results.comparison", "results.plotting")


def test_mistakes_are_found_before_anything_is_trained(tmp_path, config, call):
    (tmp_path / "file").write_text("not a folder")
    cases = {
        ("anakim",): "there is no runner 'anakim'; did you mean 'anakin'?",
        ("gin/runners/anakim.gin",): "did you mean 'gin/runners/anakin.gin'",
        ("anakin", "anakin"): "'anakin' is there twice",
        ("a/b=anakin",): "a label is letters",
        ("anakin", "--seeds", 0): "--seeds: expected a whole number of at least 1, got '0'",
        ("anakin", "--seeds", "few"): "got 'few'",
        ("anakin", "--runner_gin", "anakim:x.gin"): "'anakim' is none of --runners; did you mean",
        ("anakin", "--runner_gin", "x.gin"): "expected a label, a colon and a value",
        ("anakin", "--runner_gin", "anakin:x.gin"): "anakin: there is no gin file 'x.gin'",
        ("anakin", "--runner_bindings", "anakin:PPO.gama = 1"): "did you mean 'gamma'?",
        ("anakin", "--gin_bindings", "SEED = 5"): "anakin: expected the seed 0, but",
        ("anakin", "--gin_bindings", "TOTAL_STEPS = 5"): "--total_steps is",
        ("anakin", "--output_dir", tmp_path / "file" / "x"): "Not a directory",
    }
    output = ("--output_dir", tmp_path / "new")
    for rest, phrase in cases.items():
        with pytest.raises(errors.UserError) as caught:
            call("compare", *output, *_arguments(config, *rest))
        assert phrase in str(caught.value)
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_band_is_a_mean_over_all_seeds_wherever_it_is_drawn(modules):
    nan = np.nan
    curves = [
        (np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 20.0])),
        (np.array([0.0, 5.0, 10.0, 15.0]), np.array([nan, 1.0, nan, 3.0])),
        (np.array([3.0]), np.array([nan])),  # measured nothing
    ]
    drawn = modules.plotting.band(curves)
    assert (drawn.x[0], drawn.x[-1]) == (5.0, 15.0)
    np.testing.assert_allclose(drawn.most, drawn.x)
    np.testing.assert_allclose(drawn.least, 1.0 + (drawn.x - 5.0) / 5.0)
    np.testing.assert_allclose(drawn.mean, (drawn.least + drawn.most) / 2)
    assert modules.plotting.band(curves[2:]) is None
    disjoint = [(np.array([1.0]), np.array([2.0])), (np.array([3.0]), np.array([4.0]))]
    apart = modules.plotting.band(disjoint)
    assert set(apart.mean) == {3.0}


def test_members_of_a_population_are_seeds(modules):
    rows = [
        {"step": 1, "r": 2.0, "r/std": 1.0, "r/seed_0": 1.0, "r/seed_1": 3.0},
        {"step": 2, "r": None, "r/seed_0": None, "r/seed_1": None},
        {"step": 3, "r": 4.0, "r/std": 0.0, "r/seed_0": 4.0, "r/seed_1": None},
    ]
    steps, values = modules.plotting.series(rows, "r")
    np.testing.assert_array_equal(steps, [1.0, 3.0])
    np.testing.assert_array_equal(values, [[1.0, 4.0], [3.0, np.nan]])
    assert modules.plotting.series(rows, "other")[0].size == 0


def _result(modules, delay, returns, evaluated):
    rows = [
        {"step": 10 * n, "wall_time": delay + n, "episode/return": value}
        for n, value in enumerate(returns, 1)
    ]
    for n, value in evaluated.items():
        rows[n]["evaluation/return"] = value
    return modules.comparison.Result("a", 0, "", None, rows, {})


def test_seeds_are_averaged_at_equal_steps_along_seconds_too(modules):
    # The second compiled for so long that the first was done before it began.
    runs = [
        _result(modules, 0.0, [0.0, 1.0, 2.0], {1: 5.0, 2: 6.0}),
        _result(modules, 100.0, [2.0, 3.0, 4.0], {1: 7.0}),
    ]
    drawn = modules.comparison.band(runs, "wall_time")
    assert (drawn.x[0], drawn.x[-1]) == (51.0, 53.0)
    assert (drawn.mean[0], drawn.mean[-1]) == (1.0, 3.0)
    where, values = modules.comparison.evaluations(runs, "wall_time")
    assert (where.tolist(), values.tolist()) == ([52.0], [6.0])


def test_numbers_are_means_over_seeds(modules):
    def summary(judged, rate, wall):
        return {
            "evaluation": judged,
            "random_policy_return": -1.0,
            "steps_per_second": rate,
            "wall_time_s": wall,
            "first_dispatch_s": 2.0,
        }

    def result(value):
        return modules.comparison.Result("a", 0, "", None, [], value)

    alone = modules.comparison.numbers([result(summary({"return": 3.0}, None, 5.0))])
    assert (alone.final_return, alone.steps_per_second) == (3.0, [])
    assert np.isnan(alone.standard_error)
    population = {"return": 2.0, "return_by_seed": {"1": 1.0, "2": 3.0}}
    both = modules.comparison.numbers(
        [result(summary({"return": 3.0}, 10.0, 5.0)), result(summary(population, 30.0, 7.0))]
    )
    assert (both.seeds, both.wall_time_s) == (3, 6.0)
    assert both.final_return == pytest.approx(7 / 3)
    assert both.standard_error == pytest.approx(2 / 3)  # the deviation is 2 / sqrt(3)
    assert both.steps_per_second == [10.0, 30.0]
