"""The grid world: mazes vary and always have a path; moves and ends."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import gridworld
from podracers import types

NUM_SEEDS = 300
STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))


def _mazes(world, seed):
    """Returns the states of `NUM_SEEDS` resets, in NumPy."""
    keys = jax.random.split(jax.random.key(seed), NUM_SEEDS)
    state, _ = jax.jit(jax.vmap(world.reset))(keys)
    return jax.device_get(state)


def _distance(walls, start, goal):
    """Returns the length of the shortest path, or None; breadth first, in plain Python."""
    frontier, seen, steps = {tuple(start)}, set(), 0
    while frontier and tuple(goal) not in frontier:
        seen |= frontier
        cells = {(row + move[0], column + move[1]) for row, column in frontier for move in STEPS}
        inside = {cell for cell in cells if min(cell) >= 0 and np.all(cell < np.array(walls.shape))}
        frontier = {cell for cell in inside - seen if not walls[cell]}
        steps += 1
    return steps if frontier else None


@pytest.mark.parametrize(
    ("rows", "columns", "density"), [(8, 8, 0.3), (5, 11, 0.6), (6, 6, 1.0), (1, 7, 1.0)]
)
def test_every_maze_has_a_shortest_path(rows, columns, density, monkeypatch):
    monkeypatch.setattr(gridworld, "_WALL_DENSITY", density)
    world = gridworld.GridWorld(rows=rows, columns=columns)
    state = _mazes(world, seed=1)
    for seed in range(NUM_SEEDS):
        start, goal = state.agent[seed], state.goal[seed]
        assert tuple(start) != tuple(goal)
        assert _distance(state.walls[seed], start, goal) == np.abs(start - goal).sum()
    # With a density of 1 only the path is free.
    if density == 1.0:
        free = (~state.walls).sum((1, 2))
        np.testing.assert_array_equal(free, 1 + np.abs(state.agent - state.goal).sum(1))


def test_mazes_vary():
    world = gridworld.GridWorld(rows=5, columns=5)
    state = _mazes(world, seed=2)
    assert len({walls.tobytes() for walls in state.walls}) > 0.95 * NUM_SEEDS
    for cells in (state.agent, state.goal):
        assert len({tuple(cell) for cell in cells}) == 25
    assert 0.15 < state.walls.mean() < 0.3


def test_paths_turn_at_random():
    world = gridworld.GridWorld(rows=3, columns=3)
    start, goal = jnp.array([0, 0]), jnp.array([2, 2])
    keys = jax.random.split(jax.random.key(3), 200)
    path = jax.vmap(lambda key: world._random_path(start, goal, key))
    paths = np.asarray(jax.jit(path)(keys))
    kinds = collections.Counter(path.tobytes() for path in paths)
    assert len(kinds) == 6  # 4 choose 2
    assert min(kinds.values()) > 10


# Agent, action -> agent; the walls are at (0, 1) and (1, 2), the goal is at (2, 2).
MOVES = [
    ((1, 1), 0, (1, 1)),  # up into a wall
    ((1, 1), 1, (1, 1)),  # right into a wall
    ((1, 1), 2, (2, 1)),
    ((1, 1), 3, (1, 0)),
    ((0, 0), 0, (0, 0)),  # off the top
    ((0, 0), 3, (0, 0)),  # off the left
    ((2, 0), 2, (2, 0)),  # off the bottom
    ((0, 2), 1, (0, 2)),  # off the right
    ((2, 0), 0, (1, 0)),
    ((2, 0), 1, (2, 1)),
]


WORLD = gridworld.GridWorld(rows=3, columns=3, max_episode_steps=10)
STEP = jax.jit(WORLD.step)


def _place(agent, time=0):
    walls = np.zeros((3, 3), bool)
    walls[0, 1] = walls[1, 2] = True
    return gridworld.State(
        jnp.asarray(walls), jnp.array([2, 2]), jnp.asarray(agent), jnp.int32(time)
    )


def test_moves():
    for agent, action, expected in MOVES:
        state, timestep = STEP(_place(agent), jnp.int32(action))
        assert tuple(np.asarray(state.agent)) == expected
        assert (timestep.reward, timestep.discount) == (0.0, 1.0)
        assert timestep.step_type == types.MID
        planes = np.zeros((3, 3, 3), np.float32)
        planes[0, 1, 0] = planes[1, 2, 0] = planes[(*expected, 1)] = planes[2, 2, 2] = 1.0
        np.testing.assert_array_equal(timestep.observation, planes)


@pytest.mark.parametrize(
    ("agent", "time", "action", "expected"),
    [
        ((2, 1), 0, 1, (1.0, 0.0, types.LAST)),  # reaches the goal
        ((1, 1), 9, 2, (0.0, 1.0, types.LAST)),  # reaches the limit
        ((2, 1), 9, 1, (1.0, 0.0, types.LAST)),  # reaches both
    ],
)
def test_goal_terminates_and_limit_truncates(agent, time, action, expected):
    _, timestep = STEP(_place(agent, time), jnp.int32(action))
    assert (timestep.reward, timestep.discount, timestep.step_type) == expected
