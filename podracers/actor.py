"""One actor: a thread that steps its host environments and acts on its device.

Axis legend: `T` time, `B` streams of this actor, `H` streams of one of its batches, `L` the learner
devices that it feeds.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from podracers import acting, pipeline, types
from podracers import environment as environment_lib

# What an actor's time goes into; the rest of it is the host's own work, in Python.
ENVIRONMENT, INFERENCE, TRANSFER = "environment step", "inference", "transfer"
SENDING, FOR_PARAMETERS, FOR_SPACE = "sending rollouts", "wait for parameters", "wait for the queue"


class Shards(NamedTuple):
    """One actor's rollout, where the learner wants it."""

    version: int  # of the parameters that acted
    slices: tuple[types.Rollout, ...]  # one on each learner device that this actor feeds


class _Batch(NamedTuple):
    """One of an actor's batches of environments."""

    host: environment_lib.HostEnvironment
    start: jax.Array  # int32, its first row among the actor's


@dataclasses.dataclass(frozen=True, eq=False)
class Actor:
    """Everything an actor needs; `run` is the body of its thread.

    Attributes:
      programs: of its device.
      hosts: its batches of `H` environments: while one is stepped, the device acts for another.
      env_id: `[B]` int32, global.
      device: where it acts.
      learners: the devices that get its rollouts.
      key: of the run.
      first: the update that its first rollout is for.
      lag: how many updates a rollout's parameters may be behind; 0 and 1 are exact.
      versions: parameters as the learner publishes them, `{device: params}`.
      queue: takes `Shards`.
    """

    programs: acting.Acting
    hosts: tuple[environment_lib.HostEnvironment, ...]
    env_id: np.ndarray
    device: jax.Device
    learners: tuple[jax.Device, ...]
    key: jax.Array
    first: int
    lag: int
    versions: pipeline.Versions
    queue: pipeline.Queue

    def run(self, worker: pipeline.Worker) -> None:
        """Collects rollouts until it is cancelled."""
        try:
            self._run(worker)
        finally:
            for host in self.hosts:
                host.close()

    def _run(self, worker: pipeline.Worker) -> None:
        env_id, key = jax.device_put((self.env_id, self.key), self.device)
        size = self.env_id.shape[0] // len(self.hosts)
        starts = [np.int32(index * size) for index in range(len(self.hosts))]
        batches = [_Batch(h, jax.device_put(s, self.device)) for h, s in zip(self.hosts, starts)]
        actor_state = self.programs.init_actor(env_id)
        with worker.doing(ENVIRONMENT):
            timesteps = [host.reset() for host in self.hosts]
        timesteps = [jax.device_put(timestep, self.device) for timestep in timesteps]
        update, warm = self.first, False
        while True:
            with worker.doing(FOR_PARAMETERS):
                least = max(update - self.lag, self.first)
                version, params = self.versions.get(least, exact=self.lag <= 1)
            # What is compiled takes as long as it takes; later, the same call has a limit.
            with worker.doing(INFERENCE if warm else pipeline.COMPILING):
                carry = self.programs.begin(
                    params[self.device], key, np.int32(update), env_id, actor_state
                )
            carry, timesteps = self._collect(
                worker, params[self.device], carry, timesteps, batches, warm
            )
            with worker.doing(SENDING):
                shards = self._send(carry.rollout)
            with worker.doing(FOR_SPACE):
                self.queue.put(Shards(version, shards))
            actor_state = carry.actor_state
            update, warm = update + 1, True

    def _collect(self, worker, params, carry, timesteps, batches, warm):
        """Returns the carry after `T` steps, and the time steps that come next."""
        programs = self.programs
        for time in range(programs.length):
            for index, batch in enumerate(batches):
                if time:
                    timesteps[index] = self._receive(worker, batch)
                first = not warm and time == 0 and index == 0
                with worker.doing(pipeline.COMPILING if first else INFERENCE):
                    carry, action = programs.act(
                        params, carry, timesteps[index], batch.start, np.int32(time)
                    )
                    jax.block_until_ready(action)
                with worker.doing(TRANSFER):
                    action = jax.tree.map(np.asarray, jax.device_get(action))
                with worker.doing(ENVIRONMENT):
                    batch.host.send(action)
        for index, batch in enumerate(batches):
            timesteps[index] = self._receive(worker, batch)
            first = not warm and index == 0
            with worker.doing(pipeline.COMPILING if first else INFERENCE):
                carry = programs.finish(carry, timesteps[index], batch.start)
        return carry, timesteps

    def _receive(self, worker: pipeline.Worker, batch: _Batch) -> types.TimeStep:
        """Returns the next time step of a batch, on the device."""
        with worker.doing(ENVIRONMENT):
            timestep = batch.host.recv()
        with worker.doing(TRANSFER):
            return jax.device_put(timestep, self.device)

    def _send(self, rollout: types.Rollout) -> tuple[types.Rollout, ...]:
        """Puts the rollout on the learner devices, straight from this one."""
        count = len(self.learners)
        parts = (rollout,) if count == 1 else acting.cut(rollout, count)
        shards = tuple(jax.device_put(part, device) for part, device in zip(parts, self.learners))
        return jax.block_until_ready(shards)
