"""Tests of the comparison of two files of results: what is slower, by how much, and exit codes."""

import copy
import json

import pytest

from tests import processes

SPEED = {"measure": "speed", "unit": "agent steps/s", "better": "higher"}
STARTUP = {"measure": "start-up", "unit": "s", "better": "lower"}
FILES = {"measure": "files added", "unit": "files", "better": None}


def figure(kind, runner, median, spread=None):
    least = {} if spread is None else {"min": spread[0], "max": spread[1]}
    return {**kind, "case": {"runner": runner}, "median": median, **least}


RECORD = {
    "command": "scripts/benchmark.py tiny",
    "results": {
        "tiny": {
            "about": "A tiny benchmark.",
            "rows": [
                figure(SPEED, "Anakin", 100.0, (95.0, 105.0)),
                figure(SPEED, "Sebulba", 50.0),
                figure(STARTUP, "Anakin", 10.0, (9.5, 12.5)),
                figure(FILES, "Anakin", 3),
            ],
        }
    },
    "device": "1 x cpu",
    "platform": "cpu",
    "host_cores": 2,
    "processes": 1,
    "versions": {"jax": "0.10.2"},
    "commit": "abc",
}


@pytest.fixture
def check(tmp_path, run):
    """Compares the record with itself once rows, and what else is named, are changed.

    What is named None is left out.
    """

    def check(*changes, options=(), **more):
        new = {**copy.deepcopy(RECORD), **more}
        new = {name: value for name, value in new.items() if value is not None}
        rows = new["results"]["tiny"]["rows"]
        for index, change in changes:
            rows[index] |= change
        for name, record in (("old", RECORD), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        files = (tmp_path / "old.json", tmp_path / "new.json")
        return run("benchmark", "--compare", *files, *options)

    return check


def scaled(index, factor):
    row = RECORD["results"]["tiny"]["rows"][index]
    return index, {name: row[name] * factor for name in ("median", "min", "max") if name in row}


def test_the_same_is_not_slower(check):
    result = check()
    assert result.returncode == 0
    assert "3 figures" in result.stdout
    assert "worse" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (scaled(0, 0.85), 1, "15.0% worse, beyond the spread of repeats"),
        (scaled(0, 1.25), 0, "25.0% better, beyond the spread of repeats"),
        (scaled(2, 1.2), 1, "20.0% worse, within the spread of repeats"),
        (scaled(2, 0.5), 0, "50.0% better, beyond the spread of repeats"),
        (scaled(1, 0.5), 1, "50.0% worse, the spread of repeats is not known"),
        (scaled(0, 0.95), 0, "slower, or more of what should be less: 0"),
        (scaled(3, 10), 0, "slower, or more of what should be less: 0"),
    ],
    ids=["slow", "fast", "late", "early", "once", "tolerated", "neither"],
)
def test_what_is_worse_is_said_and_decides_the_exit_code(check, change, code, said):
    result = check(change)
    assert result.returncode == code, result.stderr
    assert said in result.stdout


def test_the_tolerance_and_the_spread_decide(check):
    assert check(scaled(0, 0.85), options=("--tolerance", 0.2)).returncode == 0
    assert check(scaled(0, 0.98), options=("--tolerance", 0.01)).returncode == 1
    passed = check(scaled(2, 1.2), options=("--beyond_spread",))
    assert passed.returncode == 0
    assert "let pass, within the spread of repeats: 1" in passed.stdout
    assert check(scaled(0, 0.85), options=("--beyond_spread",)).returncode == 1


def test_what_only_one_file_has_is_named(check):
    result = check((0, {"case": {"runner": "Podracer"}}))
    assert result.returncode == 0
    assert "old.json: tiny, speed (runner Anakin)" in result.stdout
    assert "new.json: tiny, speed (runner Podracer)" in result.stdout


def test_different_hardware_is_refused(check):
    processes.assert_mistake(check(host_cores=64), "host_cores '2' and '64'", "--anyway")
    assert check(host_cores=64, options=("--anyway",)).returncode == 0
    # What one file does not know is no difference.
    assert check(cpu="Some Processor").returncode == 0
    assert check(processes=None).returncode == 0


def test_files_without_a_figure_in_common_do_not_compare(check):
    other = {"other": RECORD["results"]["tiny"]}
    processes.assert_mistake(check(results={**other, "tiny": {"about": "", "rows": []}}), "common")


def test_files_that_hold_something_else_are_named(check, run, tmp_path):
    processes.assert_mistake(check((0, {"better": "larger"})), "new.json", "'larger'")
    processes.assert_mistake(check((0, {"median": "many"})), "new.json", "not all figures")
    file, absent = tmp_path / "old.json", tmp_path / "absent.json"
    file.write_text(json.dumps({"results": {}}))
    processes.assert_mistake(run("benchmark", "--compare", file, file), "holds no results")
    processes.assert_mistake(run("benchmark", "--compare", absent, file), "absent.json")


def test_a_tolerance_is_a_number(check):
    processes.assert_mistake(check(options=("--tolerance", "much")), "'much'")
