"""Tests of the page of results: it says what was measured, and the published one is up to date."""

import dataclasses
import importlib
import sys
import types

import matplotlib
import pytest
from PIL import Image

from podracers import errors
from tests import processes


@pytest.fixture
def modules(monkeypatch):
    """The script, and what lies beside it."""
    before = matplotlib.get_backend()
    monkeypatch.syspath_prepend(str(processes.ROOT / "scripts"))
    names = {"report": "report", "results": "results.rows", "speed_tables": "results.tables"}
    modules = {name: importlib.import_module(path) for name, path in names.items()}
    yield types.SimpleNamespace(**modules)
    matplotlib.use(before)


def _row(results, name, returns, **options):
    runs = tuple(results.SeedRun(n, value, 10.0 * n, "c" * 40) for n, value in enumerate(returns))
    known = results.Measured("2026-01-31", "a machine", "0", 5_000_000, 64, -1.0, runs=runs)
    settings = {"agent": "A", "environment": name, "runner": "Anakin", "most": 3.0, **options}
    return results.Row(experiment=name, measured=known, **settings)


@pytest.fixture
def rows(modules):
    made = [
        _row(modules.results, "one", [1.0, 3.0]),
        _row(modules.results, "two", [3.0, 3.0, 3.0]),
        _row(modules.results, "alone", [2.0], agent="B"),
        _row(modules.results, "pong", [16.0], most=21.0, atari_game="Pong"),
    ]
    unknown = dataclasses.replace(made[0], experiment="none", measured=None)
    return {row.name: row for row in [*made, unknown]}


def _lines(table):
    return {line.split("`")[1]: line for line in table.splitlines() if "`" in line}


def test_returns_have_intervals_where_there_are_seeds(modules, rows):
    lines = _lines(modules.report.returns_table(rows))
    assert lines["one"] == (
        "| `one` | `anakin` | A | one | 2.00 ± 1, of 3 | 1.00 to 3.00 | -10.7 to 14.7 "
        "| 2: 1.00, 3.00 | -1.00 | 5M | 0 to 10 s |"
    )
    assert "| 2.00, of 3 | none | none | 1: 2.00 |" in lines["alone"]
    assert "not measured" in lines["none"]


def test_aggregates_are_over_tasks_with_as_many_seeds(modules, rows):
    # One of the two is cut to two seeds; 1 of -1 to 3 is a half.
    (line,) = modules.report.tasks_table(rows).splitlines()[2:]
    assert line.startswith("| A | Anakin | one, two | 2 | 0.88 (0.75 to 1.00) | 0.88 (")
    assert line.split(" | ")[-1].startswith("1.00 (")  # 0.5 and one 1 are left out


def test_atari_scores_are_by_game_and_one_game_has_no_aggregate(modules, rows):
    table = modules.report.atari_table(rows)
    assert _lines(table)["pong"].endswith("| 16.0 | -20.7 | 14.6 | 1.04 |")
    assert "A under Anakin: 1 of 57 games: no median and no IQM" in table
    freeway = dataclasses.replace(rows["pong-anakin"], experiment="freeway", atari_game="Freeway")
    table = modules.report.atari_table(rows | {"freeway": freeway})
    assert "2 of 57 games, 1 seed(s) of each: median 0.79, interquartile mean 0.79, mean" in table


def test_commands_say_where_numbers_come_from(modules, rows):
    line = _lines(modules.report.commands_table(rows))["one"]
    command = "--gin_file gin/experiments/one.gin --runner anakin --gin_bindings 'SEED = 0'"
    assert f"`python scripts/train.py {command}`" in line
    assert "| 2026-01-31 | cccccccccc | a machine |" in line


def test_the_readme_has_what_was_measured_in_few_words(modules, rows):
    lines = _lines(modules.report.readme_table(rows))
    end = "-1.00 | 5M | 0 to 10 s |"
    assert lines["one"] == f"| `one` | `anakin` | 2.00 ± 1, of 3 (2 seeds) |  | {end}"
    one = next(iter(rows.values()))
    runs = tuple(dataclasses.replace(run, greedy_return=0.5) for run in one.measured.runs)
    sampled = dataclasses.replace(one, measured=dataclasses.replace(one.measured, runs=runs))
    lines = _lines(modules.report.readme_table({**rows, one.name: sampled}))
    assert lines["one"] == f"| `one` | `anakin` | 2.00 ± 1, of 3 (2 seeds) | 0.50 | {end}"


def test_the_readme_counts_one_seed(modules, rows):
    lines = _lines(modules.report.readme_table(rows))
    assert lines["alone"].startswith("| `alone` | `anakin` | 2.00, of 3 (1 seed) |")
    assert "none" not in lines


def _record(modules, *results):
    provenance = {"host_cores": 2, "device": "1 x cpu", "commit": "c" * 40}
    named = {str(index): result for index, result in enumerate(results)}
    return sys.modules["benchmarks.records"].Record("benchmark.py x", named, provenance)


def test_speed_says_what_replay_takes(modules):
    records = sys.modules["benchmarks.records"]
    kinds = {"agent steps/s": [9e3, 1e4, 2e4], "gradient steps/s": [70.0, 80.0, 90.0]}
    made = [
        records.Kind("a", unit, "higher", 1).row(values, experiment="e", runner=runner)
        for unit, values in kinds.items()
        for runner in ("Anakin", "Sebulba")
    ]
    made += [
        records.Kind("b", unit, None, 4).row(value, experiment="e")
        for unit, value in (("ms", 1.5), ("share", 0.21))
    ]
    record = _record(modules, records.Result("About.", tuple(made), ("A ratio of 4.",)))
    text = modules.speed_tables.replay_table(record)
    speed = "10k (9k to 20k)"
    assert f"| `e` | {speed} | {speed} | 80 | 80 | 1.5 ms, 21% |\n\n- A ratio of 4.\n" in text
    assert "`python benchmark.py x`, 2 host cores, 1 x cpu, commit cccccccccc;" in text


def test_speed_of_a_search_is_by_simulations_and_batch(modules):
    records = sys.modules["benchmarks.records"]
    kind = records.Kind("speed", "decisions/s", "higher", 0)
    made = [
        kind.row(count * batch, simulations=count, batch=batch)
        for count in (4, 16)
        for batch in (8, 32)
    ]
    text = modules.speed_tables.search_table(_record(modules, records.Result("About.", (*made,))))
    assert "| decisions/s | batch 8 | batch 32 |" in text
    assert "| 16 simulations | 128 | 512 |" in text


def test_prose_stays_and_a_missing_marker_is_a_mistake(modules):
    text = "before\n<!-- begin: a -->\nold\n<!-- end: a -->\nafter\n"
    filled = modules.report.fill(text, {"a": r"| \1 |" + "\n"})
    assert filled == text.replace("old", r"| \1 |")
    assert modules.report.fill(filled, {"a": "old\n"}) == text
    with pytest.raises(errors.UserError, match="0 tables 'b', expected one"):
        modules.report.fill(text, {"b": ""})


def _mark(name):
    return f"<!-- begin: {name} -->\n<!-- end: {name} -->\n"


def test_the_page_is_written_drawn_and_checked(modules, rows, tmp_path, monkeypatch, capsys):
    names = ("r.json", "r.md", "README.md", "r.png")
    ledger, page, readme, picture = (tmp_path / name for name in names)
    modules.results.write(rows, ledger)
    marks = [*modules.report.TABLES, "speed of replay", "speed of search"]
    page.write_text("prose\n" + "".join(map(_mark, marks)))
    readme.write_text(_mark("readme"))
    words = ["--results", ledger, "--document", page, "--readme", readme, "--picture", picture]

    def report(*more):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words), *more])
        return modules.report.main()

    assert report("--check") == 1
    assert not picture.exists()
    assert readme.read_text() == _mark("readme")
    assert report() == 0
    assert report("--check") == 0
    assert "| `alone` |" in readme.read_text()
    readme.write_text(readme.read_text().replace("2.00", "3.00"))
    assert report("--check") == 1
    assert report() == 0
    assert page.read_text().startswith("prose\n")
    assert "16.0" in page.read_text()
    with Image.open(picture) as image:
        assert image.width > 500


def test_the_published_pages_say_what_the_published_numbers_are(modules, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert modules.report.main() == 0, "run: python scripts/report.py"
