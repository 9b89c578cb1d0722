"""Round robins between runs, their checkpoints and built-in opponents."""

import contextlib

import jax
import numpy as np
import pytest

from environments import opponents, pgx
from podracers.checkpoints import checkpoint
from podracers.training import experiment, run_directory

pytest.importorskip("pgx")
GAME = pgx.Pgx("tic_tac_toe")


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    """A run of two checkpoints, of parameters that learnt nothing."""
    path = tmp_path_factory.mktemp("match") / "pqn"
    bindings = ["NUM_ENVS = 16", "ROLLOUT_LENGTH = 8", "q_network.encoder = @MLP()"]
    settings = experiment.load(["tic_tac_toe_pqn.gin"], [*bindings, "MLP.hidden_sizes = (8,)"])
    agent, directory = settings.build().agent, run_directory.RunDirectory(path)
    directory.create()
    directory.config.write_text(settings.text())
    with contextlib.closing(checkpoint.Checkpointer(directory.checkpoints)) as checkpointer:
        for step in (1024, 2048):
            params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(step)))
            checkpointer.save(step, params, params, {"update": step})
    return path


def test_checkpoints_and_opponents_meet_in_both_seats(run_dir, run, tmp_path):
    name = f"{run_dir}@1024"
    result = run("match", name, "perfect", "--games", 20, "--out", tmp_path / "x.png")
    assert result.stderr == ""
    games, _, first, second, *_ = result.stdout.splitlines()
    assert games.startswith(f"{name} - perfect: ")
    assert sum(int(word) for word in games.split() if word.isdigit()) == 20
    assert first.split()[:2] == ["1", "perfect"]
    assert second.split()[:2] == ["2", "pqn@1024"]  # without the runs' folder
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_seed_repeats(run_dir, run):
    words = ("match", run_dir, f"{run_dir}@1024", "--games", 20)
    results = [run(*words, "--seed", seed).stdout for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]


def test_scores_are_those_of_the_first_and_the_second_seat(tools):
    """Of random players, the one with the first move wins more often."""
    players, keys = (
        (opponents.Random(), opponents.Random()),
        jax.random.split(jax.random.key(0), 200),
    )
    first, second = tools("match").match.play(GAME, *players, keys).mean(axis=0)
    assert first > second + 0.1


def test_no_opening_occurs_twice(tools):
    game = pgx.Pgx("tic_tac_toe", opening_moves=3)
    keys = tools("match").match.openings(game, 40, 3, 0)
    _, timestep = jax.jit(jax.vmap(game.reset))(keys)
    boards = np.asarray(timestep.observation["observation"])
    assert len({board.tobytes() for board in boards}) == 40


def test_ratings_are_those_of_the_model(tools):
    """3 points of 4, with half a point each for the virtual draw: odds of 3.5 to 1.5."""
    scores = np.full((2, 2, 2, 2), np.nan)
    scores[0, 1] = [[1.0, 1.0], [1.0, 0.0]]
    scores[1, 0] = 1.0 - scores[0, 1]
    elo, (low, high) = tools("match").match.ratings(scores, 0)
    np.testing.assert_allclose(elo[0] - elo[1], 400 * np.log10(3.5 / 1.5), rtol=1e-6)
    np.testing.assert_allclose(np.sum(elo), 0.0, atol=1e-9)
    assert np.all(low <= elo) and np.all(elo <= high) and np.all(low < high)
