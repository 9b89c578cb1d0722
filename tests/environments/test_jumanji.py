"""Every registered Jumanji id runs by its id alone, with legal actions, as its spec says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import jumanji
from podracers import environment, errors, types

STREAMS = 2
STEPS = 6

# One of every kind of observation and action: discrete with a mask, flattened joint mask (2 and 3
# parts, nested observation), a mask per agent with rewards per agent, ragged without a mask, no
# upper limit on the score, nested positions, continuous.
QUICK = {
    "Snake-v1": (4,),
    "Game2048-v1": (4,),
    "Tetris-v0": (40,),
    "BinPack-v2": (800,),
    "Sudoku-very-easy-v0": (729,),
    "Connector-v3": (10, 5),
    "RubiksCube-v0": None,
    "Maze-v0": (4,),
    "MultiCVRP-v0": (2, 21),
    "SearchAndRescue-v0": None,
}
SLOW = {
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

# The tasks that Jumanji ends at a time limit; the clock shows in the step itself in the first two.
LIMITED = [
    "Connector-v3",
    "RubiksCube-v0",
    "SearchAndRescue-v0",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "Cleaner-v0",
            "LevelBasedForaging-v0",
            "Maze-v0",
            "MMST-v0",
            "PacMan-v1",
            "RobotWarehouse-v0",
            "SlidingTilePuzzle-v0",
            "Snake-v1",
            "Sokoban-v0",
            "Tetris-v0",
        )
    ),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Sokoban would fetch its levels, and retry for half a minute where there is no network."""
    from jumanji.environments.routing.sokoban import generator

    def refuse(**_):
        raise OSError("no network in tests")

    monkeypatch.setattr(generator, "hf_hub_download", refuse)


def random_action(spec: specs.Array, observation: types.PyTree, key: jax.Array) -> jax.Array:
    """Returns a legal action, uniformly."""
    mask = observation.get(environment.ACTION_MASK)
    if isinstance(spec, specs.DiscreteArray):
        mask = jnp.ones(spec.num_values, bool) if mask is None else mask
        return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf))
    if spec.dtype.kind == "f":
        return jax.random.uniform(key, spec.shape, minval=spec.minimum, maxval=spec.maximum)
    if mask is None:
        return jax.random.randint(key, spec.shape, 0, jnp.asarray(spec.maximum) + 1)
    return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf))  # [D]


def play(env: jumanji.Jumanji, key: jax.Array, steps: int = STEPS):
    """Returns `(actions, timesteps)`, `[T]` and `[T + 1]`, of one stream that acts at random."""
    reset_key, key = jax.random.split(key)
    state, first = env.reset(reset_key)

    def body(carry, key):
        state, timestep = carry
        action = random_action(env.spec.action, timestep.observation, key)
        state, timestep = env.step(state, action)
        return (state, timestep), (action, timestep)

    _, (actions, rest) = jax.lax.scan(body, (state, first), jax.random.split(key, steps))
    return actions, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def batch_of(env: jumanji.Jumanji, steps: int = STEPS):
    """Returns `play` of several streams, as NumPy: `[B, T]` and `[B, T + 1]`."""
    keys = jax.random.split(jax.random.key(7), STREAMS)
    played = jax.jit(jax.vmap(functools.partial(play, env, steps=steps)))(keys)
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
    import jumanji as library

    assert set(MASKS) == library.registered_environments()
