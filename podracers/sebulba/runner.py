"""Sebulba: host environments, actor devices that infer, learner devices that update.

The architecture of Hessel et al., "Podracer architectures for scalable Reinforcement Learning",
2021, https://arxiv.org/abs/2104.06272, section "Sebulba": simulators that cannot be compiled step
on the host, and each actor thread sends its rollouts directly to the learner devices.

Axis legend: `T` time, `E` environments, `B` streams, `A` actors, `D` learner devices.
"""

import contextlib
import dataclasses
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import device_memory, errors, keys, metrics, parallel, types
from podracers import environment as environment_lib
from podracers import precision as precision_lib
from podracers.sebulba import actor, jax_host, timing
from podracers.sebulba import learner as learner_lib
from podracers.sebulba import placement as placement_lib
from podracers.supervision import pipeline


@dataclasses.dataclass
class _Session:
    """Running actors."""

    supervisor: pipeline.Supervisor  # supervises the actors' threads
    versions: pipeline.Versions  # published parameters, `{device: params}`
    queues: list[pipeline.Queue]  # one for the rollouts of each actor
    timers: timing.Timers
    update: int  # number of updates that the latest state has taken
    state: learner_lib.SebulbaState | None = None  # the latest; None during an update


@dataclasses.dataclass(frozen=True, eq=False)
class Sebulba(contextlib.AbstractContextManager["Sebulba"]):
    """Runs an agent on host environments, or on a JAX environment that is stepped on the host.

    Attributes:
      agent: the agent.
      environment: a factory of host environments, or a JAX environment.
      num_envs: `E`, environments over all actors of all processes; each is a stream, or one for
        each agent.
      rollout_length: `T`, agent steps of each stream between updates.
      actor_devices: an index into this process's devices for each actor thread (an index may occur
        several times); None to choose.
      learner_devices: indices of the devices that learn; None for those that do not act. All
        processes have the same placement, and their learner devices learn together.
      lag: number of updates that a rollout's parameters are behind. 0: actors wait for the learner.
        1: collecting overlaps learning, and is reproducible. More: actors take the newest
        parameters, which are at most `lag` updates old.
      batches_per_actor: number of batches that an actor's streams are split into, so that some step
        while the device acts for others. None for 2, or for 1 where the streams of a process are
        odd in number, or where the CPU acts: its cores step as well, and small batches cost more.
      num_threads: threads of all simulators together; None for the number of cores.
      timeout: seconds that a step of a simulator, or any other single wait, may take.
      precision: the precision that the agent computes with.
    """

    population = 1
    updates_per_dispatch = 1  # the host dispatches each update

    agent: agent_lib.Agent
    environment: environment_lib.AnyEnvironment
    num_envs: int
    rollout_length: int
    actor_devices: tuple[int, ...] | None = None
    learner_devices: tuple[int, ...] | None = None
    lag: int = 1
    batches_per_actor: int | None = None
    num_threads: int | None = None
    timeout: float = 60.0
    precision: precision_lib.Precision = precision_lib.DEFAULT
    # Of the running actors; None without any.
    _session: _Session | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self):
        errors.require_count(self, "num_envs", "rollout_length", "steps_per_update")
        errors.require_count(self, "lag", least=0)
        errors.require_count(self, "batches_per_actor", "num_threads")
        if not self.timeout > 0:
            raise errors.UserError(f"Sebulba.timeout: expected seconds, got {self.timeout!r}")

    @property
    def population_values(self) -> dict[str, tuple[float, ...]]:
        """Returns none: there is one member."""
        return {}

    @property
    def steps_per_update(self) -> int:
        """Agent steps of one update, over all streams."""
        return self.num_envs * self.environment.spec.num_agents * self.rollout_length

    @functools.cached_property
    def placement(self) -> placement_lib.Placement:
        """The devices that act and learn. The constructor of a runner touches no device.

        Raises:
          errors.UserError: there is no such device, or the streams do not divide.
        """
        count = jax.process_count()
        if self.num_envs % count:
            raise errors.UserError(
                f"Sebulba.num_envs = {self.num_envs} does not divide over {count} processes: use "
                f"{errors.nearest_multiples(self.num_envs, count)}"
            )
        return placement_lib.plan(
            [parallel.devices(process) for process in range(count)],
            jax.process_index(),
            self.num_envs // count,
            self.num_batches,
            self.actor_devices,
            self.learner_devices,
        )

    @property
    def num_batches(self) -> int:
        """Number of batches that each actor's streams are split into."""
        is_odd = self.num_envs // jax.process_count() % 2
        return self.batches_per_actor or (1 if is_odd or parallel.platform() == "cpu" else 2)

    def describe(self) -> list[str]:
        processes = jax.process_count()
        group = f" on each of {processes} processes" if processes > 1 else ""
        count = self.environment.spec.num_agents
        agents = f" x {count} agents" if count > 1 else ""
        return [
            f"Sebulba{group}, {self.placement.describe()}",
            f"{len(self.placement.actors)} x {self.num_batches} batches of "
            f"{self._envs_per_actor // self.num_batches} environments{agents} on "
            f"{self._threads_per_batch} threads each, x {self.rollout_length} steps = "
            f"{self.steps_per_update} agent steps an update, lag {self.lag}",
            *device_memory.usage(self, self.placement.mesh),
        ]

    def trace(self, seed: int) -> jax.stages.Traced:
        """Traces one update as a run does; the run reuses the trace."""
        return self._learner.trace(jax.eval_shape(lambda: self.init(seed)))

    def trace_acting(self, seed: int) -> dict[str, jax.stages.Traced]:
        """Traces the programs of an actor's device, by name; nothing runs."""
        state = jax.eval_shape(lambda: self.init(seed))
        params = jax.eval_shape(self.agent.actor_params, state.learner)
        device = self.placement.actors[0]
        rows = self._envs_per_actor * self._factory.spec.num_agents
        return self._programs.trace(device, params, rows, self.num_batches)

    def init(self, seed: int) -> learner_lib.SebulbaState:
        return self._learner.init(np.int32(seed))

    def step(
        self,
        state: learner_lib.SebulbaState,
        num_updates: int,
        report: metrics.Report | None = None,
    ) -> tuple[learner_lib.SebulbaState, metrics.Report]:
        """Takes `num_updates` updates; `state` is donated.

        The simulators restart if `state` is not the one that the last call returned, such as a
        restored state or that of another seed.

        Raises:
          pipeline.WorkerError: an actor hangs.
          Exception: that of an actor.
        """
        try:
            session = self._session
            if session is None or session.state is not state:
                session = self._start(state)
            session.state = None
            session.timers.learner.switch("")
            for _ in range(num_updates):
                state, latest = self._update(session, state)
                report = metrics.merge(report, latest) if report else latest
            assert report is not None  # there is an update
        except BaseException:
            self.close()
            raise
        session.timers.learner.switch(timing.ELSEWHERE)
        session.state = state
        return state, report

    def _update(
        self, session: _Session, state: learner_lib.SebulbaState
    ) -> tuple[learner_lib.SebulbaState, metrics.Report]:
        """Takes one update: waits for rollouts, learns, publishes parameters."""
        timer = session.timers.learner
        with timer(timing.FOR_ROLLOUTS):
            shards = [queue.get() for queue in session.queues]  # one rollout of each actor
        session.timers.lags += [session.update - shard.version for shard in shards]
        with timer(timing.LEARNING):
            slices = [part for shard in shards for part in shard.slices]
            state, report = self._learner.learn(state, self._learner.assemble(slices))
            del shards, slices
            params = self._copy_params(state)  # dispatched before the update has ended
            jax.block_until_ready((state, report, list(params.values())))
        session.update += 1
        with timer(timing.PUBLISHING):
            session.versions.publish(session.update, params)
        return state, report

    def _copy_params(self, state: learner_lib.SebulbaState) -> dict[jax.Device, types.PyTree]:
        """Copies the acting parameters to the actors' devices; no later donation deletes them."""
        copies = self._learner.copy_actor_params(state.learner)
        learners = self.placement.learners

        def on(device: jax.Device) -> types.PyTree:
            source = device if device in learners else learners[0]
            of_source = jax.tree.map(
                lambda x: next(s.data for s in x.addressable_shards if s.device == source), copies
            )
            return jax.device_put(of_source, device)

        return {device: on(device) for device in set(self.placement.actors)}

    def actor_params(self, state: learner_lib.SebulbaState) -> types.PyTree:
        return self.agent.actor_params(state.learner)

    def diagnostics(self) -> metrics.Diagnostics:
        """Returns shares of the time since the last call, and the bottleneck."""
        if self._session is None:
            return metrics.Diagnostics({}, "")
        return self._session.timers.take()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        session = self._session
        object.__setattr__(self, "_session", None)
        if session is not None:
            session.supervisor.close()

    @functools.cached_property
    def _factory(self) -> environment_lib.HostEnvironmentFactory:
        if environment_lib.is_host(self.environment):
            return self.environment
        return jax_host.JaxHostEnvironment(self.environment)

    @functools.cached_property
    def _programs(self) -> actor.ActorPrograms:
        spec = self._factory.spec
        sizes = self.rollout_length, self.num_envs * spec.num_agents, self.lag
        return actor.ActorPrograms(self.agent, spec, *sizes, self.precision)

    @functools.cached_property
    def _learner(self) -> learner_lib.Learner:
        return learner_lib.Learner(self._programs, self.placement)

    @property
    def _envs_per_actor(self) -> int:
        """Number of environments of each actor."""
        return self.num_envs // (jax.process_count() * len(self.placement.actors))

    @property
    def _threads_per_batch(self) -> int:
        """Number of host threads that step one batch; all batches together use all threads."""
        available = self.num_threads or parallel.num_host_cores()
        return max(available // (len(self.placement.actors) * self.num_batches), 1)

    def _start(self, state: learner_lib.SebulbaState) -> _Session:
        """Starts actors that collect for this state."""
        self.close()
        # A copy on the host, because the key in the state is donated with it.
        data = np.asarray(jax.random.key_data(state.key.addressable_data(0)))
        key = jax.random.wrap_key_data(jnp.asarray(data))
        supervisor = pipeline.Supervisor(self.timeout)
        session = _Session(
            supervisor=supervisor,
            versions=pipeline.Versions(supervisor, self.lag + 1),
            queues=[pipeline.Queue(supervisor, max(self.lag, 1)) for _ in self.placement.actors],
            timers=timing.Timers(num_devices=jax.local_device_count()),
            update=int(state.update),
        )
        object.__setattr__(self, "_session", session)
        weakref.finalize(session, supervisor.cancel)  # the runner may never be closed
        params = self._copy_params(state)
        jax.block_until_ready(list(params.values()))
        session.versions.publish(session.update, params)
        for index in range(len(self.placement.actors)):
            run = self._actor(session, index, key).run
            session.timers.actors.append(supervisor.start(f"actor {index}", run).timer)
        return session

    def _actor(self, session: _Session, index: int, key: jax.Array) -> actor.Actor:
        place, rows = self.placement, self._envs_per_actor
        number = jax.process_index() * len(place.actors) + index  # unique in the run
        first_learner = index * place.learners_per_actor // place.actors_per_learner
        stream_key = keys.streams(key, session.update)
        is_host = environment_lib.is_host(self.environment)
        factory, threads = self._factory, self._threads_per_batch  # the thread must not hold `self`
        return actor.Actor(
            programs=self._programs.on(place.actors[index]),
            length=self.rollout_length,
            make=lambda part: factory.make(stream_key, part, threads),
            num_batches=self.num_batches,
            # The first step of a JAX environment is compiled.
            starting=pipeline.STARTING if is_host else pipeline.COMPILING,
            env_id=np.arange(number * rows, (number + 1) * rows, dtype=np.int32),
            device=place.actors[index],
            learners=place.learners[first_learner : first_learner + place.learners_per_actor],
            key=key,
            first=session.update,
            lag=self.lag,
            versions=session.versions,
            queue=session.queues[index],
            factory=factory,
        )
