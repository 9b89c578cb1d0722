"""The program of the learner devices: one update on rollouts that are on these devices already.

Axis legend: `T` time, `B` streams, `D` learner devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import keys, metrics, parallel, types
from podracers.sebulba import actor
from podracers.sebulba import placement as placement_lib

_SPEC: Callable[..., types.PyTree] = jax.sharding.PartitionSpec
_ROWS, _COLUMNS = _SPEC(parallel.AXIS), _SPEC(None, parallel.AXIS)
_ROLLOUT_LAYOUT = types.Rollout(_COLUMNS, _COLUMNS, _COLUMNS, _ROWS, _ROWS)


class SebulbaState(NamedTuple):
    """State of a run in a checkpoint. Simulators are not part of it, and restart."""

    learner: Any  # replicated over learner devices
    memory: Any  # memories of all learner devices, concatenated along the first axis
    episodes: metrics.EpisodeStatistics  # [B] split over learner devices
    key: jax.Array  # typed, constant: all keys are folded from it
    update: jax.Array  # int32, number of updates taken


_STATE_LAYOUT = SebulbaState(_SPEC(), _ROWS, _ROWS, _SPEC(), _SPEC())


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """Jitted functions over all learner devices; only one thread calls them."""

    programs: actor.ActorPrograms  # they hold the agent and the shapes of rollouts
    placement: placement_lib.Placement

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The learner devices of all processes."""
        return parallel.make_mesh(self.placement.mesh)

    @functools.cached_property
    def init(self):
        """`seed -> SebulbaState`, before the first update."""
        function = self.programs.precision.tracing()(self._init_shard)
        return parallel.mapped(function, self.mesh, _SPEC(), _STATE_LAYOUT)

    @functools.cached_property
    def learn(self):
        """`(state, rollouts) -> (state, report)`; donates `state`."""
        function = self.programs.precision.tracing()(self._learn_shard)
        in_specs = _STATE_LAYOUT, (_ROLLOUT_LAYOUT,) * self.placement.actors_per_learner
        out_specs = _STATE_LAYOUT, _SPEC()
        return parallel.mapped(function, self.mesh, in_specs, out_specs, donate_argnums=(0,))

    @functools.cached_property
    def copy_actor_params(self):
        """`learner -> actor_params`, as copies that no later donation deletes."""
        return jax.jit(
            lambda learner: jax.tree.map(jnp.copy, self.programs.agent.actor_params(learner)),
            out_shardings=jax.sharding.NamedSharding(self.mesh, _SPEC()),
        )

    def trace(self, state: SebulbaState) -> jax.stages.Traced:
        """Traces one update from the shapes of a state."""
        count = self.placement.actors_per_learner
        params = jax.eval_shape(self.programs.agent.actor_params, state.learner)
        rollout = self.programs.template(params, self.programs.num_streams // count)
        rollout = parallel.placed(rollout, self.mesh, _ROLLOUT_LAYOUT)
        state = parallel.placed(state, self.mesh, _STATE_LAYOUT)
        return self.learn.trace(state, (rollout,) * count)

    def assemble(self, slices: Sequence[types.Rollout]) -> tuple[types.Rollout, ...]:
        """Makes global arrays of slices on the learner devices, without moving data.

        The slices are those of every actor of this process, in order. Returns as many rollouts as
        there are actors to a learner device, which `learn` joins.
        """

        def assemble(axis: int, *arrays: jax.Array) -> jax.Array:
            shape = list(arrays[0].shape)
            shape[axis] *= self.mesh.devices.size
            sharding = jax.sharding.NamedSharding(self.mesh, _COLUMNS if axis else _ROWS)
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(arrays))

        count = self.placement.actors_per_learner
        return tuple(actor.map_streams(assemble, *slices[index::count]) for index in range(count))

    def _init_shard(self, seed: jax.Array) -> SebulbaState:
        # The key is made here because an array on a device of one process is no argument for a
        # program on the devices of several.
        key = jax.random.key(seed)
        learner = self.programs.agent.init_learner(keys.learner(key))
        params = self.programs.agent.actor_params(learner)
        rows = self.programs.num_streams // parallel.axis_size()
        template = _without_metrics(self.programs.template(params, rows))
        memory = self.programs.agent.init_memory(template)
        return SebulbaState(
            learner=learner,
            memory=parallel.check_leading_axis(memory),
            episodes=metrics.EpisodeStatistics.init(rows),
            key=key,
            update=jnp.zeros((), jnp.int32),
        )

    def _learn_shard(self, state: SebulbaState, rollouts: tuple[types.Rollout, ...]):
        """Takes one update on this device."""
        rollout = rollouts[0]
        if len(rollouts) > 1:  # several actors feed this device
            rollout = actor.map_streams(lambda axis, *xs: jnp.concatenate(xs, axis), *rollouts)
        _, learn_key = keys.act_and_learn(state.key, state.update)
        with jax.named_scope("learn"):
            agent_state = types.AgentState(state.learner, state.memory)
            agent_state, means = self.programs.agent.update(
                agent_state, _without_metrics(rollout), learn_key
            )
        episodes = state.episodes.with_metrics(self.programs.spec.metrics)
        episodes, episode_means = episodes.track_rollout(rollout.timestep).flush()
        means = {**episode_means, **means}
        players = self.programs.spec.players
        report = metrics.of_update(means, rollout.timestep, state.update, players)
        state = SebulbaState(*agent_state, episodes, state.key, state.update + 1)
        return state, metrics.sum_over_devices(report)


def _without_metrics(rollout: types.Rollout) -> types.Rollout:
    """Returns a rollout as agents receive it."""
    return rollout._replace(timestep=rollout.timestep._replace(metrics={}))
