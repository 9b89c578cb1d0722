"""Acting in JAX environments: batches with auto-reset, and rollouts of `T` steps in one `scan`.

Axis legend: `T` time, `E` environments, `A` agents of each, `B = E * A` streams (neighbours are
agents of one environment), `K` environments that are reset together.

Under `vmap`, a reset inside `step` is computed for every stream at every step, and a select
discards it where no episode ended. `reset_batch = K` avoids that: after each step, a loop resets
`K` of the streams whose episode ended, until none is left. Unlike the "optimistic" resets of
Craftax (https://github.com/MichaelTMatthews/Craftax), which share fresh states among streams, the
results are bit for bit as if every stream were reset.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import keys, metrics, types


class BatchState(NamedTuple):
    """The state of `E` environments."""

    environment: Any  # [E, ...]
    key: jax.Array  # [E] typed keys, one an environment, constant
    episode: jax.Array  # [E] int32, index of the current episode
    last: jax.Array  # [E] bool, true if the latest time step was LAST


def to_streams(spec: environment_lib.EnvironmentSpec, tree: types.PyTree) -> types.PyTree:
    """Returns the leaves `[B, ...]` of time steps `[E, ...]`, or `[E, A, ...]` of some agents."""
    if spec.num_agents == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def to_agents(spec: environment_lib.EnvironmentSpec, tree: types.PyTree) -> types.PyTree:
    """Returns the leaves `[E, ...]`, or `[E, A, ...]`, of actions `[B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *spec.agent_axis, *x.shape[1:]), tree)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedEnvironment:
    """`E` copies of an environment, with next-step auto-reset (S1: the step after LAST is FIRST).

    Without `reset_batch` (`K`), a reset of every stream is computed at every step, which is faster
    where a reset costs less than about ten steps.
    """

    environment: environment_lib.Environment
    reset_batch: int | None = None

    def init(self, key: jax.Array) -> tuple[BatchState, types.TimeStep]:
        """Starts `E` environments from their keys `[E]`; the time steps are `[B]`."""
        episode = jnp.zeros(key.shape, jnp.int32)
        return self._results(key, episode, self._reset(key, episode))

    def step(self, state: BatchState, action: types.PyTree) -> tuple[BatchState, types.TimeStep]:
        """Takes actions `[B]`; an environment whose episode had ended ignores them and restarts."""
        action = to_agents(self.environment.spec, action)
        inner, timestep = jax.vmap(self.environment.step)(state.environment, action)
        episode = state.episode + state.last.astype(jnp.int32)
        if self.reset_batch is None:
            fresh = self._reset(state.key, episode)
            inner, timestep = select(state.last, fresh, (inner, timestep))
            # One observation, of the selected state: XLA removes those of both states.
            if observe := getattr(self.environment, "observation_of", None):
                timestep = timestep._replace(observation=jax.vmap(observe)(inner))
        else:
            chunk = min(self.reset_batch, episode.shape[0])  # K
            inner, timestep = self._reset_in_chunks(state, episode, (inner, timestep), chunk)
        return self._results(state.key, episode, (inner, timestep))

    def _results(
        self, key: jax.Array, episode: jax.Array, results: tuple[Any, types.TimeStep]
    ) -> tuple[BatchState, types.TimeStep]:
        spec, (inner, timestep) = self.environment.spec, results
        # The end of an episode is that of all agents.
        last = timestep.last() if spec.num_agents == 1 else timestep.last()[:, 0]
        return BatchState(inner, key, episode, last), to_streams(spec, timestep)

    def _reset(self, key: jax.Array, episode: jax.Array) -> tuple[Any, types.TimeStep]:
        with jax.named_scope("reset"):
            return jax.vmap(self.environment.reset)(jax.vmap(jax.random.fold_in)(key, episode))

    def _reset_in_chunks(
        self, state: BatchState, episode: jax.Array, stepped: types.PyTree, chunk: int
    ) -> tuple[Any, types.TimeStep]:
        def body(carry):
            waiting, current = carry
            rank = jnp.cumsum(waiting.astype(jnp.int32)) - 1  # [E] index among waiting ones
            chosen = waiting & (rank < chunk)  # [E]
            rows = jnp.nonzero(chosen, size=chunk, fill_value=0)[0]  # [K]
            fresh = self._reset(state.key[rows], episode[rows])
            # A gather and a select, because typed keys in the state allow no scatter.
            fresh = jax.tree.map(lambda x: x[jnp.clip(rank, 0, chunk - 1)], fresh)
            return waiting & ~chosen, select(chosen, fresh, current)

        _, current = jax.lax.while_loop(
            lambda carry: jnp.any(carry[0]), body, (state.last, stepped)
        )
        return current


class Streams(NamedTuple):
    """State of acting that is carried from step to step and from rollout to rollout."""

    environment: BatchState  # [E, ...]
    timestep: types.TimeStep  # [B, ...] the latest, for which no action is chosen yet
    actor_state: Any  # [B, ...]
    env_id: jax.Array  # [B] int32, global indices of the streams
    episodes: metrics.EpisodeStatistics  # [B]


def init(
    agent: agent_lib.Agent,
    environment: BatchedEnvironment,
    env_id: jax.Array,
    num_envs: int,
    key: jax.Array,
) -> Streams:
    """Starts the environments `env_id`, `[E]` int32, out of `num_envs` on all devices.

    Their global indices are folded into `key`, which is equal for all of them.
    """
    state, timestep = environment.init(keys.per_stream(key, env_id))
    spec = environment.environment.spec
    stream_id = spec.streams_of(env_id)
    return Streams(
        environment=state,
        timestep=timestep._replace(metrics={}),
        actor_state=agent.init_actor(stream_id, num_envs * spec.num_agents),
        env_id=stream_id,
        episodes=metrics.EpisodeStatistics.init(stream_id.shape[0]),
    )


def unroll(
    agent: agent_lib.Agent,
    environment: BatchedEnvironment,
    params: types.PyTree,
    streams: Streams,
    key: jax.Array,
    length: int,
    steps_per_pass: int = 1,
) -> tuple[Streams, types.Rollout]:
    """Acts for `length` steps.

    Args:
      agent: the agent that acts.
      environment: the environments to act in.
      params: the result of `agent.actor_params`; one version for the whole rollout (S5).
      streams: the streams at the end of the last rollout.
      key: one typed key for this rollout, equal for all streams and devices.
      length: `T`.
      steps_per_pass: steps in one pass of the compiled loop.

    Returns:
      The streams at the end of this rollout, and the rollout.
    """
    stream_keys = keys.per_stream(key, streams.env_id)  # [B]

    def step(carry: Streams, time: jax.Array):
        with jax.named_scope("act"):
            act_keys = keys.at_time(stream_keys, time)
            action, actor_state, extras = agent.act(
                params, carry.actor_state, carry.timestep, act_keys
            )
        with jax.named_scope("environment"):
            state, timestep = environment.step(carry.environment, action)
        following = carry._replace(
            environment=state,
            timestep=timestep._replace(metrics={}),
            actor_state=actor_state,
            episodes=carry.episodes.track(timestep),
        )
        return following, (carry.timestep, action, extras)

    names = environment.environment.spec.metrics
    begun = streams._replace(episodes=streams.episodes.with_metrics(names))
    with jax.named_scope("rollout"):
        final, (timesteps, actions, extras) = jax.lax.scan(
            step, begun, jnp.arange(length), unroll=steps_per_pass
        )
    rollout = types.Rollout(
        timestep=jax.tree.map(
            lambda xs, x: jnp.concatenate([xs, x[None]]), timesteps, final.timestep
        ),
        action=actions,
        extras=extras,
        actor_state=streams.actor_state,
    )
    return final, rollout


def select(condition: jax.Array, on_true: types.PyTree, on_false: types.PyTree) -> types.PyTree:
    """Returns rows of `on_true` where `condition` `[E]` holds, else of `on_false`."""

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, on_true, on_false)
