"""The Agent protocol: pure functions that are independent of the runner.

Axis legend: `T` time, `B` the streams of one shard (of one device, or of one actor thread).
"""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax

from podracers import types


class Policy(Protocol):
    """Frozen dataclass with the methods of an agent that act."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the actor state of `B` streams: recurrent core, exploration, previous action.

        Args:
          env_id: `[B]` int32, the global index of each stream.
          num_envs: number of streams in all (environments times their agents).
          evaluation: whether the streams are for evaluation.
        """

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
          actor_state: `[B, ...]`; the agent resets it where `timestep` is FIRST.
          timestep: `[B, ...]`.
          key: `[B]` typed keys, one for each stream, so that a stream's actions do not depend on
            its device, its thread or other streams.
          evaluation: act without exploration (static).

        Returns:
          `(action, actor_state, extras)`, each `[B, ...]`.
        """


@runtime_checkable
class Agent(Policy, Protocol):
    """Frozen dataclass of static configuration, built from an `EnvironmentSpec` (`spec=`).

    An agent with a stochastic policy may have a field `greedy_evaluation: bool`: whether `act`
    takes the most probable action in evaluation. If it is false, evaluations measure both.

    An agent may have a method `check_run(num_envs, rollout_length, num_updates)`, which raises an
    `errors.UserError` if its parameters would be the same after a run of this size as before.

    An agent whose runs may begin with the parameters of another run (`Experiment.initial_run`) has
    a method `restart(learner)`. Its learner has a field `params`, or `train_state.params`, and
    `normalizer` if it has statistics of observations. `restart` receives the result of
    `init_learner` in which leaves of these fields were replaced. It returns this learner with all
    state that depends on the leaves recomputed, such as the optimizer's and target parameters.
    """

    def init_learner(self, key: jax.Array) -> Any:
        """Returns the state that learner devices share: parameters, optimizer state, counters."""

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns the memory of one learner device; `()` for an agent without memory.

        Runners concatenate the devices' memories along the first axis of every leaf. If that axis
        is the streams, a run can be resumed with another number of devices.

        Args:
          rollout: a template of one shard's rollout; only its shapes and dtypes are used.
        """

    def actor_params(self, learner: Any) -> types.PyTree:
        """Returns the part of the learner that `act` needs and that is sent to actors."""

    def update(
        self, state: types.AgentState, rollout: types.Rollout, key: jax.Array
    ) -> tuple[types.AgentState, dict[str, types.Mean]]:
        """Learns from one rollout in zero or more gradient steps; called once for every rollout.

        Runs under the mapped axis of `podracers.parallel`, on this device's shard of the rollout.

        Args:
          state: the learner (equal on all devices) and this device's memory.
          rollout: `[T, B, ...]`, this device's streams.
          key: one typed key, equal on all devices.

        Returns:
          The new state, and this device's share of the metrics, which the runner merges.
        """


def greedy(agent: Agent) -> Agent | None:
    """Returns the agent with greedy evaluations; None if they are greedy, or it has no choice."""
    if getattr(agent, "greedy_evaluation", True):
        return None
    return dataclasses.replace(agent, greedy_evaluation=True)


def without_replay(state: types.PyTree) -> types.PyTree:
    """Returns a runner's state with `()` in the place of replay, nodes with `is_replay = True`."""
    return jax.tree.map(lambda x: () if _is_replay(x) else x, state, is_leaf=_is_replay)


def with_replay(state: types.PyTree, fresh: types.PyTree) -> types.PyTree:
    """Returns a state that has the replay of `fresh`, a complete state, where it has none."""
    return jax.tree.map(
        lambda x, y: y if jax.tree.leaves(y) else x, fresh, state, is_leaf=_is_replay
    )


def _is_replay(node: Any) -> bool:
    return getattr(node, "is_replay", False)
