"""Tests of learning curves: grouping of runs, titles and legends."""

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


@pytest.fixture(scope="module", name="curves")
def _curves(tools):
    return tools("results.curves").curves


@pytest.fixture(name="make")
def _make(tmp_path):
    """Writes the directory of a run; each is newer than the one before."""
    count = 0

    def make(files, *bindings, seeds=(), value=0.0, used=""):
        nonlocal count
        count += 1
        experiment.load(files, bindings)
        directory = run_directory.RunDirectory(tmp_path / f"catch-{count}")
        directory.path.mkdir()
        directory.config.write_text(config.text())
        if used:
            directory.operative_config.write_text(config.text() + used)
        names = ["episode/return", *(f"episode/return/seed_{seed}" for seed in seeds)]
        rows = [{"step": n, "wall_time": 1.0} | dict.fromkeys(names, value + n) for n in (10, 20)]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(directory.config, (count, count))
        return str(directory.path)

    return make


def _drawn(curves, *paths):
    """Returns the labels of each panel's curves by its title."""
    panels = curves.panels([x for path in paths for x in curves.read(path)], "episode/return")
    return {panel.title: list(panel.curves) for panel in panels}


def test_options_without_influence_on_learning_make_no_curve(make, curves):
    paths = [
        make([CATCH]),
        make(
            [CATCH],
            "Experiment.seed = 1",
            "Experiment.log_period = 1",
            "Anakin.reset_batch = None",
            "Experiment.total_steps = 5e5",  # a literal, where the others have a macro
            "PPO.anneal_steps = 500_000",
        ),
        make([CATCH], "SEED = 2", "Anakin.population = 3", seeds=(2, 3, 4)),
    ]
    assert _drawn(curves, *paths) == {"PPO on Catch, Anakin": ["5 seeds"]}
    known = {f"Experiment.{x}" for x in experiment.Experiment.__dataclass_fields__}
    for module, name in (("anakin", "Anakin"), ("sebulba", "Sebulba")):
        part = getattr(importlib.import_module(f"podracers.{module}"), name)
        known |= {f"runner.{x}" for x in part.__dataclass_fields__}
    assert known >= curves.IGNORED


def test_the_legend_has_the_parameters_that_differ(make, curves):
    drawn = _drawn(
        curves,
        make([CATCH], "PPO.learning_rate = 1e-3"),
        make([CATCH], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make([CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make([CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "Sebulba.lag = 2"),
        make([CARTPOLE, "gin/agents/dqn.gin"], "Experiment.agent = @dqn.DQN"),
    )
    assert drawn == {
        "PPO on Catch": [
            "runner = Anakin, num_envs = 64, learning_rate = 0.001 (1 seed)",
            "runner = Anakin, num_envs = 32, learning_rate = 0.0003 (1 seed)",
            "runner = Sebulba, num_envs = 32, learning_rate = 0.0003, lag = default (1 seed)",
            "runner = Sebulba, num_envs = 64, learning_rate = 0.0003, lag = 2 (1 seed)",
        ],
        "DQN on CartPole, Anakin": ["1 seed"],
    }
    # A panel is an environment inside its wrappers.
    searched, pong = "gin/experiments/catch_alphazero.gin", "gin/experiments/pong_ppo_cpu.gin"
    drawn = _drawn(curves, make([searched]), make([CATCH]), make([pong]))
    assert list(drawn) == ["Catch, Anakin", "PPO on Pong-v5, Sebulba"]
    first, second = drawn["Catch, Anakin"]
    assert first.startswith("agent = AlphaZero, environment = Searchable, ")
    assert second.startswith("agent = PPO, environment = Catch, ")


def test_a_default_equals_its_value(make, curves):
    drawn = _drawn(
        curves,
        make([CATCH], used="ppo.PPO.normalize_advantages = True\n"),
        make([CATCH], "SEED = 1", "PPO.normalize_advantages = True"),
        make([CATCH], "PPO.normalize_advantages = False"),
    )
    labels = ["normalize_advantages = True (2 seeds)", "normalize_advantages = False (1 seed)"]
    assert drawn == {"PPO on Catch, Anakin": labels}


def test_the_newest_of_several_runs_of_a_seed_is_drawn(make, curves):
    old, new = make([CATCH], value=100.0), make([CATCH], value=200.0)
    runs = [x for path in (new, old) for x in curves.read(path)]
    (panel,) = curves.panels(runs, "episode/return")
    ((curve,),) = panel.curves.values()
    np.testing.assert_array_equal(curve[:, 2], [210.0, 220.0])


def test_population_values_are_configurations(make, curves):
    values = "{'PPO.learning_rate': (1e-3, 3e-4), 'gamma': (0.9,)}"
    population = ("Anakin.population = 4", f"Anakin.population_values = {values}")
    paths = [
        make([CATCH], "SEED = 2", *population, seeds=(2, 3, 4, 5)),
        make([CATCH], "SEED = 7", "PPO.learning_rate = 3e-4", "PPO.gamma = 0.9"),
    ]
    labels = ["learning_rate = 0.001 (2 seeds)", "learning_rate = 0.0003 (3 seeds)"]
    assert _drawn(curves, *paths) == {"PPO on Catch, Anakin": labels}


def test_a_picture_is_written(make, call, tmp_path, capsys):
    paths = [make([CATCH]), make([CATCH, SEBULBA]), make([CARTPOLE])]
    out = tmp_path / "x.png"
    call("plot", "--run_dir", *paths[:2], "--run_dir", paths[2], "--out", out)
    assert capsys.readouterr().out == f"{out}: 3 curves\n"
    with Image.open(out) as image:
        pixels = np.asarray(image.convert("RGB"), np.int32)
    for colour in ((0x34, 0x78, 0xC8), (0xEE, 0x7A, 0x30)):
        assert np.any(np.abs(pixels - colour).max(axis=-1) < 3)


def test_user_mistakes(make, call, tmp_path):
    out, path = tmp_path / "x.png", make([CATCH])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.gin").write_text("SEED = 3\n")
    cases = {
        ("--run_dir", tmp_path / "none", "--out", out): "no run",
        ("--run_dir", tmp_path / "c", "--out", out): "Experiment.agent",
        ("--run_dir", path, "--metric", "los", "--out", out): "'los'",
        ("--run_dir", path, "--out", tmp_path / "no" / "x.png"): "cannot write",
    }
    for words, phrase in cases.items():
        with pytest.raises(errors.UserError, match=phrase):
            call("plot", *words)
