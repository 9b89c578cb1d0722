"""EnvPool's environments: more than 1,600 tasks, stepped in batches by threads of C++.

EnvPool (Weng et al., "EnvPool: A Highly Parallel Reinforcement Learning Environment Execution
Engine", https://arxiv.org/abs/2206.10558) is imported lazily: its import takes seconds. `families`
holds the differences between its simulators.

Axis legend: `B` streams.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from environments import adaptors, episode_metrics, opponents, pgx
from environments.envpool import families, scratch, spaces
from podracers import environment, errors, types

_LOGGER = logging.getLogger(__name__)
_STEP = ("reward", "done", "trunc", "elapsed_step")
_PLAYERS = ("info:current_player", "info:env_id", "info:players.env_id", "info:players.id")


@dataclasses.dataclass(frozen=True, eq=False)
class EnvPool:
    """A factory of EnvPool environments that keep the contract (`docs/architecture.md`).

    - Observations are an array, or nested dicts of arrays; 64-bit floats become 32-bit floats, and
      images are `[height, width, channels]`.
    - Frames are not stacked (networks do that): the option `stack_num` is 1 unless set.
    - A multi-discrete action whose mask covers the joint choice becomes one flat discrete action.
    - The time limit truncates, unless the task ends by its own rules on the same step (`families`
      has the exceptions).
    - Games of two players keep the rules of `environments.pgx`, whose games they are, and whose
      package their evaluations need.

    Attributes:
      task_id: EnvPool id, such as `Pong-v5`, `Hopper-v4` or `Jumanji/Snake-v1`.
      options: keyword arguments of `envpool.make` for the task.
      max_episode_steps: time limit, in agent steps; None for the task's own.
      action_repeat: number of EnvPool's steps per agent step. Rewards are summed (the option
        `frame_skip` of dm_control's tasks returns only the last one); the end of an episode ends
        the agent step. Each of EnvPool's steps creates an observation.
      observation_keys: parts of a dict observation to keep, beside the action mask; None for all.
      metrics: entries of `info` to report for each episode (rule S6), with a reduction over
        EnvPool's steps: "last", "max", "mean" or "sum", such as `{'x_velocity': 'mean'}`. They are
        added to those of the family, such as `success` (`families.Family.metrics`).
      opponent: of a game of two players, `opponent()` returns the player of evaluations; see
        `environments.opponents`.
    """

    task_id: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_episode_steps: int | None = None
    action_repeat: int = 1
    observation_keys: Sequence[str] | None = None
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    opponent: Callable[..., opponents.Opponent] = opponents.Random

    def __post_init__(self):
        errors.require_types(self)
        errors.require_count(self, "action_repeat", "max_episode_steps")
        episode_metrics.check("EnvPool.metrics", self.metrics)

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of one environment; no simulator is started."""
        limit = self._task.limit
        players = self._task.pool_spec.config.max_num_players
        name, _ = families.GAMES.get(self.task_id, ("", {}))
        return environment.EnvironmentSpec(
            self.task_id,
            jax.tree.map(lambda leaf: leaf.spec, self._observation),
            self._actions.spec,
            -(-limit // self.action_repeat) if limit < families.NO_LIMIT else None,
            metrics=tuple(self._reductions),
            players=players,
            alternates=players == 2 and name not in pgx.MOVES_TWICE,
            hidden=name in pgx.HIDDEN,
        )

    @property
    def evaluation_environment(self) -> environment.Environment:
        """Games against `opponent`, in JAX; absent for one player, and for Chinese rules of Go."""
        if self.task_id not in families.GAMES:
            raise AttributeError(f"Pgx has no {self.task_id}")
        return pgx.Pgx(*families.GAMES[self.task_id], self.opponent).evaluation_environment

    @property
    def render(self) -> Callable[[types.TimeStep], np.ndarray]:
        """Draws a time step; the attribute is absent unless the observation is an image."""
        return adaptors.image_of(self.spec)

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> "EnvPoolEnvironment":
        """Starts `B` simulators (see `environment.HostEnvironmentFactory`).

        Raises:
          errors.UserError: EnvPool cannot start them.
        """
        import envpool  # noqa: PLC0415  (slow to import)

        seeds = environment.stream_seeds(key, env_id).tolist()
        options = self._task.options
        start = functools.partial(
            envpool.make_gymnasium,
            self.task_id,
            num_envs=len(seeds),
            num_threads=max(1, min(num_threads, len(seeds))),
            seed=seeds,
            **options,
        )
        folders = self._task.family.folders
        directory = scratch.Directory(folders) if folders else None
        try:
            # No local variable refers to the pool: the simulators end with its last reference, and
            # a frame that imports modules for the first time may stay alive with its variables.
            with adaptors.options_of(f"EnvPool's {self.task_id}", options):
                return EnvPoolEnvironment(
                    directory.start(start) if directory else start(), self, directory
                )
        except BaseException:
            if directory:
                directory.close()
            raise

    @functools.cached_property
    def _task(self) -> families.Task:
        if self.task_id.rpartition("-")[0] in families.ONE_PROBLEM:
            _LOGGER.warning(
                "%s has one problem in all episodes; jumanji.Jumanji draws new ones", self.task_id
            )
        return families.load(self.task_id, self.options, self.max_episode_steps, self.action_repeat)

    @functools.cached_property
    def _actions(self) -> adaptors.ActionCodec:
        return spaces.actions(self.task_id, self._task.pool_spec)

    @functools.cached_property
    def _observation(self) -> types.PyTree:
        return spaces.observation(
            self.task_id, self._task.pool_spec, self._actions, self.observation_keys
        )

    @functools.cached_property
    def _reductions(self) -> dict[str, str]:
        """The reduction of each entry of `info` that is reported."""
        numbers = spaces.numbers(self._task.pool_spec)
        for name in self.metrics:
            errors.require_known(
                f"EnvPool.metrics: info of {self.task_id} has no number", name, numbers
            )
        defaults = self._task.family.metrics
        return {name: defaults[name] for name in numbers if name in defaults} | {**self.metrics}


class EnvPoolEnvironment:
    """`B` simulators of one task; `EnvPool.make` makes it (see `environment.HostEnvironment`).

    EnvPool restarts episodes that it ended at the next step. Rows that the adaptor ended at the
    time limit are reset explicitly in that step, while the others are stepped.
    """

    def __init__(self, pool: Any, factory: EnvPool, directory: scratch.Directory | None = None):
        self._pool, self._factory, self._directory = pool, factory, directory
        self._task, self.num_envs = factory._task, pool.num_envs
        self._rows = np.arange(self.num_envs, dtype=np.int32)
        self._last = np.zeros(self.num_envs, bool)  # streams whose latest time step was LAST
        self._cut = np.zeros(self.num_envs, bool)  # the adaptor ended the episode
        self._action = np.empty(0)  # actions of the current step, in EnvPool's format
        self._mover = np.zeros(self.num_envs, np.int32)  # index of the player to move, of two
        self._passes = np.zeros(self.num_envs, bool)  # the latest step passed the turn
        self._metrics = episode_metrics.EpisodeMetrics(factory._reductions, self.num_envs)
        self._infos = {name: f"info:{name}" for name in factory._reductions}
        parts = [leaf.key for leaf in jax.tree.leaves(factory._observation)]
        keys = {*_STEP, *self._task.family.evidence, *parts, *self._infos.values()}
        if factory.spec.players == 2:
            keys |= {*_PLAYERS}
        self._index = {key: i for i, key in enumerate(pool._state_keys) if key in keys}

    def reset(self) -> types.TimeStep[np.ndarray]:
        self._pool.async_reset()
        self._last[:] = True
        self._cut[:] = False
        self._metrics.restart(self._last)
        return self._time_step(self._receive())

    def send(self, action: np.ndarray) -> None:
        if self._cut.all():
            self._pool.async_reset()
            return
        self._action = self._factory._actions.decode(action)
        if self._cut.any():
            # EnvPool returns the batch of one call at a time: `recv` calls the resets.
            self._step(~self._cut)
        else:
            self._pool.send(self._action)

    def recv(self) -> types.TimeStep[np.ndarray]:
        state = self._receive()
        if self._cut.any() and not self._cut.all():
            self._pool._reset(self._rows[self._cut])
            state = _merge(self._cut, self._receive(), state)
        self._metrics.restart(self._last)
        going = ~self._last
        self._report({key: state[key][going] for key in self._infos.values()}, going)
        for _ in range(self._factory.action_repeat - 1):
            going = ~(self._last | self._ended(state))
            if not going.any():
                break
            self._step(going)
            later = self._receive()
            self._report(later, going)
            later["reward"] = later["reward"] + state["reward"][going]
            state = _merge(going, later, {key: value[~going] for key, value in state.items()})
        return self._time_step(state)

    def close(self) -> None:
        """Ends the simulators' threads and processes."""
        self._pool = None  # EnvPool has no `close`: deleting the pool frees everything
        directory, self._directory = self._directory, None
        if directory:
            directory.close()

    def _step(self, rows: np.ndarray) -> None:
        """Begins a step of the environments selected by a mask `[B]`."""
        self._pool.send(self._action[rows], self._rows[rows])

    def _report(self, state: dict[str, np.ndarray], rows: np.ndarray) -> None:
        """Adds the numbers of one of EnvPool's steps, of the environments of a mask `[B]`."""
        for name, key in self._infos.items():
            self._metrics.add(name, state[key], rows)

    def _ended(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Returns `[B]` bool, where EnvPool or the time limit ends an episode."""
        return state["done"] | (state["elapsed_step"] >= self._task.limit)

    def _receive(self) -> dict[str, np.ndarray]:
        """Returns new arrays of the required entries, by EnvPool's names."""
        # The public `recv` also creates unused arrays, such as Atari's memory.
        arrays = self._pool._recv()
        state = {key: arrays[i] for key, i in self._index.items()}
        if self._factory.spec.players == 2:
            state = self._of_players(state)
        return state

    def _of_players(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns arrays `[B, ...]` from those of games, some of which have a row a player.

        They are the observation of the player to move, and the reward of the player who moved.
        """
        # EnvPool returns games in the order in which they were stepped.
        order = np.argsort(state.pop("info:env_id"))
        state = {key: x[order] if len(x) == len(order) else x for key, x in state.items()}
        rows = np.lexsort((state.pop("info:players.id"), state.pop("info:players.env_id")))
        mover, self._mover = self._mover, state["info:current_player"]
        for key, player in (("obs", self._mover), ("reward", mover)):
            state[key] = state[key][rows[2 * self._rows + player]]
        self._passes = self._mover != mover
        return state

    def _time_step(self, state: dict[str, np.ndarray]) -> types.TimeStep[np.ndarray]:
        first = self._last
        terminated = self._task.terminated(state) & ~first
        last = self._ended(state) & ~first
        self._last, self._cut = last, last & ~state["done"]
        step_type = np.where(last, types.LAST, types.MID)
        sign = np.where(self._passes, -1.0, 1.0)
        return types.TimeStep(
            observation=jax.tree.map(lambda leaf: leaf.read(state), self._factory._observation),
            # Some families report a reward of the reset.
            reward=np.where(first, 0.0, state["reward"]).astype(np.float32),
            discount=np.where(terminated, 0.0, np.where(first, 1.0, sign)).astype(np.float32),
            step_type=np.where(first, types.FIRST, step_type).astype(np.int8),
            metrics=self._metrics.read(),
        )


def _merge(
    mask: np.ndarray, chosen: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns arrays `[B, ...]`: rows of `chosen` where `mask` `[B]` is true, others elsewhere."""
    merged = {}
    for key, array in others.items():
        merged[key] = np.empty((len(mask), *array.shape[1:]), array.dtype)
        merged[key][mask], merged[key][~mask] = chosen[key], array
    return merged
