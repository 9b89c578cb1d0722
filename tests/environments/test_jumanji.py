"""Every registered Jumanji id runs by its id alone, with legal actions, as its spec describes."""

import jax
import jax.numpy as jnp
import jumanji as library
import matplotlib
import numpy as np
import pytest
from jumanji.environments.routing.sokoban import generator as sokoban

from environments import jumanji
from podracers import contract, environment, types
from tests import streams

STREAMS = 4

# Shapes of masks, of several kinds; the other ids are slow.
MASKS = {
    "Snake-v1": (4,),
    "Tetris-v0": (40,),
    "Connector-v3": (10, 5),
    "Maze-v0": (4,),
    "RubiksCube-v0": None,
    "MultiCVRP-v0": (2, 21),
    "FlatPack-v0": (8100,),
    "JobShop-v0": (10, 21),
}
QUICK = ("Snake-v1",)
RENDERED = ("Snake-v1", "Maze-v0", "BinPack-v2", "RubiksCube-v0", "Connector-v3")
SLOW = sorted(library.registered_environments() - set(QUICK))


def _cases(quick, slow):
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def play(env: jumanji.Jumanji, steps: int, key: jax.Array):
    """Returns random actions `[T]` and their time steps `[T]`, of one stream."""
    reset_key, key = jax.random.split(key)

    def body(carry, key):
        state, timestep = carry
        action = environment.random_action(env.spec.action, timestep.observation, key)
        state, timestep = env.step(state, action)
        return (state, timestep), (action, timestep)

    return jax.lax.scan(body, env.reset(reset_key), jax.random.split(key, steps))[1]


def batch_of(function):
    """Returns the results of a function of a key for several streams, in NumPy, `[B, ...]`."""
    keys = jax.random.split(jax.random.key(3), STREAMS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(function))(keys))


@pytest.mark.filterwarnings("error:::matplotlib")
@pytest.mark.parametrize("name", _cases(QUICK, SLOW))
def test_runs_by_its_id_alone_and_is_rendered(name, monkeypatch):
    # Sokoban's levels are downloaded.
    monkeypatch.setattr(
        "jumanji.environments.routing.sokoban.env.HuggingFaceDeepMindGenerator",
        lambda *_, **__: sokoban.ToyGenerator(),
    )
    env = jumanji.Jumanji(name)
    mask = env.spec.observation.get(environment.ACTION_MASK)
    if name in MASKS:
        assert (mask.shape if mask is not None else None) == MASKS[name]
    contract.check_environment(env, num_steps=6)
    if name in RENDERED:
        before = matplotlib.get_backend()
        picture = env.render(jax.jit(env.reset)(jax.random.key(0))[0])
        assert (picture.shape, picture.dtype) == ((400, 400, 3), np.uint8)
        assert len(np.unique(picture)) > 1
        assert matplotlib.get_backend() == before


@pytest.mark.parametrize("name", _cases(["Maze-v0"], ["RubiksCube-v0", "SearchAndRescue-v0"]))
def test_time_limit_truncates_and_changes_nothing_else(name):
    """Compares with Jumanji's own environment, whose clock ends episodes in its own way."""
    limit = 4
    env = jumanji.Jumanji(name, {"time_limit": limit})
    theirs = library.make(name, time_limit=limit)
    assert env.spec.max_episode_steps == limit

    def play_both(key):
        actions, ours = play(env, limit, key)
        state, _ = theirs.reset(jax.random.key_data(jax.random.split(key)[0]))

        def body(state, action):
            state, timestep = theirs.step(state, env._actions.decode(action, jnp))
            return state, (timestep.reward, timestep.step_type)

        return ours, jax.lax.scan(body, state, actions)[1]

    ours, (reward, step_type) = batch_of(play_both)
    last = ours.step_type == types.LAST
    played = np.cumsum(last, axis=1) - last == 0  # the first episode of each stream, LAST included
    summed = reward.reshape(*last.shape, -1).sum(-1)
    np.testing.assert_allclose(ours.reward[played], summed[played], atol=1e-6)
    np.testing.assert_array_equal(ours.step_type[played], step_type[played])
    alive = played[:, -1]
    assert last[alive, -1].all() and alive.any()
    # Few episodes of random play end by the rules in so few steps.
    assert (ours.discount[alive, -1] == 1.0).any()
    assert (ours.discount[:, :-1][last[:, :-1]] == 0.0).all()


def test_late_clock_does_not_change_rewards():
    """SearchAndRescue scales its reward by the steps that are left of the true limit."""
    ours, _ = jumanji.Jumanji("SearchAndRescue-v0")._built
    theirs = library.make("SearchAndRescue-v0")
    items = np.eye(2, 40, dtype=bool)
    expected = theirs._reward_fn(items, 100, theirs.time_limit)
    assert expected.sum() > 0.0
    np.testing.assert_array_equal(ours._reward_fn(items, 100, ours.time_limit), expected)


def test_any_action_is_legal_where_jumanji_allows_none():
    env = jumanji.Jumanji("Maze-v0")
    theirs = library.make("Maze-v0")
    masks = np.array([[False] * 4, [False, True, False, False]])

    def observe(mask):
        observation = theirs.reset(jax.random.PRNGKey(0))[1].observation
        return env._observe(observation._replace(action_mask=mask))["action_mask"]

    masks_seen = streams.evaluate(jax.vmap(observe), masks)
    np.testing.assert_array_equal(masks_seen, [[True] * 4, masks[1]])


def test_death_terminates():
    """A snake that runs into its wall dies long before the limit."""
    env = jumanji.Jumanji("Snake-v1")

    def up(key):
        state, _ = env.reset(key)
        return jax.lax.scan(lambda s, _: env.step(s, jnp.int32(0)), state, None, 12)[1]

    timestep = batch_of(up)
    last = timestep.step_type == types.LAST
    assert last.any(axis=1).all() and (timestep.discount[last] == 0.0).all()
    grid = timestep.observation["grid"]
    assert (grid.dtype, grid.shape[2:]) == (np.float32, (12, 12, 5))


@pytest.mark.parametrize(
    "name",
    _cases(["LevelBasedForaging-v0"], ["RobotWarehouse-v0", "Connector-v3"]),
)
def test_agents_are_the_parts_of_the_joint_action(name):
    joint, agents = jumanji.Jumanji(name), jumanji.Jumanji(name, agents=True)
    contract.check_environment(agents, num_steps=60)
    count = agents.spec.num_agents
    assert joint.spec.action.shape == (count,)

    def play_both(key):
        action = jax.random.randint(key, (20, count), 0, 5)

        def run(env):
            return jax.lax.scan(env.step, env.reset(key)[0], action)[1]

        return run(joint), run(agents)

    whole, parts = batch_of(play_both)
    np.testing.assert_array_equal(parts.step_type, whole.step_type[..., None].repeat(count, -1))
    for key in {"agents_view", "action_mask"} & set(whole.observation):
        np.testing.assert_array_equal(parts.observation[key], whole.observation[key])
    np.testing.assert_array_equal(parts.discount, whole.discount[..., None].repeat(count, -1))
    # A blocked agent of Connector still pays for each step; RobotWarehouse has one reward of all.
    total = parts.reward.mean(-1) if name == "RobotWarehouse-v0" else parts.reward.sum(-1)
    np.testing.assert_allclose(total, whole.reward, atol=1e-6)
    if "grid" not in whole.observation:
        return
    # An agent sees its own path, head and target as those of the first one.
    grid = parts.observation["grid"][0, 0]
    np.testing.assert_array_equal(grid[0], whole.observation["grid"][0, 0])
    for number in range(count):
        is_agent = (grid[number] >= 1) & (grid[number] <= 3)
        np.testing.assert_array_equal(is_agent, (grid[0] - 1) // 3 == number)
