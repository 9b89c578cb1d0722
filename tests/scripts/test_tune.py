"""Tests of the search for fast settings: candidates, the climb, the duel, the file, the end."""

import itertools
import math
import pathlib
import signal
import time

import pytest

from podracers import errors
from podracers.sebulba import placement
from podracers.training import experiment
from tests import processes

NUM_DEVICES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def modules(tools):
    return tools(
        "tune", "tuning.candidates", "tuning.coordinate_search", "tuning.findings", "tuning.trial"
    )


@pytest.fixture
def tune(call):
    """Calls the script in this process; the candidates have processes of their own."""

    def tune(*words):
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return call("tune", *words)
        finally:
            signal.signal(signal.SIGTERM, handler)

    return tune


@pytest.fixture
def config(tmp_path):
    return processes.config_file(tmp_path)


def _values(modules, name, machine, **start):
    """Returns the values of the field of the same name, by direction."""
    candidate = modules.candidates.Candidate(tuple(start.items()))
    directions = modules.candidates.Choice(name).directions(candidate, machine)
    return [[each.get(name) for each in direction] for direction in directions]


def test_what_follows_from_a_start(modules):
    machine = modules.candidates.Machine(num_devices=1, num_cores=4, is_host=True, num_batches=2)
    assert _values(modules, "num_envs", machine, num_envs=12) == [
        [24, 48, 96, 192, 384, 768],
        [6, 3],
    ]
    assert _values(modules, "rollout_length", machine, rollout_length=20) == [[40, 80], [10, 5]]
    assert _values(modules, "batches_per_actor", machine, batches_per_actor=None) == [[4, 8], [1]]
    assert _values(modules, "num_threads", machine, num_threads=None) == [[8], [2, 1]]
    resets = {"num_envs": 64, "reset_batch": 16}
    assert _values(modules, "reset_batch", machine, **resets) == [[None], [4, 1]]
    every = {"num_envs": 64, "reset_batch": None}
    assert _values(modules, "reset_batch", machine, **every) == [[], [256, 64, 16, 4, 1]]
    in_jax = modules.candidates.Machine(num_devices=1, num_cores=4, is_host=False)
    assert _values(modules, "num_threads", in_jax, num_threads=None) == [[], []]


@pytest.mark.parametrize("count", NUM_DEVICES)
def test_every_split_of_devices_that_is_tried_can_be_fed(modules, count):
    """Twice over: from what is chosen where nothing is said, and from what that leads to."""
    chosen = placement.plan([range(count)], 0, 5040, 1, None, None)
    machine = modules.candidates.Machine(count, 2, True, chosen.actors, chosen.learners)
    choices = [modules.candidates.Choice(name) for name in ("devices", "actor_threads")]
    first = modules.candidates.Candidate((("actor_devices", None), ("learner_devices", None)))
    tried = {first}
    for _ in range(2):
        for choice, candidate in itertools.product(choices, list(tried)):
            for direction in choice.directions(candidate, machine):
                tried.update(direction)
    assert len(tried) > 3
    for each in tried - {first}:
        split = each.get("actor_devices"), each.get("learner_devices")
        fed = placement.plan([range(count)], 0, 5040 * 64, 1, *split)
        assert (fed.actors, fed.learners) == split
    shared = tuple(range(count))
    assert any(
        set(each.get("actor_devices") or ()) == set(each.get("learner_devices") or ()) == {*shared}
        for each in tried
    )


class Table:
    """Measures by looking up: `num_envs` leads to a rate, or to what goes wrong."""

    def __init__(self, modules, rates):
        self._modules, self._rates, self.asked = modules, rates, []

    def __call__(self, candidate, floor=0.0):
        value = candidate.get("num_envs")
        self.asked.append(value)
        rate = self._rates.get(value, "out of memory")
        if isinstance(rate, str):
            return self._modules.trial.Outcome(problem=rate, refused=rate == "does not divide")
        return self._modules.trial.Outcome(rates=[rate, 2.0 * rate, 0.5 * rate])


def _climb(modules, rates, start=8, values=None, limit=99):
    """Returns what was found, and which numbers of environments were asked for."""
    measure = Table(modules, rates)
    choice = modules.candidates.Choice("num_envs", values)
    found = modules.findings.Findings(modules.candidates.Candidate((("num_envs", start),)))
    found.add(found.start, measure(found.start))
    modules.coordinate_search.search(
        *(found, [choice], modules.candidates.Machine(num_devices=1, num_cores=2)),
        *(measure, lambda: len(measure.asked) < limit),
    )
    return found, measure.asked


def test_climbs_while_it_gets_faster_and_asks_nothing_twice(modules):
    rising = {8: 10.0, 16: 20.0, 32: 30.0, 64: 30.5, 128: 99.0}
    found, asked = _climb(modules, rising)
    assert asked == [8, 16, 32, 64]  # half of what it came from was asked before it
    assert found.best.get("num_envs") == 32
    assert found.complete
    found, asked = _climb(modules, {8: 10.0, 16: 9.0, 4: 20.0, 2: 15.0})
    assert asked == [8, 16, 4, 2]
    assert found.best.get("num_envs") == 4


def test_what_does_not_divide_is_skipped_and_what_does_not_fit_ends_a_direction(modules):
    found, asked = _climb(modules, {8: 10.0, 16: "does not divide", 32: 20.0, 128: 99.0})
    assert asked == [8, 16, 32, 64]
    assert found.best.get("num_envs") == 32


def test_a_start_that_cannot_be_measured_is_left_behind(modules):
    found, _ = _climb(modules, {4: 5.0})
    assert found.best.get("num_envs") == 4
    assert _climb(modules, {})[0].best is None


def test_values_of_the_user_are_all_tried(modules):
    found, asked = _climb(modules, {8: 10.0, 1: 5.0, 64: 20.0, 3: 1.0}, values=(1, 64, 5, 3))
    assert asked == [8, 1, 64, 5, 3]
    assert found.best.get("num_envs") == 64


def test_stops_when_the_time_is_up(modules):
    found, asked = _climb(modules, {2**n: 10.0 * n for n in range(3, 12)}, limit=3)
    assert asked == [8, 16, 32]
    assert found.best.get("num_envs") == 32
    assert not found.complete


def _found(modules, rounds, **options):
    start, best = (modules.candidates.Candidate((("num_envs", n),)) for n in (8, 16))
    measured = {
        start: modules.trial.Outcome(rates=[10.0], host_memory=10**9),
        best: modules.trial.Outcome(rates=[20.0], host_memory=2 * 10**9),
    }
    return modules.findings.Findings(start, measured, best, rounds, **options)


def test_the_best_has_to_win_each_time(modules):
    ours, lost = [(10.0, 12.0), (20.0, 22.0), (10.0, 15.0)], (10.0, 9.9)
    won = _found(modules, ours, last=10.0)
    assert won.chosen.get("num_envs") == 16
    assert "1.20 (1.10 to 1.50) times the speed of the start" in won.verdict()[1]
    assert won.verdict()[-1] == "the fastest is num_envs 16"
    for rounds in ([*ours, lost], ours[:1], [*ours, (10.0, math.nan)], [(math.nan, 12.0)] * 3):
        held = _found(modules, rounds, last=10.0)
        assert held.chosen.get("num_envs") == 8
        assert held.verdict()[-1].endswith("own values")
    assert _found(modules, [lost], interrupted=True).chosen.get("num_envs") == 16
    assert "other work" not in won.verdict()[0]
    assert "other work" in _found(modules, ours, last=8.0).verdict()[0]


def test_sizes_are_read_as_people_write_them(modules):
    sizes = {"8GB": 8e9, "1.5 GB": 1.5e9, "500MB": 5e8, "2GiB": 2.0 * 1024**3, "100": 100.0}
    assert {text: modules.tune._bytes(text) for text in sizes} == sizes


def test_mistakes_are_found_before_anything_is_measured(tmp_path, config, tune):
    cases = {
        ("--parameters", "num_env"): "Anakin has no 'num_env'; did you mean 'num_envs'?",
        ("--parameters", "batches_per_actor"): "Anakin has no 'batches_per_actor'",
        ("--parameters", "num_envs=few"): "expected whole numbers such as num_envs=2,4, got 'few'",
        ("--parameters", "num_envs=8,0"): "got '0'",
        ("--parameters", "num_envs=None"): "got 'None'",
        ("--memory", "lots"): "expected a size such as 8GB or 500MB, got 'lots'",
        ("--minutes", "0"): "--minutes: expected more than 0",
        ("--out", tmp_path / "missing" / "tuned.gin"): "--out: cannot write",
        ("--gin_bindings", "PPO.gama = 1"): "did you mean 'gamma'?",
        ("--gin_file", "gin/runners/anakim.gin"): "did you mean 'gin/runners/anakin.gin'",
    }
    for rest, phrase in cases.items():
        with pytest.raises(errors.UserError) as caught:
            tune("--gin_file", config, "--out", tmp_path / "tuned.gin", *rest)
        assert phrase in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [config]


SHORT = ("--seconds", 0.1, "--minutes", 4)


@pytest.mark.slow
def test_a_search_leaves_a_file_that_an_experiment_reads(tmp_path, config, tune, capsys):
    out = tmp_path / "tuned.gin"
    # Six environments do not divide over four devices.
    options = ("--parameters", "num_envs=6,4", "--gin_bindings", "SEED = 1")
    assert tune("--gin_file", config, *options, "--out", out, *SHORT) == 0
    said = capsys.readouterr().out
    assert "num_envs 6: Anakin.num_envs = 6 does not divide over 4 devices" in said
    assert "of what it was at the beginning" in said
    text = out.read_text()
    assert "# Made by: python scripts/tune.py --gin_file" in text
    assert "4 x cpu" in text
    assert "# num_envs: with another value the agent learns otherwise" in text
    assert all(len(line) <= 100 or "Made by" in line for line in text.splitlines())
    runner = experiment.load([str(config), str(out)], []).build().runner
    assert runner.num_envs in (8, 4)
    assert f"anakin.Anakin.num_envs = {runner.num_envs}\n" in text


@pytest.mark.slow
def test_where_nothing_fits_one_line_says_so(tmp_path, config, tune):
    options = ("--parameters", "num_envs=16", "--memory", "1MB", "--out", tmp_path / "tuned.gin")
    with pytest.raises(errors.RunFailure) as caught:
        tune("--gin_file", config, *options, *SHORT)
    assert "none of 2 candidates could be measured; the start: takes" in str(caught.value)
    assert "more than 1 MB" in str(caught.value)
    assert list(tmp_path.iterdir()) == [config]


def _is_alive(pid):
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_so_far_and_leaves_nobody_behind(tmp_path, config):
    out = tmp_path / "tuned.gin"
    arguments = ("--gin_file", config, "--parameters", "num_envs=256", "--out", out, *SHORT)
    process = processes.start("tune", *arguments)
    while (line := process.stdout.readline()) and not line.startswith("num_envs 256: "):
        pass
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # One of them is multiprocessing's own, the other the next candidate.
    while len(running := children.read_text().split()) < 2 and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    result = processes.finish(process)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "stopped early: the fastest so far was num_envs 256" in result.stdout
    limit = time.monotonic() + 30  # one that was just being started finds out by itself
    while (left := [pid for pid in running if _is_alive(pid)]) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left
    assert experiment.load([str(config), str(out)], []).build().runner.num_envs == 256
