"""Adaptor of Pgx, an optional package: board and card games of one or two players.

Koyama et al., "Pgx: Hardware-Accelerated Parallel Game Simulators for Reinforcement Learning",
2023, https://arxiv.org/abs/2303.17503. The package is imported lazily: its import creates arrays.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors, opponents, rendering
from podracers import environment, errors, types

HIDDEN = ("kuhn_poker", "leduc_holdem")
MOVES_TWICE = ("backgammon", "leduc_holdem")  # one player may move twice in a row
_STONES = ("connect_four", "go_9x9", "go_19x19", "othello", "tic_tac_toe")  # planes 0 and 1


@dataclasses.dataclass(frozen=True, eq=False)
class Pgx(adaptors.Adaptor):
    """A game of Pgx under the contract.

    A game of two players is played by one agent against itself: every time step is that of the
    player to move, its reward is that of the player who moved, and the discount is -1 where the
    other player is to move, whoever that is by the rules of the game. An illegal action loses.
    Evaluations are games against `opponent`. The observation has Pgx's planes or numbers as
    `observation`, beside the mask of legal actions.

    Attributes:
      name: id in Pgx, such as `connect_four`.
      options: arguments of the game's constructor, such as `size` of `hex`.
      opponent: `opponent()` returns the player of evaluations; see `environments.opponents`.
      opening_moves: largest number of random moves before an episode begins, in training only. Each
        number from 0 on is equally likely; a move that would end the game is not made. In self-play
        without them, agents that explore little learn one line of play.
    """

    opponent: Callable[..., opponents.Opponent] = opponents.Random
    opening_moves: int = 0

    def __post_init__(self):
        super().__post_init__()
        errors.require_count(self, "opening_moves", least=0)

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        state = jax.eval_shape(self._built.init, jax.random.key(0))
        arrays = state.observation, state.legal_action_mask
        observation, mask = (specs.Array(array.shape, array.dtype) for array in arrays)
        players = self._built.num_players
        return environment.EnvironmentSpec(
            name=self.name,
            observation={"observation": observation, environment.ACTION_MASK: mask},
            action=specs.DiscreteArray(mask.shape[0], name="action"),
            players=players,
            alternates=players == 2 and self.name not in MOVES_TWICE,
            hidden=self.name in HIDDEN,
        )

    @property
    def evaluation_environment(self) -> environment.Environment:
        """Games against `opponent`; absent for one player."""
        if self.spec.players == 1:
            raise AttributeError(f"{self.name} has one player")
        return opponents.Against(dataclasses.replace(self, opening_moves=0), self.opponent)

    def reset(self, key: jax.Array) -> tuple[adaptors.KeyedState, types.TimeStep]:
        reset_key, step_key = jax.random.split(key)
        state = adaptors.KeyedState(adaptors.strong(self._built.init(reset_key)), step_key)
        if self.opening_moves:
            state = self._opened(state, jax.random.fold_in(reset_key, 1))
        return state, types.restart(_observation(state.inner))

    def _opened(self, state: adaptors.KeyedState, key: jax.Array) -> adaptors.KeyedState:
        """Returns the state after random moves, as many as are drawn."""
        count_key, key = jax.random.split(key)
        count = jax.random.randint(count_key, (), 0, self.opening_moves + 1)

        def move(index: jax.Array, state: adaptors.KeyedState) -> adaptors.KeyedState:
            move_key = jax.random.fold_in(key, index)
            observation = _observation(state.inner)
            action = environment.random_action(self.spec.action, observation, move_key)
            moved, timestep = self.step(state, action)
            return jax.tree.map(lambda x, y: jnp.where(timestep.last(), x, y), state, moved)

        return jax.lax.fori_loop(0, count, move, state)

    def step(
        self, state: adaptors.KeyedState, action: jax.Array
    ) -> tuple[adaptors.KeyedState, types.TimeStep]:
        mover = state.inner.current_player
        key = jax.random.fold_in(state.key, state.inner._step_count)
        inner = adaptors.strong(self._built.step(state.inner, action, key))
        timestep = types.transition(
            _observation(inner),
            inner.rewards[mover],
            terminated=inner.terminated,
            truncated=inner.truncated,
            passes=inner.current_player != mover,
        )
        return adaptors.KeyedState(inner, state.key), timestep

    @property
    def render(self) -> Callable[[adaptors.KeyedState], np.ndarray]:
        """Draws a board of stones, those of the first player dark; absent for other games."""
        if self.name not in _STONES:
            raise AttributeError(f"{self.name} has no picture")
        return _draw

    def _make(self) -> Any:
        name, options = self.name, dict(self.options)
        games = adaptors.optional_import("pgx", f"environment '{name}'")
        known = [game for game in games.available_envs() if not game.startswith("minatar")]
        errors.require_known("Pgx has no game", name, known)
        inner = games.make(name)
        if inner.num_players > 2:
            raise errors.UserError(
                f"Pgx's {name} has {inner.num_players} players, supported are 1 and 2"
            )
        if name == "go_9x9":
            options = {"size": 9} | options
        parameters = [x for x in inspect.signature(type(inner)).parameters if x != "kwargs"]
        with adaptors.options_of(f"Pgx's {name}", options, parameters):
            return type(inner)(**options)


def _observation(state: Any) -> dict[str, jax.Array]:
    return {"observation": state.observation, environment.ACTION_MASK: state.legal_action_mask}


def _draw(state: adaptors.KeyedState) -> np.ndarray:
    """Returns a picture of a state, uint8 `[height, width, 3]`."""
    planes = np.asarray(state.inner.observation)[..., :2]
    # Planes are those of the player to move, and the moves of the first one have even numbers.
    colours = (rendering.INK, rendering.ORANGE)[:: 1 - 2 * (int(state.inner._step_count) % 2)]
    image, side = rendering.board(*planes.shape[:2])
    for row, column, plane in np.argwhere(planes):
        centre = rendering.cell_centre(row, column, side)
        image.disc(centre, 0.4 * side, colours[plane])
    return image.finish()
