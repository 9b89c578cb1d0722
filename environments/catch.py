"""Catch: a ball falls down a small board and must be caught by a paddle on the bottom row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import rendering
from podracers import environment, errors, types

_MAX_SIZE = 256  # cells


class State(NamedTuple):
    """Positions of the ball and the paddle."""

    ball_row: jax.Array  # int32
    ball_column: jax.Array  # int32
    paddle_column: jax.Array  # int32


@dataclasses.dataclass(frozen=True, eq=False)
class Catch:
    """The game of the Podracer notebook: 10 rows, 5 columns, nine steps, a reward at the end.

    The observation is an image `[rows, columns, 1]` in which ball and paddle are one. Actions 0, 1
    and 2 move the paddle left, not at all, and right. The ball starts on the top row in a random
    column and falls one row a step; on the bottom row the episode terminates, with reward 1 if the
    paddle is below the ball and -1 if it is not.

    Source: Hessel et al., "Podracer architectures for scalable Reinforcement Learning" (2021),
    https://arxiv.org/abs/2104.06272; the game of Mnih et al., "Recurrent Models of Visual
    Attention" (2014).

    Attributes:
      rows: height of the board, in cells.
      columns: width of the board, in cells.
    """

    rows: int = 10
    columns: int = 5

    def __post_init__(self):
        errors.require_count(self, "rows", least=2, most=_MAX_SIZE)
        errors.require_count(self, "columns", most=_MAX_SIZE)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        shape = (self.rows, self.columns, 1)
        return environment.EnvironmentSpec(
            name="Catch",
            observation=specs.BoundedArray(shape, np.float32, 0.0, 1.0),
            action=specs.DiscreteArray(3),
            max_episode_steps=self.rows - 1,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Drops a ball from a random column, above a paddle in the middle."""
        state = State(
            ball_row=jnp.zeros((), jnp.int32),
            ball_column=jax.random.randint(key, (), 0, self.columns, jnp.int32),
            paddle_column=jnp.full((), self.columns // 2, jnp.int32),
        )
        return state, types.restart(self._observe(state))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Moves the paddle, then lets the ball fall by one row."""
        move = jnp.asarray(action, jnp.int32) - 1
        state = State(
            ball_row=state.ball_row + 1,
            ball_column=state.ball_column,
            paddle_column=jnp.clip(state.paddle_column + move, 0, self.columns - 1),
        )
        landed = state.ball_row >= self.rows - 1
        caught = state.ball_column == state.paddle_column
        reward = jnp.where(landed, jnp.where(caught, 1.0, -1.0), 0.0)
        return state, types.transition(self._observe(state), reward, terminated=landed)

    def render(self, state: State) -> np.ndarray:
        """Draws the board, uint8 `[height, width, 3]`."""
        image, side = rendering.board(self.rows, self.columns, min_side=200)
        paddle = rendering.cell_centre(self.rows - 1, int(state.paddle_column), side)
        ball = rendering.cell_centre(int(state.ball_row), int(state.ball_column), side)
        image.box(paddle, (side * 0.86, side * 0.86), rendering.BLUE, side * 0.18)
        image.disc(ball, side * 0.3, rendering.ORANGE)
        return image.finish()

    def _observe(self, state: State) -> jax.Array:
        """Returns the image, float32 `[rows, columns, 1]`."""
        # Comparisons rather than scatters: a scatter inside a batched scan is slow on CPU.
        row = jnp.arange(self.rows)[:, None]
        column = jnp.arange(self.columns)[None, :]
        ball = (row == state.ball_row) & (column == state.ball_column)
        paddle = (row == self.rows - 1) & (column == state.paddle_column)
        return (ball | paddle)[..., None].astype(jnp.float32)
