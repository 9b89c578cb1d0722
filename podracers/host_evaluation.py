"""Judges a policy on host environments: what `evaluation` does on those that JAX compiles.

Axis legend: `E` episodes, `B` of them that are played together.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import errors, evaluation, types
from podracers.supervision import closing, pipeline

MAX_BATCH = 64  # simulators that are alive at the same time

_Doing = Callable[[str], AbstractContextManager[None]]  # see `pipeline.Worker.doing`


@dataclasses.dataclass(frozen=True, eq=False)
class HostEvaluator:
    """Plays `E` episodes, a batch of simulators at a time; each counts its first episode only.

    Everything runs on one device, the first of those that hold the parameters: programs of several
    devices stay the runner's.

    Attributes:
      agent: who acts.
      environment: a recipe for host environments.
      num_episodes: `E`. Simulators are slow, so that the default is less than that of `Evaluator`.
      max_steps: where an episode is cut; None for the environment's own limit.
      timeout: seconds that a step of a simulator may take.
    """

    agent: agent_lib.Agent
    environment: environment_lib.HostEnvironmentFactory
    num_episodes: int = 64
    max_steps: int | None = None
    timeout: float = 60.0

    def __post_init__(self):
        if self.num_episodes < 1:
            raise errors.UserError(f"an evaluation of {self.num_episodes} episodes: expected >= 1")

    @property
    def limit(self) -> int:
        """Agent steps after which an episode is cut."""
        limit = self.environment.spec.max_episode_steps
        return self.max_steps or limit or evaluation.DEFAULT_MAX_STEPS

    def run(
        self,
        params: types.PyTree,
        key: jax.Array,
        stop: Callable[[], bool] = lambda: False,
    ) -> evaluation.Episodes:
        """Returns what the policy reaches; the same key gives the same episodes.

        Raises:
          evaluation.Stopped: `stop()` was true before the end.
          pipeline.WorkerError: a simulator hangs.
        """
        try:
            return pipeline.call(
                "evaluation",
                lambda worker: self._run(params, key, worker.doing),
                self.timeout,
                stop,
            )
        except pipeline.Cancelled as error:
            raise evaluation.Stopped from error

    def _run(self, params: types.PyTree, key: jax.Array, doing: _Doing) -> evaluation.Episodes:
        count = self.num_episodes
        # Batches of one size, so that acting compiles once; what is beyond the last is dropped.
        size = -(-count // -(-count // MAX_BATCH))
        batches = [
            self._play(params, key, np.arange(start, start + size, dtype=np.int32), doing)
            for start in range(0, count, size)
        ]
        return evaluation.Episodes(*(np.concatenate(leaves)[:count] for leaves in zip(*batches)))

    def moments(
        self,
        params: types.PyTree,
        key: jax.Array,
        env_id: np.ndarray,
        doing: _Doing,
    ) -> Iterator[tuple[environment_lib.HostEnvironment, types.TimeStep]]:
        """Yields some environments, and their time steps `[B, ...]` up to the limit.

        It has to be closed.

        Args:
          params: what the agent acts with.
          key: of the evaluation.
          env_id: `[B]` int32, which of its episodes.
          doing: is told what happens.
        """
        params = jax.tree.map(evaluation.first_shard, params)
        device = evaluation.device(params)
        key = jax.device_put(key, device)
        with doing(pipeline.COMPILING):
            actor_state, act_keys = self._begin(key, jax.device_put(env_id, device))
        with doing(pipeline.STARTING):
            host = self.environment.make(key, env_id, _num_threads())
        try:
            with doing(pipeline.STARTING):
                timestep = host.reset()
            yield host, timestep
            for time in range(self.limit):
                with doing("inference" if time else pipeline.COMPILING):
                    action, actor_state = self._act(
                        params, actor_state, timestep, act_keys, np.int32(time)
                    )
                    action = np.asarray(jax.device_get(action))
                with doing("environment step" if time else pipeline.STARTING):
                    host.send(action)
                    timestep = host.recv()
                yield host, timestep
        finally:
            closing.close(host)

    def _play(
        self, params: types.PyTree, key: jax.Array, env_id: np.ndarray, doing: _Doing
    ) -> evaluation.Episodes:
        """Returns a batch of episodes, leaves `[B]`."""
        returns = np.zeros(env_id.shape, np.float64)
        lengths = np.zeros(env_id.shape, np.int32)
        finished = np.zeros(env_id.shape, np.bool_)
        counted = env_id < self.num_episodes
        with contextlib.closing(self.moments(params, key, env_id, doing)) as moments:
            next(moments)
            for _, timestep in moments:
                returns += np.where(finished, 0.0, timestep.reward)
                lengths += ~finished
                finished |= timestep.last()
                if np.all(finished[counted]):
                    break
        return evaluation.Episodes(returns.astype(np.float32), lengths, finished)

    @functools.cached_property
    def _begin(self):
        """`(key, env_id [B]) -> (actor_state, act_keys [B])`."""

        def begin(key, env_id):
            _, act_keys = jax.vmap(evaluation.episode_keys, (None, 0))(key, env_id)
            return self.agent.init_actor(env_id, self.num_episodes, True), act_keys

        return jax.jit(begin)

    @functools.cached_property
    def _act(self):
        """`(params, actor_state, timestep, act_keys [B], time) -> (action, actor_state)`."""

        def act(params, actor_state, timestep, act_keys, time):
            step_keys = jax.vmap(jax.random.fold_in, (0, None))(act_keys, time)
            action, actor_state, _ = self.agent.act(
                params, actor_state, timestep, step_keys, evaluation=True
            )
            return action, actor_state

        return jax.jit(act)


def record(
    agent: agent_lib.Agent,
    environment: environment_lib.HostEnvironmentFactory,
    params: types.PyTree,
    key: jax.Array,
    max_steps: int | None = None,
) -> list[types.TimeStep]:
    """Plays one episode and returns its time steps (no batch axis), for rendering.

    Args:
      agent: who acts.
      environment: a recipe for host environments.
      params: what the agent acts with.
      key: of the episode: that of `HostEvaluator.run` gives the first of its episodes.
      max_steps: where to stop; None for the environment's own limit.
    """
    return _play_one(
        HostEvaluator(agent, environment, 1, max_steps),
        params,
        key,
        lambda _, timestep: jax.tree.map(lambda leaf: leaf[0], timestep),
    )


def film(
    agent: agent_lib.Agent,
    environment: environment_lib.HostEnvironmentFactory,
    params: types.PyTree,
    key: jax.Array,
    max_steps: int | None = None,
) -> list[np.ndarray]:
    """Plays the episode of `record` in a simulator that draws itself; returns its pictures.

    Args: see `record`; the environment has `filmed`.
    """
    evaluator = HostEvaluator(agent, environment.filmed(), 1, max_steps)
    return _play_one(evaluator, params, key, lambda host, _: host.render()[0])


def _play_one(
    evaluator: HostEvaluator,
    params: types.PyTree,
    key: jax.Array,
    take: Callable[[environment_lib.HostEnvironment, types.TimeStep], Any],
) -> list[Any]:
    """Plays the first episode, and returns what `take` makes of each moment of it."""
    env_id = np.zeros(1, np.int32)

    def play(worker: pipeline.Worker) -> list[Any]:
        taken = []
        with contextlib.closing(evaluator.moments(params, key, env_id, worker.doing)) as moments:
            for host, timestep in moments:
                taken.append(take(host, timestep))
                if timestep.last()[0]:
                    break
        return taken

    return pipeline.call("recording", play, evaluator.timeout)


def _num_threads() -> int:
    """Returns how many of the host's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
