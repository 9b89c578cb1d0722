"""The pure acting loop: an agent and a batched environment, `T` steps in one `scan`.

Axis legend: `T` time, `B` streams.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import agent as agent_lib
from podracers import batch, keys, metrics, types


class Streams(NamedTuple):
    """Everything that acting carries from one step, and from one rollout, to the next."""

    environment: batch.BatchState  # [B, ...]
    timestep: types.TimeStep  # [B, ...] the latest, on which no action was chosen yet
    actor_state: Any  # [B, ...]
    env_id: jax.Array  # [B] int32, global
    episodes: metrics.EpisodeStatistics  # [B]


def init(
    agent: agent_lib.Agent,
    environment: batch.BatchedEnvironment,
    env_id: jax.Array,
    num_envs: int,
    key: jax.Array,
) -> Streams:
    """Starts `B` streams.

    Args:
      agent: who will act.
      environment: what it will act in.
      env_id: `[B]` int32, the global indices of these streams; each makes its own key of its own.
      num_envs: how many streams there are in all, on every device.
      key: one typed key, equal for all streams.
    """
    state, timestep = environment.init(jax.vmap(jax.random.fold_in, (None, 0))(key, env_id))
    return Streams(
        environment=state,
        timestep=timestep,
        actor_state=agent.init_actor(env_id, num_envs),
        env_id=env_id,
        episodes=metrics.EpisodeStatistics.init(env_id.shape[0]),
    )


def unroll(
    agent: agent_lib.Agent,
    environment: batch.BatchedEnvironment,
    params: types.PyTree,
    streams: Streams,
    key: jax.Array,
    length: int,
) -> tuple[Streams, types.Rollout]:
    """Acts for `length` steps.

    Args:
      agent: who acts.
      environment: what it acts in.
      params: what `agent.actor_params` returned; one version for the whole rollout (S5).
      streams: where the last rollout ended.
      key: one typed key for this rollout, equal for all streams and devices.
      length: `T`.

    Returns:
      The streams where this rollout ends, and the rollout.
    """
    row_keys = keys.rows(key, streams.env_id)  # [B]

    def step(carry: Streams, time: jax.Array):
        with jax.named_scope("act"):
            act_keys = keys.at_time(row_keys, time)
            action, actor_state, extras = agent.act(
                params, carry.actor_state, carry.timestep, act_keys
            )
        with jax.named_scope("environment"):
            state, timestep = environment.step(carry.environment, action)
        following = carry._replace(
            environment=state,
            timestep=timestep,
            actor_state=actor_state,
            episodes=carry.episodes.track(timestep),
        )
        return following, (carry.timestep, action, extras)

    final, (timesteps, actions, extras) = jax.lax.scan(step, streams, jnp.arange(length))
    rollout = types.Rollout(
        timestep=jax.tree.map(
            lambda xs, x: jnp.concatenate([xs, x[None]]), timesteps, final.timestep
        ),
        action=actions,
        extras=extras,
        actor_state=streams.actor_state,
    )
    return final, rollout
