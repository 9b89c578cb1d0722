"""Programs, commands and metrics in docs/usage.md and the README."""

import importlib
import json
import re
import shlex

import matplotlib
import pytest

from tests import documented

ROOT = documented.ROOT


@pytest.mark.slow
def test_the_readmes_ten_lines_learn(capsys):
    exec(documented.program("ten lines", ROOT / "README.md"), {})
    *training, evaluated = map(float, capsys.readouterr().out.split())
    assert len(training) == 5
    assert min(training[-1], evaluated) > training[0]


@pytest.mark.slow
def test_the_readmes_two_lines_train_and_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, small = (
        documented.program("two lines", ROOT / "README.md"),
        ', ["TOTAL_STEPS = 2048"])',
    )
    assert program.count('["catch_ppo.gin"])') == 1
    names = {}
    exec(program.replace('["catch_ppo.gin"])', f'["catch_ppo.gin"]{small}'), names)
    assert names["policy"].step == names["summary"]["environment_steps"] == 2048


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "path"),
    [
        ("run", "100_000", "2048", "catch-from-python"),
        ("on_log", '"], [])', '"], ["Experiment.evaluation_period = 1"])', "until-solved"),
    ],
)
def test_a_run_from_python_leaves_a_summary(name, old, new, path, tmp_path, monkeypatch):
    """One whose function of the log ends it as soon as it has evaluated."""
    monkeypatch.chdir(tmp_path)
    program = documented.program(name).replace("> 0.95", "< 2.0")
    assert old in program
    exec(program.replace(old, new), {})
    summary = json.loads((tmp_path / "runs" / path / "summary.json").read_text())
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


_PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
_TEXT = "\n".join(page.read_text() for page in _PAGES).replace("\\\n", " ")


_INSTALLED = dict(
    line.split(" = ")
    for line in documented.setup()["options.entry_points"]["console_scripts"].split("\n")[1:]
)


def test_commands_name_options_that_exist():
    names = "|".join(_INSTALLED)
    lines = re.findall(rf"(?<![\w/-])((?:{names}|python scripts/\w+\.py) [^\n`;]*)", _TEXT)
    assert len(lines) > 40
    for line in lines:
        name, *words = shlex.split(line.removeprefix("python scripts/"), comments=True)
        script = name.removeprefix("podracers-").removesuffix(".py").replace("-", "_") + ".py"
        command = ROOT / "podracers" / "commands" / script
        source = (command if command.exists() else ROOT / "scripts" / script).read_text()
        if "add_experiment" in source:
            source += (ROOT / "podracers/commands/command_line.py").read_text()
        for option in {word for word in words if word.startswith("--")} - {"--help"}:
            assert f'"{option}"' in source, f"{script} has no {option}"


def test_commands_of_the_pages_are_installed():
    """A user without a clone has no `scripts/`."""
    for place in _INSTALLED.values():
        module, name = place.split(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\n{name} = functools.partial(command_line.run, main)\n" in source
    assert set(re.findall(r"(?:^|`)(podracers-[a-z-]+) ", _TEXT, re.M)) <= {*_INSTALLED}
    called = set(re.findall(r"(?<!bin/)python scripts/(\w+)", _TEXT))
    assert called <= {"report", "train", "evaluate_rule"}  # `generated` has the last one


def test_every_documented_metric_is_logged():
    folders = ("agents", "podracers")
    source = "".join(p.read_text() for f in folders for p in sorted((ROOT / f).rglob("*.py")))
    # Of the policy that was evaluated, and of the metric of an episode.
    assembled = ("evaluation/", "episode/", "memory/")
    for name in documented.metrics():
        if name.startswith(assembled):
            continue
        literal = re.sub(r"<\w+>", "", name)  # a part of an f-string
        assert f'"{name}"' in source if literal == name else literal in source, name
