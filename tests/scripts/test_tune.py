"""Tests of the search for fast settings: candidates, the search, the file, Ctrl-C."""

import functools
import itertools
import pathlib
import signal

import pytest

from podracers import errors
from podracers.sebulba import placement
from podracers.training import experiment
from tests import processes

SHORT = ("--minutes", 4)


@pytest.fixture(scope="module")
def modules(tools):
    return tools("tuning.candidates", "tuning.search", "tuning.trial")


@pytest.fixture
def tune(call):
    handler = signal.getsignal(signal.SIGTERM)
    yield functools.partial(call, "tune")
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def config(tmp_path):
    return processes.config_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("num_envs", {"num_envs": 12}, ([24, 48, 96, 192, 384, 768], [6, 3])),
        ("rollout_length", {"rollout_length": 20}, ([40, 80], [10, 5])),
        ("batches_per_actor", {"batches_per_actor": 2}, ([4, 8], [1])),
        ("num_threads", {"num_threads": 4}, ([8], [2, 1])),
        ("reset_batch", {"num_envs": 64, "reset_batch": 4}, ([16, None], [1])),
        ("reset_batch", {"num_envs": 512, "reset_batch": None}, ([], [256, 64, 16, 4, 1])),
        ("devices", {"devices": 2}, ([3], [1])),
    ],
)
def test_values_that_follow_from_settings(modules, name, settings, expected):
    assert modules.candidates.values(name, settings, num_devices=3, num_cores=4) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_split_of_devices_is_a_valid_placement(modules, count):
    start = {"devices": 1, "actor_threads": 1, "num_envs": 8}
    assert modules.candidates.fields(start, start, count) == {}
    for acting, threads in itertools.product(range(1, count + 1), (2, 8)):
        settings = {"devices": acting, "actor_threads": threads, "num_envs": 8}
        made = modules.candidates.fields(settings, start, count)
        assert made.keys() == {"actor_devices", "learner_devices"}
        found = placement.plan([range(count)], 0, 5040 * 64, 1, *made.values())
        assert (len(set(found.actors)), len(found.actors)) == (acting, acting * threads)
        assert set(found.actors).isdisjoint(found.learners) == (acting < count)


def _search(modules, rates, start=8, values=None, budget=99.0):
    """Returns a search over a table of rates, or of errors, and the order of measurements."""
    order = []

    def measure(settings):
        order.append(settings["num_envs"])
        rate = rates.get(order[-1], "out of memory")
        if isinstance(rate, str):
            return modules.trial.Outcome(problem=rate, refused=rate == "does not divide")
        return modules.trial.Outcome(rates=[rate, 2.0 * rate, 0.5 * rate], seconds=1.0)

    first = {"num_envs": start}
    found = modules.search.Search(measure, budget, [(first, measure(first))])
    found.run({"num_envs": values}, num_devices=1, num_cores=2)
    return found, order


@pytest.mark.parametrize(
    ("rates", "options", "order", "best"),
    [
        # It continues while candidates gain, and measures none twice.
        ({8: 10.0, 16: 20.0, 32: 30.0, 64: 30.5, 128: 99.0}, {}, [8, 16, 32, 64], 32),
        ({8: 10.0, 16: 9.0, 4: 20.0, 2: 15.0}, {}, [8, 16, 4, 2], 4),
        # Settings that do not divide are skipped; a failure ends the direction.
        ({8: 10.0, 16: "does not divide", 32: 20.0, 128: 99.0}, {}, [8, 16, 32, 64], 32),
        ({4: 5.0}, {}, [8, 16, 4, 2], 4),
        ({}, {}, [8, 16, 4], None),
        # All values of the user are measured.
        ({8: 10.0, 1: 5.0, 64: 20.0, 3: 1.0}, {"values": (1, 64, 5, 3)}, [8, 1, 64, 5, 3], 64),
        # Seconds: three measurements, another one, and two rounds of the start and the best.
        ({2**n: 10.0 * n for n in range(3, 12)}, {"budget": 8.0}, [8, 16, 32], 32),
    ],
)
def test_coordinate_search(modules, rates, options, order, best):
    found, measured = _search(modules, rates, **options)
    assert measured[: len(order)] == order
    again = [8, best] * 2 if isinstance(rates.get(8), float) else []
    assert measured[len(order) :] == again
    assert (found.best and found.measured[found.best][0]["num_envs"]) == best
    assert found.complete == ("budget" not in options)


def test_the_best_must_win_every_round(modules):
    outcomes = [modules.trial.Outcome(rates=[rate]) for rate in (10.0, 20.0)]
    measured = [({"num_envs": 8}, outcomes[0]), ({"num_envs": 16}, outcomes[1])]

    def found(rounds, **options):
        return modules.search.Search(None, 1.0, measured, 1, rounds, **options)

    won = found([(10.0, 12.0), (20.0, 22.0)])
    assert won.chosen == {"num_envs": 16}
    assert "1.20, 1.10 times" in won.verdict()[0]
    for rounds in ([(10.0, 12.0), (10.0, 9.9)], [(10.0, 12.0)], []):
        assert found(rounds).chosen == {"num_envs": 8}
    assert found([], interrupted=True).chosen == {"num_envs": 16}


@pytest.mark.slow
def test_a_search_writes_a_file_that_an_experiment_reads(tmp_path, config, tune, capsys):
    out = tmp_path / "tuned.gin"
    # Six environments do not divide over four devices.
    options = ("--parameters", "num_envs=6,4", "--gin_bindings", "SEED = 1")
    assert tune("--gin_file", config, *options, "--out", out, *SHORT) == 0
    assert "num_envs = 6 does not divide" in capsys.readouterr().out
    num_envs = experiment.load([str(config), str(out)], []).build().runner.num_envs
    assert num_envs in (8, 4)
    assert (f"anakin.Anakin.num_envs = {num_envs}\n" in out.read_text()) == (num_envs == 4)


@pytest.mark.slow
def test_settings_beyond_the_memory_limit_fail(tmp_path, config, tune):
    options = ("--parameters", "num_envs=16", "--memory", 0.001, "--out", tmp_path / "tuned.gin")
    with pytest.raises(errors.RunFailure, match="more than 1 MB"):
        tune("--gin_file", config, *options, *SHORT)
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_so_far(tmp_path, config):
    out = tmp_path / "tuned.gin"
    arguments = ("--gin_file", config, "--parameters", "num_envs=256", "--out", out, *SHORT)
    process = processes.start("tune", *arguments)
    while (line := process.stdout.readline()) and not line.startswith("num_envs 256: "):
        pass
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # One of them is multiprocessing's own, the other the next candidate.
    while len(children.read_text().split()) < 2 and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    result = processes.finish(process)  # at its exit, Python waits for a child that is left
    assert result.returncode == 0, result.stderr
    assert "stopped early; the fastest so far: num_envs 256" in result.stdout
    assert experiment.load([str(config), str(out)], []).build().runner.num_envs == 256
