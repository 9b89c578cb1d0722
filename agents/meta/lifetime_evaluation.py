"""Evaluation of a learned update rule: returns of the agents that it trains, over their lifetimes.

Axis legend: `L` lifetimes, `S` segments of a lifetime, `E` environments of each.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import environment, evaluation, metrics, tasks, types


class Lives(NamedTuple):
    """Results of lifetimes, on the host."""

    returns: np.ndarray  # [L, S] mean undiscounted return of ended episodes; NaN if none ended
    task: np.ndarray  # [L] int32, index of the kind of task
    params: Any  # [L, ...] task parameters

    def optimum(self, family: tasks.TaskFamily) -> np.ndarray:
        """Returns the highest expected return in the task of each lifetime, `[L]`."""
        lives = (jax.tree.map(lambda x, n=n: x[n], self.params) for n in range(len(self.task)))
        return np.array([family.optimal_return(params) for params in lives])


class _Carry(NamedTuple):
    state: Any
    timestep: types.TimeStep
    actor_state: Any
    episodes: metrics.EpisodeStatistics  # [L * E]


def live(
    agent: agent_lib.Agent,
    lifetimes: environment.Environment,
    params: types.PyTree,
    key: jax.Array,
    num_lifetimes: int,
    num_segments: int = 10,
) -> Lives:
    """Runs agents from their initial state to the end of the longest lifetime.

    Args:
      agent: an agent that learns in `act(..., evaluation=True)`.
      lifetimes: an `environments.meta.lifetimes.Lifetimes` of one length, whose state has `params`.
      params: the result of `agent.actor_params`.
      key: random key; equal keys give equal tasks.
      num_lifetimes: `L`.
      num_segments: `S`, number of equal parts of a lifetime.
    """
    earned, ended, task, drawn = jax.device_get(
        _run(agent, lifetimes, num_lifetimes, num_segments, params, key)
    )
    with np.errstate(invalid="ignore"):
        returns = np.where(ended > 0, earned / ended, np.nan)
    return Lives(returns.T, task, drawn)


# Compiled once for all parameters with which an agent is evaluated.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(agent, lifetimes, num_lifetimes, num_segments, params, key) -> tuple[Any, ...]:
    """Returns sums of returns and numbers of episodes `[S, L]`, kinds and parameters of tasks."""
    length = lifetimes.spec.max_episode_steps // num_segments
    env_id = jnp.arange(num_lifetimes, dtype=jnp.int32)
    reset_keys, act_keys = jax.vmap(evaluation.episode_keys, (None, 0))(key, env_id)

    def step(carry: _Carry, time: jax.Array) -> tuple[_Carry, None]:
        keys = jax.vmap(jax.random.fold_in, (0, None))(act_keys, time)
        action, actor_state, _ = agent.act(
            params, carry.actor_state, carry.timestep, keys, evaluation=True
        )
        state, timestep = jax.vmap(lifetimes.step)(carry.state, action)
        # Time steps of the environments of all lifetimes, `[L * E]`, without observations.
        names = (tasks.REWARD, tasks.DISCOUNT, tasks.STEP_TYPE)
        merged = types.TimeStep((), *(timestep.observation[name].ravel() for name in names))
        episodes = carry.episodes.track(merged)
        return _Carry(state, timestep, actor_state, episodes), None

    def segment(carry: _Carry, number: jax.Array) -> tuple[_Carry, tuple[jax.Array, jax.Array]]:
        carry, _ = jax.lax.scan(step, carry, number * length + jnp.arange(length))
        episodes = carry.episodes
        ended = jnp.sum(episodes.ended.reshape(num_lifetimes, -1), axis=1)
        earned = jnp.sum(episodes.ended_return.reshape(num_lifetimes, -1), axis=1)
        return carry._replace(episodes=episodes.flush()[0]), (earned, ended)

    state, timestep = jax.vmap(lifetimes.reset)(reset_keys)
    episodes = metrics.EpisodeStatistics.init(timestep.observation[tasks.REWARD].size)
    actor_state = agent.init_actor(env_id, num_lifetimes, True)
    start = _Carry(state, timestep, actor_state, episodes)
    _, totals = jax.lax.scan(segment, start, jnp.arange(num_segments))
    return *totals, timestep.observation[tasks.TASK], state.params
