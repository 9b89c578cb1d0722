"""Judges a policy on host environments: what `evaluation` does on those that JAX compiles.

Axis legend: `E` episodes, `B` of them that are played together.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import jax
import numpy as np

from podracers import agent as agent_lib
from podracers import closing, errors, evaluation, pipeline, types
from podracers import environment as environment_lib

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

    def timesteps(
        self,
        params: types.PyTree,
        key: jax.Array,
        env_id: np.ndarray,
        doing: _Doing,
    ) -> Iterator[types.TimeStep]:
        """Yields the time steps `[B, ...]` of some episodes, up to the limit; has to be closed.

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
            yield timestep
            for time in range(self.limit):
                with doing("inference" if time else pipeline.COMPILING):
                    action, actor_state = self._act(
                        params, actor_state, timestep, act_keys, np.int32(time)
                    )
                    action = np.asarray(jax.device_get(action))
                with doing("environment step" if time else pipeline.STARTING):
                    host.send(action)
                    timestep = host.recv()
                yield timestep
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
        with contextlib.closing(self.timesteps(params, key, env_id, doing)) as timesteps:
            next(timesteps)
            for timestep in timesteps:
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
    evaluator = HostEvaluator(agent, environment, 1, max_steps)
    env_id = np.zeros(1, np.int32)

    def play(worker: pipeline.Worker) -> list[types.TimeStep]:
        recorded = []
        with contextlib.closing(
            evaluator.timesteps(params, key, env_id, worker.doing)
        ) as timesteps:
            for timestep in timesteps:
                recorded.append(jax.tree.map(lambda leaf: leaf[0], timestep))
                if recorded[-1].last():
                    break
        return recorded

    return pipeline.call("recording", play, evaluator.timeout)


def _num_threads() -> int:
    """Returns how many of the host's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
