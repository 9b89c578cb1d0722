"""Tabular grids: moves, walls, collecting, respawn and the exact optimum."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments.meta import grid_optimum, tabular_grids
from podracers import environment, tasks
from tests import streams

MOVE = {name: index for index, name in enumerate(("n", "ne", "e", "se", "s", "sw", "w", "nw", "."))}
FAMILY = tabular_grids.TabularGrids(("small", "longer"))
STEP = jax.jit(FAMILY.step)


@pytest.fixture(scope="module", name="sampled")
def _sampled():
    return jax.device_get(
        jax.jit(jax.vmap(FAMILY.sample))(jax.random.split(jax.random.key(0), 200))
    )


@pytest.fixture(scope="module", name="params")
def _params(sampled):
    """Returns a small level, 5 x 5, with the good object in cell 12, the bad one in cell 13."""
    params = jax.tree.map(lambda x: jnp.asarray(x[np.argmax(sampled.task == 0)]), sampled)
    cells = params.object_cell.at[:2].set(jnp.array([12, 13]))
    return params._replace(object_cell=cells, num_actions=jnp.int32(9))


def _state(params, cell, present=(True, True), time=0):
    there = jnp.zeros(params.object_cell.shape, bool).at[:2].set(jnp.array(present))
    return tabular_grids.State(jnp.int32(cell), there, jnp.int32(time), jax.random.key(0))


@pytest.mark.parametrize(
    ("num_actions", "cell", "action", "expected_cell", "reward"),
    [
        (9, 0, MOVE["n"], 0, 0.0),
        (9, 0, MOVE["ne"], 0, 0.0),  # never in part
        (9, 0, MOVE["se"], 6, 0.0),
        (9, 6, MOVE["se"], 12, 1.0),
        (9, 12, MOVE["."], 12, 1.0),
        (9, 12, MOVE["e"], 13, -1.0),
        (18, 6, MOVE["se"], 12, 0.0),
        (18, 6, 9 + MOVE["se"], 6, 1.0),
        (18, 12, 9 + MOVE["."], 12, 1.0),
        (18, 12, 9 + MOVE["e"], 12, -1.0),
        (18, 12, 9 + MOVE["n"], 12, 0.0),
    ],
)
def test_moves_and_collecting(params, num_actions, cell, action, expected_cell, reward):
    params = params._replace(num_actions=jnp.int32(num_actions))
    state, timestep = STEP(params, _state(params, cell), np.int32(action))
    assert (state.cell, timestep.reward) == (expected_cell, reward)
    assert timestep.observation[environment.ACTION_MASK].sum() == num_actions
    bits = 3 - (reward == 1.0) - 2 * (reward == -1.0)  # a collected object is absent
    assert timestep.observation[tasks.ROWS].tolist() == [expected_cell + 25 * bits]


def test_time_limit_truncates_and_objects_terminate(params):
    _, timestep = STEP(params, _state(params, 0, time=29), np.int32(0))
    assert timestep.last() and timestep.discount == 1.0
    bad = params._replace(termination=jnp.ones_like(params.termination))
    _, timestep = STEP(bad, _state(params, 12), np.int32(MOVE["e"]))
    assert timestep.terminated()


def test_objects_respawn_at_their_rate(params):
    state = _state(params, 0, (False, False))
    keys = jax.random.split(jax.random.key(1), 4000)
    step = jax.vmap(lambda key: FAMILY.step(params, state._replace(key=key), jnp.int32(0))[0])
    present = streams.evaluate(step, keys).present
    np.testing.assert_allclose(present.mean(0)[:2], 0.1, atol=0.02)
    np.testing.assert_allclose(present[:, :2].all(axis=1).mean(), 0.01, atol=0.01)  # independent
    assert not present[:, 2:].any()


def test_tasks_differ_and_lie_in_free_cells(sampled):
    assert set(sampled.num_actions) == {9, 18}
    for task, name in enumerate(FAMILY.levels):
        level = tabular_grids.LEVELS[name]
        chosen = jax.tree.map(lambda x, task=task: x[sampled.task == task], sampled)
        cells = chosen.object_cell[:, : len(level.objects)]
        assert all(len(set(row)) == len(row) for row in cells)
        assert level.is_free()[cells].all()
        assert (chosen.object_cell[:, len(level.objects) :] == 63).all()
        assert len(np.unique(cells)) > 20
        assert (chosen.num_starts == level.is_free().sum() - len(level.objects)).all()
        for row, count, there in zip(chosen.start, chosen.num_starts, cells):
            assert level.is_free()[row[:count]].all() and not set(row[:count]) & set(there)


@pytest.mark.parametrize("name", tabular_grids.LEVELS)
def test_every_free_cell_is_reachable(name):
    level = tabular_grids.LEVELS[name]
    neighbours, seen = level.neighbours(), {int(np.argmax(level.is_free()))}
    while (more := seen | set(neighbours[list(seen)].ravel().tolist())) != seen:
        seen = more
    assert seen == set(np.flatnonzero(level.is_free()))


def test_published_sizes():
    levels = [tabular_grids.LEVELS[name] for name in tabular_grids.PUBLISHED]
    assert [level.num_states for level in levels] == [1936, 676, 1936, 8064, 1936]
    assert [len(level.walls) for level in levels] == [0, 0, 0, 7, 9 + 9 - 1]
    assert FAMILY.spec.observation[tasks.ROWS].maximum == 63 * 2**7


def _brute_force(neighbours, object_cell, objects, on_arrival, num_steps):
    """Tries every action and every outcome, in plain Python."""
    # Sets of present objects; the first object is the lowest bit.
    sets = [present[::-1] for present in itertools.product((False, True), repeat=len(objects))]

    @functools.cache
    def value(cell, present, steps):
        if steps == 0:
            return 0.0
        results = []
        for action in range(9 if on_arrival else 18):
            target = neighbours[cell, action % 9]
            hit = np.array(present) & (object_cell == target) & (on_arrival or action >= 9)
            reward, termination, _ = hit @ objects
            stands = int(target if action < 9 else cell)
            chance = np.where(present, ~hit, objects[:, 2])  # of presence after the step
            chances = [np.prod(np.where(after, chance, 1.0 - chance)) for after in sets]
            later = sum(p * value(stands, s, steps - 1) for p, s in zip(chances, sets) if p)
            results.append(reward + (1.0 - termination) * later)
        return max(results)

    return np.array([[value(c, s, num_steps) for s in sets] for c in range(len(neighbours))])


@pytest.mark.parametrize("on_arrival", [True, False])
def test_the_optimum_is_that_of_brute_force(on_arrival):
    level = tabular_grids.Level(3, 3, (), 5, frozenset({(1, 1)}))
    objects = np.array([[1.0, 0.3, 0.4], [-1.0, 0.5, 1.0], [0.5, 0.0, 0.2]])
    arguments = (level.neighbours(), np.array([0, 5, 7]), objects, on_arrival, 5)
    np.testing.assert_allclose(
        grid_optimum.finite_horizon_values(*arguments), _brute_force(*arguments), atol=1e-9
    )
