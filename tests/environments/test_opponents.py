"""Games against an opponent that is part of the environment, and the built-in opponents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import opponents, pgx
from podracers import contract

pytest.importorskip("pgx")

GAME = pgx.Pgx("tic_tac_toe")


class Lowest(opponents._Memoryless):
    """Takes the lowest legal action, and marks the number of its moves in its memory."""

    def init(self, game):
        return jnp.zeros((), jnp.int32)

    def act(self, game, memory, state, timestep, key):
        return jnp.argmax(timestep.observation["action_mask"]).astype(jnp.int32), memory + 1


def _position(*moves: int):
    """Returns the state and the time step after these moves."""
    state, timestep = GAME.reset(jax.random.key(0))
    for move in moves:
        state, timestep = GAME.step(state, move)
    return state, timestep


@pytest.mark.parametrize(
    "opponent",
    [
        Lowest(),
        *(pytest.param(x(), marks=pytest.mark.slow) for x in (opponents.Random, opponents.Perfect)),
    ],
)
def test_a_game_against_an_opponent_keeps_the_contract(opponent):
    contract.check_environment(opponents.Against(GAME, opponent), num_steps=60)


@pytest.mark.parametrize(("seat", "moves", "reward"), [(0, (1, 4, 7), 1.0), (1, (3, 4, 8), -1.0)])
def test_the_opponent_answers_and_rewards_are_the_agents(seat, moves, reward):
    """First: 1, (0), 4, (2), 7 wins. Second: (0), 3, (1), 4, (2) loses before the third move."""
    env = opponents.Against(GAME, Lowest(), seat)
    state, timestep = env.reset(jax.random.key(0))
    assert timestep.first() and timestep.discount == 1.0
    assert int(np.sum(timestep.observation["observation"])) == seat
    for index, move in enumerate(moves):
        assert not timestep.last()
        state, timestep = env.step(state, move)
        assert int(state.memory) == index + (seat == 1) + (not timestep.last() or seat == 1)
        if timestep.last():
            break
    assert timestep.reward == reward and timestep.discount == 0.0
    outcome = {1.0: "win", -1.0: "loss"}[reward]
    taken, other = ("first", "second") if seat == 0 else ("second", "first")
    for name in opponents.Against.OUTCOMES:
        assert timestep.metrics[name] == (name == outcome)
        assert timestep.metrics[f"{taken}/{name}"] == (name == outcome)
        assert np.isnan(timestep.metrics[f"{other}/{name}"])


def _games(player, opponent, count=64, game=GAME):
    """Returns the metrics of games of a player against an opponent, `[N]` each."""
    env = opponents.Against(game, opponent)

    def play(key):
        def move(carry):
            state, _, key = carry
            key, act_key = jax.random.split(key)
            action, _ = player.act(game, (), state.game, state.timestep, act_key)
            return *env.step(state, action), key

        start = *env.reset(key), jax.random.fold_in(key, 1)
        return jax.lax.while_loop(lambda carry: ~carry[1].last(), move, start)[1].metrics

    return jax.device_get(jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), count)))


def test_a_perfect_player_never_loses_and_knows_its_best_moves():
    best = opponents._solution()
    assert np.count_nonzero(best.any(axis=1)) == 5478 - 958  # positions, without ended games
    random, perfect = opponents.Random(), opponents.Perfect()
    metrics = _games(perfect, perfect, 16)
    assert np.all(metrics["draw"] == 1.0) and np.all(metrics["best_moves"] == 1.0)
    metrics = _games(random, perfect)
    assert np.all(metrics["win"] == 0.0) and np.mean(metrics["loss"]) > 0.6
    assert 0.5 < np.mean(metrics["best_moves"]) < 0.9
    seats = np.isnan(metrics["first/win"])
    assert 16 < np.sum(seats) < 48 and np.array_equal(seats, ~np.isnan(metrics["second/win"]))


# The player to move must take 2: else the other one does, or wins elsewhere.
CHANCE, THREAT = (0, 3, 1, 4), (0, 4, 1)


@pytest.mark.parametrize(
    ("opponent", "positions"),
    [
        (opponents.Greedy(), [CHANCE]),
        (opponents.UCT(200), [CHANCE, THREAT]),
        (opponents.Perfect(), [THREAT]),
    ],
)
def test_an_opponent_wins_at_once_and_searches_see_a_threat(opponent, positions):
    @jax.jit
    def act(state, timestep, keys):
        return jax.vmap(lambda key: opponent.act(GAME, (), state, timestep, key)[0])(keys)

    for moves in positions:
        actions = act(*_position(*moves), jax.random.split(jax.random.key(0), 8))
        assert set(np.asarray(actions).tolist()) == {2}


def test_returns_of_playouts_are_those_of_the_player_to_move():
    """With 2 left alone the first player wins; before that move, it wins if the other took 6."""
    moves, keys = (0, 3, 1, 4, 5, 8, 7, 6), jax.random.split(jax.random.key(0), 100)
    for count, expected in ((8, {1.0}), (7, {0.0, -1.0})):
        state, timestep = _position(*moves[:count])
        playout = functools.partial(opponents._playout, GAME, state, timestep)
        values = np.asarray(jax.jit(jax.vmap(playout))(keys))
        assert set(values.tolist()) == expected
        assert abs(np.mean(values) - sum(expected) / len(expected)) < 0.15


def test_a_random_opponent_plays_legal_moves_in_both_seats():
    metrics = _games(opponents.Random(), opponents.Random(), 400)
    first = np.nanmean(metrics["first/win"])
    assert 0.5 < first < 0.68  # exactly 0.585
