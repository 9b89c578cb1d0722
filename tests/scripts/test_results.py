"""Tests of recorded results: statistics, the file of rows, the generated pages."""

import concurrent.futures
import dataclasses
import json
import re
import shutil

import pytest

from podracers import errors
from podracers.commands import command_line
from podracers.training import experiment
from tests import processes

RUN = {"agent_steps": 5_000_000, "episodes": 64, "random_policy": -1.0, "date": "2026-01-31"}
RUN |= {"hardware": "a machine", "jax": "0", "wall_time_s": 10.0, "commit": "c" * 40}


@pytest.fixture(scope="module")
def modules(tools):
    names = ("aggregates", "plotting", "rows", "rules", "tables", "training_process")
    return tools(*(f"results.{name}" for name in names))


def test_statistics(modules):
    scores = [[0.0, 1.0, 2.0, 3.0], [10.0, 10.0, 10.0, 14.0], [5.0, 5.0, 5.0, 5.0]]
    iqm, bootstrap = modules.aggregates.interquartile_mean, modules.aggregates.bootstrap
    # Of twelve scores in order, the three lowest and the three highest are left out.
    assert bootstrap(scores, iqm)[0] == pytest.approx((3 + 4 * 5 + 10) / 6)
    # Runs are resampled within their task.
    assert bootstrap([[0.0] * 3, [100.0] * 3], iqm) == (50.0, (50.0, 50.0))
    assert bootstrap([[3.0], [5.0]], iqm) == (4.0, None)
    sample = modules.aggregates.Sample.of([1.0, 2.0, 6.0])
    assert (sample.mean, sample.standard_error) == pytest.approx((3.0, (7.0 / 3.0) ** 0.5))
    # 4.302653 is the 97.5th percentile of Student's t with two degrees of freedom.
    width = 4.302653 * sample.standard_error
    assert sample.interval() == pytest.approx((3.0 - width, 3.0 + width))
    assert modules.aggregates.Sample.of([2.0]).interval() is None
    p, one, other = modules.aggregates.p_of_equal_means, [1.0, 2.0, 4.0, 4.5], [3.0, 7.0, 8.0]
    assert p(one, other) == pytest.approx(0.16507, abs=1e-5)  # t = -1.7995, 3.1605 degrees
    equal, unequal, alone = [1.0, 1.0], [0.9, 0.9], [1.0]
    assert (p(equal, equal), p(equal, unequal), p(alone, unequal)) == (1.0, 0.0, None)


def _entry(name, returns, **options):
    runs = [{**RUN, "seed": n, "final_return": value} for n, value in enumerate(returns)]
    entry = {"experiment": name, "runner": "Anakin", "agent": "PPO", "environment": name}
    return entry | {"runs": runs, "highest": 3.0} | options


def _read(modules, folder, *entries):
    path = folder / "results.json"
    path.write_text(json.dumps(entries))
    return modules.rows.read(path), path


def test_rows_are_read_and_written(modules, tmp_path):
    curve = [[100, 1.5, 0.0], [200, 2.5, 1.0]]
    entry = _entry("a", [1.0, 3.0], gin_bindings=["A.x = 1"], suite="s")
    entry["runs"][0] |= {"curve": curve, "greedy_return": 0.5, "settings": "x"}
    for run, success in zip(entry["runs"], (0.25, 1.0)):
        run["metrics"] = {"success": success} | {f"achievement/{n}": 1.0 for n in range(9)}
    rows, path = _read(modules, tmp_path, entry, _entry("folder/b.gin", [], variant="two"))
    a, b = rows.values()
    page = modules.tables.page(rows, {})
    # Of seed 0, the last evaluations.
    assert "| a | PPO, Anakin | 1.75 ± 1.2; success 0.62 | 2 | 5M | highest: 3 |" in page
    assert "| `a` `anakin` | 0.50, 3.00 |" in page and f"\n{a.command(0)}\n" in page
    assert "b-two" not in page  # without a run
    assert max(line.count(" | ") for line in page.splitlines()) < 7  # as wide as a page
    assert a.command(3) == (
        "python scripts/train.py --gin_file gin/experiments/a.gin --runner anakin "
        "--gin_bindings 'SEED = 3' --gin_bindings 'A.x = 1'"
    )
    assert (b.name, b.gin_file) == ("b-two-anakin", "folder/b.gin")
    assert (a.returns, a.random_policy) == ([0.5, 3.0], -1.0)
    assert (a.runs[0].actions, a.runs[1].actions) == ("sampled", "greedy")
    modules.rows.write(rows, path)
    assert modules.rows.read(path) == rows
    assert json.loads(path.read_text())[0] == entry
    assert len(path.read_text().splitlines()) < 30  # a line for each run
    assert modules.rows.find(rows, "b-two", "anakin") == [b]
    assert modules.rows.find(rows, suite="s") == [a]


def test_a_new_run_replaces_runs_of_other_settings(modules, tmp_path):
    rows, _ = _read(modules, tmp_path, _entry("a", [1.0, 3.0]))
    row = rows["a-anakin"]
    new = dataclasses.replace(row.runs[0], seed=2, settings="new")
    joined = row.with_run(new)
    assert [run.seed for run in joined.runs] == [0, 1, 2]  # old settings are unknown
    other = dataclasses.replace(new, seed=0, settings="other")
    assert [run.seed for run in joined.with_run(other).runs] == [0, 1]
    longer = dataclasses.replace(new, agent_steps=6_000_000)
    assert [run.seed for run in joined.with_run(longer).runs] == [2]
    matches = [new.matches(steps, "new") for steps in (4_990_000, 4_700_000, 5_100_000)]
    assert matches == [True, False, False]


def test_concurrent_updates_are_all_recorded(modules, tmp_path):
    _, path = _read(modules, tmp_path, _entry("a", [1.0]))

    def note(text):
        def noted(row):
            return dataclasses.replace(row, note=row.note + text)

        for _ in range(10):
            modules.rows.update("a-anakin", noted, path)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(note, "xyz"))
    assert sorted(modules.rows.read(path)["a-anakin"].note) == sorted("xyz" * 10)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "entries", [[{"agent": "A"}], ["A"], [_entry("a", [1.0]), _entry("a", [1.0])]]
)
def test_incomplete_files_are_refused(modules, tmp_path, entries):
    with pytest.raises(errors.UserError, match=r"results\.json"):
        _read(modules, tmp_path, *entries)


def test_every_published_row_describes_a_run(modules):
    rows = modules.rows.read()
    json.loads(modules.rows.PATH.read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    for row in rows.values():
        runner = command_line.runner_file(row.runner.lower())
        files = [str(processes.ROOT / row.gin_file), runner]
        settings = experiment.load(files, ["SEED = 7", *row.gin_bindings])
        assert settings.seed == 7, row.name
        assert settings.runner.__name__ == row.runner, row.name
        assert settings.agent.__name__ == row.agent.partition(",")[0], row.name
        digest = modules.training_process.settings_digest(settings.text())
        if "not_sticky" not in row.variant:  # their files have changed since
            assert {run.settings for run in row.runs} <= {digest, None}, row.name
        for published in row.published if row.runs and not row.explanation else ():
            reached = row.sample.mean + 0.005 * abs(published.value)
            assert reached >= published.value - (published.error or 0.0), row.name
    assert len({row.command(0) for row in rows.values()}) == len(rows)
    assert {row.suite for row in rows.values() if row.runs} == {*modules.tables.SUITES}
    assert {row.atari_game for row in rows.values()} == {None, *modules.tables.ATARI_SCORES}


def test_pages_and_pictures_are_up_to_date_and_generated(tmp_path, call, capsys):
    assert call("report", "--check") == 0, "run: python scripts/report.py"
    shutil.copytree(processes.ROOT / "docs", tmp_path / "docs")
    generated, readme = tmp_path / "docs/generated", tmp_path / "README.md"
    text = (processes.ROOT / "README.md").read_text()
    old = re.sub("(?<=begin: readme -->\n).*?(?=<!-- end: readme)", "old\n", text, flags=re.S)
    readme.write_text(old)
    ledger, other = tmp_path / "docs/results.json", generated / "results/suite_football.png"
    rows = json.loads(ledger.read_text())
    (run,) = next(row for row in rows if row["experiment"] == "mujoco_sac")["runs"]
    run["curve"][0][2] += 1.0
    ledger.write_text(json.dumps(rows))
    other.unlink()
    pictures = [
        generated / "results/suite_mujoco.png",
        other,
        tmp_path / "docs/learning_curves.png",
    ]
    capsys.readouterr()
    assert call("report", "--root", tmp_path, "--check") == 1
    expected = [f"{path}: out of date" for path in (readme, *pictures)]
    assert capsys.readouterr().out.splitlines() == expected
    assert readme.read_text() == old != text
    assert call("report", "--root", tmp_path) == call("report", "--root", tmp_path, "--check") == 0
    assert readme.read_text() == text
    linked = re.findall(r"\(results/(.*)\)", (generated / "results.md").read_text())
    assert {path.name for path in other.parent.glob("suite_*")} == set(linked)


def test_a_suite_has_panels_of_tasks_with_curves(modules, tmp_path):
    published = [{"value": 3, "source": "a", "steps": "b"}]
    entries = [
        _entry("a", [1.0, 3.0], environment="x", published=published),
        _entry("b", [1.0], agent="DQN, long", drawn_with="x", published=published),
        _entry("c", [1.0], environment="y"),
        _entry("d", [1.0], environment="y"),
    ]
    for entry in entries[:3]:
        entry["runs"][0]["curve"] = [[100, 1.5, 0.0], [200, 2.5, 1.0]]
    rows, _ = _read(modules, tmp_path, *entries)
    panel, alone = modules.plotting.suite(rows.values())
    counts = {label: len(seeds) for label, seeds in panel.curves.items()}
    assert (panel.title, counts) == ("x", {"PPO, Anakin": 1, "DQN, long, Anakin, b": 1})
    assert panel.levels == {"random policy": -1.0, "published": 3}
    assert (alone.title, [*alone.curves]) == ("y", ["PPO, Anakin"])
    rows["b-anakin"] = dataclasses.replace(
        rows["b-anakin"], published=(dataclasses.replace(*rows["b-anakin"].published, value=4),)
    )
    levels = modules.rows.levels([rows["a-anakin"], rows["b-anakin"]])
    assert levels == {"random policy": -1.0, "published, PPO": 3, "published, DQN": 4}
    (panel, _) = modules.plotting.suite(rows.values())
    assert panel.scales == {"PPO, Anakin": (-1.0, 3), "DQN, long, Anakin, b": (-1.0, 4)}
    assert modules.rows.reference("SAC", [*rows.values()]) == 3  # the first one of the task
    assert modules.rows.levels([rows["d-anakin"]]) == {"random policy": -1.0, "highest possible": 3}


def test_evaluations_of_rules(modules, tmp_path):
    rules, path = modules.rules, tmp_path / "small.json"
    shares = {rules.RULE: [[0.0, 0.9], [0.1, 1.0], [0.0, 0.2]], rules.A2C: [[0.5, 1.0]] * 3}
    task = rules.Task("gin/some.gin", "small", shares, (40.0, 0.01))
    evaluation = rules.Evaluation("--run_dir a b c", ["a", "b", "c"], 64, 2399, [task])
    line = "| `small` of `some` | 0.90 [0.20, 1.00] | 1.00 [1.00, 1.00] | 40, 0.01 |"
    assert line in rules.table(evaluation)
    rules.write(evaluation, path)
    assert rules.table(rules.read(path)) == rules.table(evaluation)
    assert rules.read(path).tasks[0].shares == shares
    path.write_text('{"command": "x"}')
    with pytest.raises(errors.UserError, match=r"small\.json"):
        rules.read(path)
