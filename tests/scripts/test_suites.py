"""Tests of suites: real runs of seconds, and what is recorded of them."""

import dataclasses
import json
import signal
import types

import pytest

from podracers import errors
from podracers.training import run_directory
from tests import processes

EXTRA = """
experiment.Experiment.checkpoint_period = 0
experiment.Experiment.evaluation_period = 2
"""
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}  # what is timed here matters to nobody


@pytest.fixture(scope="module")
def modules(tools):
    return tools(
        "results.reproduction", "results.suites", "results.rows", "results.training_process"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("suites")


def _ledger(folder, *rows):
    """Writes a file of results with rows of a suite, and returns its path."""
    config = processes.config_file(folder, EXTRA)
    (folder / "other.gin").write_text(config.read_text())
    shared = {"runner": "Anakin", "agent": "PPO", "suite": "two"}
    experiments = [str(config), str(folder / "other.gin")]
    made = [{"experiment": e, "environment": e, **shared, **r} for e, r in zip(experiments, rows)]
    path = folder / "results.json"
    path.write_text(json.dumps(made))
    return path


def _work(run, ledger, folder, seeds, *words):
    words += ("--suite", "two", "--results", ledger, "--out", folder / "runs", "--seeds", seeds)
    return run("reproduce", *words, environment=CACHED)


@pytest.fixture(scope="module")
def worked(folder, run):
    """A suite of a row that learns and one that fails, worked through: the file, what was said."""
    ledger = _ledger(folder, {"gin_bindings": ["PPO.num_minibatches = 7"]}, {})
    return ledger, _work(run, ledger, folder, 2)


@pytest.mark.slow
def test_every_run_is_recorded_seed_by_seed_and_failures_are_shown(worked, folder):
    ledger, result = worked
    assert result.returncode == 1, result.stderr
    order = [line.split(";")[0] for line in result.stdout.splitlines() if line.startswith("[")]
    assert order == [
        "[1/4] tiny-anakin, seed 0",
        "[2/4] other-anakin, seed 0",
        "[3/4] tiny-anakin, seed 1",
        "[4/4] other-anakin, seed 1",
    ]
    failing, learning = json.loads(ledger.read_text())
    assert [each["seed"] for each in failing["failures"]] == [0, 1]
    assert "7 minibatches" in failing["failures"][0]["message"]
    assert "measured" not in failing
    runs = learning["measured"]["runs"]
    assert [each["seed"] for each in runs] == [0, 1]
    assert len({each["settings"] for each in runs}) == 1
    for each in runs:
        steps, seconds, returns = zip(*each["curve"])
        assert list(steps) == sorted(set(steps)) and len(steps) > 2
        assert steps[-1] == learning["measured"]["agent_steps"]
        assert list(seconds) == sorted(seconds)
        assert returns[-1] == pytest.approx(each["final_return"], abs=1e-4)


@pytest.mark.slow
def test_what_is_recorded_is_not_trained_again_nor_a_row_that_is_not_named(worked, run, tmp_path):
    ledger, _ = worked
    rows = json.loads(ledger.read_text())
    lost = tmp_path / "results.json"
    first = rows[1]["measured"]["runs"].pop(0)
    lost.write_text(json.dumps(rows))
    result = _work(run, lost, tmp_path, 2, "other")
    assert result.returncode == 0, result.stderr
    assert "[1/1] other-anakin, seed 0; about" in result.stdout
    _, row = json.loads(lost.read_text())
    assert [each["seed"] for each in row["measured"]["runs"]] == [0, 1]
    assert row["measured"]["runs"][0]["final_return"] == first["final_return"]


@pytest.mark.slow
def test_a_suite_that_was_stopped_goes_on(worked, tmp_path):
    ledger = _ledger(tmp_path, {}, {})
    words = ("--suite", "two", "--results", ledger, "--out", tmp_path / "runs", "--seeds", 1)
    process = processes.start("reproduce", *words, environment=CACHED)
    folder = tmp_path / "runs"
    stopped = processes.interrupt(
        process,
        signal.SIGTERM,
        lambda: any(processes.num_lines(d) >= 3 for d in folder.glob("tiny-anakin-*/seed-0")),
    )
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped: the same command goes on" in stopped.stdout
    assert not any("measured" in row for row in json.loads(ledger.read_text()))
    resumed = processes.run("reproduce", *words, environment=CACHED)
    assert resumed.returncode == 0, resumed.stderr
    ended = [row["measured"]["runs"][0]["final_return"] for row in json.loads(ledger.read_text())]
    assert ended[0] == ended[1]  # one configuration, once interrupted


def test_runs_of_other_settings_are_trained_again(modules, tmp_path):
    row = next(iter(modules.rows.read(_ledger(tmp_path, {})).values()))
    planned = modules.reproduction.plan(row, 1, tmp_path)
    same = modules.training_process.settings_digest(planned.config)
    assert planned.seed == 1 and "SEED = 1" in planned.config

    def missing(settings, steps=planned.total_steps):
        run = modules.rows.SeedRun(1, 0.5, settings=settings)
        known = modules.rows.Measured("2026-01-31", "a machine", "0", steps, 8, runs=(run,))
        measured = dataclasses.replace(row, measured=known)
        return [each.seed for _, each in modules.suites._missing([measured], 2, tmp_path)[0]]

    assert missing(same) == missing(None) == [0]
    assert missing(same, steps=round(1.03 * planned.total_steps)) == [0]  # with a whole update
    assert missing("another") == missing(same, steps=1) == [0, 1]
    assert missing(same, steps=2 * planned.total_steps) == [0, 1]
    # Those of other settings are beside the old ones, which `Run.train` would not go on with.
    changed = dataclasses.replace(row, gin_bindings=("TOTAL_STEPS = 77",))
    left, _ = modules.suites._missing([row, changed], 2, tmp_path)
    folders = {run.directory.path.parent for _, run in left}
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path}


def test_a_digest_is_of_what_is_set_and_not_of_the_names_of_modules(modules):
    digest = modules.training_process.settings_digest
    text = "from a import b as c\nfrom d import e\nSEED = 0\nc.F.g = @e.H\nc.F.i = 'c.j'\n"
    other = "from d import e as x\nfrom a import b\n# F\nSEED = 1\nb.F.i = 'c.j'\nb.F.g = @x.H\n"
    assert digest(text) == digest(other)
    assert digest(text) != digest(text.replace("@e.H", "@c.H"))
    assert digest(text) != digest(text.replace("c.F.g = @e.H\n", ""))
    # A long value is one, however gin breaks it into lines.
    broken = "c.F.g = \\\n    ((1, 2),\n     (3, 4),\n     (5, 6))\n"
    assert digest(broken) == digest("c.F.g = ((1, 2), (3, 4), (5, 6))\n")
    assert digest(broken) != digest(broken.replace("3", "0").replace("5", "3").replace("0", "5"))


def test_the_time_left_is_that_of_other_seeds_with_the_same_settings(modules):
    time = modules.suites._time
    seconds = {"known": [60.0, 180.0], "other": [240.0], "new": []}
    assert time(["known", "other"], seconds) == "about 6 min left"
    assert time(["known", "new"], seconds) == "about 2 min left, and 1 run(s) of unknown length"
    assert time(["new"], seconds) == "time left unknown"


def test_seeds_of_several_machines_are_said_to_be(modules, tmp_path, monkeypatch):
    def measured(seed, hardware, settings, random):
        runs = (modules.rows.SeedRun(seed, 0.5, settings=settings),)
        return modules.rows.Measured("2026-01-31", hardware, "0", 100, 8, random, runs=runs)

    def joined(row, new):
        run = types.SimpleNamespace(directory=types.SimpleNamespace(path=tmp_path), seed=1)
        monkeypatch.setattr(modules.reproduction, "measured", lambda *_: new)
        return modules.suites._joined(row, run)

    row = next(iter(modules.rows.read(_ledger(tmp_path, {})).values()))
    row = dataclasses.replace(row, measured=measured(0, "a", "same", 1.0))
    both = joined(row, measured(1, "b", "same", 3.0))
    assert (both.hardware, both.random_policy, len(both.runs)) == ("a and b", 2.0, 2)
    again = joined(dataclasses.replace(row, measured=both), measured(1, "b", "same", 3.0))
    assert (again.hardware, len(again.runs)) == ("a and b", 2)
    new = measured(1, "b", "other", 3.0)  # nothing of what was recorded counts any more
    assert joined(row, new) == new


def test_a_run_that_another_process_is_at_is_left_to_it(modules, tmp_path, monkeypatch):
    ledger = _ledger(tmp_path, {})
    rows = list(modules.rows.read(ledger).values())
    ((_, run),) = modules.suites._missing(rows, 1, tmp_path)[0]
    run.directory.path.mkdir(parents=True)
    monkeypatch.setattr(modules.training_process.Run, "train", lambda *_: pytest.fail("trained"))
    run.directory.lock.acquire()
    said = []
    assert modules.suites.train(rows, 1, tmp_path, ledger, said.append) is False
    run.directory.lock.release()
    assert said[-1].startswith("left out: ")

    other = run_directory.RunDirectory(run.directory.path).lock

    def lose(run, *_):  # to one that begins at the same time
        other.acquire()
        run.directory.lock.acquire()

    monkeypatch.setattr(modules.training_process.Run, "train", lose)
    assert modules.suites.train(rows, 1, tmp_path, ledger, said.append) is False
    other.release()
    assert said[-1].startswith("left out: ")
    assert "failures" not in json.loads(ledger.read_text())[0]


def test_a_run_that_is_stopped_before_it_is_ready_has_not_failed(modules, tmp_path):
    class AfterTheStart:
        asked = 0

        def __bool__(self):
            self.asked += 1
            return self.asked > 1

    rows = list(modules.rows.read(_ledger(tmp_path, {})).values())
    ((_, run),) = modules.suites._missing(rows, 1, tmp_path)[0]
    assert run.train(AfterTheStart()) is False


def test_what_is_published_of_a_failure_names_no_folder(modules, tmp_path):
    log = tmp_path / "seed-0.log"
    log.write_text("a line\n")
    rows = list(modules.rows.read(_ledger(tmp_path, {})).values())
    ((_, run),) = modules.suites._missing(rows, 1, tmp_path)[0]
    error = modules.training_process.failure(-signal.SIGKILL, log)
    assert str(log) in str(error)
    said = modules.suites._message(errors.RunFailure(f"{run.name}: {error}"), run)
    assert said == "the run was killed by SIGKILL, as the system does when memory runs out"


def test_the_list_of_a_suite_has_its_rows_only(call, tmp_path, capsys):
    ledger = _ledger(tmp_path, {"suite": "three"}, {})
    assert call("reproduce", "--list", "--suite", "two", "--results", ledger) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["other"]


def test_a_suite_is_found_by_name(call, tmp_path):
    ledger = _ledger(tmp_path, {}, {})
    with pytest.raises(errors.UserError, match="there is no suite 'tow'; did you mean 'two'"):
        call("reproduce", "--suite", "tow", "--results", ledger)
    with pytest.raises(errors.UserError, match="has no row 'othr'; did you mean 'other'"):
        call("reproduce", "othr", "--suite", "two", "--results", ledger)
    with pytest.raises(errors.UserError, match="has no row 'sebula'; known: anakin"):
        call("reproduce", "--runner", "sebula", "--suite", "two", "--results", ledger)
    with pytest.raises(errors.UserError, match="--suite: expected neither --note nor --record"):
        call("reproduce", "--record", "--suite", "two", "--results", ledger)
