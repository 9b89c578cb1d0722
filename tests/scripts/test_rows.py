"""Tests of the file of results: what it has to hold, and that every row still describes a run."""

import concurrent.futures
import dataclasses
import json

import pytest

from podracers import command_line, errors
from podracers.training import experiment
from tests import processes


@pytest.fixture(scope="module")
def results(tools):
    return tools("results.rows").rows


def _entry(experiment="a", **measured):
    known = {"date": "2026-01-31", "hardware": "a machine", "jax": "0", "agent_steps": 1}
    return {
        "experiment": experiment,
        "agent": "A",
        "environment": "E",
        "runner": "Anakin",
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
    bare = _entry("folder/mine.gin")
    del bare["measured"], bare["gin_bindings"]
    bare["agent"] = "A, bare"
    b = _entry("b", **summary) | {"environment": "F"}
    made.write_text(json.dumps([_entry(runs=RUNS), b, bare]))
    return made


def test_a_row_knows_its_command_and_its_numbers(results, path):
    row = results.read(path)["a-anakin"]
    assert row.command(3) == (
        "python scripts/train.py --gin_file gin/experiments/a.gin --runner anakin "
        "--gin_bindings 'SEED = 3' --gin_bindings 'A.x = 1'"
    )
    assert results.read(path)["mine-anakin"].gin_file == "folder/mine.gin"
    known = row.measured
    assert (known.sample.mean, known.sample.standard_error, known.sample.runs) == (2.0, 1.0, 2)
    assert known.bootstrap_interval() == (1.0, 3.0)
    assert known.seconds == 30.0


def test_variants_tell_rows_of_one_experiment_apart(results, tmp_path):
    path = tmp_path / "results.json"
    bare = {key: value for key, value in _entry().items() if key != "measured"}
    other = {"variant": "two", "agent": "A, two", "gin_bindings": ["A.x = 2"]}
    path.write_text(json.dumps([bare, {**bare, **other}]))
    first, second = results.read(path).values()
    assert (first.name, second.name) == ("a-anakin", "a-two-anakin")
    assert results.find(results.read(path), "a-two") == second
    assert second.command(0) == first.command(0).replace("A.x = 1", "A.x = 2")


def test_where_only_a_summary_was_kept_there_is_no_bootstrap(results, path):
    known = results.read(path)["b-anakin"].measured
    assert (known.sample.mean, known.sample.standard_error, known.sample.runs) == (-177.0, 6.0, 3)
    assert known.bootstrap_interval() is None
    assert known.sample.student_interval() == pytest.approx((-202.8, -151.2), abs=0.1)
    assert (known.seconds, known.returns) == (9.0, [])


def test_what_is_written_is_what_was_read(results, path, tmp_path):
    rows = results.read(path)
    results.write(rows, tmp_path / "copy.json")
    assert results.read(tmp_path / "copy.json") == rows
    assert json.loads((tmp_path / "copy.json").read_text()) == json.loads(path.read_text())


def test_what_several_write_at_once_is_all_there(results, path):
    def note(text):
        def added(row):
            return dataclasses.replace(row, explanation=row.explanation + text)

        for _ in range(10):
            results.update("a-anakin", added, path)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(note, "xyz"))
    assert sorted(results.read(path)["a-anakin"].explanation) == sorted("xyz" * 10)
    assert list(path.parent.iterdir()) == [path]


def test_a_row_that_is_gone_is_named_with_the_nearest(results, path):
    with pytest.raises(errors.UserError) as caught:
        results.update("a-anakn", lambda row: row, path)
    assert str(caught.value).startswith(f"'{path}' has no row 'a-anakn'")
    assert "a-anakin" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("{", "Expecting"),
        ('[{"agent": "A"}]', "row 0: "),
        ('{"a": {"agent": "A"}}', "expected a list of rows"),
        (json.dumps([_entry(runs=[], mean=1.0)]), "expected 'runs', or 'mean' and"),
        (json.dumps([_entry(runs=[{"seed": 0}])]), "final_return"),
        (json.dumps([_entry(runs=RUNS, retuns=1)]), "retuns"),
        (json.dumps([_entry(runs=RUNS), _entry(runs=RUNS)]), "row 1: 'a-anakin' is there twice"),
        (
            json.dumps([_entry(runs=RUNS), _entry("b", runs=RUNS)]),
            "row 1: 'b-anakin' has agent, runner and task of 'a-anakin'",
        ),
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


def test_a_row_is_found_by_experiment_and_runner(results):
    rows = [results.Row("x", runner, "A", "E") for runner in ("Anakin", "Sebulba")]
    rows = {row.name: row for row in rows}
    assert results.find(rows, "x").runner == results.find(rows, "x", "anakin").runner == "Anakin"
    assert results.find(rows, "x", "sebulba").runner == "Sebulba"
    with pytest.raises(errors.UserError, match="no result of 'x' under 'sebula'; did you mean 's"):
        results.find(rows, "x", "sebula")


def test_every_published_row_describes_a_run(results):
    rows = results.read()
    for row in rows.values():
        assert (processes.ROOT / row.gin_file).is_file(), row.name  # what `make EXPERIMENT=` takes
        runner = command_line.runner_file(row.runner.lower())
        settings = experiment.load([row.gin_file, runner], ["SEED = 7", *row.gin_bindings])
        assert settings.seed == 7, row.name
        assert settings.runner.__name__ == row.runner, row.name
        assert settings.agent.__name__ == row.agent.partition(",")[0], row.name
        assert not any("population" in binding for binding in row.gin_bindings), row.name
    commands = [row.command(0) for row in rows.values()]
    assert len(set(commands)) == len(commands)


def test_every_published_row_is_reproduced_or_explained(results):
    for row in results.read().values():
        if row.measured is None or row.explanation:
            continue
        for published in row.published:
            reached = row.measured.sample.mean + 0.005 * abs(published.value)
            assert reached >= published.value - (published.error or 0.0), row.name
