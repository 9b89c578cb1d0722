"""Games of two players against an opponent, which is part of the environment.

`Against` turns a game (an environment whose `spec.players` is 2) into one for a single player, whom
the opponent answers within the step. It is the environment of evaluations of every game, and may be
that of training, under both runners.

Axis legend: `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import mctx
import numpy as np

from environments import wrappers
from podracers import environment, errors, types
from podracers.training import trained


class Opponent(Protocol):
    """A player of games of one stream, without batch axis; pure functions."""

    def init(self, game: environment.Environment) -> Any:
        """Returns its memory before a game."""

    def act(
        self,
        game: environment.Environment,
        memory: Any,
        state: Any,
        timestep: types.TimeStep,
        key: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Returns an action and the memory after it, where it is to move in a state of the game."""


class _Memoryless:
    """An opponent that plays each position anew."""

    def init(self, game: environment.Environment) -> tuple[()]:
        return ()


@dataclasses.dataclass(frozen=True)
class Random(_Memoryless):
    """Plays uniformly random legal actions."""

    def act(self, game, memory, state, timestep, key):
        return environment.random_action(game.spec.action, timestep.observation, key), memory


@dataclasses.dataclass(frozen=True)
class Greedy(_Memoryless):
    """Plays the action with the largest immediate reward, a win if there is one; ties at random."""

    def act(self, game, memory, state, timestep, key):
        state = wrappers.redrawn(state, key)
        actions = jnp.arange(game.spec.num_actions, dtype=game.spec.action.dtype)
        _, after = jax.vmap(game.step, (None, 0))(state, actions)
        return _random_best(after.reward, _legal(game, timestep), key), memory


@dataclasses.dataclass(frozen=True)
class UCT(_Memoryless):
    """Monte Carlo tree search with random playouts, without a network, by mctx.

    Kocsis and Szepesvári, "Bandit Based Monte-Carlo Planning", 2006,
    https://doi.org/10.1007/11871842_29, with the exploration term of PUCT and uniform priors.
    Each search draws its own random events.

    Attributes:
      simulations: playouts of each move.
      exploration: factor of the exploration term.
    """

    simulations: int = 100
    exploration: float = 1.5

    def __post_init__(self):
        errors.require_count(self, "simulations")

    def act(self, game, memory, state, timestep, key):
        legal = _legal(game, timestep)
        # Its states have no typed keys, which a tree cannot store.
        model = game if game.spec.model else wrappers.Searchable(game)
        timestep = timestep._replace(observation=environment.without_state(timestep.observation))
        root = self._node(model, model.pack(wrappers.redrawn(state, key)), timestep, key)
        # The priors of `A` actions are 1 / A, and PUCT multiplies them by this constant.
        constant = self.exploration * jnp.sqrt(legal.size)
        plan = mctx.muzero_policy(
            params=(),
            rng_key=key,
            root=jax.tree.map(lambda x: jnp.asarray(x)[None], root),
            recurrent_fn=jax.tree_util.Partial(functools.partial(self._simulate, model)),
            num_simulations=self.simulations,
            invalid_actions=~legal[None],
            qtransform=functools.partial(mctx.qtransform_by_min_max, min_value=-1.0, max_value=1.0),
            dirichlet_fraction=0.0,
            pb_c_init=constant,
            temperature=0.0,
        )
        return plan.action[0].astype(game.spec.action.dtype), memory

    def _node(self, model, state, timestep, key) -> mctx.RootFnOutput:
        value = _playout(model.inner, model.unpack(state), timestep, key)
        prior = jnp.where(_legal(model, timestep), 0.0, jnp.finfo(jnp.float32).min)
        return mctx.RootFnOutput(
            prior_logits=prior, value=value, embedding=(state, timestep.last())
        )

    def _simulate(self, model, params, key, action, embedding):
        """Returns the step from a node `[1, ...]`; an ended game stays as it is, with value 0."""
        state, ended = jax.tree.map(lambda x: x[0], embedding)
        timestep, after = model.step_from(state, action[0])
        node = self._node(model, after, timestep, key)
        output = mctx.RecurrentFnOutput(
            reward=jnp.where(ended, 0.0, timestep.reward),
            discount=jnp.where(ended, 0.0, timestep.discount),
            prior_logits=node.prior_logits,
            value=jnp.where(ended, 0.0, node.value),
        )
        embedding = jax.tree.map(
            lambda x, y: jnp.where(ended, x, y), (state, ended), (after, timestep.last())
        )
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (output, embedding))


def _playout(game: Any, state: Any, timestep: types.TimeStep, key: jax.Array) -> jax.Array:
    """Returns the return of random moves to the end, for the player to move; 0 after the end."""

    def move(carry):
        state, timestep, key, total, sign = carry
        key, act_key = jax.random.split(key)
        action = environment.random_action(game.spec.action, timestep.observation, act_key)
        state, timestep = game.step(state, action)
        total += sign * timestep.reward
        return state, timestep, key, total, sign * timestep.discount

    start = (state, timestep, key, jnp.float32(0.0), jnp.float32(1.0))
    return jax.lax.while_loop(lambda carry: ~carry[1].last(), move, start)[3]


@dataclasses.dataclass(frozen=True)
class Perfect(_Memoryless):
    """Plays tic-tac-toe without a mistake, at random among the best moves.

    All 5,478 positions are solved at construction. A position's number has a digit of base 3 for
    each cell: 0 if it is empty, 1 if the player to move has it, and 2 if the other one has.
    """

    def act(self, game, memory, state, timestep, key):
        best = self.best_actions(timestep)
        return _random_best(best.astype(jnp.float32), best, key), memory

    def best_actions(self, timestep: types.TimeStep) -> jax.Array:
        """Returns the best actions of the player to move, bool `[A]`."""
        planes = timestep.observation["observation"].reshape(9, 2).astype(jnp.int32)
        return jnp.asarray(_solution())[jnp.dot(planes @ jnp.array([1, 2]), 3 ** jnp.arange(9))]


@dataclasses.dataclass(frozen=True)
class Run:
    """Plays as the trained agent of a run does in evaluations, by its own search if it has one.

    Attributes:
      path: the run directory's path.
      step: the checkpoint of this agent step; None for the newest.
      best: the best evaluated checkpoint instead.
    """

    path: str
    step: int | None = None
    best: bool = False

    def __post_init__(self):
        _ = self.policy  # loaded before any trace

    @functools.cached_property
    def policy(self) -> trained.TrainedPolicy:
        """The agent, with its parameters."""
        return trained.load(self.path, self.best, step=self.step)

    def init(self, game):
        return self.policy.parts.agent.init_actor(jnp.zeros(1, jnp.int32), 1, True)

    def act(self, game, memory, state, timestep, key):
        agent: Any = self.policy.parts.agent
        trained_in: Any = self.policy.parts.environment
        observation = environment.without_state(timestep.observation)
        if trained_in.spec.model is not None:
            packed = trained_in.pack(state)
            observation = wrappers.with_part(observation, environment.STATE, packed)
        seen = timestep._replace(observation=observation, metrics={})
        seen = jax.tree.map(lambda x: jnp.asarray(x)[None], seen)
        action, memory, _ = agent.act(self.policy.params, memory, seen, key[None], True)
        return action[0], memory


_LINES = np.array(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)


@functools.cache
def _solution() -> np.ndarray:
    """Returns the best moves of each position of tic-tac-toe by its number, bool `[19683, 9]`."""
    best, powers = np.zeros((3**9, 9), bool), 3 ** np.arange(9)

    @functools.cache
    def value(cells: tuple[int, ...]) -> int:  # value for the player to move, whose cells are 1
        position = np.array(cells)
        if (position[_LINES] == 2).all(axis=1).any():
            return -1
        empty = np.flatnonzero(position == 0)
        if not empty.size:
            return 0
        other = np.array([0, 2, 1])[position]
        values = [-value((*other[:move], 2, *other[move + 1 :])) for move in empty.tolist()]
        best[position @ powers, empty[np.equal(values, max(values))]] = True
        return max(values)

    value((0,) * 9)
    return best


class AgainstState(NamedTuple):
    """The state of a game against an opponent."""

    game: Any
    timestep: types.TimeStep  # the game's
    memory: Any  # the opponent's
    key: jax.Array  # [] typed key of the opponent's moves
    is_first: jax.Array  # bool: the agent has the first move of the game
    moves: jax.Array  # float32: number of the agent's moves
    best_moves: jax.Array  # float32: number of those that were among the best


@dataclasses.dataclass(frozen=True, eq=False)
class Against:
    """A game whose other player is an opponent: an environment for a single player.

    The agent's seat is drawn for each episode, and the reward of a step is the sum of its own over
    its move and the opponent's answers. At LAST the metrics `win`, `draw` and `loss` are 0 or 1 by
    the sign of the last reward; those of the group `first` (`second`) are NaN where the agent
    had the other seat, so their means are over the episodes with that seat. Against an opponent
    that knows the best moves, `best_moves` is the share of the agent's that are among them.

    An agent that searches gets the state of the game alone, not the opponent's coming draws: the
    game may be a `wrappers.Searchable`.

    Attributes:
      game: an environment with `spec.players = 2`, or `game()` returns it.
      opponent: the opponent, or `opponent()` returns it.
      seat: 0 if the agent always has the first move, 1 if never; None to draw it.
    """

    game: Any
    opponent: Any = Random
    seat: int | None = None
    OUTCOMES: ClassVar[tuple[str, ...]] = ("win", "draw", "loss")

    def __post_init__(self):
        for name in ("game", "opponent"):
            part = getattr(self, name)
            if isinstance(part, type) or not hasattr(part, "step" if name == "game" else "act"):
                object.__setattr__(self, name, part())
        errors.require_count(self, "seat", least=0, most=1)
        spec = self.game.spec
        if spec.players != 2 or spec.max_episode_steps is not None:
            raise errors.UserError(
                f"Against.game: expected a game of two players without a time limit, got "
                f"{environment.name_of(self.game)} (put wrappers.TimeLimit around Against)"
            )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The game's, for one player, with the metrics of the outcome."""
        seats = tuple(f"{seat}/{name}" for seat in ("first", "second") for name in self.OUTCOMES)
        shares = ("best_moves",) if hasattr(self.opponent, "best_actions") else ()
        return dataclasses.replace(
            self.game.spec, players=1, alternates=False, metrics=(*self.OUTCOMES, *seats, *shares)
        )

    def reset(self, key: jax.Array) -> tuple[AgainstState, types.TimeStep]:
        key, seat_key = jax.random.split(key)
        is_first = jax.random.bernoulli(seat_key)
        return self.begin(key, is_first if self.seat is None else jnp.asarray(self.seat == 0))

    def begin(self, key: jax.Array, is_first: jax.Array) -> tuple[AgainstState, types.TimeStep]:
        """Returns the result of `reset` for a seat: whether the agent has the first move."""
        reset_key, key = jax.random.split(key)
        game, timestep = self.game.reset(reset_key)
        zero = jnp.zeros((), jnp.float32)
        memory = self.opponent.init(self.game)
        state = AgainstState(game, timestep, memory, key, is_first, zero, zero)
        state, _ = self._answer(state, ~is_first)
        observation = state.timestep.observation
        return state, types.restart(observation, self._metrics(state, zero))

    def step(self, state: AgainstState, action: jax.Array) -> tuple[AgainstState, types.TimeStep]:
        if hasattr(self.opponent, "best_actions"):
            best = state.best_moves + self.opponent.best_actions(state.timestep)[action]
            state = state._replace(moves=state.moves + 1.0, best_moves=best)
        game, timestep = self.game.step(state.game, action)
        state = state._replace(game=game, timestep=timestep)
        state, answered = self._answer(state, timestep.discount < 0.0)
        reward, last = timestep.reward + answered, state.timestep
        timestep = types.transition(
            last.observation, reward, last.terminated(), last.last(), self._metrics(state, reward)
        )
        return state, timestep

    def _answer(self, state: AgainstState, is_due: jax.Array) -> tuple[AgainstState, jax.Array]:
        """Returns the state where the agent is to move or the game ended, and its rewards."""

        def move(carry):
            state, _, total = carry
            key, act_key = jax.random.split(state.key)
            action, memory = self.opponent.act(
                self.game, state.memory, state.game, state.timestep, act_key
            )
            game, timestep = self.game.step(state.game, action)
            state = state._replace(game=game, timestep=timestep, memory=memory, key=key)
            return state, timestep.discount > 0.0, total - timestep.reward

        start = state, is_due, jnp.zeros((), jnp.float32)
        state, _, total = jax.lax.while_loop(lambda carry: carry[1], move, start)
        return state, total

    def _metrics(self, state: AgainstState, reward: jax.Array) -> dict[str, jax.Array]:
        values = dict(zip(self.OUTCOMES, (reward > 0.0, reward == 0.0, reward < 0.0)))
        for seat, has_seat in (("first", state.is_first), ("second", ~state.is_first)):
            values |= {
                f"{seat}/{name}": jnp.where(has_seat, values[name].astype(jnp.float32), jnp.nan)
                for name in self.OUTCOMES
            }
        if hasattr(self.opponent, "best_actions"):
            values["best_moves"] = state.best_moves / jnp.maximum(state.moves, 1.0)
        return values

    @property
    def render(self) -> Callable[[AgainstState], np.ndarray]:
        """Draws a state; the attribute is absent if the game has none."""
        game: Any = self.game
        draw = game.render
        return lambda state: draw(state.game)


def _legal(game: environment.Environment, timestep: types.TimeStep) -> jax.Array:
    """Returns the legal actions, bool `[A]`."""
    mask = environment.action_mask(timestep.observation)
    return jnp.ones(game.spec.num_actions, bool) if mask is None else mask


def _random_best(score: jax.Array, legal: jax.Array, key: jax.Array) -> jax.Array:
    """Returns a legal action with the largest score `[A]`, at random where several have it."""
    score = jnp.where(legal, score, -jnp.inf)
    noise = jax.random.uniform(key, score.shape)
    return jnp.argmax(jnp.where(score == jnp.max(score), noise, -1.0)).astype(jnp.int32)
