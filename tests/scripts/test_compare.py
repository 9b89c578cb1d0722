"""Tests of comparisons of runners: the runs, the numbers, the picture, and signals."""

import json
import signal

import numpy as np
import pytest

from tests import processes

EXTRA = """
experiment.Experiment.checkpoint_period = 0
experiment.Experiment.log_period = 2  # updates
experiment.Experiment.evaluation_period = 50  # updates
"""
STEPS = 150 * 64
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Returns the words of a comparison that a function completes: its folder and its runners."""
    config = processes.config_file(tmp_path_factory.mktemp("compare"), EXTRA)
    shared = ("--gin_file", config, "--seeds", 1, "--gin_bindings", f"TOTAL_STEPS = {STEPS}")
    return lambda output, *runners: ("--output_dir", output, *shared, "--runners", *runners)


@pytest.fixture(scope="module")
def modules(tools):
    return tools("compare", "results.plotting")


@pytest.fixture(scope="module")
def compared(arguments, tmp_path_factory, run):
    """Words of a comparison that was made, its folder and its result."""
    output = tmp_path_factory.mktemp("compared")
    short = ("--runner_bindings", "short:Anakin.rollout_length = 4")
    words = arguments(output, "anakin", "short=anakin", *short)
    result = run("compare", *words, environment=CACHED)
    return words, output, result


@pytest.mark.slow
def test_runs_are_trained_once_and_compared(compared, run):
    words, output, result = compared
    headlines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [line.split(" (")[0] for line in headlines] == [
        "[1/2] anakin, seed 0: training",
        "[2/2] short, seed 0: training",
    ]
    summaries = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/summary.json")}
    assert len(summaries) == 2
    for path in summaries:
        summary = json.loads(path.read_text())
        assert (summary["seed"], summary["environment_steps"]) == (0, STEPS)
        for number in (summary["evaluation"]["return"], summary["steps_per_second"]):
            assert f"{number:,.2f}".removesuffix(".00") in result.stdout
    assert (output / "comparison.png").stat().st_size > 10_000  # bytes
    again = run("compare", *words)
    assert "[2/2] short, seed 0: finished before" in again.stdout
    assert summaries == {path: path.stat().st_mtime_ns for path in summaries}


@pytest.mark.slow
def test_the_child_of_a_killed_process_saves_and_the_same_command_continues(
    compared, arguments, tmp_path, run
):
    words, runs = arguments(tmp_path, "anakin"), (tmp_path / "runs").glob
    process = processes.start("compare", *words, environment=CACHED)
    killed = processes.interrupt(
        process, signal.SIGKILL, lambda: any(processes.num_lines(d) >= 3 for d in runs("*/seed-0"))
    )
    assert "stopped at" in killed.stdout  # by the child: the kernel sends it SIGTERM
    (run_dir,) = runs("*/seed-0")
    assert not (run_dir / "summary.json").exists()
    resumed = run("compare", *words, environment=CACHED)
    assert "[1/1] anakin, seed 0: resuming" in resumed.stdout
    (whole,) = compared[1].glob("runs/anakin-*/seed-0")
    processes.assert_same_end(whole, run_dir)


def test_a_band_is_a_mean_over_all_seeds_at_equal_steps(modules):
    # The second seed compiled until after the end of the first.
    curves = [
        np.array([[0.0, 1.0, 0.0], [10.0, 2.0, 10.0], [20.0, 3.0, 20.0]]),
        np.array([[5.0, 101.0, 1.0], [15.0, 102.0, 3.0]]),
    ]
    drawn = modules.plotting.band(curves)
    np.testing.assert_array_equal(drawn.x, [5.0, 10.0, 15.0])
    np.testing.assert_allclose(drawn.mean, [3.0, 6.0, 9.0])
    assert (drawn.seeds, drawn.extent) == (2, (1.0, 15.0))
    np.testing.assert_array_equal(drawn.high, drawn.low)  # no interval
    by_time = modules.plotting.band(curves, 1)
    assert (by_time.x[0], by_time.x[-1]) == (51.25, 52.25)
    np.testing.assert_array_equal(by_time.mean, drawn.mean)
    drawn = modules.plotting.band([*curves, np.array([[5.0, 1.0, 3.0], [15.0, 2.0, 3.0]])])
    # 4.302653 is the 97.5th percentile of Student's t with two degrees of freedom.
    width = 4.302653 * np.std([[5, 1, 3], [10, 2, 3], [15, 3, 3]], axis=1, ddof=1) / 3**0.5
    np.testing.assert_allclose(drawn.high - drawn.mean, width, rtol=1e-6)
    np.testing.assert_allclose(drawn.mean - drawn.low, width, rtol=1e-6)


def test_a_drawing_over_tasks_has_interquartile_means_of_scaled_returns(modules):
    def seeds(length, *returns):
        return [np.array([[length / 2, 0.0, x], [length, 1.0, x]]) for x in returns]

    def panel(title, length, *returns, **others):
        curves = {"a": seeds(length, *returns), "b": seeds(length, *returns[::-1]), **others}
        return modules.plotting.Panel(title, curves, {}, dict.fromkeys(curves, (100.0, 200.0)))

    panels = [panel("x", 10.0, 120.0, 140.0), panel("y", 20.0, 140.0, 120.0)]
    assert modules.plotting.overall(panels) == []  # two tasks
    panels.append(panel("z", 900.0, 200.0, 200.0, c=seeds(900.0, 1.0)))
    (drawing,) = modules.plotting.overall(panels)
    assert (drawing.title, [*drawing.bands]) == ("interquartile mean over x, y, z", ["a", "b"])
    band = drawing.bands["a"]
    assert (band.x[0], band.x[-1], band.seeds) == (50.0, 100.0, 2)  # percent
    # Of six scores in order, the lowest and the highest are left out; a resample of either task
    # has its lower score twice in every fourth case.
    for values, expected in ((band.low, 0.4), (band.mean, 0.5), (band.high, 0.55)):
        np.testing.assert_allclose(values, expected)
    scales = {"a": (0.0, 1.0), "b": (1.0, 1.0)}  # that of the second is empty
    alone = [panel._replace(scales=scales) for panel in panels]
    assert modules.plotting.overall(alone) == []


def test_members_of_a_population_are_seeds(modules):
    rows = [
        {"r": 2.0, "r/std": 1.0, "r/seed_0": 1.0, "r/seed_1": 3.0},
        {"r": None, "r/seed_0": None, "r/seed_1": None},
        {"r": 4.0, "r/std": 0.0, "r/seed_0": 4.0, "r/seed_1": None, "of/r/seed_2": 1.0},
    ]
    rows = [{"step": n, "wall_time": 0.5 * n, **row} for n, row in enumerate(rows)]
    first, second = modules.plotting.curves(rows, "r").values()
    np.testing.assert_array_equal(first, [[0.0, 0.0, 1.0], [2.0, 1.0, 4.0]])
    np.testing.assert_array_equal(second, [[0.0, 0.0, 3.0]])


def test_numbers_are_means_over_seeds(modules):
    def summary(rate, **evaluation):
        times = {"wall_time_s": rate, "first_dispatch_s": 2.0, "steps_per_second": rate}
        return {"random_policy_return": -1.0, "evaluation": evaluation} | times

    alone = modules.compare.numbers([summary(None, **{"return": 3.0})])
    names = ("seeds", "final_return", "standard_error", "steps_per_second")
    assert [alone[name] for name in names] == [1, 3.0, None, None]
    population = summary(30.0, **{"return": 2.0, "return_by_seed": {"1": 1.0, "2": 3.0}})
    averages = modules.compare.numbers([summary(10.0, **{"return": 3.0}), population])
    # The deviation is 2 / sqrt(3).
    assert [averages[name] for name in names] == pytest.approx([3, 7 / 3, 2 / 3, 20.0])
