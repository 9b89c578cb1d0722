"""Games of Pgx: whose turn it is, whose reward; and EnvPool's games against them."""

import jax
import numpy as np
import pytest

from environments import envpool, opponents, pgx, wrappers
from podracers import contract, environment, host_contract

package = pytest.importorskip("pgx")

QUICK = ("tic_tac_toe",)
SLOW = (
    *("2048", "animal_shogi", "backgammon", "connect_four", "gardner_chess", "go_9x9", "hex"),
    *("kuhn_poker", "leduc_holdem", "othello"),
)  # go_19x19, chess and shogi take minutes
GAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
STEPS = 60


def _played(name: str, num_steps: int = STEPS):
    """Returns states, actions and time steps of random moves from one reset, in NumPy.

    The last of `num_steps` moves may be long after the end of the game.
    """
    game = pgx.Pgx(name)

    def step(carry, key):
        state, timestep = carry
        action = environment.random_action(game.spec.action, timestep.observation, key)
        following = game.step(state, action)
        return following, (following, action)

    begun = game.reset(jax.random.key(3))
    keys = jax.random.split(jax.random.key(4), num_steps)
    _, ((state, timestep), action) = jax.jit(lambda x: jax.lax.scan(step, x, keys))(begun)
    inner = jax.tree.map(lambda x, y: np.stack([x, *y]), begun[0].inner, state.inner)
    return jax.device_get((inner, action, timestep))


@pytest.mark.parametrize("name", GAMES)
def test_keeps_the_contract(name):
    contract.check_environment(pgx.Pgx(name, opening_moves=2), num_steps=30)


@pytest.mark.parametrize(
    "name",
    ["tic_tac_toe", "leduc_holdem", pytest.param("backgammon", marks=pytest.mark.slow)],
)
def test_rewards_and_signs_are_those_of_the_players(name):
    """In the library's words: the sum over both players is 0, and `current_player` is to move."""
    inner, _, timestep = _played(name, 1000 if name == "backgammon" else 20)
    end = int(np.argmax(timestep.last())) + 1
    assert timestep.last()[end - 1]
    np.testing.assert_allclose(inner.rewards[: end + 1].sum(axis=1), 0.0, atol=1e-6)
    mover, following = inner.current_player[:end], inner.current_player[1 : end + 1]
    expected = inner.rewards[1 : end + 1][np.arange(end), mover]
    np.testing.assert_array_equal(timestep.reward[:end], expected)
    sign = np.where(mover == following, 1.0, -1.0)
    sign[-1] = 0.0
    np.testing.assert_array_equal(timestep.discount[:end], sign)
    assert timestep.reward[end - 1] != 0.0 or name == "tic_tac_toe"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*QUICK, *SLOW) if name != "2048"])
def test_alternates_only_where_no_player_moves_twice(name):
    inner, _, timestep = _played(name, 100)
    end = int(np.argmax(timestep.last())) if timestep.last().any() else 100
    moves_twice = np.any(inner.current_player[:end] == inner.current_player[1 : end + 1])
    assert not (moves_twice and pgx.Pgx(name).spec.alternates)
    assert moves_twice or name != "backgammon"


def test_openings_are_moves_that_do_not_end_the_game():
    game = pgx.Pgx("tic_tac_toe", opening_moves=9)
    state, timestep = jax.jit(jax.vmap(game.reset))(jax.random.split(jax.random.key(0), 500))
    counts = np.asarray(state.inner._step_count)
    assert set(counts) == set(range(9))  # the ninth move ends the game
    assert not np.any(state.inner.terminated)
    assert np.all(timestep.first()) and np.all(timestep.discount == 1.0)
    assert game.evaluation_environment.game.opening_moves == 0


def test_stones_of_one_player_keep_their_colour():
    state, _ = pgx.Pgx("connect_four").reset(jax.random.key(0))
    game, pictures = pgx.Pgx("connect_four"), []
    for action in (3, 3):
        state, _ = game.step(state, action)
        pictures.append(game.render(state))
    first, second = pictures
    assert first.shape == second.shape and first.dtype == np.uint8
    side = first.shape[0] // 6
    assert np.array_equal(first[5 * side :], second[5 * side :])  # the lowest row
    assert not np.array_equal(first, second)


HOST_GAMES = ("ConnectFour-v1", "TicTacToe-v1", "Othello-v1", "Hex-v1", "Go9x9-v1")


@pytest.mark.parametrize(
    "task_id", ["TicTacToe-v1", *(pytest.param(x, marks=pytest.mark.slow) for x in HOST_GAMES)]
)
def test_games_of_envpool_are_those_of_pgx(task_id):
    """Every time step of the same moves, so that one agent plays both."""
    factory = envpool.EnvPool(task_id)
    game = factory.evaluation_environment.game
    assert jax.tree.map(lambda x: (x.shape, x.dtype), factory.spec.observation) == jax.tree.map(
        lambda x: (x.shape, x.dtype), game.spec.observation
    )
    with host_contract.simulators(factory, np.arange(4, dtype=np.int32)) as host:
        recording = host_contract.record(host, factory.spec, STEPS)
    timestep = recording.timestep
    step = jax.jit(jax.vmap(game.step))
    state, expected = jax.vmap(game.reset)(jax.random.split(jax.random.key(0), 4))
    ended = np.zeros(4, bool)
    for time in range(STEPS):
        state, expected = step(state, recording.action[time])
        ended |= timestep.first()[time + 1]
        actual = jax.tree.map(lambda x: x[time + 1][~ended], timestep._replace(metrics={}))  # noqa: B023
        expected = jax.tree.map(lambda x: np.asarray(x)[~ended], expected)  # noqa: B023
        last = np.asarray(expected.last())
        for name in ("reward", "discount", "step_type"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        seen, shown = (x.observation["observation"][~last] for x in (actual, expected))
        np.testing.assert_array_equal(seen, shown)
    assert ended.any() or task_id in ("Othello-v1", "Hex-v1", "Go9x9-v1")


def test_an_agent_that_searches_is_evaluated_with_the_game_alone():
    """Its observation has the state of the game, without the opponent's key."""
    training = wrappers.Searchable(pgx.Pgx("tic_tac_toe", opening_moves=3))
    evaluation = training.evaluation_environment
    assert isinstance(evaluation, opponents.Against)
    shapes = lambda spec: jax.tree.map(lambda x: x.shape, spec.observation)  # noqa: E731
    assert shapes(evaluation.spec) == shapes(training.spec)
    state, timestep = jax.jit(evaluation.reset)(jax.random.key(1))
    model = evaluation.spec.model
    shown = timestep.observation[environment.STATE]
    jax.tree.map(np.testing.assert_array_equal, shown, model.pack(state.game))
    after, _ = model.step_from(shown, 4)
    assert after.discount == -1.0  # the other player is to move: no answer


def test_a_time_limit_of_training_is_none_of_evaluations():
    limited = wrappers.TimeLimit(pgx.Pgx("tic_tac_toe"), max_episode_steps=5)
    for training in (limited, wrappers.Searchable(limited)):
        evaluation = training.evaluation_environment
        assert isinstance(evaluation, opponents.Against)
        assert evaluation.spec.max_episode_steps is None
