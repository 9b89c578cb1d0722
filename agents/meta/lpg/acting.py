"""Tabular agents that learn as they act: the actor state of lifetimes.

`meta_training.LPG` updates them by a learned rule, `tabular_a2c.TabularA2C` by A2C.

Axis legend: `B` lifetimes of one device, `E` environments of each, `T` transitions of an update,
`H` combinations of hyper-parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.meta.lpg import tabular
from podracers import environment, tasks, types, unroll

# `learn(agent, chunk, arm)` returns the updated agent of one lifetime.
Learn = Callable[[Any, tabular.Chunk, jax.Array], Any]


class Lifetime(NamedTuple):
    """An agent, and the transitions since its last update."""

    agent: Any  # [B, ...] tables; `policy` holds logits, [B, S, A]
    chunk: tabular.Chunk  # [B, T, E]; without the final time step
    arm: jax.Array  # [B] int32
    time: jax.Array  # [B] int32, steps since the start of the lifetime


def init(spec: environment.EnvironmentSpec, agent: Any, chunk_length: int, count: int) -> Lifetime:
    """Returns initial agents.

    Args:
      spec: specification of lifetimes.
      agent: one agent; only its shapes and types are used.
      chunk_length: `T`.
      count: `B`.
    """
    timestep = spec.timesteps()
    action: types.PyTree = timestep.observation[tasks.REWARD].update(dtype=jnp.int32)
    chunk = tabular.Chunk(timestep, action)

    def zeros(tree: Any, *leading: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)

    number = jnp.zeros((count,), jnp.int32)
    return Lifetime(zeros(agent, count), zeros(chunk, count, chunk_length), number, number)


def act(
    learn: Learn,
    arm_logits: jax.Array,
    state: Lifetime,
    timestep: types.TimeStep,
    key: jax.Array,
    rollout_length: int | None = None,
) -> tuple[jax.Array, Lifetime]:
    """Updates agents whose chunk is full, then samples an action for each environment.

    Args:
      learn: update of one agent.
      arm_logits: `[tasks, H]`, logits by which initial agents' hyper-parameters are drawn.
      state: actor state before the step.
      timestep: time steps of lifetimes, `[B]`.
      key: `[B]`.
      rollout_length: steps of a rollout, a multiple of `T`; its last chunk causes no update. None
        updates after every chunk.

    Returns:
      `[B, E]` int32, and the state after the step.
    """
    arm_key, act_key = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
    state = jax.lax.cond(  # rare; selecting among all agents at every step costs time
        jnp.any(timestep.first()),
        lambda: _reset(state, timestep, arm_logits, arm_key),
        lambda: state,
    )
    chunk_length = state.chunk.action.shape[1]
    phase = state.time[0] % chunk_length  # equal for all: lifetimes begin with rollouts
    is_due = (phase == 0) & (state.time > 0)
    if rollout_length is not None:
        is_due &= state.time % rollout_length != 0
    agent = jax.lax.cond(
        jnp.any(is_due),
        lambda: unroll.select(is_due, _updated(learn, state, timestep), state.agent),
        lambda: state.agent,
    )
    log_policy = jax.vmap(tabular.log_policy)(agent.policy, timestep.observation)
    action = jax.vmap(jax.random.categorical)(act_key, log_policy).astype(jnp.int32)  # [B, E]
    step = tabular.Chunk(timestep, action)
    chunk = jax.tree.map(lambda xs, x: xs.at[:, phase].set(x), state.chunk, step)
    return action, state._replace(agent=agent, chunk=chunk, time=state.time + 1)


def _reset(
    state: Lifetime, timestep: types.TimeStep, arm_logits: jax.Array, key: jax.Array
) -> Lifetime:
    """Resets agents where lifetimes begin, and draws their hyper-parameters."""
    logits = arm_logits[timestep.observation[tasks.TASK]]
    arm = jax.vmap(jax.random.categorical)(key, logits).astype(jnp.int32)
    initial = jax.tree.map(jnp.zeros_like, state)._replace(arm=arm, chunk=state.chunk)
    return unroll.select(timestep.first(), initial, state)


def _updated(learn: Learn, state: Lifetime, timestep: types.TimeStep) -> Any:
    """Returns the agents after an update with full chunks; `timestep` is the final time step."""
    closed = jax.tree.map(
        lambda xs, x: jnp.concatenate([xs, x[:, None]], axis=1), state.chunk.timestep, timestep
    )
    chunk = tabular.Chunk(tabular.merged(closed), state.chunk.action)
    return jax.vmap(learn)(state.agent, chunk, state.arm)
