"""Tests of the file of results: what it has to hold, and that every row still describes a run."""

import importlib
import json
import re

import pytest

from podracers import errors, experiment
from tests import processes


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(processes.ROOT / "scripts"))
        yield importlib.import_module("results")


def _entry(**measured):
    known = {"date": "2026-01-31", "hardware": "a machine", "jax": "0", "agent_steps": 1}
    return {
        "agent": "A",
        "environment": "E",
        "runner": "R",
        "gin_files": ["one.gin", "two.gin"],
        "gin_bindings": ["A.x = 1"],
        "measured": {**known, "episodes": 2, "random_policy": 0.5, **measured},
    }


RUNS = [
    {"seed": 0, "final_return": 1.0, "wall_time_s": 10.0, "commit": "abc"},
    {"seed": 1, "final_return": 3.0, "wall_time_s": 20.0, "commit": "abc-dirty"},
]


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "results.json"
    summary = {"mean": -177.0, "standard_error": 6.0, "num_seeds": 3, "wall_times_s": [2.0, 4.0]}
    bare = _entry()
    del bare["measured"], bare["gin_bindings"]
    made.write_text(json.dumps({"a": _entry(runs=RUNS), "b": _entry(**summary), "c": bare}))
    return made


def test_a_row_knows_its_command_and_its_numbers(results, path):
    row = results.read(path)["a"]
    assert row.command(3) == (
        "python scripts/train.py --gin_file one.gin --gin_file two.gin "
        "--gin_bindings 'SEED = 3' --gin_bindings 'A.x = 1'"
    )
    known = row.measured
    assert (known.sample.mean, known.sample.standard_error, known.sample.runs) == (2.0, 1.0, 2)
    assert known.bootstrap_interval() == (1.0, 3.0)
    assert known.seconds == 30.0


def test_where_only_a_summary_was_kept_there_is_no_bootstrap(results, path):
    known = results.read(path)["b"].measured
    assert (known.sample.mean, known.sample.standard_error, known.sample.runs) == (-177.0, 6.0, 3)
    assert known.bootstrap_interval() is None
    assert known.sample.student_interval() == pytest.approx((-202.8, -151.2), abs=0.1)
    assert (known.seconds, known.returns) == (9.0, [])


def test_what_is_written_is_what_was_read(results, path, tmp_path):
    rows = results.read(path)
    results.write(rows, tmp_path / "copy.json")
    assert results.read(tmp_path / "copy.json") == rows
    assert json.loads((tmp_path / "copy.json").read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("{", "Expecting"),
        ('{"a": {"agent": "A"}}', "row 'a'"),
        (json.dumps({"a": _entry(runs=[], mean=1.0)}), "expected 'runs', or 'mean' and"),
        (json.dumps({"a": _entry(runs=[{"seed": 0}])}), "final_return"),
        (json.dumps({"a": _entry(runs=RUNS, retuns=1)}), "retuns"),
    ],
)
def test_a_file_that_does_not_say_enough_is_refused(results, tmp_path, text, phrase):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(errors.UserError) as caught:
        results.read(path)
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_have_the_digits_that_are_worth_reading(results):
    assert [results.number(x) for x in (0.5, -177.0, 4724.4, None)] == [
        *("0.50", "-177.0", "4724"),
        "not kept",
    ]
    assert results.interval((1.0, 12.0)) == "1.00 to 12.0"
    assert results.interval(None) == "none"


def test_every_published_row_describes_a_run(results):
    rows = results.read()
    for name, row in rows.items():
        assert re.fullmatch(r"[a-z0-9_]+", name)
        settings = experiment.load(row.gin_files, ["SEED = 7", *row.gin_bindings])
        assert settings.seed == 7, name
        assert settings.runner.__name__ == row.runner, name
        assert settings.agent.__name__ == row.agent, name
        assert not any("population" in binding for binding in row.gin_bindings), name
    commands = [row.command(0) for row in rows.values()]
    assert len(set(commands)) == len(commands)
