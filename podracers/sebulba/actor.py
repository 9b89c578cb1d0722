"""An actor: a thread that steps its host environments and acts on its device.

A rollout is a buffer on the device, which each program donates to the next and writes in place.
Each frame is transferred to the device once, and of the outputs of `act` only the action is
transferred back.

Axis legend: `T` time, `E` environments and `B` streams of this actor, `H` streams of one of its
batches, `L` the learner devices that it feeds.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import keys, types
from podracers import precision as precision_lib
from podracers.sebulba import timing
from podracers.supervision import pipeline


def map_streams(function: Callable[..., Any], *rollouts: types.Rollout) -> types.Rollout:
    """Maps `function(axis, *arrays)` over the leaves of rollouts; `axis` is that of streams."""
    stream_axes = (1, 1, 1, 0, 0)  # one for each field, in their order
    return types.Rollout(
        *(
            jax.tree.map(functools.partial(function, axis), *parts)
            for axis, *parts in zip(stream_axes, *rollouts, strict=True)
        )
    )


class Carry(NamedTuple):
    """A rollout that is being collected; all on one device."""

    rollout: types.Rollout  # buffers [T + 1, B, ...] and [T, B, ...]
    actor_state: Any  # [B, ...] the latest
    stream_keys: jax.Array  # [B] of this rollout
    calls: jax.Array  # int32, number of batches written; it determines the next time and rows


class Arrival(NamedTuple):
    """A time step on its way to the device, where each array is a transfer of its own."""

    observation: types.PyTree  # [H, ...]
    # float32 `[3 + M, H]`, one transfer: reward, discount, step type, M metrics in order of names
    scalars: jax.Array | np.ndarray

    def unpack(self, names: Sequence[str]) -> types.TimeStep:
        """Returns the time step, whose metrics have these names, on the device."""
        reward, discount, step_type, *rows = self.scalars
        metrics = dict(zip(sorted(names), rows, strict=True))
        step_type = step_type.astype(jnp.int8)
        return types.TimeStep(self.observation, reward, discount, step_type, metrics)


class DevicePrograms(NamedTuple):
    """The jitted functions of one device; calls transfer their NumPy arguments to it.

    Batches call `act` in order, at each time, and then `finish`, which writes the time step that
    bootstraps. Both donate `carry`.
    """

    init_actor: jax.stages.Wrapped  # (env_id [B]) -> actor_state
    # (params, key, update, version of params, env_id [B], actor_state) -> empty carry
    begin: jax.stages.Wrapped
    act: jax.stages.Wrapped  # (params, carry, arrival [H]) -> (carry, action [H])
    finish: jax.stages.Wrapped  # (carry, arrival [H]) -> carry


class Shards(NamedTuple):
    """One actor's rollout, on its learner devices."""

    version: int  # version of the parameters that acted
    slices: tuple[types.Rollout, ...]  # one on each learner device that this actor feeds


@dataclasses.dataclass
class _Batch:
    """One of an actor's batches of environments."""

    host: environment_lib.HostEnvironment
    arrival: Arrival  # [H, ...] the latest, on the host unless two rollouts need it


@dataclasses.dataclass(frozen=True, eq=False)
class Actor:
    """An actor; `run` is the body of its thread.

    Its streams are split into batches: while one is stepped, the device acts for another. Up to the
    end of the first rollout, the activity of the environments is `starting`.
    """

    programs: DevicePrograms  # jitted functions of `device`
    length: int  # `T`
    make: Callable[[np.ndarray], environment_lib.HostEnvironment]  # called with their indices
    num_batches: int
    starting: str  # `pipeline.COMPILING` or `pipeline.STARTING`
    env_id: np.ndarray  # [E] int32, global
    device: jax.Device  # the one that acts
    learners: tuple[jax.Device, ...]  # devices that get its rollouts
    key: jax.Array  # the run's key
    first: int  # the update of its first rollout
    lag: int  # most updates that a rollout's parameters may be behind; 0 and 1 are exact
    versions: pipeline.Versions  # parameters as the learner publishes them, `{device: params}`
    queue: pipeline.Queue  # receives its `Shards`
    factory: environment_lib.HostEnvironmentFactory  # it makes the environments

    def run(self, worker: pipeline.Worker) -> None:
        """Makes the environments, collects rollouts until cancelled, closes the environments."""
        with contextlib.ExitStack() as closing:
            batches = []
            # Here, because some simulators belong to the thread that makes them.
            for part in np.split(self.env_id, self.num_batches):
                with worker.doing(self.starting):
                    host = self.make(part)
                    closing.callback(pipeline.close_environments, host)
                with worker.doing(self.starting):
                    arrival = self._arrival("reset", host.reset())
                batches.append(_Batch(host, jax.device_put(arrival, self.device)))
            self._run(worker, batches)

    def _run(self, worker: pipeline.Worker, batches: list[_Batch]) -> None:
        with worker.doing(pipeline.COMPILING):
            stream_id = self.factory.spec.streams_of(self.env_id)
            stream_id, key = jax.device_put((stream_id, self.key), self.device)
            actor_state = self.programs.init_actor(stream_id)
        update, warm = self.first, False
        while True:
            # Compilation has no time limit; later calls of the same programs have one.
            inference, transfer, sending = (
                activity if warm else pipeline.COMPILING
                for activity in (timing.INFERENCE, timing.TRANSFER, timing.SENDING)
            )
            stepping = timing.ENVIRONMENT if warm else self.starting
            with worker.doing(timing.FOR_PARAMETERS):
                oldest = max(update - self.lag, self.first)
                version, params = self.versions.get(oldest, exact=self.lag <= 1)
                params = params[self.device]
            with worker.doing(inference):
                numbers = np.int32(update), np.int32(version)
                carry = self.programs.begin(params, key, *numbers, stream_id, actor_state)
            for step in range(self.length):
                for batch in batches:
                    if step:
                        self._receive(worker, batch, stepping)
                    with worker.doing(transfer):
                        carry, action = self.programs.act(params, carry, batch.arrival)
                        for leaf in jax.tree.leaves(action):
                            leaf.copy_to_host_async()
                    with worker.doing(inference):
                        action = jax.tree.map(np.asarray, action)
                    with worker.doing(stepping):
                        batch.host.send(action)
            for batch in batches:
                self._receive(worker, batch, stepping)
                with worker.doing(transfer):  # once, though two rollouts need it
                    batch.arrival = jax.device_put(batch.arrival, self.device)
                with worker.doing(inference):
                    carry = self.programs.finish(carry, batch.arrival)
            with worker.doing(sending):
                count = len(self.learners)
                slices = split(carry.rollout, count) if count > 1 else (carry.rollout,)
                # Directly from the device that acted to those that learn.
                slices = jax.block_until_ready(tuple(map(jax.device_put, slices, self.learners)))
            with worker.doing(timing.FOR_SPACE):
                self.queue.put(Shards(version, slices))
            actor_state, update, warm = carry.actor_state, update + 1, True

    def _receive(self, worker: pipeline.Worker, batch: _Batch, activity: str) -> None:
        """Waits for the next time step of a batch."""
        with worker.doing(activity):
            timestep = batch.host.recv()
        batch.arrival = self._arrival("recv", timestep)

    @functools.cached_property
    def _expected(self) -> types.TimeStep:
        spec = self.factory.spec
        return spec.timesteps(self.env_id.size * spec.num_agents // self.num_batches)

    def _arrival(self, method: str, timestep: types.TimeStep[np.ndarray]) -> Arrival:
        faults = environment_lib.structure_faults(method, timestep, self._expected)
        environment_lib.refuse(self.factory, faults)
        # A new array, because the device may alias it.
        return Arrival(timestep.observation, np.array(jax.tree.leaves(timestep[1:]), np.float32))


@functools.partial(jax.jit, static_argnums=1)
def split(rollout: types.Rollout, count: int) -> tuple[types.Rollout, ...]:
    """Splits a rollout into `count` equal slices of its streams."""
    parts = map_streams(lambda axis, x: jnp.split(x, count, axis), rollout)
    outer, inner = jax.tree.structure(rollout), jax.tree.structure([0] * count)
    return tuple(jax.tree.transpose(outer, inner, parts))


@dataclasses.dataclass(frozen=True, eq=False)
class ActorPrograms:
    """The programs of actor devices."""

    agent: agent_lib.Agent
    spec: environment_lib.EnvironmentSpec
    length: int  # `T`
    num_streams: int  # sum over actors, which share them equally
    lag: int  # most updates that a rollout's parameters may be behind
    precision: precision_lib.Precision

    def template(self, params: types.PyTree, rows: int) -> types.Rollout:
        """Returns the shapes of a rollout of `rows` streams (`jax.ShapeDtypeStruct`).

        Its time steps have metrics, which the learner removes before the agent receives them.
        """

        def step(params, env_id, stream_keys, arrival):
            actor_state = self.agent.init_actor(env_id, self.num_streams)
            timestep = arrival.unpack(self.spec.metrics)
            action, _, extras = self._agent_act(
                params, actor_state, timestep._replace(metrics={}), stream_keys
            )
            return types.Rollout(timestep, action, extras, actor_state)

        env_id = jax.ShapeDtypeStruct((rows,), np.int32)
        stream_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        shapes = jax.eval_shape(step, params, env_id, stream_keys, self._arrival(rows))

        def over_time(tree: types.PyTree, length: int) -> types.PyTree:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype), tree)

        return types.Rollout(
            timestep=over_time(shapes.timestep, self.length + 1),
            action=over_time(shapes.action, self.length),
            extras=over_time(shapes.extras, self.length),
            actor_state=shapes.actor_state,
            age=jax.ShapeDtypeStruct((rows,), np.int32) if self.lag else (),
        )

    def trace(
        self, device: jax.Device, params: types.PyTree, rows: int, num_batches: int
    ) -> dict[str, jax.stages.Traced]:
        """Traces each program as an actor's thread calls it; returns them by name.

        The actor has `rows` streams in `num_batches`, and acts with parameters of these shapes.
        """
        env_id = jax.ShapeDtypeStruct((rows,), np.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        actor_state = jax.eval_shape(self._init_actor, env_id)
        begin = (params, key, np.int32(0), np.int32(0), env_id, actor_state)
        carry = jax.eval_shape(self._begin, *begin)
        arrival = self._arrival(rows // num_batches)
        programs = self.on(device)
        return {
            "init_actor": programs.init_actor.trace(env_id),
            "begin": programs.begin.trace(*begin),
            "act": programs.act.trace(params, carry, arrival),
            "finish": programs.finish.trace(carry, arrival),
        }

    def on(self, device: jax.Device) -> DevicePrograms:
        """Returns the programs of a device."""
        if device not in self._programs:
            # With the device in the program's type, arguments on the host and on the device are the
            # same program; otherwise JAX compiles it twice.
            jit = functools.partial(jax.jit, in_shardings=jax.sharding.SingleDeviceSharding(device))
            self._programs[device] = DevicePrograms(
                init_actor=jit(self._init_actor),
                begin=jit(self._begin, donate_argnums=5),
                act=jit(self._act, donate_argnums=1),
                finish=jit(self._finish, donate_argnums=0),
            )
        return self._programs[device]

    @functools.cached_property
    def _programs(self) -> dict[jax.Device, DevicePrograms]:
        return {}

    # Jitted within larger programs, so that all of them share one trace.
    @functools.cached_property
    def _agent_act(self):
        return jax.jit(self.precision.tracing()(self.agent.act), inline=True)

    def _arrival(self, rows: int) -> Arrival:
        """Returns the shapes of an arrival of `rows` streams."""
        observation = self.spec.timesteps(rows).observation
        count = 3 + len(self.spec.metrics)
        scalars: types.PyTree = jax.ShapeDtypeStruct((count, rows), np.float32)
        return Arrival(observation, scalars)

    def _init_actor(self, env_id):
        return self.agent.init_actor(env_id, self.num_streams)

    def _begin(self, params, key, update, version, env_id, actor_state):
        act_key, _ = keys.act_and_learn(key, update)
        template = self.template(params, env_id.shape[0])
        rollout = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        # A copy, because the rollout keeps the first state while later ones replace it in place.
        rollout = rollout._replace(
            actor_state=jax.tree.map(jnp.copy, actor_state),
            age=jax.tree.map(lambda x: x + update - version, rollout.age),
        )
        stream_keys = keys.per_stream(act_key, env_id)
        return Carry(rollout, actor_state, stream_keys, jnp.zeros((), jnp.int32))

    def _act(self, params, carry, arrival):
        timestep = arrival.unpack(self.spec.metrics)
        rows = timestep.step_type.shape[0]
        time, start = _place(carry, rows)

        def rows_of(tree):
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows), tree)

        with jax.named_scope("act"):
            act_keys = keys.at_time(rows_of(carry.stream_keys), time)
            action, actor_state, extras = self._agent_act(
                params, rows_of(carry.actor_state), timestep._replace(metrics={}), act_keys
            )
        rollout = carry.rollout._replace(
            timestep=_write(carry.rollout.timestep, timestep, time, start),
            action=_write(carry.rollout.action, action, time, start),
            extras=_write(carry.rollout.extras, extras, time, start),
        )
        actor_state = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            carry.actor_state,
            actor_state,
        )
        return Carry(rollout, actor_state, carry.stream_keys, carry.calls + 1), action

    def _finish(self, carry, arrival):
        timestep = arrival.unpack(self.spec.metrics)
        time, start = _place(carry, timestep.step_type.shape[0])
        written = _write(carry.rollout.timestep, timestep, time, start)
        rollout = carry.rollout._replace(timestep=written)
        return carry._replace(rollout=rollout, calls=carry.calls + 1)


def _place(carry: Carry, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the time of the next batch of `rows` rows, and its first row."""
    time, batch = jnp.divmod(carry.calls, carry.stream_keys.shape[0] // rows)
    return time, batch * rows


def _write(buffers: types.PyTree, values: types.PyTree, time: Any, start: Any) -> types.PyTree:
    """Writes `[H, ...]` into `[T, B, ...]`."""

    def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
        where = (time, start, *(0 for _ in value.shape[1:]))
        return jax.lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), where)

    return jax.tree.map(write, buffers, values)
