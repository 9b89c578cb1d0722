"""Tabular grid worlds, with objects that are collected, may end the episode, and respawn.

The five tabular levels of Oh et al., "Discovering Reinforcement Learning Algorithms", 2020,
https://arxiv.org/abs/2007.08794, with the numbers of Jackson et al., "Discovering General
Reinforcement Learning Algorithms with Adversarial Environment Design", 2023,
https://arxiv.org/abs/2310.02782, appendix C, and two small ones. All levels share one program
and are padded to the largest level.

Axis legend: `C` cells, `N` objects, `A` actions, `L` levels.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments.meta import grid_optimum
from podracers import environment, errors, tasks, types

# Moves, as (row, column): the eight directions, and staying.
MOVES = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (0, 0))
NUM_ACTIONS = (9, 18)


class Object(NamedTuple):
    """A kind of object."""

    reward: float  # the reward of collecting it
    termination: float  # probability that collecting it ends the episode
    respawn: float  # probability of respawn at each step


@dataclasses.dataclass(frozen=True)
class Level:
    """A kind of grid world.

    Attributes:
      rows: height, in cells, without the surrounding wall.
      columns: width, in cells.
      objects: kinds of the grid's objects.
      max_episode_steps: time limit, in steps; truncates.
      walls: cells, as (row, column), that cannot be entered.
    """

    rows: int
    columns: int
    objects: tuple[Object, ...]
    max_episode_steps: int
    walls: frozenset[tuple[int, int]] = frozenset()

    @property
    def num_cells(self) -> int:
        """Number of cells, including walls."""
        return self.rows * self.columns

    @property
    def num_states(self) -> int:
        """Number of rows of a table: one for each cell and set of present objects."""
        return self.num_cells << len(self.objects)

    def is_free(self) -> np.ndarray:
        """Returns which cells can be entered, `[C]` bool."""
        cells = np.ndindex(self.rows, self.columns)
        return np.array([cell not in self.walls for cell in cells])

    def neighbours(self) -> np.ndarray:
        """Returns destinations of moves, `[C, 9]` int32; moves into walls stay."""
        free = self.is_free().reshape(self.rows, self.columns)
        table = np.empty((self.rows, self.columns, len(MOVES)), np.int32)
        for row, column, move in np.ndindex(table.shape):
            to = (row + MOVES[move][0], column + MOVES[move][1])
            inside = 0 <= to[0] < self.rows and 0 <= to[1] < self.columns
            to = to if inside and free[to] else (row, column)
            table[row, column, move] = to[0] * self.columns + to[1]
        return table.reshape(self.num_cells, len(MOVES))


_LONGER_WALLS = {(0, 4), (2, 4), (4, 4), (6, 4), (3, 3), (3, 4), (3, 5)}
_CROSS = {(row, 5) for row in range(11) if row not in (0, 7)} | {
    (4, column) for column in range(11) if column not in (2, 8)
}
LEVELS = {
    "dense": Level(
        11, 11, 2 * (Object(1, 0, 0.05),) + (Object(-1, 0.5, 0.1), Object(-1, 0, 0.5)), 500
    ),
    "sparse": Level(13, 13, (Object(1, 1, 0), Object(-1, 1, 0)), 50),
    "long": Level(11, 11, 2 * (Object(1, 0, 0.01),) + 2 * (Object(-1, 0.5, 1),), 1000),
    "longer": Level(
        7,
        9,
        2 * (Object(1, 0.1, 0.01),) + 5 * (Object(-1, 0.8, 1),),
        2000,
        frozenset(_LONGER_WALLS),
    ),
    "long_dense": Level(11, 11, 4 * (Object(1, 0, 0.005),), 2000, frozenset(_CROSS)),
    # Not published: a small one for tests and CPUs, and one to hold out of training.
    "small": Level(5, 5, (Object(1, 0, 0.1), Object(-1, 0.5, 0.1)), 30),
    "small_held_out": Level(4, 6, (Object(1, 0.1, 0.2), Object(-1, 1, 0.5), Object(-1, 0, 1)), 40),
}
PUBLISHED = ("dense", "sparse", "long", "longer", "long_dense")


class Params(NamedTuple):
    """One grid world, padded."""

    task: jax.Array  # int32, the index of its level
    num_cells: jax.Array  # int32
    num_actions: jax.Array  # int32, 9 or 18
    max_steps: jax.Array  # int32
    neighbours: jax.Array  # [C, 9] int32, destination of each move
    start: jax.Array  # [C] int32, start cells first
    num_starts: jax.Array  # int32
    object_cell: jax.Array  # [N] int32; C where there is no object
    reward: jax.Array  # [N] float32, for collecting
    termination: jax.Array  # [N] float32, probability
    respawn: jax.Array  # [N] float32, probability


class State(NamedTuple):
    """State of an episode."""

    cell: jax.Array  # int32
    present: jax.Array  # [N] bool, objects that can be collected
    time: jax.Array  # int32, steps since the reset
    key: jax.Array  # typed, of the episode


@dataclasses.dataclass(frozen=True, eq=False)
class TabularGrids:
    """A family of grid worlds (a `tasks.TaskFamily`).

    The state, one row of a table, is the agent's cell and the set of present objects; the task
    determines the objects' cells. An episode begins in a random free cell, with all objects
    present. Collecting an object pays its reward, removes it, and ends the episode with its
    probability of termination; from the next step on, it respawns with its probability of respawn.

    The task determines the number of actions. With 9, a move collects the object in its
    destination; a move into a wall, also a diagonal one, stays; actions 9 and above are masked.
    With 18, the first nine move without collecting; the others stay and collect the object in one
    of the nine directions.

    Attributes:
      levels: names in `LEVELS`, equally likely.
      num_actions: numbers of actions, 9 or 18, equally likely for each task.
    """

    levels: tuple[str, ...] = PUBLISHED
    num_actions: tuple[int, ...] = NUM_ACTIONS

    def __post_init__(self):
        for name in self.levels or ("",):
            errors.require_known("TabularGrids.levels: no level", name, LEVELS)
        if not self.num_actions or not set(self.num_actions) <= set(NUM_ACTIONS):
            raise errors.UserError(
                f"TabularGrids.num_actions: expected some of 9 and 18, got {self.num_actions!r}"
            )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of the largest level."""
        levels = [LEVELS[name] for name in self.levels]
        num_actions = max(self.num_actions)
        num_states = max(level.num_states for level in levels)
        return environment.EnvironmentSpec(
            name="TabularGrids",
            observation={
                tasks.ROWS: environment.MultiDiscreteArray((1,), np.int32, 0, num_states),
                environment.ACTION_MASK: specs.Array((num_actions,), np.bool_),
            },
            action=specs.DiscreteArray(num_actions),
            max_episode_steps=max(level.max_episode_steps for level in levels),
        )

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(self.levels)

    def sample(self, key: jax.Array) -> Params:
        """Samples a level, the number of actions, and the cells of the objects."""
        level_key, action_key, cell_key = jax.random.split(key, 3)
        level = jax.random.randint(level_key, (), 0, len(self.levels))
        chosen = jax.tree.map(lambda x: jnp.asarray(x)[level], self._tables)
        num_actions = jax.random.choice(action_key, jnp.asarray(self.num_actions, jnp.int32))
        # The largest of independent uniform numbers lie in random, distinct cells.
        scores = jnp.where(chosen["free"], jax.random.uniform(cell_key, chosen["free"].shape), -1.0)
        _, cells = jax.lax.top_k(scores, self._tables["reward"].shape[1])
        num_cells, exists = scores.shape[0], chosen.pop("exists")
        object_cell = jnp.where(exists, cells, num_cells).astype(jnp.int32)
        occupied = jnp.any(jnp.arange(num_cells)[:, None] == object_cell, axis=1)
        is_start = chosen.pop("free") & ~occupied
        return Params(
            task=level,
            num_actions=num_actions,
            start=jnp.argsort(~is_start, stable=True).astype(jnp.int32),
            num_starts=jnp.sum(is_start.astype(jnp.int32)),
            object_cell=object_cell,
            **chosen,
        )

    def task(self, params: Params) -> jax.Array:
        return params.task

    def reset(self, params: Params, key: jax.Array) -> tuple[State, types.TimeStep]:
        start_key, key = jax.random.split(key)
        start = params.start[jax.random.randint(start_key, (), 0, params.num_starts)]
        present = params.object_cell < params.neighbours.shape[0]
        state = State(start, present, jnp.zeros((), jnp.int32), key)
        return state, types.restart(self._observe(params, state))

    def step(self, params: Params, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        moves_only = action < len(MOVES)
        target = params.neighbours[state.cell, action % len(MOVES)]
        collects = ~moves_only | (params.num_actions == len(MOVES))
        collected = state.present & (params.object_cell == target) & collects  # [N], at most one
        draws = jax.random.uniform(
            jax.random.fold_in(state.key, state.time), (1 + collected.shape[0],)
        )
        respawned = ~state.present & (draws[1:] < params.respawn)
        state = State(
            cell=jnp.where(moves_only, target, state.cell),
            present=(state.present & ~collected) | respawned,
            time=state.time + 1,
            key=state.key,
        )
        timestep = types.transition(
            self._observe(params, state),
            reward=jnp.sum(jnp.where(collected, params.reward, 0.0)),
            terminated=draws[0] < jnp.sum(jnp.where(collected, params.termination, 0.0)),
            truncated=state.time >= params.max_steps,
        )
        return state, timestep

    def optimal_return(self, params: Params) -> float:
        """Returns the exact highest expected return of an episode, from a random start."""
        host = jax.tree.map(np.asarray, params)
        exists = host.object_cell < host.neighbours.shape[0]
        num_cells = int(host.num_cells)
        values = grid_optimum.finite_horizon_values(
            host.neighbours[:num_cells],
            host.object_cell[exists],
            np.stack([host.reward, host.termination, host.respawn], axis=1)[exists],
            collects_on_arrival=int(host.num_actions) == len(MOVES),
            num_steps=int(host.max_steps),
        )
        return float(np.mean(values[host.start[: int(host.num_starts)], -1]))

    @functools.cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Padded arrays of the levels, `[L, ...]`: fields of `Params`, and `free` and `exists`."""
        levels = [LEVELS[name] for name in self.levels]
        most_cells = max(level.num_cells for level in levels)
        most_objects = max(len(level.objects) for level in levels)

        def padded(values: np.ndarray, length: int) -> np.ndarray:
            padding = [(0, length - len(values))] + [(0, 0)] * (values.ndim - 1)
            return np.pad(values, padding)

        objects = np.stack(
            [padded(np.array(level.objects, np.float32), most_objects) for level in levels]
        )
        return {
            "num_cells": np.array([level.num_cells for level in levels], np.int32),
            "max_steps": np.array([level.max_episode_steps for level in levels], np.int32),
            "free": np.stack([padded(level.is_free(), most_cells) for level in levels]),
            "neighbours": np.stack([padded(level.neighbours(), most_cells) for level in levels]),
            "exists": np.arange(most_objects) < [[len(level.objects)] for level in levels],
            "reward": objects[..., 0],
            "termination": objects[..., 1],
            "respawn": objects[..., 2],
        }

    def _observe(self, params: Params, state: State) -> dict[str, jax.Array]:
        bits = jnp.sum(state.present.astype(jnp.int32) << jnp.arange(state.present.shape[0]))
        return {
            tasks.ROWS: (state.cell + params.num_cells * bits)[None],
            environment.ACTION_MASK: jnp.arange(max(self.num_actions)) < params.num_actions,
        }
