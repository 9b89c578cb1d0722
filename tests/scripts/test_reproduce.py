"""Tests of reproduced rows and of suites: real runs of seconds, and records of them."""

import dataclasses
import functools
import json
import signal
import time

import pytest

from podracers import errors
from podracers.training import run_directory
from tests import processes

EXTRA = """
experiment.Experiment.checkpoint_period = 0
experiment.Experiment.evaluation_period = 2
"""
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}


@pytest.fixture(scope="module")
def modules(tools):
    return tools("results.reproduction", "results.rows", "results.training_process")


@pytest.fixture
def main(call):
    return functools.partial(call, "reproduce")


def _ledger(folder, *rows):
    """Writes a file of results with rows of the suite "two", and returns its path."""
    config = processes.config_file(folder, EXTRA + processes.REPORTING)
    (folder / "other.gin").write_text(config.read_text())
    shared = {"runner": "Anakin", "agent": "PPO", "suite": "two"}
    experiments = [str(config), str(folder / "other.gin")]
    entries = [{"experiment": x, "environment": x, **shared} for x in experiments]
    path = folder / "results.json"
    path.write_text(json.dumps([entry | row for entry, row in zip(entries, rows)]))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A suite, of a row that fails and one that learns, trained with two seeds: file, output."""
    folder = tmp_path_factory.mktemp("reproduce")
    ledger = _ledger(folder, {"gin_bindings": ["PPO.num_minibatches = 7"]}, {})
    words = ("--suite", "two", "--results", ledger, "--out", folder / "runs", "--seeds", 2)
    return ledger, processes.run("reproduce", *words, code=1, environment=CACHED)


@pytest.mark.slow
def test_a_suite_records_every_run_and_continues_after_failures(recorded):
    ledger, result = recorded
    order = [line.split(":")[0] for line in result.stdout.splitlines() if line.startswith("[")]
    names = ("tiny-anakin, seed 0", "other-anakin, seed 0", "tiny-anakin, seed 1")
    names += ("other-anakin, seed 1",)
    assert order == [f"[{n}/4] {name}" for n, name in enumerate(names, 1)]
    failing, learning = json.loads(ledger.read_text())
    assert "runs" not in failing
    assert result.stderr.count("7 does not div") == result.stdout.count("failed: tiny-anakin") == 2
    assert "100%" in result.stderr
    assert [run["seed"] for run in learning["runs"]] == [0, 1]
    for run in learning["runs"]:
        (folder,) = (ledger.parent / "runs").glob(f"other-anakin-*/seed-{run['seed']}")
        summary = json.loads((folder / "summary.json").read_text())
        assert (run["agent_steps"], run["episodes"]) == (2560, 8)
        assert run["final_return"] == summary["evaluation"]["return"]
        assert run["greedy_return"] == summary["evaluation"]["greedy_return"]
        assert run["metrics"] == summary["evaluation"]["metrics"] != {}
        assert (run["wall_time_s"], run["commit"]) == (summary["wall_time_s"], summary["commit"])
        steps, seconds, returns = zip(*run["curve"])
        assert list(steps) == sorted(set(steps)) and len(steps) > 2
        assert (steps[-1], list(seconds)) == (2560, sorted(seconds))
        assert returns[-1] == pytest.approx(run["final_return"], abs=1e-4)


@pytest.mark.slow
def test_a_suite_that_was_stopped_continues_and_agrees_with_itself(
    recorded, main, tmp_path, capsys
):
    ledger, folder = _ledger(tmp_path, {}), tmp_path / "runs"
    suite = ("--suite", "two", "--results", ledger, "--out", folder, "--seeds", 1)
    process = processes.start("reproduce", *suite, environment=CACHED)
    stopped = processes.interrupt(
        process,
        signal.SIGTERM,
        lambda: any(processes.num_lines(d) >= 3 for d in folder.glob("tiny-anakin-*/seed-0")),
    )
    assert "stopped: the same command continues" in stopped.stdout
    (row,) = json.loads(ledger.read_text())
    assert "runs" not in row
    assert main(*suite) == 0
    (run,) = json.loads(ledger.read_text())[0]["runs"]
    expected = json.loads(recorded[0].read_text())[1]["runs"][0]["final_return"]
    assert run["final_return"] == expected
    # The run is there: nothing is trained again.
    capsys.readouterr()
    words = ("tiny", "--results", ledger, "--out", folder, "--seeds", 1)
    assert main(*words) == 0
    output = capsys.readouterr().out
    assert "finished before" in output and "identical: 1 seed(s)" in output
    ledger.write_text(json.dumps([row | {"runs": [{**run, "seed": n} for n in range(3)]}]))
    with pytest.raises(errors.UserError, match="would replace 3"):
        main(*words, "--record")
    ledger.write_text(json.dumps([row]))
    (file,) = folder.glob("tiny-anakin-*/seed-0/summary.json")
    known = json.loads(file.read_text())
    for cpu, name in (({"cpu": "of another machine"}, "of another machine"), ({}, "unknown")):
        file.write_text(json.dumps({key: x for key, x in known.items() if key != "cpu"} | cpu))
        assert main(*words, "--record") == 0
        (run,) = json.loads(ledger.read_text())[0]["runs"]
        assert run["final_return"] == expected and name in run["hardware"]


@pytest.mark.parametrize(
    ("program", "expected", "phrase"),
    [
        ("sys.exit(2)", SystemExit, "2"),  # after one line of its own
        ("os.kill(os.getpid(), 9)", errors.RunFailure, "SIGKILL"),
        ("pathlib.Path(sys.argv[-1], 'summary.json').touch()", True, ""),
        ("time.sleep(1000)", False, ""),  # stopped
    ],
)
def test_ends_of_children(modules, tmp_path, monkeypatch, program, expected, phrase):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(f"import os, pathlib, sys, time\n{program}\n")
    monkeypatch.setattr(modules.training_process, "ROOT", tmp_path)
    directory, start = run_directory.RunDirectory(tmp_path), time.monotonic()
    run = modules.training_process.Run("a", 0, (), directory, 1, "")

    class Stop:
        def __bool__(self):
            return expected is False and time.monotonic() - start > 1.0

    if isinstance(expected, bool):
        assert run.train(Stop()) == expected
    else:
        with pytest.raises(expected, match=phrase):
            run.train(Stop())
    assert time.monotonic() - start < processes.PATIENCE


def _runs(modules, returns, **changes):
    known = {"agent_steps": 1000, "episodes": 8, "random_policy": 0.0, "date": "2026-01-31"}
    known |= {"hardware": "a machine", "jax": "0"} | changes
    return [modules.rows.Run(seed=n, final_return=x, **known) for n, x in enumerate(returns)]


@pytest.mark.parametrize(
    ("returns", "changes", "verdict", "differs"),
    [
        ([1.0, 1.1, 0.9], {}, "identical: 3 seed(s)", False),
        ([1.1, 0.9, 1.0], {}, "agree: the means differ by", False),
        ([9.0, 9.1, 8.9], {}, "differ: the means differ by", True),
        ([9.0, 9.1, 8.9], {"agent_steps": 995}, "differ", True),  # in round numbers
        ([9.0, 9.1, 8.9], {"agent_steps": 800}, "no verdict: no earlier", False),
        ([9.0, 9.1, 8.9], {"settings": "a"}, "no verdict: no earlier", False),
        ([9.0, 9.1, 8.9], {"greedy_return": 9.0}, "no verdict: no earlier", False),
        ([9.0], {}, "no verdict: one seed", False),
        ([], {}, "no verdict: no earlier", False),
    ],
)
def test_verdicts(modules, returns, changes, verdict, differs):
    old = _runs(modules, returns, **changes)
    new = _runs(modules, [1.0, 1.1, 0.9], settings="b")
    text, is_difference = modules.reproduction.verdict(old, new)
    assert text.startswith(verdict)
    assert is_difference == differs


def test_runs_of_other_settings_are_trained_again(modules, tmp_path):
    row = next(iter(modules.rows.read(_ledger(tmp_path, {})).values()))
    planned = modules.reproduction.plan(row, 1, tmp_path)

    def missing(settings, steps=planned.total_steps):
        recorded = _runs(modules, [0, 0.5], agent_steps=steps, settings=settings)[1:]
        known = dataclasses.replace(row, runs=tuple(recorded))
        return [run.seed for run in modules.reproduction.missing([known], 2, tmp_path)]

    assert missing(planned.settings) == missing(None) == [0]
    assert missing("another") == missing(planned.settings, steps=1) == [0, 1]
    # Changed settings have their own folder.
    changed = dataclasses.replace(row, gin_bindings=("TOTAL_STEPS = 77",))
    other = modules.reproduction.plan(changed, 1, tmp_path)
    assert other.directory.path.parent != planned.directory.path.parent


def test_a_digest_depends_on_bindings_and_not_on_names_of_modules(modules):
    digest = modules.training_process.settings_digest
    text = "from a import b as c\nfrom d import e\nSEED = 0\nc.F.g = @e.H\nc.F.i = 'c.j'\n"
    other = "from d import e as x\nfrom a import b\n# F\nSEED = 1\nb.F.i = 'c.j'\nb.F.g = @x.H\n"
    assert digest(text) == digest(other) == "32b6324fef8c"  # as it was recorded
    assert digest(text) != digest(text.replace("@e.H", "@c.H"))
    assert digest(text) != digest(text.replace("c.F.g = @e.H\n", ""))
    # gin breaks long values into lines.
    broken = "c.F.g = \\\n    ((1, 2),\n     (3, 4),\n     (5, 6))\n"
    assert digest(broken) == digest("c.F.g = ((1, 2), (3, 4), (5, 6))\n")


def test_rows_are_listed(main, modules, tmp_path, capsys):
    ledger = _ledger(tmp_path, {"suite": "three"}, {})
    assert main("--list", "--suite", "two", "--results", ledger) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["other", "anakin", "unknown", "0"]
    runs = tuple(_runs(modules, [1.0, 2.0], wall_time_s=90.0))
    row = dataclasses.replace(next(iter(modules.rows.read(ledger).values())), runs=runs)
    _, line = modules.reproduction.listing([row]).splitlines()
    assert line.split()[2:5] == ["3.0", "2", "1.50"]
