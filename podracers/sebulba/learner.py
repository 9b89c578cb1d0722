"""The program of the learner devices: one update on rollouts that lie there already.

Axis legend: `T` time, `B` streams, `D` learner devices.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import agent as agent_lib
from podracers import keys, metrics, parallel, types
from podracers.sebulba import actor
from podracers.sebulba import placement as placement_lib


class SebulbaState(NamedTuple):
    """What a checkpoint holds: the learner, whole. Simulators are outside of it, and restart."""

    learner: Any  # replicated over learner devices
    memory: Any  # what all learner devices remember, side by side
    episodes: metrics.EpisodeStatistics  # [B] split over learner devices
    key: jax.Array  # typed, constant: every key is folded from it
    update: jax.Array  # int32, how many updates were taken


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """Jitted functions over all learner devices; one thread alone calls them.

    Attributes:
      agent: the agent that learns.
      programs: those of the actors, for the shapes of rollouts.
      placement: the devices that learn, and which actors feed them.
      num_envs: `B`, streams of all actors.
    """

    agent: agent_lib.Agent
    programs: actor.ActorPrograms
    placement: placement_lib.Placement
    num_envs: int

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The learner devices of all processes."""
        return parallel.make_mesh(self.placement.mesh)

    @functools.cached_property
    def init(self):
        """`seed -> SebulbaState`, before the first update."""
        return jax.jit(
            jax.shard_map(
                self.programs.precision.tracing()(self._init_shard),
                mesh=self.mesh,
                in_specs=(jax.sharding.PartitionSpec(),),
                out_specs=self._layout,
                check_vma=False,
            )
        )

    @functools.cached_property
    def learn(self):
        """`(state, pieces) -> (state, report)`; donates `state`."""
        rollouts = (self._layout_of_rollouts,) * self.placement.actors_per_learner
        return jax.jit(
            jax.shard_map(
                self.programs.precision.tracing()(self._learn_shard),
                mesh=self.mesh,
                in_specs=(self._layout, rollouts),
                out_specs=(self._layout, jax.sharding.PartitionSpec()),
                # With the check on, gradients of replicated parameters are summed twice.
                check_vma=False,
            ),
            donate_argnums=0,
        )

    def trace(self, state: SebulbaState) -> jax.stages.Traced:
        """Traces one update from the shapes of a state."""
        params = jax.eval_shape(self.agent.actor_params, state.learner)
        rollout = self.programs.template(params, self.num_envs // self.placement.actors_per_learner)
        piece = parallel.placed(rollout, self.mesh, self._layout_of_rollouts)
        state = parallel.placed(state, self.mesh, self._layout)
        return self.learn.trace(state, (piece,) * self.placement.actors_per_learner)

    @functools.cached_property
    def copy_actor_params(self):
        """`learner -> actor_params`, which no later donation can delete."""
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return jax.jit(
            lambda learner: jax.tree.map(jnp.copy, self.agent.actor_params(learner)),
            out_shardings=replicated,
        )

    def assemble(self, slices: Sequence[types.Rollout]) -> tuple[types.Rollout, ...]:
        """Makes global arrays of what lies on the learner devices, without moving anything.

        Args:
          slices: those of every actor of this process, in order.

        Returns:
          As many rollouts as there are actors to a learner device, for `learn` to join.
        """
        count = self.placement.actors_per_learner
        return tuple(self._assemble(slices[index::count]) for index in range(count))

    def _assemble(self, shards: Sequence[types.Rollout]) -> types.Rollout:
        """Returns the rollout of which each learner device of this process has a shard."""

        def join(axis: int, spec: jax.sharding.PartitionSpec, *arrays: jax.Array) -> jax.Array:
            shape = list(arrays[0].shape)
            shape[axis] *= self.mesh.devices.size
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(arrays))

        parts = zip(actor.STREAM_AXIS, self._layout_of_rollouts, *shards)
        return types.Rollout(
            *(
                jax.tree.map(functools.partial(join, axis, spec), *trees)
                for axis, spec, *trees in parts
            )
        )

    @property
    def _layout_of_rollouts(self) -> types.Rollout:
        columns = jax.sharding.PartitionSpec(None, parallel.AXIS)
        rows = jax.sharding.PartitionSpec(parallel.AXIS)
        return types.Rollout(columns, columns, columns, rows)

    @property
    def _layout(self) -> SebulbaState:
        spec = jax.sharding.PartitionSpec
        rows = spec(parallel.AXIS)
        return SebulbaState(learner=spec(), memory=rows, episodes=rows, key=spec(), update=spec())

    def _init_shard(self, seed: jax.Array) -> SebulbaState:
        # Made here: an array of one process's device would not do for the devices of several.
        key = jax.random.key(seed)
        learner = self.agent.init_learner(keys.learner(key))
        params = self.agent.actor_params(learner)
        rows = self.num_envs // parallel.axis_size()
        memory = self.agent.init_memory(self.programs.template(params, rows))
        return SebulbaState(
            learner=learner,
            memory=parallel.check_leading_axis(memory),
            episodes=metrics.EpisodeStatistics.init(rows),
            key=key,
            update=jnp.zeros((), jnp.int32),
        )

    def _learn_shard(self, state: SebulbaState, rollouts: tuple[types.Rollout, ...]):
        rollout = rollouts[0] if len(rollouts) == 1 else _join(rollouts)
        _, learn_key = keys.act_and_learn(state.key, state.update)
        agent_state = types.AgentState(state.learner, state.memory)
        with jax.named_scope("learn"):
            agent_state, means = self.agent.update(agent_state, rollout, learn_key)
        episodes, episode_means = state.episodes.track_rollout(rollout.timestep).flush()
        means = {**episode_means, **means}
        report = metrics.add(metrics.empty(means), means, state.update)
        state = SebulbaState(
            learner=agent_state.learner,
            memory=agent_state.memory,
            episodes=episodes,
            key=state.key,
            update=state.update + 1,
        )
        return state, metrics.sum_over_devices(report)


def _join(rollouts: tuple[types.Rollout, ...]) -> types.Rollout:
    """Joins the streams of several actors, on one learner device."""
    return types.Rollout(
        *(
            jax.tree.map(lambda *xs, axis=axis: jnp.concatenate(xs, axis), *trees)
            for axis, *trees in zip(actor.STREAM_AXIS, *rollouts)
        )
    )
