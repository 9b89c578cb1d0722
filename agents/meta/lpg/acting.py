"""Tabular agents that learn as they act: the actor state of lifetimes.

Who teaches them is a function from an agent and a chunk of its transitions to the agent after it: a
rule (`meta_training.LPG`), or an algorithm made by hand (`tabular_a2c.TabularA2C`).

Axis legend: `B` lifetimes of one device, `E` environments of each, `T` transitions of an update,
`H` combinations of hyper-parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.meta.lpg import tabular
from podracers import environment, tasks, types

# Returns an agent after an update: `(agent, chunk, arm)` of one lifetime.
Learn = Callable[[Any, tabular.Chunk, jax.Array], Any]

# What agents learn from.
_SHOWN = (
    tasks.ROWS,
    tasks.REWARD,
    tasks.DISCOUNT,
    tasks.STEP_TYPE,
    tasks.TASK,
    environment.ACTION_MASK,
)


class Lifetime(NamedTuple):
    """An agent, and the transitions that it has not learnt from."""

    agent: Any  # [B, ...] tables, of which `policy` holds logits, [B, S, A]
    chunk: tabular.Chunk  # [B, T, E]; it lacks the time step that closes it
    arm: jax.Array  # [B] int32
    time: jax.Array  # [B] int32, steps since birth


def init(
    spec: environment.EnvironmentSpec, newborn: Any, chunk_length: int, count: int
) -> Lifetime:
    """Returns agents that have learnt nothing.

    Args:
      spec: of lifetimes.
      newborn: one agent; zeros.
      chunk_length: `T`.
      count: `B`.
    """
    shown = {name: x for name, x in spec.zero_observation().items() if name in _SHOWN}
    zeros = np.zeros(shown[tasks.REWARD].shape, np.int32)
    chunk = tabular.Chunk(types.TimeStep(shown, np.float32(0), np.float32(0), np.int8(0)), zeros)

    def repeated(x: Any, *leading: int) -> jax.Array:
        return jnp.zeros((count, *leading, *np.shape(x)), x.dtype)

    number = jnp.zeros((count,), jnp.int32)
    return Lifetime(
        agent=jax.tree.map(repeated, newborn),
        chunk=jax.tree.map(lambda x: repeated(x, chunk_length), chunk),
        arm=number,
        time=number,
    )


def act(
    learn: Learn,
    arm_logits: jax.Array,
    state: Lifetime,
    timestep: types.TimeStep,
    key: jax.Array,
    rollout_length: int | None = None,
) -> tuple[jax.Array, Lifetime]:
    """Learns where a chunk is full, then samples an action for each environment.

    Args:
      learn: takes an update of one agent.
      arm_logits: `[tasks, H]`, what the hyper-parameters of newborn agents are drawn by.
      state: before the step.
      timestep: of lifetimes, `[B]`.
      key: `[B]`.
      rollout_length: steps, a multiple of `T`: the last chunk of so many is not learnt from.

    Returns:
      `[B, E]` int32, and the state after the step.
    """
    arm_key, act_key = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
    state = jax.lax.cond(  # rare, and a selection of all agents is not free
        jnp.any(timestep.first()),
        lambda: _reborn(state, timestep, arm_logits, arm_key),
        lambda: state,
    )
    chunk_length = state.chunk.action.shape[1]
    phase = state.time[0] % chunk_length  # lifetimes begin with rollouts, so it is of all
    is_due = (phase == 0) & (state.time > 0)
    if rollout_length is not None:
        is_due &= state.time % rollout_length != 0
    agent = jax.lax.cond(
        jnp.any(is_due),
        lambda: select(is_due, _taught(learn, state, timestep), state.agent),
        lambda: state.agent,
    )
    log_policy = jax.vmap(tabular.log_policy)(agent.policy, timestep.observation)
    action = jax.vmap(jax.random.categorical)(act_key, log_policy).astype(jnp.int32)  # [B, E]
    moment = tabular.Chunk(_kept(timestep), action)
    chunk = jax.tree.map(lambda xs, x: xs.at[:, phase].set(x), state.chunk, moment)
    return action, state._replace(agent=agent, chunk=chunk, time=state.time + 1)


def select(condition: jax.Array, on_true: types.PyTree, on_false: types.PyTree) -> types.PyTree:
    """Returns rows of `on_true` where `condition` `[B]` holds, else of `on_false`."""

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, on_true, on_false)


def _reborn(
    state: Lifetime, timestep: types.TimeStep, arm_logits: jax.Array, key: jax.Array
) -> Lifetime:
    """Replaces agents where lifetimes begin, and draws their hyper-parameters."""
    logits = arm_logits[timestep.observation[tasks.TASK]]
    arm = jax.vmap(jax.random.categorical)(key, logits).astype(jnp.int32)
    newborn = jax.tree.map(jnp.zeros_like, state)._replace(arm=arm)
    return select(timestep.first(), newborn._replace(chunk=state.chunk), state)


def _taught(learn: Learn, state: Lifetime, timestep: types.TimeStep) -> Any:
    """Returns the agents after an update with full chunks, which `timestep` closes."""
    closed = jax.tree.map(
        lambda xs, x: jnp.concatenate([xs, x[:, None]], axis=1),
        state.chunk.timestep,
        _kept(timestep),
    )
    chunk = tabular.Chunk(tabular.merged(closed), state.chunk.action)
    return jax.vmap(learn)(state.agent, chunk, state.arm)


def _kept(timestep: types.TimeStep) -> types.TimeStep:
    """Returns time steps of lifetimes without what their agents do not learn from."""
    shown = {name: timestep.observation[name] for name in _SHOWN}
    return timestep._replace(observation=shown)
