"""Tests of evaluating a run from its folder."""

import itertools
import json
import re
import shutil

import jax
import numpy as np
from PIL import Image

from podracers import evaluation, trees
from podracers.training import trained
from tests import processes

TRAIN, EVALUATE = "train", "evaluate"


def test_the_script_evaluates_the_newest_checkpoint_and_draws_an_episode(reference, run, tmp_path):
    video = tmp_path / "catch.gif"
    result = run(EVALUATE, "--run_dir", reference, "--episodes", 16, "--video", video)
    assert result.stderr == ""
    line = re.match(r"step 2,560: return (-?[\d.]+) ± ", result.stdout)
    assert -1.0 <= float(line[1]) <= 1.0
    assert "over 16 episodes), length 9.0 agent steps" in result.stdout
    assert f"{video}: 10 frames" in result.stdout
    with Image.open(video) as image:
        assert (image.format, image.n_frames) == ("GIF", 10)
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB"), np.int32))
    # The ball falls by a row in each frame, so neighbouring frames differ.
    assert all(np.abs(a - b).max() > 50 for a, b in itertools.pairwise(frames))


def _lines(run_dir):
    """Returns the lines to print for the evaluation in the summary: sampled, and greedy."""
    summary = json.loads((run_dir / "summary.json").read_text())
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


def test_prints_the_returns_of_the_summary(reference, run):
    result = run(EVALUATE, "--run_dir", reference)
    assert result.stdout.splitlines() == _lines(reference)
    other = run(EVALUATE, "--run_dir", reference, "--seed", 5).stdout.splitlines()
    assert len(other) == 2 and other != _lines(reference)
    other = run(EVALUATE, "--run_dir", reference, "--best", "--episodes", 16).stdout
    best = json.loads((reference / "summary.json").read_text())["best_checkpoint"]
    assert other.startswith(f"step {best:,}: ")
    assert other.count("over 16 episodes") == 2


def test_a_run_is_read_without_its_code_and_other_code_is_named_before(
    reference, run, tmp_path, caplog
):
    trusted = trained.load(reference, best=True)
    path = tmp_path / "run"
    shutil.copytree(reference, path, ignore=shutil.ignore_patterns(".lock"))
    with (path / "config.gin").open("a") as file:
        file.write("import a_strangers_lab\ninclude 'a_strangers.gin'\n")
    step, params = trained.params(path, best=True)
    assert step == trusted.step
    assert trees.structure(params) == sorted(trees.structure(trusted.params))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params["params"], trusted.params.params)
    assert caplog.text == ""
    for script, *options in ((EVALUATE,), (TRAIN, "--resume")):
        refused = run(script, "--run_dir", path, *options, code=2)
        processes.assert_mistake(refused, "'a_strangers_lab'")
        assert "imports other code: a_strangers_lab, a_strangers.gin" in caplog.text
        caplog.clear()


def test_metrics_are_printed_without_those_of_groups(tools):
    metrics = {"success": np.array([0.0, 1.0]), "achievement/dig": np.ones(2)}
    episodes = evaluation.Episodes(np.zeros(2), np.ones(2), np.ones(2, bool), metrics)
    printed = tools("evaluate").evaluate._described(episodes)
    assert printed.endswith("length 1.0 agent steps, success 0.5")
