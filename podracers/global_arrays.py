"""Takes arrays that are spread over the devices of several processes to one of them, and back.

Process 0 saves what all of them hold, as if it had been alone: so what is saved fits any number of
processes and devices, and only process 0 needs a disk. Large arrays go piece by piece.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from podracers import distributed, parallel, types

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
    whole = jax.tree.leaves(tree) if distributed.is_lead() else [None] * len(leaves)
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


def _rows(x: Any, axis: int, shards: int) -> int:
    """Returns how many rows of each shard make a piece."""
    each = x.shape[axis] // shards
    of_row = max(x.size * x.dtype.itemsize // x.shape[axis], 1)
    return int(np.clip(_PIECE // (of_row * shards), 1, each))


def _leaf_to_host(x: Any) -> np.ndarray | None:
    lead = distributed.is_lead()
    if not isinstance(x, jax.Array):
        return np.asarray(x) if lead else None
    axis = _split_axis(x)
    if axis is None:
        return np.array(x.addressable_data(0)) if lead else None
    shards = x.sharding.mesh.devices.size
    each, rows = x.shape[axis] // shards, _rows(x, axis, shards)
    whole = np.empty(x.shape, x.dtype) if lead else None
    for first in range(0, each, rows):
        start = min(first, each - rows)  # the last piece may say some rows again
        piece = _gather(x.sharding, axis, rows)(x, np.int32(start)).addressable_data(0)
        if lead:
            into = np.moveaxis(whole, axis, 0)
            parts = np.moveaxis(np.asarray(piece), axis, 0)
            for shard in range(shards):
                at = shard * each + start
                into[at : at + rows] = parts[shard * rows : (shard + 1) * rows]
        else:
            jax.block_until_ready(piece)
    return whole


@functools.cache
def _gather(sharding: jax.sharding.NamedSharding, axis: int, rows: int):
    """`(x, start) ->` the rows from `start` on of every shard, in every device."""

    def of_shard(x, start):
        piece = jax.lax.dynamic_slice_in_dim(x, start, rows, axis)
        return jax.lax.all_gather(piece, parallel.AXIS, axis=axis, tiled=True)

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
    held = {
        device: (index, np.empty([len(range(*s.indices(n))) for s, n in zip(index, shape)], dtype))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    count = shape[0] if shape else 1
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    rows = int(np.clip(_PIECE // max(size // max(count, 1), 1), 1, max(count, 1)))
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        size_of_piece = (stop - start, *shape[1:]) if shape else ()
        piece = np.zeros(size_of_piece, dtype)
        if whole is not None:
            piece[...] = whole[start:stop] if shape else whole
        # Bytes: what they stand for is no matter of the sum that a broadcast is.
        raw = multihost_utils.broadcast_one_to_all(piece.reshape(-1).view(np.uint8))
        piece = np.asarray(raw).view(dtype).reshape(size_of_piece)
        for index, part in held.values():
            if not shape:
                part[...] = piece
                continue
            low, high, _ = index[0].indices(shape[0])
            begin, end = max(low, start), min(high, stop)
            if begin < end:
                part[begin - low : end - low] = piece[
                    (slice(begin - start, end - start), *index[1:])
                ]
    shards = [jax.device_put(part, device) for device, (_, part) in held.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
