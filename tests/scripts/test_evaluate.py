"""Tests of evaluating a run from its folder."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests import processes

# So many that other episodes have another mean return.
_MANY = """
experiment.Experiment.evaluation_episodes = 300
experiment.Experiment.greedy_evaluation_episodes = 200
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    config = processes.config_file(folder, _MANY)
    result = processes.run("train", "--gin_file", config, "--run_dir", folder / "run")
    assert result.returncode == 0, result.stderr
    return folder / "run"


_HOST = """
from environments import gymnasium

include 'gin/environments/gymnasium.gin'
include 'gin/runners/sebulba.gin'

gymnasium.Gymnasium.env_id = 'tests.environments.own_games:Own/Picture-v0'
TOTAL_STEPS = 192  # agent steps
SEED = 3
experiment.Experiment.evaluation_period = 0
"""
# So that a script can import a game of the tests' own.
_FROM_HERE = {"PYTHONPATH": str(processes.ROOT)}


# In this process, for the fixture `run`.
_HERE = ("podracers.training.evaluate", "--run_dir")


def _evaluate(run_dir, *arguments, **options):
    return processes.run("evaluate", "--run_dir", run_dir, *arguments, **options)


def test_evaluates_the_newest_checkpoint_and_draws_an_episode(run_dir, tmp_path):
    video = tmp_path / "catch.gif"
    result = _evaluate(run_dir, "--episodes", 16, "--video", video)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = re.match(r"step 2,560: return (-?[\d.]+) ± ", result.stdout)
    assert -1.0 <= float(found[1]) <= 1.0
    assert "over 16 episodes), length 9.0 agent steps" in result.stdout
    assert f"{video}: 10 frames" in result.stdout
    with Image.open(video) as image:
        assert (image.format, image.n_frames) == ("GIF", 10)
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB"), np.int32))
    # The ball falls by a row in each frame, so no two neighbours look alike.
    assert all(np.abs(a - b).max() > 50 for a, b in itertools.pairwise(frames))


def _lines(summary):
    """Returns what is to be printed of a summary's evaluation: sampled, and greedy."""
    judged = summary["evaluation"]
    return [
        f"{head}return {judged[f'{name}return']:.2f} ± {judged[f'{name}standard_error']:.2f} (mean "
        f"and standard error over {judged[f'{name}episodes']} episodes), length "
        f"{judged[f'{name}length']:.1f} agent steps"
        for name, head in (
            ("", f"step {summary['environment_steps']:,}: "),
            ("greedy_", "greedy: "),
        )
    ]


def test_says_what_the_summary_of_the_run_says(run_dir, run):
    summary = json.loads((run_dir / "summary.json").read_text())
    result = run(*_HERE, run_dir)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == _lines(summary)
    other = run(*_HERE, run_dir, "--seed", 5).stdout.splitlines()
    assert len(other) == 2 and other != _lines(summary)


def test_evaluates_the_best_checkpoint(run_dir, run):
    result = run(*_HERE, run_dir, "--best", "--episodes", 4)
    assert result.returncode == 0, result.stderr
    best = re.search(r'"best_checkpoint": (\d+)', (run_dir / "summary.json").read_text())[1]
    assert result.stdout.startswith(f"step {int(best):,}: ")


@pytest.mark.slow
def test_evaluates_and_draws_a_game_that_is_played_on_the_host(tmp_path):
    config = processes.config_file(tmp_path, _HOST)
    options = {"environment": _FROM_HERE}
    run_dir, video = tmp_path / "run", tmp_path / "game.gif"
    result = processes.run("train", "--gin_file", config, "--run_dir", run_dir, **options)
    assert result.returncode == 0, result.stderr
    result = _evaluate(run_dir, **options)
    assert result.stdout.splitlines() == _lines(json.loads((run_dir / "summary.json").read_text()))
    result = _evaluate(run_dir, "--episodes", 5, "--video", video, **options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = re.match(r"step 192: return ([\d.]+) ± ", result.stdout)
    assert 0.0 <= float(found[1]) <= 9.0
    assert "over 5 episodes), length 9.0 agent steps" in result.stdout
    with Image.open(video) as image:
        assert image.n_frames == 10
        assert image.size == (20, 12)
        image.seek(9)
        last = np.asarray(image.convert("RGB"), np.int32)
    assert last[:, 18:].max() > 200 and last[:, :18].max() < 50
    # Without the game's module on the path, there is no game.
    processes.assert_mistake(_evaluate(run_dir), "No module named 'tests'")


_OWN = "tests.environments.own_games:Own"


def test_a_game_without_pictures_gives_no_video(tmp_path):
    processes.config_file(tmp_path, f"{_HOST}gymnasium.Gymnasium.env_id = '{_OWN}/Walk-v0'\n")
    shutil.copy(tmp_path / "tiny.gin", tmp_path / "config.gin")
    result = _evaluate(tmp_path, "--video", tmp_path / "x.gif", environment=_FROM_HERE)
    processes.assert_mistake(result, "Own/Walk-v0 has no render mode 'rgb_array'")


@pytest.mark.slow
def test_draws_a_game_of_gymnasiums_that_renders_itself(tmp_path):
    game = f"gymnasium.Gymnasium.env_id = '{_OWN}/Drawn-v0'\n"
    config = processes.config_file(tmp_path, _HOST + game)
    run_dir, path = tmp_path / "run", tmp_path / "game.gif"
    result = processes.run(
        "train", "--gin_file", config, "--run_dir", run_dir, environment=_FROM_HERE
    )
    assert result.returncode == 0, result.stderr
    result = _evaluate(run_dir, "--episodes", 1, "--video", path, environment=_FROM_HERE)
    assert result.returncode == 0, result.stderr
    length = float(re.search(r"length ([\d.]+) agent steps", result.stdout)[1])
    assert f"{path}: {length + 1:.0f} frames" in result.stdout
    with Image.open(path) as image:
        assert image.size == (20, 12)
    # What it is drawn with is missing.
    with (run_dir / "config.gin").open("a") as file:
        file.write("gymnasium.Gymnasium.options = {'fault': 'missing'}\n")
    result = _evaluate(run_dir, "--video", path, environment=_FROM_HERE)
    processes.assert_mistake(result, "no_such_package is not installed")


def test_mistakes(run_dir, run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run_dir / "config.gin", empty)
    cases = {
        (empty,): "has no checkpoint yet",
        (tmp_path / "nothing",): "there is no run in",
        (run_dir, "--episodes", 0): "--episodes: expected a whole number of at least 1, got '0'",
        (run_dir, "--seed", -1): "--seed: expected 0 <= seed < 2**31, got -1",
        (run_dir, "--episodes", "many"): "got 'many'",
    }
    for arguments, phrase in cases.items():
        processes.assert_mistake(run(*_HERE, *arguments), phrase)
    assert [path.name for path in empty.iterdir()] == ["config.gin"]
    nowhere = ("--episodes", 4, "--video", tmp_path / "no" / "x.gif")
    processes.assert_mistake(run(*_HERE, run_dir, *nowhere), "No such file or directory")
