"""Takes arrays that are spread over the devices of several processes to one of them, and back.

Process 0 saves what all of them hold, as if it had been alone: so what is saved fits any number of
processes and devices, and only process 0 needs a disk. Large arrays go piece by piece.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from podracers import parallel, types
from podracers.hosts import processes

_Bounds = tuple[int, int]  # along one axis: from, to
_PIECE = 1 << 26  # bytes that each device holds at the most while something is on its way


def to_host(tree: types.PyTree) -> types.PyTree:
    """Returns NumPy arrays of the whole of each global array, in process 0; all processes call it.

    Args:
      tree: arrays over the devices of all processes, replicated or split along one axis; typed keys
        are returned as their data.

    Returns:
      Elsewhere than in process 0 the leaves are None.
    """
    return jax.tree.map(_leaf_to_host, plain(tree))


def to_devices(tree: types.PyTree, template: types.PyTree) -> types.PyTree:
    """Returns global arrays, from what process 0 has; all processes call it.

    Args:
      tree: NumPy arrays in process 0, as `to_host` returned them; not looked at elsewhere.
      template: arrays of the shapes, types and shardings that are to be.
    """
    leaves, structure = jax.tree.flatten(template)
    whole = jax.tree.leaves(tree) if processes.is_lead() else [None] * len(leaves)
    put = [_leaf_to_devices(x, like) for x, like in zip(whole, leaves, strict=True)]
    return jax.tree.unflatten(structure, put)


def plain(tree: types.PyTree) -> types.PyTree:
    """Returns the tree with the data of typed keys in their place; shapes become those of data."""
    return jax.tree.map(_plain, tree)


def like(tree: types.PyTree, template: types.PyTree) -> types.PyTree:
    """Returns the tree with typed keys again where the template has them."""
    return jax.tree.map(lambda x, given: _wrap(x, given) if _is_key(given) else x, tree, template)


def _plain(x: Any) -> Any:
    if not _is_key(x):
        return x
    if isinstance(x, jax.Array):
        return _key_data(x)
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


_key_data = jax.jit(jax.random.key_data)


def _wrap(data: Any, key: Any) -> jax.Array:
    """Returns typed keys of the kind, and in the place, of others."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), key)
    wrap = functools.partial(jax.random.wrap_key_data, impl=kinds[0])
    return jax.jit(wrap, out_shardings=key.sharding)(data)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _split_axis(x: jax.Array) -> int | None:
    """Returns the axis along which an array is split over devices; None where it is replicated."""
    if x.is_fully_replicated:
        return None
    (axis,) = [index for index, name in enumerate(x.sharding.spec) if name is not None]
    return axis


def _blocks(shape: Sequence[int], itemsize: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Cuts an array into blocks of one shape, of `_PIECE` bytes at the most.

    Returns:
      The shape, and where the blocks start; the last along an axis may say some again.
    """
    block = list(shape)
    for axis, length in enumerate(shape):
        rest = itemsize * math.prod(block[:axis] + block[axis + 1 :])
        block[axis] = int(np.clip(_PIECE // max(rest, 1), min(length, 1), length))
    starts = [
        [min(start, length - step) for start in range(0, length, max(step, 1))]
        for length, step in zip(shape, block)
    ]
    return block, list(itertools.product(*starts))


def _leaf_to_host(x: Any) -> np.ndarray | None:
    lead = processes.is_lead()
    if not isinstance(x, jax.Array):
        return np.asarray(x) if lead else None
    axis = _split_axis(x)
    if axis is None:
        return np.array(x.addressable_data(0)) if lead else None
    shards = x.sharding.mesh.devices.size
    of_shard = [n // shards if i == axis else n for i, n in enumerate(x.shape)]
    whole = np.empty([shards, *of_shard], x.dtype) if lead else None
    block, starts = _blocks(of_shard, x.dtype.itemsize * shards)
    for start in starts:
        piece = _gather(x.sharding, tuple(block))(x, np.array(start, np.int32))
        if lead:
            place = tuple(slice(low, low + size) for low, size in zip(start, block))
            whole[:, *place] = np.asarray(piece.addressable_data(0))
        else:
            jax.block_until_ready(piece)
    return np.moveaxis(whole, 0, axis).reshape(x.shape) if lead else None


@functools.cache
def _gather(sharding: jax.sharding.NamedSharding, block: tuple[int, ...]):
    """`(x, start) ->` the block `[D, ...]` of every shard that begins there, on every device."""

    def of_shard(x, start):
        piece = jax.lax.dynamic_slice(x, list(start), block)
        return jax.lax.all_gather(piece, parallel.AXIS)

    replicated = jax.sharding.PartitionSpec()
    return jax.jit(
        jax.shard_map(
            of_shard,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, replicated),
            out_specs=replicated,
            check_vma=False,
        )
    )


def _leaf_to_devices(whole: np.ndarray | None, given: jax.Array) -> jax.Array:
    """Sends one leaf from process 0 to where it belongs."""
    if _is_key(given):
        data = jax.eval_shape(jax.random.key_data, given)
        return _wrap(_send(whole, data.shape, data.dtype, given.sharding), given)
    return _send(whole, given.shape, given.dtype, given.sharding)


def _send(whole: np.ndarray | None, shape, dtype, sharding: jax.sharding.NamedSharding):
    """Broadcasts an array piece by piece; each process keeps what lies on its devices."""
    indices = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    held = {
        index: np.empty([high - low for low, high in index], dtype) for index in indices.values()
    }
    block, starts = _blocks(shape, np.dtype(dtype).itemsize)
    for start in starts:
        place = tuple((low, low + size) for low, size in zip(start, block))
        piece = np.zeros(block, dtype)
        if whole is not None:
            piece[...] = whole[_within(place, [(0, n) for n in shape])]
        # Bytes: what they stand for is no matter of the sum that a broadcast is.
        raw = multihost_utils.broadcast_one_to_all(
            piece.reshape(-1).view(np.uint8), is_source=processes.is_lead()
        )
        piece = np.asarray(raw).view(dtype).reshape(block)
        for index, part in held.items():
            common = [
                (max(mine[0], sent[0]), min(mine[1], sent[1])) for mine, sent in zip(index, place)
            ]
            if all(low < high for low, high in common):
                part[_within(common, index)] = piece[_within(common, place)]
    shards = [jax.device_put(held[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _within(common: Sequence[_Bounds], place: Sequence[_Bounds]) -> tuple[slice, ...]:
    """Returns where a part of an array lies in the piece of it at `place`."""
    return tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(common, place))
