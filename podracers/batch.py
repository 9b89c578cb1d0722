"""Batches a one-stream environment and restarts its episodes (S1: the step after LAST is FIRST).

Axis legend: `B` streams, `K` lanes that are reset together.

Under `vmap`, a reset inside `step` is computed for every lane at every step and thrown away by a
select wherever no episode ended. `reset_batch = K` avoids that: after each step, while ended lanes
remain, `K` of them are reset together. Unlike "optimistic" resets, which share a few fresh states
among the lanes that happened to end (Craftax's wrapper, https://github.com/MichaelTMatthews/Craftax),
each lane keeps its own key, so the results are those of resetting every lane, bit for bit, however
many episodes end at once.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import environment as environment_lib
from podracers import types


class BatchState(NamedTuple):
    """The state of `B` streams."""

    environment: Any  # [B, ...]
    key: jax.Array  # [B] typed keys, one a stream, constant
    episode: jax.Array  # [B] int32, how many episodes were begun before this one
    last: jax.Array  # [B] bool, the latest time step was LAST


def _select(condition: jax.Array, on_true: types.PyTree, on_false: types.PyTree) -> types.PyTree:
    """Returns rows of `on_true` where `condition` `[B]` holds, else of `on_false`."""

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, on_true, on_false)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedEnvironment:
    """`B` streams of one environment, with next-step auto-reset.

    Attributes:
      environment: the one-stream environment.
      reset_batch: `K`, or None to reset every lane at every step, which saves a loop where a reset
        costs next to nothing.
    """

    environment: environment_lib.Environment
    reset_batch: int | None = None

    def init(self, key: jax.Array) -> tuple[BatchState, types.TimeStep]:
        """Starts `B` streams from their keys `[B]`."""
        episode = jnp.zeros(key.shape, jnp.int32)
        state, timestep = self._reset(key, episode)
        return BatchState(state, key, episode, timestep.last()), timestep

    def step(self, state: BatchState, action: types.PyTree) -> tuple[BatchState, types.TimeStep]:
        """Steps every stream; where its episode had ended, the action is ignored: it restarts."""
        inner, timestep = jax.vmap(self.environment.step)(state.environment, action)
        episode = state.episode + state.last.astype(jnp.int32)
        if self.reset_batch is None:
            fresh = self._reset(state.key, episode)
            inner, timestep = _select(state.last, fresh, (inner, timestep))
        else:
            inner, timestep = self._reset_in_chunks(state, episode, (inner, timestep))
        return BatchState(inner, state.key, episode, timestep.last()), timestep

    def _reset(self, key: jax.Array, episode: jax.Array) -> tuple[Any, types.TimeStep]:
        with jax.named_scope("reset"):
            return jax.vmap(self.environment.reset)(jax.vmap(jax.random.fold_in)(key, episode))

    def _reset_in_chunks(
        self, state: BatchState, episode: jax.Array, stepped: types.PyTree
    ) -> tuple[Any, types.TimeStep]:
        chunk = min(self.reset_batch, state.last.shape[0])

        def body(carry):
            waiting, current = carry
            rank = jnp.cumsum(waiting.astype(jnp.int32)) - 1  # [B] place among those that wait
            chosen = waiting & (rank < chunk)  # [B]
            rows = jnp.nonzero(chosen, size=chunk, fill_value=0)[0]  # [K]
            fresh = self._reset(state.key[rows], episode[rows])
            # A gather and a select, not a scatter: typed keys in the state allow no scatter.
            fresh = jax.tree.map(lambda x: x[jnp.clip(rank, 0, chunk - 1)], fresh)
            return waiting & ~chosen, _select(chosen, fresh, current)

        _, current = jax.lax.while_loop(
            lambda carry: jnp.any(carry[0]), body, (state.last, stepped)
        )
        return current
