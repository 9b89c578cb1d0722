"""XLand-MiniGrid under the contract: goals terminate, limits truncate, tiles are kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import xminigrid
from podracers import contract, environment, errors, types

package = pytest.importorskip("xminigrid")
benchmarks = pytest.importorskip("xminigrid.benchmarks")

XLAND = "XLand-MiniGrid-R1-9x9"
QUICK = "MiniGrid-Empty-5x5"
# One id, the smallest, of each class and kind of grid.
SLOW = {
    (spec.entry_point, spec.kwargs.get("grid_type")): name
    for name, spec in reversed(package.registration._REGISTRY.items())
    if name != QUICK
}


@pytest.fixture(autouse=True)
def benchmark(monkeypatch, tmp_path):
    """Writes the file of a benchmark with two rulesets, whose goals are to hold a ball."""
    tile = package.core.constants.Tiles.BALL
    goals = np.array([[1, tile, 1, 0, 0], [1, tile, 2, 0, 0]], np.uint8)  # red, green
    arrays = {
        "goals": jnp.asarray(goals),
        "rules": jnp.zeros((2, 1, 7), jnp.uint8),
        "init_tiles": jnp.asarray(goals[:, None, 1:3]),
        "num_rules": jnp.zeros(2, jnp.uint8),
    }
    benchmarks.save_bz2_pickle(arrays, str(tmp_path / "trivial_21k"))
    monkeypatch.setattr(benchmarks, "DATA_PATH", str(tmp_path))


def make(name: str, **options) -> xminigrid.XMiniGrid:
    rules = {"ruleset": ("trivial-21k", 1)} if name.startswith("XLand") else {}
    return xminigrid.XMiniGrid(name, rules | options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, *SLOW.values()])
def test_keeps_the_contract(name):
    env = make(name, max_steps=30)
    contract.check_environment(env, num_steps=90)
    image = env.render(jax.jit(env.reset)(jax.random.key(0))[0])
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    assert image.std() > 0.0


FORWARD, RIGHT = 0, 1
TO_GOAL = [FORWARD, FORWARD, RIGHT, FORWARD, FORWARD]  # in the room of 3 x 3, corner to corner


@pytest.mark.parametrize(("max_steps", "reward", "discount"), [(4, 0.0, 1.0), (5, 0.1, 0.0)])
def test_the_goal_terminates_and_the_limit_truncates(max_steps, reward, discount):
    env = make(QUICK, max_steps=max_steps)
    assert env.spec.max_episode_steps == max_steps

    @jax.jit
    def play(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(env.step, state, actions)[1]

    actions = jnp.asarray(TO_GOAL[:max_steps])
    first, timestep = jax.tree.map(np.asarray, play(actions))
    assert (first.step_type, first.reward, first.discount) == (types.FIRST, 0.0, 1.0)
    expected = [types.MID] * (len(actions) - 1) + [types.LAST]
    assert timestep.step_type.tolist() == expected
    np.testing.assert_allclose(timestep.reward, [0.0] * (len(actions) - 1) + [reward], rtol=1e-6)
    assert timestep.discount.tolist() == [1.0] * (len(actions) - 1) + [discount]
    assert timestep.metrics["success"][-1] == (reward > 0.0)
    # The final observation is that of the goal: the agent stands in the middle of the last row.
    tiles = package.core.constants.Tiles
    stands_on = tiles.GOAL if discount == 0.0 else tiles.FLOOR
    assert timestep.observation[-1, -1, 3, 0] == stands_on


def test_specs():
    spec = make("MiniGrid-DoorKey-6x6").spec
    assert (spec.observation.shape, spec.observation.dtype) == ((7, 7, 2), np.uint8)
    assert environment.num_values(spec.observation).tolist() == [13, 12]  # tiles, colours
    assert (spec.action.num_values, spec.max_episode_steps) == (6, 10 * 6 * 6)
    larger = make("MiniGrid-DoorKey-6x6", height=9, width=9, view_size=5).spec
    assert (larger.observation.shape, larger.max_episode_steps) == ((5, 5, 2), 10 * 9 * 9)


def test_a_ruleset_has_the_goal():
    state, _ = jax.eval_shape(make(XLAND).reset, jax.random.key(0))
    assert state.state.goal_encoding.shape == (5,)
    _, params = make(XLAND)._built
    assert params.ruleset.goal[:3].tolist() == [1, 3, 2]
    fixed = make(XLAND, ruleset=params.ruleset)
    assert fixed._built[1].ruleset is params.ruleset


def test_a_benchmark_that_is_not_there_is_one_line(monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("no network\nin tests")

    monkeypatch.setattr("urllib.request.urlretrieve", refuse)
    with pytest.raises(errors.UserError, match=r"\('small-1m', 0\)}: OSError: no network$"):
        _ = make(XLAND, ruleset=("small-1m", 0)).spec
    assert "Downloading benchmark data" in capsys.readouterr().out  # before the wait
    with pytest.raises(errors.UserError, match=r"^trivial-21k has the rulesets 0 to 1, got 2$"):
        _ = make(XLAND, ruleset=("trivial-21k", 2)).spec
