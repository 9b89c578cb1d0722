"""Anakin: acting, stepping the environment and learning in one compiled program.

The architecture of Hessel et al., "Podracer architectures for scalable Reinforcement Learning",
2021, https://arxiv.org/abs/2104.06272, section "Anakin": the program is replicated over the
devices, each with its own streams, and gradients are combined in each gradient step.

Axis legend: `P` population (absent where it is 1), `E` environments, `B` streams, `D` devices.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import device_memory, errors, keys, metrics, parallel, types, unroll
from podracers import environment as environment_lib
from podracers import population as population_lib
from podracers import precision as precision_lib


class AnakinState(NamedTuple):
    """Complete state of a run. Saving and restoring it continues the run bit for bit."""

    learner: Any  # [P, ...] replicated over devices
    memory: Any  # [P, ...] memories of all devices, concatenated along the next axis
    streams: unroll.Streams  # [P, B, ...] split over devices
    key: jax.Array  # [P] typed, constant: all keys are folded from it
    update: jax.Array  # int32, number of updates taken
    evolution: Any = ()  # `population.Evolution`, or () if options stay


@dataclasses.dataclass(frozen=True, eq=False)
class Anakin(contextlib.AbstractContextManager["Anakin"]):
    """Runs an agent on a JAX environment.

    Attributes:
      agent: the agent.
      environment: a JAX environment.
      num_envs: `E`, environments over all devices; each is a stream, or one for each agent.
      rollout_length: `T`, agent steps of each stream between updates.
      population: `P`, number of independent seeds to train at once.
      population_values: numbers by option of the agent, such as `{'learning_rate': (1e-4, 1e-3)}`,
        one for each member; fewer are repeated cyclically (see `population.by_option`).
      pbt_period: updates between two exploit steps of population based training, which begins with
        `population_values`: members of the lowest quarter by the return of episodes since the last
        step continue from copies of members of the highest quarter, with options that
        `population.explore` changed. A step is left out if a member has ended no episode. None for
        options that stay.
      pbt_ranges: lowest and highest value of each of these options.
      reset_batch: number of streams of a device to reset together; None to reset all of them at
        every step (see `unroll.BatchedEnvironment`); "auto" for 16 on a CPU, and None elsewhere.
      num_devices: number of devices to use; None for all.
      steps_per_pass: steps of acting in one pass of the compiled loop; "auto" for 8 on a GPU, where
        they are fewer kernels (and take longer to compile), and 1 elsewhere.
      precision: the precision that the agent computes with.
    """

    updates_per_dispatch = None  # any number
    timeout = None  # there is no simulator on the host

    agent: agent_lib.Agent
    environment: environment_lib.Environment
    num_envs: int
    rollout_length: int
    population: int = 1
    population_values: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    pbt_period: int | None = None
    pbt_ranges: population_lib.Ranges = dataclasses.field(default_factory=dict)
    reset_batch: int | str | None = "auto"
    num_devices: int | None = None
    steps_per_pass: int | str = "auto"
    precision: precision_lib.Precision = precision_lib.DEFAULT

    def __post_init__(self):
        errors.require_count(self, "num_envs", "rollout_length", "population")
        for name in ("reset_batch", "steps_per_pass"):
            if isinstance(value := getattr(self, name), str):
                errors.require_known(f"Anakin.{name}: got", value, ("auto",))
            else:
                errors.require_count(self, name)
        errors.require_count(self, "num_devices", "pbt_period")
        values = population_lib.by_option(self.agent, self.population, self.population_values)
        object.__setattr__(self, "population_values", values)
        if self.pbt_period is not None:
            if not values or self.population < population_lib.MIN_MEMBERS:
                raise errors.UserError(
                    f"Anakin.pbt_period: expected Anakin.population_values, and Anakin.population "
                    f"of at least {population_lib.MIN_MEMBERS}; got {self.population_values!r} and "
                    f"{self.population}"
                )
            ranges = population_lib.ranges_by_option(self.agent, values, self.pbt_ranges)
            object.__setattr__(self, "pbt_ranges", ranges)
        elif self.pbt_ranges:
            raise errors.UserError("Anakin.pbt_ranges: expected Anakin.pbt_period, got None")
        errors.require_count(self, "steps_per_update")
        if environment_lib.is_host(self.environment):
            raise errors.UserError(
                f"Anakin needs an environment written in JAX, and {self.environment.spec.name} "
                "runs on the host: use --runner sebulba"
            )

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of all processes; the constructor of a runner touches no device."""
        devices = parallel.devices()
        available = len(devices)
        count = self.num_devices or available
        if count > available or (count < available and jax.process_count() > 1):
            raise errors.UserError(
                f"Anakin.num_devices = {count}: {jax.process_count()} process(es) have {available} "
                "devices, and several processes use all of theirs"
            )
        if self.num_envs % count:
            near = errors.nearest_multiples(self.num_envs, count)
            raise errors.UserError(
                f"Anakin.num_envs = {self.num_envs} does not divide over {count} devices: "
                f"use {near}, or set Anakin.num_devices"
            )
        return parallel.make_mesh(devices[:count])

    @property
    def steps_per_update(self) -> int:
        """Agent steps of one update, over all streams of one member of the population."""
        return self.num_envs * self.environment.spec.num_agents * self.rollout_length

    @property
    def reset_size(self) -> int | None:
        """`reset_batch`, or the choice for the devices.

        A pass of the loop over resets takes 12 kernels and a copy to the host on a GPU, and there
        are passes in proportion to the streams: with 65,536 of them, 96% of the time.
        """
        if isinstance(self.reset_batch, str):  # "auto"
            return 16 if self.mesh.devices.flat[0].platform == "cpu" else None
        return self.reset_batch

    @property
    def pass_length(self) -> int:
        """`steps_per_pass`, or the choice for the devices: on a GPU most kernels are short."""
        if isinstance(self.steps_per_pass, str):  # "auto"
            return 8 if self.mesh.devices.flat[0].platform == "gpu" else 1
        return self.steps_per_pass

    def trace(self, seed: int) -> jax.stages.Traced:
        """Traces one update as a run does; the run reuses the trace."""
        try:
            shapes = jax.eval_shape(lambda: self.init(seed))
            state = parallel.placed(shapes, self.mesh, self._layout)
            return self._step.trace(state, np.int32(1), self._no_updates)
        except TypeError as error:  # also the base of JAX's own tracing errors
            if not self.population_values:
                raise
            raise errors.UserError(
                "Anakin.population_values: an option that decides what is compiled cannot differ "
                f"between members; check {', '.join(self.population_values)} "
                f"({errors.one_line(error)})"
            ) from error

    def diagnostics(self) -> metrics.Diagnostics:
        """Returns nothing: the host cannot time the parts of one program."""
        return metrics.Diagnostics({}, "")

    def describe(self) -> list[str]:
        devices = self.mesh.devices.tolist()
        members = f", a population of {self.population}" if self.population > 1 else ""
        count = self.environment.spec.num_agents
        agents = f" x {count} agents" if count > 1 else ""
        return [
            f"Anakin on {len(devices)} x {devices[0].device_kind}: {self.num_envs} environments"
            f"{agents} x {self.rollout_length} steps = {self.steps_per_update} agent steps an "
            f"update{members}",
            *device_memory.usage(self, devices),
        ]

    def init(self, seed: int) -> AnakinState:
        return self._init(np.int32(seed))

    def step(
        self, state: AnakinState, num_updates: int, report: metrics.Report | None = None
    ) -> tuple[AnakinState, metrics.Report]:
        # From the host, so that no placement of the report on devices compiles another program.
        begun = self._no_updates if report is None else jax.device_get(report)
        return self._step(state, np.int32(num_updates), begun)

    def actor_params(self, state: AnakinState) -> types.PyTree:
        def member(learner, values):
            return population_lib.with_options(self.agent, values).actor_params(learner)

        params = self._per_member(member)(state.learner, self._options(state))
        if self.pbt_period is None:
            return params
        return population_lib.Acting(params, state.evolution.options)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing: the state belongs to the caller."""

    @functools.cached_property
    def _values(self) -> dict[str, np.ndarray]:
        """Per-member option values, `[P]` each, of a new run."""
        return population_lib.arrays(self.population_values)

    def _options(self, state: AnakinState) -> Mapping[str, jax.typing.ArrayLike]:
        """Returns the members' options, `[P]` each, before an update."""
        return self._values if self.pbt_period is None else state.evolution.options

    def _per_member(self, function):
        return function if self.population == 1 else jax.vmap(function)

    @functools.cached_property
    def _layout(self) -> AnakinState:
        """Shardings of the state, as a tree prefix."""
        spec: Callable[..., types.PyTree] = jax.sharding.PartitionSpec
        rows = spec(parallel.AXIS) if self.population == 1 else spec(None, parallel.AXIS)
        return AnakinState(spec(), rows, rows, key=spec(), update=spec(), evolution=spec())

    @functools.cached_property
    def _batched(self) -> unroll.BatchedEnvironment:
        return unroll.BatchedEnvironment(self.environment, self.reset_size)

    @functools.cached_property
    def _init(self):
        function = self.precision.tracing()(self._init_shard)
        return parallel.mapped(function, self.mesh, jax.sharding.PartitionSpec(), self._layout)

    @functools.cached_property
    def _step(self):
        function, whole = self.precision.tracing()(self._step_shard), jax.sharding.PartitionSpec()
        layout = self._layout, whole
        return parallel.mapped(function, self.mesh, (*layout, whole), layout, donate_argnums=(0,))

    @functools.cached_property
    def _no_updates(self) -> metrics.Report:
        """The report of no update, on the host."""
        layout = self._layout, jax.sharding.PartitionSpec()
        function = self.precision.tracing()(self._one_update)
        mapped = parallel.mapped(function, self.mesh, (self._layout,), layout)
        return metrics.empty(jax.eval_shape(mapped, jax.eval_shape(lambda: self.init(0)))[1])

    def _init_shard(self, seed: jax.Array) -> AnakinState:
        """Initialises this device's part of the state."""

        def member(key: jax.Array, values: Mapping[str, jax.typing.ArrayLike]):
            agent = population_lib.with_options(self.agent, values)
            learner = agent.init_learner(keys.learner(key))
            local = self.num_envs // parallel.axis_size()
            env_id = parallel.axis_index() * local + jnp.arange(local, dtype=jnp.int32)
            streams = unroll.init(agent, self._batched, env_id, self.num_envs, keys.streams(key))
            _, template = jax.eval_shape(self._act, learner, streams, key, values)
            memory = parallel.check_leading_axis(agent.init_memory(template))
            return learner, memory, streams

        # Keys are made here because an array on a device of one process is no argument for a
        # program on the devices of several.
        if self.population == 1:
            key = jax.random.key(seed)
            learner, memory, streams = member(key, self._values)
        else:
            key = jax.vmap(jax.random.key)(seed + jnp.arange(self.population))
            # `lax.map`, because `vmap` batches the factorisations of orthogonal initialisers, and
            # two batched ones can deadlock on a CPU of two cores (jaxlib 0.10: each holds a thread
            # and waits for another).
            learner, memory, streams = jax.lax.map(lambda x: member(*x), (key, self._values))
        state = AnakinState(learner, memory, streams, key, jnp.zeros((), jnp.int32))
        if self.pbt_period is None:
            return state
        options = {name: jnp.asarray(values) for name, values in self._values.items()}
        none = types.Mean(jnp.zeros(self.population), jnp.zeros(self.population))
        return state._replace(evolution=population_lib.Evolution(options, none))

    def _step_shard(self, state: AnakinState, num_updates: jax.Array, report: metrics.Report):
        def body(_, carry):
            state, report = carry
            state, latest = self._one_update(state)
            # Summed in the order of updates, so that a report does not depend on dispatches.
            latest = latest._replace(means=parallel.global_sum(latest.means))
            return state, metrics.merge(report, latest)

        # The trip count is traced, so that any number of updates runs the same program.
        state, report = jax.lax.fori_loop(0, num_updates, body, (state, report))
        return state, metrics.Report(report.means, *jax.lax.pmin(report[1:], parallel.AXIS))

    # Jitted within larger programs: one trace for the shapes of its report and the loop.
    @functools.cached_property
    def _one_update(self):
        return jax.jit(self._update, inline=True)

    def _update(self, state: AnakinState) -> tuple[AnakinState, metrics.Report]:
        """Takes one update of every member on this device."""

        def member(learner, memory, streams, key, values):
            act_key, learn_key = keys.act_and_learn(key, state.update)
            streams, rollout = self._act(learner, streams, act_key, values)
            agent = population_lib.with_options(self.agent, values)
            with jax.named_scope("learn"):
                agent_state = types.AgentState(learner, memory)
                agent_state, means = agent.update(agent_state, rollout, learn_key)
            episodes, episode_means = streams.episodes.flush()
            streams = streams._replace(episodes=episodes)
            means = {**episode_means, **means}
            players = self.environment.spec.players
            report = metrics.of_update(means, rollout.timestep, state.update, players)
            return agent_state.learner, agent_state.memory, streams, report

        learner, memory, streams, report = self._per_member(member)(
            state.learner, state.memory, state.streams, state.key, self._options(state)
        )
        state = state._replace(
            learner=learner, memory=memory, streams=streams, update=state.update + 1
        )
        if self.pbt_period is None:
            return state, report
        returns = parallel.global_sum(report.means["episode/return"])  # so that devices agree
        returns = state.evolution.returns.merge(returns)
        state = state._replace(evolution=state.evolution._replace(returns=returns))
        due = (state.update % self.pbt_period == 0) & jnp.all(returns.count > 0.0)
        state, means = self._evolve(state, due)
        return state, report._replace(means=report.means | means)

    def _evolve(
        self, state: AnakinState, due: jax.Array
    ) -> tuple[AnakinState, dict[str, types.Mean]]:
        """Takes an exploit step if it is due.

        Returns:
          The state, and metrics: the options `[P]` before the step, and the member `[P]` that each
          member continues from.
        """
        (options, returns), members = state.evolution, jnp.arange(self.population)

        def step(state: AnakinState) -> tuple[AnakinState, jax.Array]:
            exploit_key, explore_key = keys.evolution(state.key[0], state.update)
            lowest, source = population_lib.exploit(returns.total / returns.count, exploit_key)
            # Streams too: replay and recurrent states continue them. New episodes have new keys.
            learner, memory, streams = jax.tree.map(
                lambda x: x.at[lowest].set(x[source]), (state.learner, state.memory, state.streams)
            )
            environment = streams.environment._replace(key=state.streams.environment.key)
            copied = jax.tree.map(lambda x: x[source], options)
            explored = population_lib.explore(copied, self.pbt_ranges, explore_key)
            changed = {
                name: x.at[lowest].set(jnp.where(source == lowest, x[lowest], explored[name]))
                for name, x in options.items()
            }
            none = jax.tree.map(jnp.zeros_like, returns)
            state = state._replace(
                learner=learner,
                memory=memory,
                streams=streams._replace(environment=environment),
                evolution=population_lib.Evolution(changed, none),
            )
            return state, members.at[lowest].set(source)

        state, sources = jax.lax.cond(due, step, lambda state: (state, members), state)
        count = jnp.broadcast_to(due, sources.shape).astype(jnp.float32)
        means = {"pbt/source": types.Mean(sources * count, count)}
        for name, values in options.items():
            means[f"pbt/{name}"] = types.Mean(values, jnp.ones_like(values))
        return state, means

    # Jitted within larger programs, so that `_init_shard` and `_update` share one trace.
    @functools.cached_property
    def _act(self):
        def act(learner: Any, streams: unroll.Streams, key: jax.Array, values: Any):
            agent = population_lib.with_options(self.agent, values)
            sizes = self.rollout_length, self.pass_length
            params = agent.actor_params(learner)
            return unroll.unroll(agent, self._batched, params, streams, key, *sizes)

        return jax.jit(act, inline=True)
