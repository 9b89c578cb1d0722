"""The program of an actor device: it acts, and assembles the rollout where it is.

A rollout is a buffer on the device, donated from one call to the next and written in place. Each
frame crosses to the device once, and what acting put out never leaves it, but for the action.

Axis legend: `T` time, `B` streams of this actor, `H` streams of one of its batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import keys, types


class Carry(NamedTuple):
    """A rollout that is being collected; all on one device."""

    rollout: types.Rollout  # buffers [T + 1, B, ...] and [T, B, ...]
    actor_state: Any  # [B, ...] the latest
    row_keys: jax.Array  # [B] of this rollout


class Programs(NamedTuple):
    """The jitted functions of one device; what is in NumPy crosses to it in the call.

    Attributes:
      init_actor: `(env_id [B]) -> actor_state`.
      begin: `(params, key, update, env_id [B], actor_state) -> Carry`, with empty buffers.
      act: `(params, carry, timestep [H], start, time) -> (carry, action [H])`; donates `carry`.
        `start` is the first row of the batch among the actor's.
      finish: `(carry, timestep [H], start) -> carry`: writes the time step that bootstraps; donates
        `carry`.
    """

    init_actor: Callable[..., Any]
    begin: Callable[..., Carry]
    act: Callable[..., tuple[Carry, types.PyTree]]
    finish: Callable[..., Carry]


@dataclasses.dataclass(frozen=True, eq=False)
class Acting:
    """Makes the programs of actor devices.

    Attributes:
      agent: who acts.
      spec: of the environment.
      length: `T`.
      num_envs: streams of all actors, of which each actor has a share.
    """

    agent: agent_lib.Agent
    spec: environment_lib.EnvironmentSpec
    length: int
    num_envs: int

    def template(self, params: types.PyTree, rows: int) -> types.Rollout:
        """Returns the shapes of a rollout of `rows` streams (`jax.ShapeDtypeStruct`)."""
        env_id = jnp.arange(rows, dtype=jnp.int32)
        actor_state = jax.eval_shape(lambda: self.agent.init_actor(env_id, self.num_envs))
        timestep = self._timestep(rows)
        row_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        action, _, extras = jax.eval_shape(self._decide, params, actor_state, timestep, row_keys)

        def over_time(length: int, tree: types.PyTree) -> types.PyTree:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype), tree)

        return types.Rollout(
            timestep=over_time(self.length + 1, timestep),
            action=over_time(self.length, action),
            extras=over_time(self.length, extras),
            actor_state=actor_state,
        )

    def _timestep(self, rows: int) -> types.TimeStep:
        def leaf(shape, dtype):
            return jax.ShapeDtypeStruct((rows, *shape), dtype)

        return types.TimeStep(
            observation=jax.tree.map(lambda s: leaf(s.shape, s.dtype), self.spec.observation),
            reward=leaf((), np.float32),
            discount=leaf((), np.float32),
            step_type=leaf((), np.int8),
        )

    def on(self, device: jax.Device) -> Programs:
        """Returns the programs of a device; they are traced once for all devices."""
        if device not in self._programs:
            where = jax.sharding.SingleDeviceSharding(device)
            # With the device in the program's type, an argument from the host and one that lies
            # there already are the same program; by itself, JAX would compile it twice.
            self._programs[device] = Programs(
                *(
                    jax.jit(traced, in_shardings=where, donate_argnums=donated)
                    for traced, donated in zip(self._traced, ((), (4,), (1,), (0,)))
                )
            )
        return self._programs[device]

    # Jitted, though within larger programs: what asks for its shapes traces it for the others, too.
    @functools.cached_property
    def _decide(self):
        return jax.jit(self.agent.act, inline=True)

    @functools.cached_property
    def _programs(self) -> dict[jax.Device, Programs]:
        return {}

    @functools.cached_property
    def _traced(self) -> Programs:
        return Programs(*map(jax.jit, (self._init_actor, self._begin, self._act, self._finish)))

    def _init_actor(self, env_id):
        return self.agent.init_actor(env_id, self.num_envs)

    def _begin(self, params, key, update, env_id, actor_state):
        act_key, _ = keys.update(key, update)
        template = self.template(params, env_id.shape[0])
        buffers = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        # A copy: the state goes on changing, and the rollout has to keep this one.
        first = jax.tree.map(jnp.copy, actor_state)
        rollout = buffers._replace(actor_state=first)
        return Carry(rollout, actor_state, keys.rows(act_key, env_id))

    def _act(self, params, carry, timestep, start, time):
        rows = timestep.step_type.shape[0]

        def own(tree):
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows), tree)

        actor_state = own(carry.actor_state)
        with jax.named_scope("act"):
            act_keys = keys.at_time(own(carry.row_keys), time)
            action, actor_state, extras = self._decide(params, actor_state, timestep, act_keys)
        rollout = carry.rollout
        rollout = rollout._replace(
            timestep=_write(rollout.timestep, timestep, time, start),
            action=_write(rollout.action, action, time, start),
            extras=_write(rollout.extras, extras, time, start),
        )
        actor_state = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            carry.actor_state,
            actor_state,
        )
        return Carry(rollout, actor_state, carry.row_keys), action

    def _finish(self, carry, timestep, start):
        written = _write(carry.rollout.timestep, timestep, self.length, start)
        return carry._replace(rollout=carry.rollout._replace(timestep=written))


def _write(buffers: types.PyTree, values: types.PyTree, time: Any, start: Any) -> types.PyTree:
    """Writes `[H, ...]` into `[T, B, ...]`."""

    def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
        where = (time, start, *(0 for _ in value.shape[1:]))
        return jax.lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), where)

    return jax.tree.map(write, buffers, values)


@functools.partial(jax.jit, static_argnums=(1,))
def cut(rollout: types.Rollout, slices: int) -> tuple[types.Rollout, ...]:
    """Cuts a rollout into equal slices of its streams."""
    over_time = rollout._replace(actor_state=())
    columns = jax.tree.map(lambda x: jnp.split(x, slices, axis=1), over_time)
    rows = jax.tree.map(lambda x: jnp.split(x, slices), rollout.actor_state)

    def take(index: int) -> types.Rollout:
        is_list = lambda x: isinstance(x, list)  # noqa: E731
        part = jax.tree.map(lambda x: x[index], columns, is_leaf=is_list)
        state = jax.tree.map(lambda x: x[index], rows, is_leaf=is_list)
        return part._replace(actor_state=state)

    return tuple(take(index) for index in range(slices))
