"""What an agent is: a handful of pure functions that know nothing of the runner.

Axis legend: `T` time, `B` the streams of one shard (of one device, or of one actor thread).
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax

from podracers import types


@runtime_checkable
class Agent(Protocol):
    """A frozen dataclass of static configuration, built from an `EnvironmentSpec` (`spec=`).

    An agent whose policy is stochastic may have one more field, `greedy_evaluation: bool`: whether
    `act` takes the most probable action in evaluation, or samples it. Evaluations then measure both
    (see `greedy`).
    """

    def init_learner(self, key: jax.Array) -> Any:
        """Returns what is identical on every learner device: parameters, optimizer, counters."""

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns what one learner device keeps to itself; `()` for an agent without memory.

        Every leaf has a first axis, along which runners lay the devices' memories side by side:
        best that of the streams, for then any number of devices can go on with what another saved.

        Args:
          rollout: a template of one shard's rollout; only its shapes and dtypes count.
        """

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the actor state of `B` streams: recurrent core, exploration, previous action.

        Args:
          env_id: `[B]` int32, the global index of each stream.
          num_envs: number of streams in all.
          evaluation: whether the streams are evaluated rather than learnt from.
        """

    def actor_params(self, learner: Any) -> types.PyTree:
        """Returns what acting needs of the learner: the part that is shipped to actors."""

    def act(
        self,
        params: types.PyTree,
        actor_state: Any,
        timestep: types.TimeStep,
        key: jax.Array,
        evaluation: bool = False,
    ) -> tuple[types.PyTree, Any, types.PyTree]:
        """Chooses an action for each of `B` streams.

        Args:
          params: the result of `actor_params`.
          actor_state: `[B, ...]`; reset here, by the agent, where `timestep` is FIRST.
          timestep: `[B, ...]`.
          key: `[B]` typed keys, one a stream: what a stream does never depends on which device or
            thread carries it, or on its neighbours.
          evaluation: act as the policy is to be judged, without what only serves exploration
            (static).

        Returns:
          `(action, actor_state, extras)`, each `[B, ...]`.
        """

    def update(
        self, state: types.AgentState, rollout: types.Rollout, key: jax.Array
    ) -> tuple[types.AgentState, dict[str, types.Mean]]:
        """Learns from one rollout, in zero or more gradient steps; called once a rollout, always.

        Runs under the mapped axis of `podracers.parallel`, on this device's shard of the rollout.

        Args:
          state: the learner (equal on all devices) and this device's memory.
          rollout: `[T, B, ...]`, this device's streams.
          key: one typed key, equal on all devices.

        Returns:
          The new state, and metrics that are this device's share: the runner merges them.
        """


def greedy(agent: Agent) -> Agent | None:
    """Returns the agent with greedy evaluations, for the same parameters.

    Args:
      agent: any agent.

    Returns:
      None where its evaluations are greedy already, or it has no field `greedy_evaluation`.
    """
    if getattr(agent, "greedy_evaluation", True):
        return None
    return dataclasses.replace(agent, greedy_evaluation=True)


def without_replay(state: types.PyTree) -> types.PyTree:
    """Returns a runner's state with `()` in the place of replay.

    Replay is whatever node of an agent's memory has an attribute `is_replay`: past rollouts, in the
    place of which an agent can begin with none.
    """
    return jax.tree.map(lambda x: () if _is_replay(x) else x, state, is_leaf=_is_replay)


def with_replay(state: types.PyTree, fresh: types.PyTree) -> types.PyTree:
    """Returns a state with the replay of another one wherever it has none.

    Args:
      state: as a runner made it, or as `without_replay` returned it.
      fresh: a whole one.
    """

    def one(given, x):
        return given if _is_replay(given) and not jax.tree.leaves(x) else x

    return jax.tree.map(one, fresh, state, is_leaf=_is_replay)


def _is_replay(node: Any) -> bool:
    return getattr(node, "is_replay", False)
