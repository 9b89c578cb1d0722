"""A runner of docs/extending.md: acting in a Python loop, on one device."""

import contextlib
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from podracers import keys, metrics, parallel, types, unroll

ALL = jax.sharding.PartitionSpec()  # partition of the single device


class State(NamedTuple):
    """Complete state of a run: a checkpoint restores it, and the run continues."""

    learner: Any
    memory: Any  # replay, for example
    streams: unroll.Streams  # environments, latest time steps, actor states, statistics: [B, ...]
    key: jax.Array  # constant; all other keys are folded from it
    update: jax.Array  # int32, number of updates taken


@dataclasses.dataclass(frozen=True, eq=False)
class Loop(contextlib.AbstractContextManager):
    """Acts in a Python loop, on one device: slow, and easy to stop in a debugger."""

    population: ClassVar[int] = 1
    population_values: ClassVar[dict] = {}
    updates_per_dispatch: ClassVar[None] = None  # `step` takes any positive number
    timeout: ClassVar[None] = None  # no simulators on the host

    agent: Any
    environment: Any  # one stream, in JAX
    num_envs: int
    rollout_length: int

    @property
    def steps_per_update(self):
        return self.num_envs * self.rollout_length

    def init(self, seed):
        return self._init(jnp.int32(seed))

    def step(self, state, num_updates, report=None):
        for _ in range(num_updates):
            streams, rollout = self._collect(state)
            state, latest = self._learn(state._replace(streams=streams), rollout)
            report = metrics.merge(report, latest) if report else latest
        return state, report

    def actor_params(self, state):
        return self.agent.actor_params(state.learner)

    def trace(self, seed):
        state = jax.eval_shape(lambda: self.init(seed))
        _, rollout = jax.eval_shape(self._collect, state)
        return self._learn.trace(state, rollout)

    def describe(self):
        return [f"a Python loop over {self.num_envs} environments x {self.rollout_length} steps"]

    def diagnostics(self):
        return metrics.Diagnostics({}, "")

    def close(self):
        pass

    def __exit__(self, *exception):
        self.close()

    def _collect(self, state):
        """Returns the next streams, and a rollout by one version of the parameters (S5)."""
        key, _ = keys.act_and_learn(state.key, state.update)
        params = self.agent.actor_params(state.learner)
        streams, steps = state.streams, []
        for time in range(self.rollout_length):
            streams, step = self._act(params, streams, key, time)
            steps.append(step)
        timestep, action, extras = jax.tree.map(lambda *xs: jnp.stack(xs), *steps)  # [T, B, ...]
        timestep = jax.tree.map(
            lambda xs, x: jnp.concatenate([xs, x[None]]), timestep, streams.timestep
        )  # [T + 1, B, ...]: index T opens the next rollout, too (S3)
        return streams, types.Rollout(timestep, action, extras, state.streams.actor_state)

    @functools.cached_property
    def _batched(self):
        return unroll.BatchedEnvironment(self.environment)  # starts the next episode (S1)

    @functools.cached_property
    def _act(self):
        def act(params, streams, key, time):
            key = keys.at_time(keys.per_stream(key, streams.env_id), time)  # [B]
            action, actor_state, extras = self.agent.act(
                params, streams.actor_state, streams.timestep, key
            )
            inner, timestep = self._batched.step(streams.environment, action)
            names = self.environment.spec.metrics
            episodes = streams.episodes.with_metrics(names).track(timestep)
            timestep = timestep._replace(metrics={})  # (S6)
            following = unroll.Streams(inner, timestep, actor_state, streams.env_id, episodes)
            return following, (streams.timestep, action, extras)

        return jax.jit(act)

    @functools.cached_property
    def _learn(self):
        def learn(state, rollout):
            _, key = keys.act_and_learn(state.key, state.update)
            agent_state = types.AgentState(state.learner, state.memory)
            agent_state, means = self.agent.update(agent_state, rollout, key)
            episodes, ended = state.streams.episodes.flush()
            streams = state.streams._replace(episodes=episodes)
            report = metrics.of_update({**ended, **means}, rollout.timestep, state.update)
            state = State(*agent_state, streams, state.key, state.update + 1)
            return state, metrics.sum_over_devices(report)

        return parallel.mapped(learn, self._mesh, ALL, ALL)  # `update` needs the mapped axis

    @functools.cached_property
    def _init(self):
        def init(seed):
            key, env_id = jax.random.key(seed), jnp.arange(self.num_envs, dtype=jnp.int32)
            learner = self.agent.init_learner(keys.learner(key))
            streams = unroll.init(
                self.agent, self._batched, env_id, self.num_envs, keys.streams(key)
            )
            state = State(learner, (), streams, key, jnp.int32(0))
            _, rollout = jax.eval_shape(self._collect, state)
            return state._replace(memory=self.agent.init_memory(rollout))

        return parallel.mapped(init, self._mesh, ALL, ALL)

    @functools.cached_property
    def _mesh(self):
        return parallel.make_mesh(parallel.devices()[:1])
