"""An actor: a thread that steps its host environments and acts on its device.

A rollout is a buffer on the device, donated from one call of the device's programs to the next and
written in place. Each frame crosses to the device once, and what acting puts out never leaves it,
but for the action.

Axis legend: `T` time, `B` streams of this actor, `H` streams of one of its batches, `L` the learner
devices that it feeds.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
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

# The axis of streams in each part of a rollout.
STREAM_AXIS = types.Rollout(timestep=1, action=1, extras=1, actor_state=0)


class Carry(NamedTuple):
    """A rollout that is being collected; all on one device."""

    rollout: types.Rollout  # buffers [T + 1, B, ...] and [T, B, ...]
    actor_state: Any  # [B, ...] the latest
    stream_keys: jax.Array  # [B] of this rollout
    calls: jax.Array  # int32, time steps of a batch that were written: says which comes next


class Arrival(NamedTuple):
    """A time step on its way to the device: each array of it is a transfer of its own."""

    observation: types.PyTree  # [H, ...]
    scalars: np.ndarray  # float32 `[3, H]`: reward, discount and step type, together

    @classmethod
    def of(cls, timestep: types.TimeStep) -> "Arrival":
        """Packs a time step of the host, `[H, ...]`; a new array, for the device may keep it."""
        scalars = np.empty((3, timestep.step_type.shape[0]), np.float32)
        scalars[0], scalars[1], scalars[2] = timestep[1:]
        return cls(timestep.observation, scalars)

    def unpack(self) -> types.TimeStep:
        """Returns the time step, on the device."""
        reward, discount, step_type = self.scalars
        return types.TimeStep(self.observation, reward, discount, step_type.astype(jnp.int8))


class DevicePrograms(NamedTuple):
    """The jitted functions of one device; what is in NumPy crosses to it in the call.

    Attributes:
      init_actor: `(env_id [B]) -> actor_state`.
      begin: `(params, key, update, env_id [B], actor_state) -> Carry`, with empty buffers.
      act: `(params, carry, arrival [H]) -> (carry, action [H])`; donates `carry`. Batches come in
        order, at each time.
      finish: `(carry, arrival [H]) -> carry`: writes the time step that bootstraps, for each batch
        in order; donates `carry`.
    """

    init_actor: Callable[..., Any]
    begin: Callable[..., Carry]
    act: Callable[..., tuple[Carry, types.PyTree]]
    finish: Callable[..., Carry]


class Shards(NamedTuple):
    """One actor's rollout, where the learner wants it."""

    version: int  # of the parameters that acted
    slices: tuple[types.Rollout, ...]  # one on each learner device that this actor feeds


@dataclasses.dataclass
class _Batch:
    """One of an actor's batches of environments, and where it is."""

    host: environment_lib.HostEnvironment
    arrival: Arrival  # [H, ...] the latest, on the host unless two rollouts need it
    sent: float = 0.0  # when its actions were sent, by `time.perf_counter`


@dataclasses.dataclass(frozen=True, eq=False)
class Actor:
    """Everything an actor needs; `run` is the body of its thread.

    Attributes:
      programs: the jitted functions of its device.
      length: `T`.
      make: function that makes the environments of given indices.
      num_batches: number of batches of `H` that its streams are cut into: while one is stepped,
        the device acts for another.
      starting: activity of a batch until its first step is done, `pipeline.COMPILING` or
        `pipeline.STARTING`.
      env_id: `[B]` int32, global.
      device: the device that acts.
      learners: the learner devices that get its rollouts.
      key: the run's key.
      first: the update that its first rollout is for.
      lag: most updates that a rollout's parameters may be behind; 0 and 1 are exact.
      versions: parameters as the learner publishes them, `{device: params}`.
      queue: the queue for its `Shards`.
      pace: how fast its simulators step.
    """

    programs: DevicePrograms
    length: int
    make: Callable[[np.ndarray], environment_lib.HostEnvironment]
    num_batches: int
    starting: str
    env_id: np.ndarray
    device: jax.Device
    learners: tuple[jax.Device, ...]
    key: jax.Array
    first: int
    lag: int
    versions: pipeline.Versions
    queue: pipeline.Queue
    pace: timing.Pace
    _hosts: list[environment_lib.HostEnvironment] = dataclasses.field(
        default_factory=list, init=False, repr=False
    )

    def run(self, worker: pipeline.Worker) -> None:
        """Collects rollouts until it is cancelled."""
        try:
            self._run(worker)
        finally:
            self.close()

    def close(self) -> None:
        """Closes every environment, whatever happens to the others."""
        while self._hosts:
            pipeline.close_environments(self._hosts.pop())

    def _run(self, worker: pipeline.Worker) -> None:
        # Made here, where they are used: some simulators belong to the thread that makes them.
        batches = self._start(worker)
        with worker.doing(pipeline.COMPILING):
            env_id, key = jax.device_put((self.env_id, self.key), self.device)
            actor_state = self.programs.init_actor(env_id)
        update, warm = self.first, False
        while True:
            with worker.doing(timing.FOR_PARAMETERS):
                least = max(update - self.lag, self.first)
                version, params = self.versions.get(least, exact=self.lag <= 1)
            # What is compiled takes as long as it takes; later, the same call has a limit.
            with worker.doing(timing.INFERENCE if warm else pipeline.COMPILING):
                carry = self.programs.begin(
                    params[self.device], key, np.int32(update), env_id, actor_state
                )
            carry = self._collect(worker, params[self.device], carry, batches, warm)
            with worker.doing(timing.SENDING if warm else pipeline.COMPILING):
                shards = self._send(carry.rollout)
            with worker.doing(timing.FOR_SPACE):
                self.queue.put(Shards(version, shards))
            actor_state = carry.actor_state
            update, warm = update + 1, True

    def _start(self, worker: pipeline.Worker) -> list[_Batch]:
        parts = np.split(self.env_id, self.num_batches)
        for part in parts:
            with worker.doing(self.starting):
                self._hosts.append(self.make(part))
        batches = []
        for host in self._hosts:
            with worker.doing(self.starting):
                arrival = Arrival.of(host.reset())
            batches.append(_Batch(host, jax.device_put(arrival, self.device)))
        return batches

    def _collect(self, worker, params, carry, batches, warm):
        """Returns the carry after `T` steps."""
        programs = self.programs
        for step in range(self.length):
            for batch in batches:
                if step:
                    self._receive(worker, batch, started=warm or step > 1)
                first = not warm and step == 0 and batch is batches[0]
                # The call itself takes the frame to the device.
                with worker.doing(pipeline.COMPILING if first else timing.TRANSFER):
                    carry, action = programs.act(params, carry, batch.arrival)
                    for leaf in jax.tree.leaves(action):
                        leaf.copy_to_host_async()  # as soon as it is there
                with worker.doing(timing.INFERENCE):
                    action = jax.tree.map(np.asarray, action)
                with worker.doing(timing.ENVIRONMENT if warm or step else self.starting):
                    batch.sent = time.perf_counter()
                    batch.host.send(action)
        for batch in batches:
            self._receive(worker, batch, started=warm or self.length > 1)
            with worker.doing(timing.TRANSFER):  # once, though two rollouts need it
                batch.arrival = jax.device_put(batch.arrival, self.device)
            first = not warm and batch is batches[0]
            with worker.doing(pipeline.COMPILING if first else timing.INFERENCE):
                carry = programs.finish(carry, batch.arrival)
        return carry

    def _receive(self, worker: pipeline.Worker, batch: _Batch, started: bool) -> None:
        """Waits for the next time step of a batch."""
        with worker.doing(timing.ENVIRONMENT if started else self.starting):
            asked = time.perf_counter()
            timestep = batch.host.recv()
            arrived = time.perf_counter()
        batch.arrival = Arrival.of(timestep)
        self.pace.add(batch.host.num_envs, arrived - batch.sent, arrived - asked)

    def _send(self, rollout: types.Rollout) -> tuple[types.Rollout, ...]:
        """Puts the rollout on the learner devices, straight from this one."""
        count = len(self.learners)
        parts = (rollout,) if count == 1 else cut(rollout, count)
        shards = tuple(jax.device_put(part, device) for part, device in zip(parts, self.learners))
        return jax.block_until_ready(shards)


@dataclasses.dataclass(frozen=True, eq=False)
class ActorPrograms:
    """Makes the programs of actor devices.

    Attributes:
      agent: the agent that acts.
      spec: the environment's specification.
      length: `T`.
      num_envs: number of streams of all actors, of which each actor has a share.
      precision: the precision that the agent computes with.
    """

    agent: agent_lib.Agent
    spec: environment_lib.EnvironmentSpec
    length: int
    num_envs: int
    precision: precision_lib.Precision

    def template(self, params: types.PyTree, rows: int) -> types.Rollout:
        """Returns the shapes of a rollout of `rows` streams (`jax.ShapeDtypeStruct`)."""
        env_id = jnp.arange(rows, dtype=jnp.int32)
        actor_state = jax.eval_shape(lambda: self.agent.init_actor(env_id, self.num_envs))
        timestep = self._timestep(rows)
        stream_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        action, _, extras = jax.eval_shape(self._decide, params, actor_state, timestep, stream_keys)

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

    def trace(
        self, device: jax.Device, params: types.PyTree, rows: int, num_batches: int
    ) -> DevicePrograms:
        """Traces the programs of an actor as its thread will call them; nothing runs.

        Args:
          device: the device that acts.
          params: shapes of what acting needs.
          rows: streams of the actor.
          num_batches: batches that its streams are cut into.

        Returns:
          A `jax.stages.Traced` in place of each program.
        """
        env_id = jax.ShapeDtypeStruct((rows,), np.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        actor_state = jax.eval_shape(self._init_actor, env_id)
        begin = (params, key, np.int32(0), env_id, actor_state)
        carry = jax.eval_shape(self._begin, *begin)
        batch = rows // num_batches
        observation = self._timestep(batch).observation
        arrival = Arrival(observation, jax.ShapeDtypeStruct((3, batch), np.float32))
        arguments = DevicePrograms(
            init_actor=(env_id,),
            begin=begin,
            act=(params, carry, arrival),
            finish=(carry, arrival),
        )
        programs = zip(self.on(device), arguments)
        return DevicePrograms(*(program.trace(*each) for program, each in programs))

    def on(self, device: jax.Device) -> DevicePrograms:
        """Returns the programs of a device; they are traced once for all devices."""
        if device not in self._programs:
            where = jax.sharding.SingleDeviceSharding(device)
            # With the device in the program's type, an argument from the host and one that lies
            # there already are the same program; by itself, JAX would compile it twice.
            self._programs[device] = DevicePrograms(
                *(
                    jax.jit(traced, in_shardings=where, donate_argnums=donated)
                    for traced, donated in zip(self._traced, ((), (4,), (1,), (0,)))
                )
            )
        return self._programs[device]

    # Jitted, though within larger programs: what asks for its shapes traces it for the others, too.
    @functools.cached_property
    def _decide(self):
        return jax.jit(self.precision.tracing()(self.agent.act), inline=True)

    @functools.cached_property
    def _programs(self) -> dict[jax.Device, DevicePrograms]:
        return {}

    @functools.cached_property
    def _traced(self) -> DevicePrograms:
        return DevicePrograms(
            *map(jax.jit, (self._init_actor, self._begin, self._act, self._finish))
        )

    def _init_actor(self, env_id):
        return self.agent.init_actor(env_id, self.num_envs)

    def _begin(self, params, key, update, env_id, actor_state):
        act_key, _ = keys.act_and_learn(key, update)
        template = self.template(params, env_id.shape[0])
        buffers = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        # A copy: the state goes on changing, and the rollout has to keep this one.
        first = jax.tree.map(jnp.copy, actor_state)
        rollout = buffers._replace(actor_state=first)
        stream_keys = keys.per_stream(act_key, env_id)
        return Carry(rollout, actor_state, stream_keys, jnp.zeros((), jnp.int32))

    def _act(self, params, carry, arrival):
        timestep = arrival.unpack()
        rows = timestep.step_type.shape[0]
        time, start = _place(carry, rows)

        def own(tree):
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows), tree)

        actor_state = own(carry.actor_state)
        with jax.named_scope("act"):
            act_keys = keys.at_time(own(carry.stream_keys), time)
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
        return Carry(rollout, actor_state, carry.stream_keys, carry.calls + 1), action

    def _finish(self, carry, arrival):
        timestep = arrival.unpack()
        time, start = _place(carry, timestep.step_type.shape[0])
        written = _write(carry.rollout.timestep, timestep, time, start)
        rollout = carry.rollout._replace(timestep=written)
        return carry._replace(rollout=rollout, calls=carry.calls + 1)


def _place(carry: Carry, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the time of the next batch of so many rows, and its first row among the actor's."""
    time, batch = jnp.divmod(carry.calls, carry.stream_keys.shape[0] // rows)
    return time, batch * rows


def _write(buffers: types.PyTree, values: types.PyTree, time: Any, start: Any) -> types.PyTree:
    """Writes `[H, ...]` into `[T, B, ...]`."""

    def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
        where = (time, start, *(0 for _ in value.shape[1:]))
        return jax.lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), where)

    return jax.tree.map(write, buffers, values)


@functools.partial(jax.jit, static_argnums=(1,))
def cut(rollout: types.Rollout, slices: int) -> tuple[types.Rollout, ...]:
    """Cuts a rollout into equal slices of its streams."""

    def take(index: int) -> types.Rollout:
        return types.Rollout(
            *(
                jax.tree.map(lambda x, axis=axis: jnp.split(x, slices, axis)[index], tree)
                for axis, tree in zip(STREAM_AXIS, rollout)
            )
        )

    return tuple(take(index) for index in range(slices))
