"""Programs, commands and metrics in docs/usage.md and the README."""

import importlib
import json
import pathlib
import re
import shlex

import matplotlib
import pytest

from podracers.commands import train
from tests import documented

ROOT = documented.ROOT


@pytest.mark.slow
def test_the_readmes_ten_lines_learn(capsys):
    exec(documented.program("ten lines", ROOT / "README.md"), {})
    *training, evaluated = map(float, capsys.readouterr().out.split())
    assert len(training) == 5
    assert min(training[-1], evaluated) > training[0]


@pytest.mark.slow
def test_a_run_from_python_leaves_a_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(documented.program("run").replace("100_000", "2048"), {})
    summary = json.loads((tmp_path / "runs" / "catch-from-python" / "summary.json").read_text())
    assert summary["environment_steps"] == 2048


@pytest.fixture(scope="module", name="swept")
def _swept(tmp_path_factory):
    """A folder in which the sweep was run, with one seed each and for an update."""
    folder = tmp_path_factory.mktemp("usage")
    small = '"TOTAL_STEPS = 2048", "PPO.epochs = 1", "PPO.num_minibatches = 1"'
    program = documented.program("sweep")
    for old, new in {"range(3)": "range(1)", '"TOTAL_STEPS = 100_000"': small}.items():
        assert old in program
        program = program.replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(program, {})
    return folder


@pytest.mark.slow
def test_the_sweep_leaves_runs_that_plot_as_two_curves(swept):
    before = matplotlib.get_backend()
    curves = importlib.import_module("podracers.scripts.results.curves")
    paths = sorted((swept / "runs" / "sweep").iterdir())
    (panel,) = curves.panels([x for path in paths for x in curves.read(path)], "episode/return")
    matplotlib.use(before)
    assert panel.title == "Catch"
    assert list(panel.curves) == [
        f"PPO, Anakin, learning_rate = {rate}" for rate in (0.0003, 0.001)
    ]


@pytest.mark.slow
def test_a_trained_agent_is_loaded_and_acts(swept, monkeypatch, capsys):
    """`tests/scripts/test_evaluate.py` also loads runs."""
    monkeypatch.chdir(swept)
    exec(documented.program("load"), {})
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"after 2048 agent steps: a return of -?1\.0", first)
    path = swept / "runs" / "sweep" / "rate-0.001-seed-0" / "summary.json"
    assert float(second) == json.loads(path.read_text())["evaluation"]["return"]


def _commands() -> list[list[str]]:
    """Returns the words of each call of a script in the pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    lines = re.findall(r"python (scripts/\w+\.py [^\n`;]*)", text)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.slow
def test_a_curriculum_begins_with_the_parameters_of_the_easier_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("TOTAL_STEPS = 64", "NUM_ENVS = 8", "ROLLOUT_LENGTH = 8", "PPO.num_minibatches = 1")
    small += ("PPO.epochs = 1", "Experiment.evaluation_episodes = 4")
    small += ("Experiment.evaluation_max_steps = 8", "ValuePropagation.num_steps = 2")
    begun = []
    for _, *command in _commands():
        words = [word.replace("$seed", "0") for word in command]
        if not any("runs/half-force-" in word or "runs/snake-6-" in word for word in words):
            continue
        is_snake = "gin/experiments/snake_planner_ppo.gin" in words
        options = (
            word for x in small[: None if is_snake else -1] for word in ("--gin_bindings", x)
        )
        monkeypatch.setattr("sys.argv", ["train.py", *words, *options])
        assert train.main() == 0
        directory = tmp_path / words[words.index("--run_dir") + 1]
        summary = json.loads((directory / "summary.json").read_text())
        begun.append(summary.get("initial_run", {}).get("path"))
    assert begun == [None, "runs/half-force-0", None, "runs/snake-6-0"]


def test_commands_name_options_that_exist():
    assert len(_commands()) > 20
    for script, *words in _commands():
        command = ROOT / "podracers" / "commands" / pathlib.Path(script).name
        source = (command if command.exists() else ROOT / script).read_text()
        if "add_experiment" in source:
            source += (ROOT / "podracers/commands/command_line.py").read_text()
        for option in {word for word in words if word.startswith("--")} - {"--help"}:
            assert f'"{option}"' in source, f"{script} has no {option}"


def test_installed_commands_exist():
    scripts = documented.setup()["options.entry_points"]["console_scripts"]
    installed = re.findall(r"^podracers-\w+", scripts, re.M)
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"^podracers-\w+", pages, re.M)) <= set(installed)


def test_every_documented_metric_is_logged():
    folders = ("agents", "podracers")
    source = "".join(p.read_text() for f in folders for p in sorted((ROOT / f).rglob("*.py")))
    # Of the policy that was evaluated, and of the metric of an episode.
    assembled = ("evaluation/", "episode/")
    for name in documented.metrics():
        if name.startswith(assembled):
            continue
        literal = re.sub(r"<\w+>", "", name)  # a part of an f-string
        assert f'"{name}"' in source if literal == name else literal in source, name
