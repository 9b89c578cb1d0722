"""Shuffled minibatches of a rollout that do not depend on the number of devices.

Neighbouring items form groups of `M`, and each group gives one item, drawn at random without
replacement, to each of the `M` minibatches: a stratified shuffle. A permutation of a device's whole
share would give other minibatches on two devices than on one.

Axis legend: `T` time, `B` streams of this device, `M` minibatches.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from agents import networks
from podracers import errors, parallel, types


def _ranks(uniform: jax.Array) -> jax.Array:
    """Returns the rank of each number along the last axis; equal numbers rank by index.

    Computed by comparisons, because XLA's sort of many short rows is slow on CPU.
    """
    size = uniform.shape[-1]
    smaller = uniform[..., None, :] < uniform[..., :, None]  # [..., M, M]
    equal = uniform[..., None, :] == uniform[..., :, None]
    earlier = jnp.arange(size) < jnp.arange(size)[:, None]  # [M, M]
    return jnp.sum(smaller | (equal & earlier), axis=-1, dtype=jnp.int32)


def _permutations(key: jax.Array, local: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns `[local, *shape]` permutations along the last axis, drawn by global index."""
    index = parallel.axis_index() * local + jnp.arange(local)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    return _ranks(jax.vmap(lambda k: jax.random.uniform(k, shape))(keys))


def _take(tree: types.PyTree, permutation: jax.Array, axis: int) -> types.PyTree:
    """Splits `axis` into groups of `M` and permutes each; returns `M` as the leading axis."""
    size = permutation.shape[axis + 1]
    if size == 1:  # nothing to permute: a gather would copy every observation
        return jax.tree.map(lambda x: x[None], tree)

    def take(x: jax.Array) -> jax.Array:
        grouped = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        index = permutation.reshape(permutation.shape + (1,) * (grouped.ndim - permutation.ndim))
        return jnp.moveaxis(jnp.take_along_axis(grouped, index, axis=axis + 1), axis + 1, 0)

    return jax.tree.map(take, tree)


def _require_divisor(num_minibatches: int, size: int, of: str) -> None:
    """Raises a `UserError` with the valid numbers nearest to `num_minibatches`."""
    if size % num_minibatches:
        lower = (n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
        divisors = {each for n in lower for each in (n, size // n)}
        near = sorted(divisors, key=lambda n: abs(n - num_minibatches))[:6]
        raise errors.UserError(
            f"num_minibatches = {num_minibatches} does not divide the {size} {of}: "
            f"use {', '.join(map(str, sorted(near)))}"
        )


def over_time(tree: types.PyTree, key: jax.Array, num_minibatches: int) -> types.PyTree:
    """Deals the transitions of each stream out to minibatches, for networks without recurrence.

    Args:
      tree: leaves `[T, B, ...]`.
      key: one typed key, equal on all devices.
      num_minibatches: `M`, which divides `T`.

    Returns:
      Leaves `[M, T / M, B, ...]`; the order along time is lost.
    """
    length, batch = jax.tree.leaves(tree)[0].shape[:2]
    _require_divisor(num_minibatches, length, "steps of a rollout (rollout_length)")
    shape = (length // num_minibatches, num_minibatches)
    permutation = _permutations(key, batch, shape)  # [B, T / M, M]
    return _take(tree, jnp.moveaxis(permutation, 0, 2), axis=0)


def over_streams(
    tree: types.PyTree, rows: types.PyTree, key: jax.Array, num_minibatches: int
) -> tuple[types.PyTree, types.PyTree]:
    """Deals whole streams out to minibatches, for recurrent networks and for V-trace.

    Args:
      tree: leaves `[T, B, ...]`.
      rows: leaves `[B, ...]` of the streams, such as the memory before the first step.
      key: one typed key, equal on all devices.
      num_minibatches: `M`, which divides `B`.

    Returns:
      Leaves `[M, T, B / M, ...]` and `[M, B / M, ...]`.
    """
    batch = jax.tree.leaves(tree)[0].shape[1]
    whole = "environments of a device, because recurrent networks and V-trace learn whole streams"
    _require_divisor(num_minibatches, batch, whole)
    permutation = _permutations(key, batch // num_minibatches, (num_minibatches,))  # [B / M, M]
    return _take(tree, permutation[None], axis=1), _take(rows, permutation, axis=0)


def deal(
    network: networks.Network, batch: Any, core: Any, key: jax.Array, num_minibatches: int
) -> types.PyTree:
    """Deals a rollout out to minibatches, by streams if its network is recurrent.

    Args:
      network: network that learns from them.
      batch: a named tuple, leaves `[T, B, ...]`, with the time steps as `timestep`.
      core: `[B, ...]` of the network before it.
      key: one typed key, equal on all devices.
      num_minibatches: `M`, which divides `B` for a recurrent network, else `T`.

    Returns:
      Items for `select` with leading axis `M`: whole streams with their cores, or for other
      networks `[M, T / M, B]` int32, the numbers `time * B + stream` of transitions.
    """
    if network.is_recurrent:
        return over_streams(batch, core, key, num_minibatches)
    shape = batch.timestep.step_type.shape
    numbers = jnp.arange(shape[0] * shape[1]).reshape(shape)
    return over_time(numbers, key, num_minibatches)


def select(
    network: networks.Network, batch: Any, core: Any, item: types.PyTree
) -> tuple[Any, types.PyTree]:
    """Returns the minibatch of one row of `deal`, and the cores before its first time step.

    The stacks of frames of a whole rollout are never in memory, only those of a minibatch.
    """
    if network.is_recurrent:
        return item
    if network.memory_length:
        item = item.reshape(1, -1)  # streams of one time step, each with a core of its own
    time, stream = jnp.divmod(item, batch.timestep.step_type.shape[1])
    core = network.core_before(core, batch.timestep, time.ravel(), stream.ravel())
    return jax.tree.map(lambda x: x[time, stream], batch), core
