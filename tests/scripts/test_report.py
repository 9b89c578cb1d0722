"""Tests of the page of results: it says what was measured, and the published one is up to date."""

import dataclasses
import shutil

import numpy as np
import pytest
from PIL import Image

from podracers import errors
from tests import processes

DOCS = processes.ROOT / "docs"


@pytest.fixture(scope="module")
def modules(tools):
    return tools(*(f"results.{name}" for name in ("rows", "tables", "markdown")))


def _row(results, name, returns, **options):
    runs = tuple(results.SeedRun(n, value, 10.0 * n, "c" * 40) for n, value in enumerate(returns))
    known = results.Measured("2026-01-31", "a machine", "0", 5_000_000, 64, -1.0, runs=runs)
    settings = {"agent": "A", "environment": name, "runner": "Anakin", "most": 3.0, **options}
    return results.Row(experiment=name, measured=known, **settings)


@pytest.fixture
def rows(modules):
    made = [
        _row(modules.rows, "one", [1.0, 3.0]),
        _row(modules.rows, "two", [3.0, 3.0, 3.0]),
        _row(modules.rows, "alone", [2.0], agent="B"),
        _row(modules.rows, "pong", [16.0], most=21.0, atari_game="Pong"),
    ]
    unknown = dataclasses.replace(made[0], experiment="none", environment="none", measured=None)
    return {row.name: row for row in [*made, unknown]}


def _lines(table):
    return {line.split("`")[1]: line for line in table.splitlines() if "`" in line}


def test_returns_have_intervals_where_there_are_seeds(modules, rows):
    lines = _lines(modules.tables.returns(rows))
    assert lines["one"] == (
        "| `one` | `anakin` | A | one | 2.00 ± 1 | 3 | 64, greedy |  | 1.00 to 3.00 "
        "| -10.7 to 14.7 | 2: 1.00, 3.00 | -1.00 | 5M | 0 to 10 s |"
    )
    assert "| 2.00 | 3 | 64, greedy |  | none | none | 1: 2.00 |" in lines["alone"]
    assert "none" not in lines  # it was not measured


def test_aggregates_are_over_tasks_with_as_many_seeds(modules, rows):
    # One of the two is cut to two seeds; 1 of -1 to 3 is a half.
    (line,) = modules.tables.tasks(rows).splitlines()[2:]
    assert line.startswith("| A | Anakin | one, two | 2 | 0.88 (0.75 to 1.00) | 0.88 (")
    assert line.split(" | ")[-1].startswith("1.00 (")  # 0.5 and one 1 are left out


def test_atari_scores_are_by_game_and_one_game_has_no_aggregate(modules, rows):
    table = modules.tables.atari(rows)
    assert _lines(table)["pong"].endswith("| 16.0 | -20.7 | 14.6 | 1.04 |")
    assert "A under Anakin: 1 of 57 games: no median and no IQM" in table
    freeway = dataclasses.replace(rows["pong-anakin"], experiment="freeway", atari_game="Freeway")
    table = modules.tables.atari(rows | {"freeway": freeway})
    assert "2 of 57 games, 1 seed(s) of each: median 0.79, interquartile mean 0.79, mean" in table


def test_commands_say_where_numbers_come_from(modules, rows):
    line = _lines(modules.tables.commands(rows))["one"]
    command = "--gin_file gin/experiments/one.gin --runner anakin --gin_bindings 'SEED = 0'"
    assert f"`python scripts/train.py {command}`" in line
    assert "| 2026-01-31 | cccccccccc | a machine |" in line


def test_the_readme_has_a_line_an_environment(modules, rows):
    one = rows["one-anakin"]
    two = rows["two-anakin"]
    more = [
        dataclasses.replace(one, runner="Sebulba"),
        dataclasses.replace(one, agent="B", measured=two.measured),
        dataclasses.replace(two, environment="three", most=None),
    ]
    lines = modules.tables.readme({**rows, **{str(n): row for n, row in enumerate(more)}})
    lines = lines.splitlines()
    assert "| one | A 2.00 ± 1; B 3.00 ± 0 | A 2.00 ± 1 | -1.00 | 3 |" in lines
    assert "| alone | B 2.00 |  | -1.00 | 3 |" in lines
    assert "| three | A 3.00 ± 0 |  | -1.00 |  |" in lines
    assert len(lines) == 2 + 5  # what was not measured has none


def test_greedy_returns_stand_beside_sampled_ones(modules, rows):
    one = rows["one-anakin"]
    runs = tuple(dataclasses.replace(run, greedy_return=0.5) for run in one.measured.runs)
    sampled = dataclasses.replace(one, measured=dataclasses.replace(one.measured, runs=runs))
    lines = _lines(modules.tables.returns({**rows, "one-anakin": sampled}))
    assert "| 2.00 ± 1 | 3 | 64, sampled | 0.50 | 1.00 to 3.00 |" in lines["one"]
    assert "| 3.00 ± 0 | 3 | 64, greedy |  | 3.00 to 3.00 |" in lines["two"]


def test_prose_stays_and_a_missing_marker_is_a_mistake(modules):
    text = "before\n<!-- begin: a -->\nold\n<!-- end: a -->\nafter\n"
    filled = modules.markdown.fill(text, {"a": r"| \1 |" + "\n"})
    assert filled == text.replace("old", r"| \1 |")
    assert modules.markdown.fill(filled, {"a": "old\n"}) == text
    with pytest.raises(errors.UserError, match="0 places for 'b', expected one"):
        modules.markdown.fill(text, {"b": ""})


def _mark(name):
    return f"<!-- begin: {name} -->\n<!-- end: {name} -->\n"


def test_the_pages_are_written_drawn_and_checked(modules, rows, tmp_path, call, capsys):
    names = ("r.json", "r.md", "README.md", "r.png", "benchmarks")
    ledger, page, readme, picture, folder = (tmp_path / name for name in names)
    modules.rows.write(rows, ledger)
    page.write_text("prose\n" + "".join(map(_mark, modules.tables.TABLES)))
    readme.write_text(_mark("readme"))
    folder.mkdir()
    shutil.copy(DOCS / "generated" / "benchmarks" / "cartpole.json", folder)
    words = ["--results", ledger, "--document", page, "--readme", readme, "--picture", picture]
    judged, of_rules = tmp_path / "rules", tmp_path / "rules.md"
    judged.mkdir()
    shutil.copy(DOCS / "rules" / "small.json", judged)
    of_rules.write_text("prose\n" + _mark("small"))
    words += ["--benchmarks", folder, "--rules", judged, "--rules_document", of_rules]
    assert call("report", *words, "--check") == 1
    assert not picture.exists()
    assert readme.read_text() == _mark("readme")
    assert call("report", *words) == 0
    assert call("report", *words, "--check") == 0
    assert "| alone |" in readme.read_text()
    assert "| `short_chain` of " in of_rules.read_text()
    readme.write_text(readme.read_text().replace("2.00", "3.00"))
    assert call("report", *words, "--check") == 1
    assert page.read_text().startswith("prose\n")
    assert "16.0" in page.read_text()
    with Image.open(picture) as image:
        assert image.width > 500
    assert "a PPO in one file" in folder.with_suffix(".md").read_text()


def test_the_published_pages_say_what_the_published_numbers_are(call, capsys):
    assert call("report", "--check") == 0, "run: python scripts/report.py"


def _in_suite(modules, name, returns, **options):
    published = (modules.rows.Published(2.0, "somebody", "1M", error=0.5, protocol="otherwise"),)
    row = _row(modules.rows, name, returns, suite="s", published=published, **options)
    runs = tuple(
        dataclasses.replace(run, curve=((100, 1.0, 0.0), (200, 2.0, run.final_return)))
        for run in row.measured.runs
    )
    return dataclasses.replace(row, measured=dataclasses.replace(row.measured, runs=runs))


def test_a_suite_stands_beside_what_was_published(modules, tools, tmp_path):
    found = tools("results.suite_page", "results.suite_picture")
    page, picture = found.suite_page, found.suite_picture
    failure = modules.rows.Failure(2, "out of memory")
    rows = [
        _in_suite(modules, "one", [2.0, 2.0]),
        _in_suite(modules, "two", [5.0, 5.0], failures=(failure,)),
        _in_suite(modules, "one", [2.0, 1.0], agent="B", runner="Sebulba"),
        _in_suite(modules, "two", [2.0, 9.0], agent="B", runner="Sebulba"),
        dataclasses.replace(_in_suite(modules, "three", [1.0]), measured=None, explanation="time"),
    ]
    rows = {row.name: row for row in rows}
    lines = page.text(rows).splitlines()
    assert lines[2] == "| [s](#s) | 5 | 4 | 0 | 1 |"
    assert lines[4] == "### s"
    (two,) = [line for line in lines if line.startswith("| `two` | `anakin`")]
    assert "| 5.00 ± 0 |" in two
    assert "| 2.00 ± 0.50 (somebody, 1M, otherwise) | seed 2 failed: out of memory |" in two
    assert "| queued |  | 0 |" in page.text(rows) and "| time |" in page.text(rows)
    # Of random -1 and published 2, the scores are 1, 1 and 2, 2, of which the middle half is 1, 2.
    assert any(line.startswith("| A under Anakin | one, two | 2 | 1.50 (") for line in lines)
    # Pairs of one: a tie and a win, twice, 0.75; of two: a win and a loss, twice, 0.5.
    (pair,) = [line for line in lines if line.startswith("| A under Anakin | B under Sebulba |")]
    assert "| one, two | 0.62 | 0.25 to 1.00 |" in pair
    # Where one of two was trained for far longer, they are not set against each other.
    two = rows["two-sebulba"]
    longer = dataclasses.replace(two.measured, agent_steps=2 * two.measured.agent_steps)
    longer = page.text({**rows, two.name: dataclasses.replace(two, measured=longer)})
    assert "probability" not in longer
    # Nor are sampled evaluations against greedy ones.
    runs = tuple(dataclasses.replace(run, greedy_return=9.0) for run in two.measured.runs)
    sampled = dataclasses.replace(two, measured=dataclasses.replace(two.measured, runs=runs))
    assert "probability" not in page.text({**rows, two.name: sampled})
    assert picture.draw(list(rows.values()), tmp_path / "suite.png")
    width = Image.open(tmp_path / "suite.png").width
    assert width > 1000
    # Another implementation of an environment shares its column.
    for drawn_with, wider in (("one", False), (None, True)):
        apart = dataclasses.replace(rows["one-sebulba"], environment="C++", drawn_with=drawn_with)
        assert picture.draw([*rows.values(), apart], tmp_path / "twin.png")
        assert (Image.open(tmp_path / "twin.png").width > width) == wider


def test_seeds_are_averaged_by_agent_steps_and_drawn_at_their_mean_time(tools):
    picture = tools("results.suite_picture").suite_picture
    fast, slow = np.array([[100, 1, 0], [200, 2, 2.0]]), np.array([[100, 3, 4], [200, 6, 6.0]])
    by_steps, by_seconds = (picture._band([fast, slow], x) for x in (0, 1))
    assert (by_steps.x[0], by_steps.x[-1]) == (100, 200)
    assert (by_seconds.x[0], by_seconds.x[-1]) == (2, 4)
    np.testing.assert_array_equal(by_seconds.mean, by_steps.mean)
    assert (by_steps.mean[0], by_steps.least[-1], by_steps.most[-1]) == (2, 2, 6)


def test_an_agent_has_one_colour_in_every_picture_and_its_variants_are_lighter(tools):
    picture = tools("results.suite_picture").suite_picture
    some, others = (
        picture._colors(["SAC, big", "SAC", "PPO"]),
        picture._colors(["SAC", "Mine", "DQN"]),
    )
    assert some["SAC"] == others["SAC"]
    assert sum(some["SAC, big"]) > sum(some["SAC"])
    assert len({*some.values(), *others.values()}) == 5
