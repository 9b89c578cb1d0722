"""Tests of reproducing a result: a real one that takes seconds, and how all of it may end."""

import dataclasses
import functools
import json
import signal

import pytest

from podracers import errors
from tests import processes

EXTRA = """
experiment.Experiment.checkpoint_period = 0
"""
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}  # what is timed here matters to nobody


def _ledger(folder, gin_file, **more):
    """Writes a file of results with one row, and returns its path."""
    path = folder / "results.json"
    row = {"experiment": str(gin_file), "runner": "Anakin", "agent": "PPO", "environment": "Catch"}
    path.write_text(json.dumps([row | more]))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, run):
    """A row that was trained and recorded with two seeds: the file, the runs, what was said."""
    folder = tmp_path_factory.mktemp("reproduce")
    ledger = _ledger(folder, processes.config_file(folder, EXTRA))
    words = ("tiny", "--results", ledger, "--out", folder / "first", "--seeds", 2)
    result = run("reproduce", *words, "--record", environment=CACHED)
    assert result.returncode == 0, result.stderr
    return ledger, folder / "first", result


def _summary(folder, seed):
    return json.loads((folder / f"seed-{seed}" / "summary.json").read_text())


@pytest.mark.slow
def test_a_row_is_trained_by_its_command_and_recorded(recorded):
    ledger, folder, result = recorded
    assert f"[2/2] tiny-anakin, seed 1: training ({folder / 'seed-1'})" in result.stdout
    assert "nothing to compare with" in result.stdout
    row = json.loads(ledger.read_text())[0]
    assert (row["agent"], row["environment"], row["runner"]) == ("PPO", "Catch", "Anakin")
    measured = row["measured"]
    assert [run["seed"] for run in measured["runs"]] == [0, 1]
    for run in measured["runs"]:
        summary = _summary(folder, run["seed"])
        assert summary["seed"] == run["seed"]
        assert run["final_return"] == summary["evaluation"]["return"]
        assert run["greedy_return"] == summary["evaluation"]["greedy_return"]
        assert (run["wall_time_s"], run["commit"]) == (summary["wall_time_s"], summary["commit"])
    assert (measured["agent_steps"], measured["episodes"]) == (2560, 8)
    assert {"date", "hardware", "jax", "random_policy"} <= measured.keys()


@pytest.mark.slow
def test_a_repetition_is_identical_and_changes_nothing(recorded, run, tmp_path):
    ledger, folder, _ = recorded
    before = ledger.read_text()
    words = ("tiny", "--results", ledger, "--out", tmp_path / "again", "--seeds", 1)
    result = run("reproduce", *words, environment=CACHED)
    assert result.returncode == 0, result.stderr
    assert "identical: 1 seed(s) with the very same returns" in result.stdout
    assert _summary(tmp_path / "again", 0)["evaluation"] == _summary(folder, 0)["evaluation"]
    assert ledger.read_text() == before


@pytest.mark.slow
def test_what_was_stopped_goes_on(recorded, tmp_path):
    ledger, folder, _ = recorded
    words = ("tiny", "--results", ledger, "--out", tmp_path / "new", "--seeds", 1)
    process = processes.start("reproduce", *words, environment=CACHED)
    run_dir = tmp_path / "new" / "seed-0"
    stopped = processes.interrupt(
        process, signal.SIGTERM, lambda: processes.num_lines(run_dir) >= 3
    )
    assert stopped.returncode == 0, stopped.stderr
    assert f"stopped: it goes on with --out {tmp_path / 'new'}" in stopped.stdout
    assert not (run_dir / "summary.json").exists()
    resumed = processes.run("reproduce", *words, environment=CACHED)
    assert resumed.returncode == 0, resumed.stderr
    assert "identical: 1 seed(s)" in resumed.stdout
    processes.assert_same_end(folder / "seed-0", run_dir)


@pytest.fixture(scope="module")
def modules(tools):
    return tools("results.reproduction", "results.rows", "results.training_process")


@pytest.fixture
def main(call):
    """Calls the script's `main` with these words."""
    return functools.partial(call, "reproduce")


def _changed(recorded, folder, returns):
    """Writes other returns of the recorded seeds, and returns the words that compare with them."""
    ledger, output, _ = recorded
    rows = json.loads(ledger.read_text())
    rows[0]["measured"]["runs"] = [
        {"seed": 10 + n, "final_return": value, "greedy_return": value}
        for n, value in enumerate(returns)
    ]
    (folder / "other.json").write_text(json.dumps(rows))
    return ("tiny", "--results", folder / "other.json", "--out", output, "--seeds", 2)


@pytest.mark.slow
def test_other_returns_are_judged_and_what_is_there_is_not_trained_again(
    recorded, main, tmp_path, capsys
):
    new = [_summary(recorded[1], seed)["evaluation"]["return"] for seed in (0, 1)]
    before = (recorded[1] / "seed-0" / "summary.json").stat().st_mtime_ns
    assert main(*_changed(recorded, tmp_path, [new[0] - 0.2, new[0], new[0] + 0.2])) == 0
    assert "agree: the means differ by" in capsys.readouterr().out
    assert main(*_changed(recorded, tmp_path, [-99.0, -99.1, -99.2])) == 1
    said = capsys.readouterr().out
    assert "differ: the means differ by" in said
    assert "-99.1" in said
    assert main(*_changed(recorded, tmp_path, [-99.0])) == 0
    assert "no verdict" in capsys.readouterr().out
    assert (recorded[1] / "seed-0" / "summary.json").stat().st_mtime_ns == before


def _measured(modules, **changes):
    known = {"date": "2026-01-31", "hardware": "a machine", "jax": "0", "agent_steps": 1000}
    known |= {"episodes": 8, "mean": 1.0, "standard_error": 0.1, "num_seeds": 3}
    return modules.rows.Measured(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "said", "differs"),
    [
        ({}, "agree: the means differ by +0, p = 1", False),
        ({"mean": 9.0}, "differ: the means differ by -8, p =", True),
        ({"mean": 9.0, "agent_steps": 995}, "differ: ", True),  # in round numbers
        ({"mean": 9.0, "agent_steps": 800}, "no verdict: other agent steps, 800 then and 1,000", 0),
        ({"mean": 9.0, "episodes": 16}, "differ: the means differ by -8", True),
        ({"mean": 9.0, "standard_error": None}, "no test: the means differ by -8", False),
        ({"mean": 9.0, "num_seeds": 1}, "no verdict: the means differ by -8", False),
    ],
)
def test_only_what_was_measured_alike_is_judged(modules, changes, said, differs):
    old, new = _measured(modules, **changes), _measured(modules)
    verdict, found = modules.reproduction.verdict(old, new)
    assert verdict.startswith(said)
    assert found == bool(differs)


def test_sampled_returns_are_not_judged_by_greedy_ones(modules):
    greedy = _measured(modules, runs=(modules.rows.SeedRun(0, 1.0),))
    sampled = _measured(modules, runs=(modules.rows.SeedRun(0, 0.5, greedy_return=1.0),))
    verdict, differs = modules.reproduction.verdict(greedy, sampled)
    assert verdict == "no verdict: other evaluations, of greedy actions then and sampled ones now"
    assert not differs


def test_runs_of_other_settings_are_not_judged(modules):
    kept, other = (modules.rows.SeedRun(0, 1.0, settings=each) for each in ("a", "b"))
    new = _measured(modules, runs=(kept,))
    verdict, differs = modules.reproduction.verdict(_measured(modules, runs=(other,)), new)
    assert (verdict, differs) == ("no verdict: the configuration was another one then", False)
    unknown = dataclasses.replace(other, settings=None)  # as of older rows
    verdict, _ = modules.reproduction.verdict(_measured(modules, runs=(unknown,)), new)
    assert verdict.startswith("identical")


def test_equal_returns_of_other_runs_are_not_identical(modules):
    runs = (modules.rows.SeedRun(0, 500.0),)
    old = _measured(modules, runs=runs, agent_steps=500)
    verdict, differs = modules.reproduction.verdict(old, _measured(modules, runs=runs))
    assert verdict.startswith("no verdict: other agent steps")
    assert not differs


@pytest.mark.slow
def test_the_list_says_which_rows_were_stopped_early(recorded, main, tmp_path, capsys):
    rows = json.loads(recorded[0].read_text())
    rows[0]["measured"]["agent_steps"] = 1280
    (tmp_path / "early.json").write_text(json.dumps(rows))
    assert main("--list", "--results", tmp_path / "early.json") == 0
    said = "recorded at 1,280 of 2,560 agent steps: no verdict"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_list_says_how_long_each_row_takes(recorded, main, capsys):
    assert main("--list", "--results", recorded[0]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["experiment", "runner", "minutes", "seeds", "return"]
    assert line.split()[:2] == ["tiny", "anakin"]
    assert float(line.split()[2]) < 10
    assert line.endswith("PPO, Catch")


def test_mistakes_are_found_before_anything_is_trained(main, modules, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("something was trained")

    monkeypatch.setattr(modules.training_process.Run, "train", refuse)
    config = processes.config_file(tmp_path, EXTRA)
    measured = dataclasses.asdict(_measured(modules, num_seeds=2))
    ledger = _ledger(tmp_path, config, measured=measured)
    (tmp_path / "bound").mkdir()
    (tmp_path / "wrong").mkdir()
    bound = _ledger(tmp_path / "bound", config, gin_bindings=["SEED = 5"])
    wrong = _ledger(tmp_path / "wrong", config, gin_bindings=["PPO.gama = 1"])
    cases = {
        (): "which result? name an experiment; --list says",
        ("tny",): "there is no result of 'tny'; did you mean 'tiny'?",
        ("tiny", "--runner", "sebulba"): "no result of 'tiny' under 'sebulba'; known: anakin",
        ("tiny", "--seeds", 0): "--seeds: expected a whole number of at least 1, got '0'",
        ("tiny", "--seeds", 1, "--record"): "--record: 1 seed(s) would take the place of 2",
        (
            "tiny",
            "--results",
            bound,
        ): "tiny-anakin: expected the seed 0, but",
        ("tiny", "--results", wrong): "did you mean 'gamma'?",
        ("tiny", "--results", tmp_path / "no.json"): "cannot read",
    }
    for words, phrase in cases.items():
        with pytest.raises(errors.UserError) as caught:
            main("--results", ledger, "--out", tmp_path / "new", *words)
        assert phrase in str(caught.value), words
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_folder_of_another_row_is_refused(recorded, main, tmp_path):
    config = processes.config_file(tmp_path, EXTRA)
    other = _ledger(tmp_path, config, gin_bindings=["PPO.gamma = 0.5"])
    with pytest.raises(errors.UserError, match="has another configuration; name another folder"):
        main("tiny", "--results", other, "--out", recorded[1], "--seeds", 2)


@pytest.mark.slow
def test_a_run_that_fails_ends_all_with_its_line_and_its_code(run, tmp_path):
    config = processes.config_file(tmp_path, EXTRA)
    ledger = _ledger(tmp_path, config, gin_bindings=["PPO.num_minibatches = 7"])
    words = ("tiny", "--results", ledger, "--out", tmp_path / "new", "--seeds", 1)
    result = run("reproduce", *words, environment=CACHED)
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: tiny-anakin, seed 0: ")
    assert "7 minibatches" in last
