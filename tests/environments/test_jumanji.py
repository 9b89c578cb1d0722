"""Every registered Jumanji id runs by its id alone, with legal actions, as its spec says."""

import functools

import jax
import jax.numpy as jnp
import jumanji as library
import matplotlib
import numpy as np
import pytest
from jumanji.environments.routing.sokoban import generator as sokoban

from environments import jumanji
from podracers import environment, errors, types
from podracers.training import check

STREAMS = 2
STEPS = 6

# Discrete with a mask, a flattened joint mask, and a mask per agent with rewards per agent. The
# slow ones have the other kinds: joint masks of three parts, ragged without a mask, no upper limit
# on the score, continuous.
QUICK = {
    "Snake-v1": (4,),
    "Tetris-v0": (40,),
    "Connector-v3": (10, 5),
    "Maze-v0": (4,),
}
SLOW = {
    "Game2048-v1": (4,),
    "Sudoku-very-easy-v0": (729,),
    "RubiksCube-v0": None,
    "MultiCVRP-v0": (2, 21),
    "SearchAndRescue-v0": None,
    "BinPack-v2": (800,),
    "CVRP-v1": (21,),
    "Cleaner-v0": (3, 4),
    "FlatPack-v0": (8100,),
    "GraphColoring-v1": (20,),
    "JobShop-v0": (10, 21),
    "Knapsack-v1": (50,),
    "LevelBasedForaging-v0": (2, 6),
    "MMST-v0": (3, 36),
    "Minesweeper-v0": (100,),
    "PacMan-v1": (5,),
    "RobotWarehouse-v0": (4, 5),
    "RubiksCube-partly-scrambled-v0": None,
    "SlidingTilePuzzle-v0": (4,),
    "Sokoban-v0": None,
    "Sudoku-v0": (729,),
    "TSP-v1": (20,),
}
MASKS = QUICK | SLOW
EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

# The tasks that Jumanji ends at a time limit.
LIMITED = [
    "Maze-v0",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "RubiksCube-v0",
            "Connector-v3",
            "SearchAndRescue-v0",
            "Snake-v1",
        )
    ),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Sokoban would fetch its levels, and retry for half a minute where there is no network."""

    def refuse(**_):
        raise OSError("no network in tests")

    monkeypatch.setattr(sokoban, "hf_hub_download", refuse)


def compiled(function):
    """Returns a jitted function that is compiled fast and runs slowly."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def play(env: jumanji.Jumanji, key: jax.Array, steps: int = STEPS):
    """Returns `(actions, timesteps)`, `[T]` and `[T + 1]`, of one stream that acts at random."""
    reset_key, key = jax.random.split(key)
    state, first = env.reset(reset_key)

    def body(carry, key):
        state, timestep = carry
        action = check.random_action(env.spec.action, timestep.observation, key)
        state, timestep = env.step(state, action)
        return (state, timestep), (action, timestep)

    _, (actions, rest) = jax.lax.scan(body, (state, first), jax.random.split(key, steps))
    return actions, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def batch_of(env: jumanji.Jumanji, steps: int = STEPS):
    """Returns `play` of several streams, as NumPy: `[B, T]` and `[B, T + 1]`."""
    keys = jax.random.split(jax.random.key(7), STREAMS)
    played = compiled(jax.vmap(functools.partial(play, env, steps=steps)))(keys)
    return jax.tree.map(np.asarray, played)


def lived(step_type: np.ndarray) -> list[tuple[int, int]]:
    """Returns the `(stream, time)` pairs of the first episode of each stream, LAST included."""
    pairs = []
    for b, row in enumerate(step_type):
        ends = np.flatnonzero(row == types.LAST)
        pairs += [(b, t) for t in range(ends[0] + 1 if len(ends) else len(row))]
    return pairs


@pytest.mark.filterwarnings("ignore:Sokoban")
@pytest.mark.parametrize("name", EVERY)
def test_runs_by_its_id_alone(name):
    env = jumanji.Jumanji(name)
    actions, timestep = batch_of(env)
    assert isinstance(env, environment.Environment)
    mask = env.spec.observation.get(environment.ACTION_MASK)
    assert (mask.shape if mask is not None else None) == MASKS[name]
    for b, t in lived(timestep.step_type):
        jax.tree.map(
            lambda spec, leaf: spec.validate(leaf[b, t]),  # noqa: B023  (called at once)
            env.spec.observation,
            timestep.observation,
        )
        if t > 0:
            env.spec.action.validate(actions[b, t - 1])
    chexed = (timestep.reward, timestep.discount, timestep.step_type)
    assert [leaf.dtype for leaf in chexed] == [np.float32, np.float32, np.int8]
    assert all(leaf.shape == (STREAMS, STEPS + 1) for leaf in chexed)
    assert np.isfinite(timestep.reward).all()
    assert (timestep.step_type[:, 0] == types.FIRST).all()
    assert set(np.unique(timestep.discount)) <= {0.0, 1.0}
    assert (timestep.discount[timestep.step_type == types.MID] == 1.0).all()


def test_every_registered_id_is_tested():
    assert set(MASKS) == library.registered_environments()


@pytest.mark.filterwarnings("ignore:Sokoban")
@pytest.mark.parametrize("name", LIMITED)
def test_time_limit_truncates_and_changes_nothing_else(name):
    """Played beside Jumanji's own environment, whose clock ends episodes as it pleases."""
    limit = 4
    env = jumanji.Jumanji(name, {"time_limit": limit})
    options = {"time_limit": limit}
    theirs = library.make(name, **options)
    assert env.spec.max_episode_steps == limit

    def play_both(key):
        actions, ours = play(env, key, limit)
        state, _ = theirs.reset(jax.random.key_data(jax.random.split(key)[0]))

        def body(state, action):
            state, timestep = theirs.step(state, env._actions.decode(action, jnp))
            return state, (timestep.reward, timestep.step_type, timestep.discount)

        return ours, jax.lax.scan(body, state, actions)[1]

    keys = jax.random.split(jax.random.key(3), 2 * STREAMS)
    ours, (reward, step_type, _) = jax.tree.map(np.asarray, compiled(jax.vmap(play_both))(keys))
    ours = jax.tree.map(lambda leaf: leaf[:, 1:], ours)
    for b, t in lived(ours.step_type):
        assert ours.reward[b, t] == pytest.approx(reward[b, t].sum(), abs=1e-6)
        assert ours.step_type[b, t] == step_type[b, t]
    at_limit = ours.step_type[:, -1] == types.LAST
    alive = (ours.step_type[:, :-1] != types.LAST).all(axis=1)
    assert at_limit[alive].all() and alive.any()
    # Random play ends none of these by the rules in so few steps but now and then.
    assert (ours.discount[alive, -1] == 1.0).any()
    assert (ours.discount[:, :-1][ours.step_type[:, :-1] == types.LAST] == 0.0).all()


def test_time_limit_terminates_where_asked():
    env = jumanji.Jumanji("Maze-v0", {"time_limit": 2}, time_limit_truncates=False)
    _, timestep = batch_of(env, steps=2)
    assert (timestep.step_type[:, -1] == types.LAST).all()
    assert (timestep.discount[:, -1] == 0.0).all()


def test_late_clock_leaves_rewards_alone():
    """SearchAndRescue scales its reward by the steps that are left of the true limit."""
    ours = jumanji.Jumanji("SearchAndRescue-v0")._inner
    theirs = library.make("SearchAndRescue-v0")
    found = jnp.eye(2, 40, dtype=bool)
    expected = theirs._reward_fn(found, 100, theirs.time_limit)
    assert expected.sum() > 0.0
    np.testing.assert_array_equal(ours._reward_fn(found, 100, ours.time_limit), expected)


def test_death_terminates():
    """A snake that turns back into its wall dies: LAST with discount 0, long before the limit."""
    env = jumanji.Jumanji("Snake-v1")

    @compiled
    def up(key):
        state, _ = env.reset(key)
        return jax.lax.scan(lambda s, _: env.step(s, jnp.int32(0)), state, None, 12)[1]

    timestep = jax.tree.map(np.asarray, up(jax.random.key(0)))
    end = int(np.argmax(timestep.step_type == types.LAST))
    assert timestep.step_type[end] == types.LAST
    assert timestep.discount[end] == 0.0
    assert (timestep.observation["grid"].dtype, timestep.observation["grid"].shape[1:]) == (
        np.float32,
        (12, 12, 5),
    )


def test_joint_choice_is_unravelled_as_the_mask_is():
    """In Tetris the flat action 13 of 4 x 10 is rotation 1, column 3."""
    env = jumanji.Jumanji("Tetris-v0")
    np.testing.assert_array_equal(env._actions.decode(jnp.int32(13)), [1, 3])
    mask = np.zeros((4, 10), bool)
    mask[1, 3] = True
    flat = mask.reshape(env._actions.mask_shape())
    np.testing.assert_array_equal(np.flatnonzero(flat), [13])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    [
        "Snake-v1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("BinPack-v2", "RubiksCube-v0")),
    ],
)
def test_renders(name):
    env = jumanji.Jumanji(name)
    state, _ = compiled(env.reset)(jax.random.key(0))
    before = matplotlib.get_backend()
    picture = env.render(state)
    assert (picture.shape, picture.dtype) == ((400, 400, 3), np.uint8)
    assert len(np.unique(picture)) > 2
    assert matplotlib.get_backend() == before


def test_without_a_network_sokoban_says_what_it_plays():
    with pytest.warns(UserWarning, match="two built-in levels"):
        assert jumanji.Jumanji("Sokoban-v0").spec.name == "Sokoban-v0 (built-in levels)"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Snak-v1", {}, "no environment 'Snak-v1'; did you mean 'Snake-v1'"),
        ("Snake", {}, "did you mean 'Snake-v1'"),
        ("Snake-v1", {"time_limt": 3}, "no option 'time_limt'; did you mean 'time_limit'"),
        ("Snake-v1", {"num_rows": -3}, "Snake-v1 rejects its options"),
    ],
)
def test_a_users_mistake_is_named(name, options, message):
    with pytest.raises(errors.UserError, match=message):
        _ = jumanji.Jumanji(name, options).spec
