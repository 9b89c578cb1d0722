"""Tabular grids: moves, walls, collecting, respawn and the exact optimum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments.meta import grid_optimum, tabular_grids
from podracers import environment, errors, tasks

MOVE = {name: index for index, name in enumerate(("n", "ne", "e", "se", "s", "sw", "w", "nw", "."))}


@pytest.fixture(scope="module", name="family")
def _family():
    return tabular_grids.TabularGrids(("small", "longer"))


def _state(params, cell, present=(True, True), time=0):
    there = np.zeros(params.object_cell.shape, bool)
    there[: len(present)] = present
    return tabular_grids.State(
        jnp.int32(cell), jnp.asarray(there), jnp.int32(time), jax.random.key(0)
    )


# 5 x 5 cells, the good object in cell 12 (the middle), the bad one in cell 13.
@pytest.mark.parametrize(
    ("num_actions", "cell", "action", "expected_cell", "reward"),
    [
        (9, 0, MOVE["n"], 0, 0.0),
        (9, 0, MOVE["nw"], 0, 0.0),
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
def test_moves_and_collecting(family, num_actions, cell, action, expected_cell, reward):
    params = family.params("small", num_actions, (12, 13))
    state, timestep = jax.jit(family.step)(params, _state(params, cell), jnp.int32(action))
    assert (state.cell, timestep.reward) == (expected_cell, reward)
    assert timestep.observation[environment.ACTION_MASK].sum() == num_actions


def test_rows_are_cells_and_objects(family):
    params = family.params("small", 9, (12, 13))
    for present, bits in [((True, True), 3), ((False, True), 2), ((True, False), 1)]:
        _, timestep = family.step(params, _state(params, 3, present), jnp.int32(MOVE["."]))
        if timestep.observation[tasks.ROWS][0] >= 75:  # what was absent came back
            continue
        assert timestep.observation[tasks.ROWS].tolist() == [3 + 25 * bits]
    assert family.spec.observation[tasks.ROWS].maximum == 63 * 2**7


def test_time_limit_truncates_and_objects_terminate(family):
    params = family.params("small", 9, (12, 13))
    _, timestep = family.step(params, _state(params, 0, time=29), jnp.int32(0))
    assert timestep.last() and timestep.discount == 1.0
    bad = params._replace(termination=jnp.ones_like(params.termination))
    _, timestep = family.step(bad, _state(params, 12), jnp.int32(MOVE["e"]))
    assert timestep.terminated()


def test_objects_come_back_at_their_rate(family):
    params = family.params("small", 9, (12, 13))
    state = _state(params, 0, (False, False))
    keys = jax.random.split(jax.random.key(1), 4000)
    step = jax.vmap(lambda key: family.step(params, state._replace(key=key), jnp.int32(0))[0])
    present = np.asarray(step(keys).present)
    np.testing.assert_allclose(present.mean(0)[:2], 0.1, atol=0.02)
    assert not present[:, 2:].any()


def test_tasks_differ_and_lie_in_free_cells(family):
    params = jax.jit(jax.vmap(family.sample))(jax.random.split(jax.random.key(0), 200))
    params = jax.device_get(params)
    assert set(params.task) == {0, 1}
    assert set(params.num_actions) == {9, 18}
    for task, name in enumerate(family.levels):
        level = tabular_grids.LEVELS[name]
        chosen = jax.tree.map(lambda x, task=task: x[params.task == task], params)
        cells = chosen.object_cell[:, : len(level.objects)]
        assert all(len(set(row)) == len(row) for row in cells)
        assert level.is_free()[cells].all()
        assert (chosen.object_cell[:, len(level.objects) :] == 63).all()
        assert len(np.unique(cells)) > 20
        starts = level.is_free().sum() - len(level.objects)
        assert (chosen.num_starts == starts).all()
        for row, count, there in zip(chosen.start, chosen.num_starts, cells):
            assert level.is_free()[row[:count]].all() and not set(row[:count]) & set(there)


@pytest.mark.parametrize("name", tabular_grids.LEVELS)
def test_every_free_cell_is_reached(name):
    level = tabular_grids.LEVELS[name]
    neighbours, seen = level.neighbours(), {int(np.argmax(level.is_free()))}
    while (more := seen | set(neighbours[list(seen)].ravel().tolist())) != seen:
        seen = more
    assert seen == set(np.flatnonzero(level.is_free()))


def test_published_sizes():
    sizes = {name: tabular_grids.LEVELS[name].num_states for name in tabular_grids.PUBLISHED}
    assert sizes == {
        "dense": 1936, "sparse": 676, "long": 1936, "longer": 8064, "long_dense": 1936
    }  # fmt: skip
    assert len(tabular_grids.LEVELS["longer"].walls) == 7
    assert len(tabular_grids.LEVELS["long_dense"].walls) == 9 + 9 - 1


def _brute_force(neighbours, object_cell, objects, on_arrival, num_steps):
    """Tries every action and every outcome, in plain Python."""
    sets = range(2 ** len(objects))

    @functools.cache
    def value(cell, bits, steps):
        if steps == 0:
            return 0.0
        best = -np.inf
        for action in range(9 if on_arrival else 18):
            target, reward, termination, left = neighbours[cell, action % 9], 0.0, 0.0, bits
            stands = target if action < 9 else cell
            if on_arrival or action >= 9:
                for index, there in enumerate(object_cell):
                    if there == target and bits >> index & 1:
                        reward, termination, _ = objects[index]
                        left -= 1 << index
            later = 0.0
            for after in sets:
                chance = 1.0
                for index, (_, _, respawn) in enumerate(objects):
                    is_there, will_be = left >> index & 1, after >> index & 1
                    if bits >> index & 1:  # present before the step: it stays, or was collected
                        chance *= is_there == will_be
                    else:
                        chance *= respawn if will_be else 1.0 - respawn
                if chance:
                    later += chance * value(int(stands), after, steps - 1)
            best = max(best, reward + (1.0 - termination) * later)
        return best

    return np.array([[value(c, bits, num_steps) for bits in sets] for c in range(len(neighbours))])


@pytest.mark.parametrize("on_arrival", [True, False])
def test_the_optimum_is_that_of_brute_force(on_arrival):
    level = tabular_grids.Level(3, 3, (), 5, frozenset({(1, 1)}))
    objects = np.array([[1.0, 0.3, 0.4], [-1.0, 0.5, 1.0], [0.5, 0.0, 0.2]])
    arguments = (level.neighbours(), np.array([0, 5, 7]), objects, on_arrival, 5)
    np.testing.assert_allclose(
        grid_optimum.finite_horizon_values(*arguments), _brute_force(*arguments), atol=1e-9
    )


@pytest.mark.parametrize("settings", [{"levels": ("dens",)}, {"levels": ()}, {"num_actions": (5,)}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(errors.UserError):
        tabular_grids.TabularGrids(**settings)
