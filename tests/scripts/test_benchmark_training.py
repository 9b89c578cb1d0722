"""Tests of the benchmarks that train: agents, start-up, devices; and of their files of results."""

import json

import pytest

from podracers import errors
from podracers.training import experiment
from tests import processes


@pytest.fixture(scope="module")
def benchmarks(tools):
    names = ("records", "startup", "scaling", "agent_speed")
    return tools(*(f"benchmarks.{name}" for name in names))


def test_a_kind_sums_up_figures(benchmarks):
    kind = benchmarks.records.Kind("speed", "agent steps/s", "higher", 1)
    row = kind.row([1.0, 2.04, 6.0], devices=4)
    assert (row.median, row.min, row.max) == (2.0, 1.0, 6.0)
    assert (row.label, row.spread) == ("speed (devices 4)", "2 (1 to 6)")
    once = kind.row(5.0, devices=4)
    assert (once.median, once.min, once.max) == (5.0, None, None)
    assert once.key == row.key
    assert kind.row(5.0, devices=8).key != row.key


@pytest.mark.parametrize(
    ("number", "text"),
    [(359126, "359k"), (999.7, "1k"), (2.5e6, "2.5M"), (23.679, "23.7"), (-0.078, "-0.078")],
)
def test_short_numbers(benchmarks, number, text):
    assert benchmarks.records.short(number) == text


def test_a_record_is_read_as_it_was_written(benchmarks, tmp_path):
    records = benchmarks.records
    kind = records.Kind("share", "share", None, 3)
    rows = (kind.row([0.1, 0.2], part="acting"), kind.row(0.5, part="learning"))
    provenance = {"device": "1 x cpu", "platform": "cpu", "host_cores": 2}
    provenance |= {"versions": {"jax": "0.10.2"}, "commit": None}
    results = {"a": records.Result("About.", rows, ("note",), "group")}
    record = records.Record("command", results, provenance)
    (tmp_path / "a.json").write_text(record.text())
    assert records.read(tmp_path / "a.json") == record


def test_a_run_that_fails_is_not_waited_for(benchmarks):
    with pytest.raises(errors.UserError, match=r"absent\.gin"):
        benchmarks.startup.first_update(["--gin_file", "gin/experiments/absent.gin"], {})


def test_processes_are_not_waited_for_once_one_has_failed(benchmarks):
    with pytest.raises(errors.UserError, match="gamma"):
        benchmarks.scaling.distributed_speed(2, ("PPO.gama = 0.9",))


def test_numbers_of_processes_take_turns(benchmarks, monkeypatch):
    called = []

    def speed(count, _):
        called.append(count)
        return float(len(called))

    monkeypatch.setattr(benchmarks.scaling, "distributed_speed", speed)
    result = benchmarks.scaling.benchmark_processes(3, [1, 2])
    assert called == [1, 2, 1, 2, 1, 2]
    ratio = next(row for row in result.rows if row.unit == "ratio" and row.case["processes"] == 2)
    assert (ratio.max, ratio.median) == (2.0, round(4 / 3, 3))  # of 2 / 1, 4 / 3 and 6 / 5


def test_every_agent_has_an_experiment_that_both_runners_take(benchmarks):
    training = benchmarks.agent_speed
    agents = {path.stem for path in (processes.ROOT / "gin" / "agents").glob("*.gin")}
    kinds = {name for name in agents if "_" not in name}  # the others are settings of these
    assert set(training.EXPERIMENTS) == kinds
    for name in training.EXPERIMENTS.values():
        for runner in training.RUNNERS:
            files = training.files(name, runner)
            parts = experiment.load(files, []).build()
            assert type(parts.runner).__name__ == runner


def figures(file, name):
    """Returns medians by measure and by case."""
    rows = json.loads(file.read_text())["results"][name]["rows"]
    return {(row["measure"], *row["case"].values()): row["median"] for row in rows}


ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


@pytest.mark.slow
def test_an_agent_is_measured_under_both_runners(tmp_path):
    file = tmp_path / "result.json"
    binding = ("--gin_bindings", "NUM_ENVS = 8", "--gin_bindings", "ROLLOUT_LENGTH = 8")
    result = processes.run(
        "benchmark",
        *("agent_dqn", "--repeats", 1, "--json", file, *binding),
        environment=ONE_DEVICE,
    )
    assert result.returncode == 0, result.stderr
    found = figures(file, "agent_dqn")
    for runner in ("Anakin", "Sebulba"):
        assert found["speed", "dqn", runner] > 0.0
        # Nothing is taken from a cache: a start compiles, and does more than that.
        assert found["start-up", "dqn", runner] > 1.0
        assert found["compiling", "dqn", runner] > 0.3
        assert 1e8 < found["peak memory", "dqn", runner] < 1e10


@pytest.mark.slow
def test_scaling_over_devices_runs(tmp_path):
    file = tmp_path / "result.json"
    result = processes.run(
        "benchmark",
        *("scaling", "--devices", 1, 2, "--repeats", 1, "--json", file),
        *("--gin_bindings", "NUM_ENVS = 16", "--gin_bindings", "ROLLOUT_LENGTH = 8"),
        environment={"XLA_FLAGS": ""},
    )
    assert result.returncode == 0, result.stderr
    found = figures(file, "scaling")
    speedup = "speed, turn by turn, over that of the first"
    for runner in ("Anakin", "Sebulba"):
        assert found[speedup, runner, 1] == 1.0
        share = found["speed", runner, 2] / found["speed", runner, 1]
        assert found[speedup, runner, 2] == pytest.approx(share, rel=1e-2)


@pytest.mark.slow
def test_scaling_over_processes_runs(tmp_path):
    file = tmp_path / "result.json"
    result = processes.run(
        "benchmark",
        *("scaling_processes", "--processes", 1, 2, "--repeats", 1, "--json", file),
        *("--gin_bindings", "NUM_ENVS = 16", "--gin_bindings", "TOTAL_STEPS = 50_000"),
        environment={"XLA_FLAGS": ""},
    )
    assert result.returncode == 0, result.stderr
    found = figures(file, "scaling_processes")
    for count in (1, 2):
        assert found["speed", "Anakin", count] > 0.0


@pytest.mark.slow
def test_a_second_start_adds_nothing_to_the_cache(tmp_path):
    file = tmp_path / "result.json"
    result = processes.run(
        "benchmark", "startup", "--repeats", 1, "--json", file, environment=ONE_DEVICE
    )
    assert result.returncode == 0, result.stderr
    found = figures(file, "startup")
    added = "files added to the compilation cache"
    assert found[added, "first"] > 0
    assert found[added, "second"] == 0
    assert found["start-up", "second"] < found["start-up", "first"]
