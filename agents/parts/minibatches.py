"""Shuffled minibatches of a rollout that do not depend on the number of devices.

Neighbouring items form groups of `M`, and each group gives one item, drawn at random without
replacement, to each of the `M` minibatches: a stratified shuffle. A permutation of a device's whole
share would give other minibatches on two devices than on one.

Axis legend: `T` time, `B` streams of this device, `M` minibatches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agents import networks
from agents.backends import layouts
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


def _grouped(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Splits `axis` into groups of `M`, whose items become the leading axis: `[M, ...]`."""
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _require_divisor(num_minibatches: int, size: int, of: str) -> None:
    """Raises a `UserError` with the valid numbers nearest to `num_minibatches`."""
    if size % num_minibatches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(divisors, key=lambda n: abs(n - num_minibatches))[:6]
        raise errors.UserError(
            f"num_minibatches = {num_minibatches} does not divide the {size} {of}: "
            f"use {', '.join(map(str, sorted(near)))}"
        )


@jax.named_scope("shuffle")
def over_streams(
    tree: types.PyTree, rows: types.PyTree, key: jax.Array, num_minibatches: int
) -> tuple[types.PyTree, types.PyTree]:
    """Deals whole streams out to `M` minibatches, for recurrent networks and for V-trace.

    Leaves `[T, B, ...]` become `[M, T, B / M, ...]`, and those of `rows`, such as the memory before
    the first step, `[B, ...]` become `[M, B / M, ...]`. The key is equal on all devices.
    """
    batch = jax.tree.leaves(tree)[0].shape[1]
    whole = "environments of a device, because recurrent networks and V-trace learn whole streams"
    _require_divisor(num_minibatches, batch, whole)
    permutation = _permutations(key, batch // num_minibatches, (num_minibatches,)).T  # [M, B / M]
    tree = jax.tree.map(lambda x: _grouped(x, num_minibatches, 1), tree)
    rows = jax.tree.map(lambda x: _grouped(x, num_minibatches, 0), rows)
    return layouts.permute(tree, permutation[:, None]), layouts.permute(rows, permutation)


@jax.named_scope("shuffle")
def dealer(
    network: networks.Network, batch: Any, core: Any, num_minibatches: int
) -> Callable[[jax.Array], tuple[Any, types.PyTree]]:
    """Returns a function that deals a rollout out to minibatches, by streams if recurrent.

    Args:
      network: network that learns from them.
      batch: leaves `[T, B, ...]`, with time steps after `network.prepare`.
      core: `[B, ...]` of the network before it.
      num_minibatches: `M`, which divides `B` for a recurrent network, else `T`.

    Returns:
      A function of a typed key, equal on all devices, that returns leaves `[M, T, B / M, ...]` of
      whole streams with the cores `[M, B / M, ...]` before them; of other networks transitions
      `[M, T / M, B, ...]` with the core. The order along time is lost. Transitions with stacks of
      frames are streams of one time step, `[M, 1, T / M * B, ...]`.
    """
    if network.is_recurrent:
        return lambda key: over_streams(batch, core, key, num_minibatches)
    length, streams = jax.tree.leaves(batch)[0].shape[:2]
    _require_divisor(num_minibatches, length, "steps of a rollout (rollout_length)")
    shape = length // num_minibatches, num_minibatches
    rows = (1, -1) if network.memory_length else (shape[0], streams)

    def reshaped(x: jax.Array) -> jax.Array:
        return x.reshape(num_minibatches, *rows, *x.shape[3:])

    groups = jax.tree.map(lambda x: reshaped(_grouped(x, num_minibatches, 0)), batch)

    @jax.named_scope("shuffle")
    def deal(key: jax.Array) -> tuple[Any, types.PyTree]:
        permutation = _permutations(key, streams, shape).transpose(2, 1, 0)  # [M, T / M, B]
        return layouts.permute(groups, reshaped(permutation)), core

    return deal
