"""Tests of the curves: which runs are one, and what titles and legends say."""

import importlib
import json
import os

import numpy as np
import pytest
from PIL import Image

from podracers import errors
from podracers.training import config, experiment, run_directory

CATCH = "gin/experiments/catch_ppo.gin"
CARTPOLE = "gin/experiments/cartpole_ppo.gin"
SEBULBA = "gin/runners/sebulba.gin"


@pytest.fixture(scope="module", name="modules")
def _modules(tools):
    return tools("results.curves", "results.groups")


@pytest.fixture(name="make")
def _make(tmp_path):
    """Writes the directory of a run; each is newer than the one before."""
    count = 0

    def make(name, files, *bindings, seeds=(), value=0.0, used=""):
        nonlocal count
        count += 1
        experiment.load(files, bindings)
        directory = run_directory.RunDirectory(tmp_path / name)
        directory.path.mkdir()
        directory.config.write_text(config.text())
        if used:
            directory.operative_config.write_text(config.text() + used)
        names = [f"episode/return/seed_{seed}" for seed in seeds]
        rows = [
            {"step": step, **dict.fromkeys(["episode/return", *names], value + step)}
            for step in (10, 20)
        ]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(directory.metrics, (count, count))
        return str(directory.path)

    return make


def _drawn(modules, *paths):
    """Returns the labels of the curves of each panel by its title, and what was said."""
    runs = [modules.groups.read(path) for path in paths]
    panels, said = modules.curves.panels(runs, "episode/return")
    return {panel.title: [curve.label for curve in panel.curves] for panel in panels}, said


def test_one_seed_under_two_runners_is_two_curves(make, modules):
    # Their folders are called as seeds of one experiment would be.
    paths = [
        make("catch-0", [CATCH], "SEED = 0"),
        make("catch-1", [CATCH, SEBULBA], "SEED = 0"),
        make("catch-2", [CATCH], "SEED = 1"),
    ]
    drawn, said = _drawn(modules, *paths)
    assert drawn == {"PPO on Catch": ["runner = Anakin (2 seeds)", "runner = Sebulba (1 seed)"]}
    assert said == []
    drawn, _ = _drawn(modules, paths[0], paths[2])
    assert drawn == {"PPO on Catch, Anakin": ["2 seeds"]}


def test_what_changes_nothing_that_is_learnt_makes_no_curve_of_its_own(make, modules):
    paths = [
        make("a", [CATCH], "SEED = 0"),
        make(
            "b",
            [CATCH],
            "Experiment.seed = 1",
            "Experiment.log_period = 1",
            "Experiment.evaluation_episodes = 7",
            "Anakin.reset_batch = None",
            "Experiment.total_steps = 5e5",  # a literal, where the others have a macro
            "PPO.anneal_steps = 500_000",
        ),
        make("c", [CATCH], "SEED = 2", "Anakin.population = 3", seeds=(2, 3, 4)),
    ]
    runs = [modules.groups.read(path) for path in paths]
    assert [run.seed for run in runs] == [0, 1, 2]
    assert runs[0].value("experiment.Experiment.total_steps") == 500_000
    drawn, said = _drawn(modules, *paths)
    assert (drawn, said) == ({"PPO on Catch, Anakin": ["5 seeds"]}, [])


def test_the_parameters_that_are_ignored_exist(modules):
    known = {f"experiment.Experiment.{name}" for name in _fields(experiment.Experiment)}
    for name in ("anakin.Anakin", "sebulba.Sebulba"):
        module, _, symbol = name.partition(".")
        part = getattr(importlib.import_module(f"podracers.{module}"), symbol)
        known |= {f"runner.{parameter}" for parameter in _fields(part)}
    assert known >= modules.groups.UNLEARNT


def _fields(part):
    return part.__dataclass_fields__


def test_the_legend_names_what_differs(make, modules):
    drawn, _ = _drawn(
        modules,
        make("a", [CATCH], "PPO.learning_rate = 1e-3"),
        make("b", [CATCH], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make("c", [CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make("d", [CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "Sebulba.lag = 2"),
        make("e", [CARTPOLE, "gin/agents/dqn.gin"], "Experiment.agent = @dqn.DQN"),
    )
    assert drawn == {
        "PPO on Catch": [
            "runner = Anakin, NUM_ENVS = 64, learning_rate = 0.001 (1 seed)",
            "runner = Anakin, NUM_ENVS = 32, learning_rate = 0.0003 (1 seed)",
            "runner = Sebulba, NUM_ENVS = 32, learning_rate = 0.0003, lag = default (1 seed)",
            "runner = Sebulba, NUM_ENVS = 64, learning_rate = 0.0003, lag = 2 (1 seed)",
        ],
        "DQN on CartPole, Anakin": ["1 seed"],
    }


def test_a_default_counts_as_what_it_is(make, modules):
    used = "ppo.PPO.normalize_advantages = True\n"
    drawn, _ = _drawn(
        modules,
        make("a", [CATCH], used=used),
        make("b", [CATCH], "SEED = 1", "PPO.normalize_advantages = True"),
        make("c", [CATCH], "PPO.normalize_advantages = False"),
    )
    assert drawn == {
        "PPO on Catch, Anakin": [
            "normalize_advantages = True (2 seeds)",
            "normalize_advantages = False (1 seed)",
        ]
    }
    drawn, _ = _drawn(modules, make("d", [CATCH]), make("e", [CATCH], "PPO.reward_scale = 0.1"))
    assert drawn == {
        "PPO on Catch, Anakin": ["reward_scale = default (1 seed)", "reward_scale = 0.1 (1 seed)"]
    }


def test_a_panel_is_an_environment_whatever_it_is_wrapped_in(make, modules):
    searched = ["gin/experiments/catch_alphazero.gin"]
    pong = ["gin/experiments/pong_ppo_cpu.gin"]
    drawn, _ = _drawn(modules, make("a", searched), make("b", [CATCH]), make("c", pong))
    assert list(drawn) == ["Catch, Anakin", "PPO on Pong-v5, Sebulba"]
    first, second = drawn["Catch, Anakin"]
    assert first.startswith("agent = AlphaZero, environment = Searchable, ")
    assert second.startswith("agent = PPO, environment = Catch, ")


def test_the_same_seed_twice_is_one_seed_and_the_newest_is_drawn(make, modules):
    old = make("old", [CATCH], "SEED = 3", value=100.0)
    new = make("new", [CATCH], "SEED = 3", value=200.0)
    both = make("both", [CATCH], "SEED = 2", "Anakin.population = 2", seeds=(2, 3), value=300.0)
    runs = [modules.groups.read(path) for path in (new, old)]
    (panel,), said = modules.curves.panels(runs, "episode/return")
    (curve,) = panel.curves
    assert curve.label == "1 seed"
    np.testing.assert_array_equal(curve.seeds[0][1], [210.0, 220.0])
    assert len(said) == 1
    assert f"'{old}' and in '{new}'" in said[0] and "\n" not in said[0]
    drawn, said = _drawn(modules, old, both)
    assert drawn == {"PPO on Catch, Anakin": ["2 seeds"]}
    assert len(said) == 1 and "seed 3" in said[0]


def test_members_with_values_of_their_own_are_curves_of_their_own(make, modules):
    population = (
        "Anakin.population = 4",
        "Anakin.population_values = {'PPO.learning_rate': (1e-3, 3e-4), 'gamma': (0.9,)}",
    )
    paths = [
        make("a", [CATCH], "SEED = 2", *population, seeds=(2, 3, 4, 5)),
        make("b", [CATCH], "SEED = 7", "PPO.learning_rate = 3e-4", "PPO.gamma = 0.9"),
    ]
    drawn, said = _drawn(modules, *paths)
    assert drawn == {
        "PPO on Catch, Anakin": [
            "learning_rate = 0.001 (2 seeds)",
            "learning_rate = 0.0003 (3 seeds)",
        ]
    }
    assert said == []


def test_draws_several_directories_after_one_flag(make, call, tmp_path, capsys):
    paths = [make("a", [CATCH]), make("b", [CATCH, SEBULBA]), make("c", [CARTPOLE])]
    out = tmp_path / "x.png"
    call("plot", "--run_dir", *paths[:2], "--run_dir", paths[2], "--out", out)
    assert capsys.readouterr().out == f"{out}: 3 curves\n"
    with Image.open(out) as image:
        pixels = np.asarray(image.convert("RGB"), np.int32)
    for colour in ((0x34, 0x78, 0xC8), (0xEE, 0x7A, 0x30)):
        assert np.any(np.abs(pixels - colour).max(axis=-1) < 3)


def test_mistakes(make, call, tmp_path):
    out = tmp_path / "x.png"
    path = make("a", [CATCH])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.gin").write_bytes(b"\xff\x00")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.gin").write_text("SEED = 3\n")
    cases = {
        ("--run_dir", tmp_path / "none", "--out", out): "there is no run in",
        ("--run_dir", tmp_path / "b", "--out", out): "cannot read",
        ("--run_dir", tmp_path / "c", "--out", out): "names no Experiment.agent",
        ("--run_dir", path, "--metric", "los", "--out", out): "has logged no 'los'",
        ("--run_dir", path, "--out", tmp_path / "no" / "x.png"): "No such file or directory",
        ("--run_dir", "--out", out): "expected at least one argument",
    }
    for words, phrase in cases.items():
        with pytest.raises(errors.UserError) as caught:
            call("plot", *words)
        assert phrase in str(caught.value)
        assert "\n" not in str(caught.value)
