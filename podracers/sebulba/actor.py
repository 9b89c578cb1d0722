"""One actor: a thread that steps its host environments and acts on its device.

Axis legend: `T` time, `B` streams of this actor, `H` streams of one of its batches, `L` the learner
devices that it feeds.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from podracers import environment as environment_lib
from podracers import types
from podracers.sebulba import acting, timing
from podracers.supervision import closing, pipeline


class Shards(NamedTuple):
    """One actor's rollout, where the learner wants it."""

    version: int  # of the parameters that acted
    slices: tuple[types.Rollout, ...]  # one on each learner device that this actor feeds


@dataclasses.dataclass
class _Batch:
    """One of an actor's batches of environments, and where it is."""

    host: environment_lib.HostEnvironment
    start: jax.Array  # int32, its first row among the actor's
    timestep: types.TimeStep  # [H, ...] the latest, on the host unless two rollouts need it
    sent: float = 0.0  # when its actions were sent, by `time.perf_counter`


@dataclasses.dataclass(frozen=True, eq=False)
class Actor:
    """Everything an actor needs; `run` is the body of its thread.

    Attributes:
      programs: of its device.
      length: `T`.
      make: makes the environments of given indices.
      num_batches: into how many batches of `H` its streams are cut: while one is stepped, the
        device acts for another.
      starting: what a batch is at until its first step is done, `pipeline.COMPILING` or
        `pipeline.STARTING`.
      env_id: `[B]` int32, global.
      device: where it acts.
      learners: the devices that get its rollouts.
      key: of the run.
      first: the update that its first rollout is for.
      lag: how many updates a rollout's parameters may be behind; 0 and 1 are exact.
      versions: parameters as the learner publishes them, `{device: params}`.
      queue: takes `Shards`.
      pace: of its simulators.
    """

    programs: acting.Programs
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
        """Closes every environment, whatever happens to the others (see `closing`)."""
        while self._hosts:
            closing.close(self._hosts.pop())

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
        for part, host in zip(parts, self._hosts):
            with worker.doing(self.starting):
                timestep = host.reset()
            start = np.int32(part[0] - self.env_id[0])
            batches.append(_Batch(host, *jax.device_put((start, timestep), self.device)))
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
                    carry, action = programs.act(
                        params, carry, batch.timestep, batch.start, np.int32(step)
                    )
                with worker.doing(timing.INFERENCE):
                    jax.block_until_ready(action)
                with worker.doing(timing.TRANSFER):
                    action = jax.tree.map(np.asarray, action)
                with worker.doing(timing.ENVIRONMENT if warm or step else self.starting):
                    batch.sent = time.perf_counter()
                    batch.host.send(action)
        for batch in batches:
            self._receive(worker, batch, started=warm or self.length > 1)
            with worker.doing(timing.TRANSFER):  # once, though two rollouts need it
                batch.timestep = jax.device_put(batch.timestep, self.device)
            first = not warm and batch is batches[0]
            with worker.doing(pipeline.COMPILING if first else timing.INFERENCE):
                carry = programs.finish(carry, batch.timestep, batch.start)
        return carry

    def _receive(self, worker: pipeline.Worker, batch: _Batch, started: bool) -> None:
        """Waits for the next time step of a batch."""
        with worker.doing(timing.ENVIRONMENT if started else self.starting):
            asked = time.perf_counter()
            batch.timestep = batch.host.recv()
            arrived = time.perf_counter()
        self.pace.add(batch.host.num_envs, arrived - batch.sent, arrived - asked)

    def _send(self, rollout: types.Rollout) -> tuple[types.Rollout, ...]:
        """Puts the rollout on the learner devices, straight from this one."""
        count = len(self.learners)
        parts = (rollout,) if count == 1 else acting.cut(rollout, count)
        shards = tuple(jax.device_put(part, device) for part, device in zip(parts, self.learners))
        return jax.block_until_ready(shards)
