"""Devices and their mesh of one axis, sums over devices, and numbers of bytes.

Losses are means over the GLOBAL batch: totals and counts are added over devices, then divided.
"""

import collections
import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from podracers import errors, trees, types

AXIS = "data"
_MAX_JOINED_SIZE = 2**16  # elements of a leaf; copying larger ones costs more than it saves

# Devices to compile for, or only their platform; part of the key of `jax.jit`'s cache of traces.
_target = jax.make_user_context(None)


def compiling_for(target: Sequence[jax.Device] | str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which programs are traced, and new runners made, for other devices.

    The target is devices, such as `jax.experimental.topologies` has, or only their platform.
    """
    return _target(target if isinstance(target, str) else tuple(target))


def devices(process: int | None = None) -> list[jax.Device]:
    """Returns the devices, of one process or of all, that programs are compiled for."""
    if isinstance(_target.value, tuple):
        return list(_target.value)
    return jax.devices() if process is None else jax.local_devices(process_index=process)


def platform() -> str:
    """Returns the platform of the program that is being traced: "cpu", "gpu" or "tpu".

    `jax.default_backend()` is wrong within the mesh of another backend, and where programs are
    compiled for another machine.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:  # the trace is one of `shard_map`
        kind = device.device_kind.lower()
        return kind if kind == "cpu" else "tpu" if kind.startswith("tpu") else "gpu"
    if isinstance(_target.value, str):
        return _target.value
    return _target.value[0].platform if _target.value else jax.default_backend()


def make_mesh(of: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a one-axis mesh over devices, by default every device of every process."""
    return jax.sharding.Mesh(np.array(devices() if of is None else of), (AXIS,))


def mapped(
    function: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    in_specs: types.PyTree,
    out_specs: types.PyTree,
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """Returns a jitted function of global arrays from a function of a device's shards."""
    # With `check_vma`, gradients of replicated parameters are summed twice.
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(sharded, donate_argnums=donate_argnums)


def axis_index() -> jax.Array:
    """Returns this device's index on the axis, an int32 scalar."""
    return jax.lax.axis_index(AXIS)


def axis_size() -> int:
    """Returns the number of devices on the axis (static)."""
    return jax.lax.axis_size(AXIS)


def check_leading_axis(memory: types.PyTree) -> types.PyTree:
    """Returns an agent's memory; its leaves are split over devices along their first axis.

    A separate device axis would cost a copy of the memory in each update (XLA on CPU, jaxlib 0.10).

    Raises:
      errors.UserError: a leaf has no axis.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(memory):
        if leaf.ndim == 0:
            name = trees.name(path)
            raise errors.UserError(f"init_memory: '{name}' is a scalar: give it the shape (1,)")
    return memory


def placed(shapes: types.PyTree, mesh: jax.sharding.Mesh, layout: types.PyTree) -> types.PyTree:
    """Returns shapes with shardings, so that tracing with them and with arrays is one trace.

    The layout is a prefix of the shapes (`jax.ShapeDtypeStruct`), of `PartitionSpec` on the mesh.
    """
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), layout)
    shardings = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)


def global_sum(tree: types.PyTree) -> types.PyTree:
    """Returns the sum of each leaf over the devices.

    Small leaves of one dtype are summed as one array, because each sum costs a round of messages.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    groups = collections.defaultdict(list)  # indices of leaves
    for index, leaf in enumerate(leaves):
        groups[leaf.dtype, None if leaf.size <= _MAX_JOINED_SIZE else index].append(index)
    for indices in groups.values():
        if len(indices) == 1:
            totals = [jax.lax.psum(leaves[indices[0]], AXIS)]
        else:
            joined, split = jax.flatten_util.ravel_pytree([leaves[index] for index in indices])
            totals = split(jax.lax.psum(joined, AXIS))
        for index, total in zip(indices, totals):
            leaves[index] = total
    return jax.tree.unflatten(structure, leaves)


def global_mean(mean: types.Mean) -> types.PyTree:
    """Returns the mean over all devices of each device's; 0 where nothing was counted.

    Its total may be a pytree, such as the gradient of a sum of losses; total and count are summed
    together.
    """
    total, count = global_sum(mean)
    return jax.tree.map(lambda x: (x / jnp.maximum(count, 1.0)).astype(x.dtype), total)


def unequal_replicas(tree: types.PyTree) -> str | None:
    """Returns a line on replicated leaves whose copies differ between devices, or None.

    `shard_map` does not verify that outputs are equal on all devices. Each device reads its copy of
    each leaf once; only a hash of 32 bits a leaf is sent. Leaves that are not replicated over a
    mesh of `make_mesh` are left out.
    """
    replicated = collections.defaultdict(list)  # paths and leaves by mesh
    for name, leaf in trees.leaves(tree).items():
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
        is_own = mesh is not None and mesh.axis_names == (AXIS,) and mesh.size > 1
        if is_own and leaf.is_fully_replicated:
            replicated[mesh].append((name, leaf))
    paths = []
    for mesh, pairs in replicated.items():
        unequal = jax.device_get(_hashes_differ(mesh)([leaf for _, leaf in pairs]))
        paths += [name for (name, _), differs in zip(pairs, unequal) if differs]
    if not paths:
        return None
    others = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return (
        f"copies of '{paths[0]}'{others} differ between devices: update must sum gradients and "
        "statistics over them, with parallel.global_mean"
    )


@functools.cache
def _hashes_differ(mesh: jax.sharding.Mesh) -> Any:
    """Returns a program that compares each of several leaves over the devices."""

    def compare(leaves: list[jax.Array]) -> jax.Array:
        hashes = jnp.stack([hash_bits(leaf) for leaf in leaves])
        return jax.lax.pmax(hashes, AXIS) != jax.lax.pmin(hashes, AXIS)

    return mapped(compare, mesh, jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec())


def hash_bits(x: jax.Array) -> jax.Array:
    """Returns a hash of the bits, uint32: a difference in one element always changes it."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    bits = x.ravel().view(f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
    # Odd factors have inverses modulo 2 ** 32.
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def num_bytes(tree: types.PyTree) -> int:
    """Returns the number of bytes of the arrays of a tree, or of their shapes and dtypes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def readable_bytes(count: float) -> str:
    """Returns a number of bytes with a unit, such as `"2.5 GB"`."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000.0 and len(units) > 1:
        count /= 1000.0
        del units[0]
    return f"{count:.3g} {units[0]}"


def num_host_cores() -> int:
    """Returns the number of host cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
