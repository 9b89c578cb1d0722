"""A grid world with random walls, start and goal in every episode, always with a path."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import rendering
from podracers import environment, errors, types

# The actions, as (row, column) moves.
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left
_WALL_DENSITY = 0.3  # probability that a cell is a wall, before the path is cleared


class State(NamedTuple):
    """A maze and the agent's position. `H` rows, `W` columns."""

    walls: jax.Array  # [H, W] bool
    goal: jax.Array  # [2] int32, row and column
    agent: jax.Array  # [2] int32, row and column
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True, eq=False)
class GridWorld:
    """Find the goal among random walls; the only reward is 1 on reaching it, which terminates.

    The observation is `[H, W, 3]`, float32: the planes of the walls, the agent and the goal. The
    four actions go up, right, down and left; a step into a wall or off the grid stays in place.

    A reset draws start, goal and walls, and clears the cells of one random shortest path: a search
    for a maze with a path would make every reset of a batch wait for the longest search.

    Attributes:
      rows: height `H`, in cells.
      columns: width `W`, in cells.
      max_episode_steps: time limit, in steps; reaching it is a truncation.
    """

    rows: int = 8
    columns: int = 8
    max_episode_steps: int = 64

    def __post_init__(self):
        errors.require_count(self, "rows", "max_episode_steps")
        errors.require_count(self, "columns", least=2 if self.rows == 1 else 1)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        shape = (self.rows, self.columns, 3)
        return environment.EnvironmentSpec(
            name="GridWorld",
            observation=specs.BoundedArray(shape, np.float32, 0.0, 1.0),
            action=specs.DiscreteArray(len(MOVES)),
            max_episode_steps=self.max_episode_steps,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Samples a maze whose start and goal are different cells."""
        start_key, goal_key, wall_key, path_key = jax.random.split(key, 4)
        cells = self.rows * self.columns
        start_cell = jax.random.randint(start_key, (), 0, cells)
        goal_cell = (start_cell + jax.random.randint(goal_key, (), 1, cells)) % cells
        start = jnp.stack([start_cell // self.columns, start_cell % self.columns])
        goal = jnp.stack([goal_cell // self.columns, goal_cell % self.columns])
        shape = (self.rows, self.columns)
        walls = jax.random.bernoulli(wall_key, _WALL_DENSITY, shape)
        walls = walls & ~self._random_path(start, goal, path_key)
        state = State(walls, goal, agent=start, time=jnp.zeros((), jnp.int32))
        return state, types.restart(self._observe(state))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Moves the agent by one cell, unless a wall blocks it."""
        target = state.agent + jnp.asarray(MOVES, jnp.int32)[action]
        highest = jnp.array([self.rows - 1, self.columns - 1], jnp.int32)
        target = jnp.clip(target, 0, highest)
        blocked = jnp.any(state.walls & self._plane(target))
        state = state._replace(agent=jnp.where(blocked, state.agent, target), time=state.time + 1)
        reached = jnp.all(state.agent == state.goal)
        timestep = types.transition(
            self._observe(state),
            reward=reached,
            terminated=reached,
            truncated=state.time >= self.max_episode_steps,
        )
        return state, timestep

    def render(self, state: State) -> np.ndarray:
        """Draws the maze, uint8 `[height, width, 3]`."""
        image, side = rendering.board(self.rows, self.columns)
        for row, column in np.argwhere(np.asarray(state.walls)):
            centre = rendering.cell_centre(row, column, side)
            image.box(centre, (side, side), rendering.INK)
        goal = rendering.cell_centre(int(state.goal[0]), int(state.goal[1]), side)
        agent = rendering.cell_centre(int(state.agent[0]), int(state.agent[1]), side)
        image.box(goal, (side * 0.8, side * 0.8), rendering.GREEN, side * 0.15)
        image.disc(agent, side * 0.32, rendering.ORANGE)
        return image.finish()

    def _random_path(self, start: jax.Array, goal: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the cells of a shortest path, its turns random: `[H, W]` bool, ends included."""
        longest = self.rows + self.columns - 2  # moves
        vertical, horizontal = jnp.abs(goal - start)
        used = jnp.arange(longest) < vertical + horizontal
        # Ranks of random numbers are a random permutation; unused moves come after all others. They
        # are counted, ties by index: XLA takes longer over a sort, to compile it and to run it.
        order = jnp.where(used, jax.random.uniform(key, (longest,)), 2.0)
        index = jnp.arange(longest)
        earlier = (order < order[:, None]) | ((order == order[:, None]) & (index < index[:, None]))
        rank = jnp.sum(earlier, axis=1)
        is_vertical = used & (rank < vertical)
        is_horizontal = used & ~is_vertical
        moves = jnp.stack([is_vertical, is_horizontal], axis=1) * jnp.sign(goal - start)
        cells = start + jnp.cumsum(moves, axis=0)  # [longest, 2]
        on_path = jax.vmap(self._plane)(cells)  # [longest, H, W]
        return jnp.any(on_path, axis=0) | self._plane(start)

    def _plane(self, cell: jax.Array) -> jax.Array:
        """Returns `[H, W]` bool, true at `cell` alone."""
        row = jnp.arange(self.rows)[:, None] == cell[0]
        return row & (jnp.arange(self.columns)[None, :] == cell[1])

    def _observe(self, state: State) -> jax.Array:
        """Returns the three planes, float32 `[H, W, 3]`."""
        planes = [state.walls, self._plane(state.agent), self._plane(state.goal)]
        return jnp.stack(planes, axis=-1).astype(jnp.float32)
