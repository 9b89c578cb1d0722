"""The devices, their mesh of one axis, the only place where gradients cross devices, memory usage.

Losses are means over the GLOBAL batch, so the number of devices never changes an update: totals and
counts are added over devices, then divided; means of devices are never averaged.
"""

import collections
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from podracers import errors, types

AXIS = "data"
_SMALL = 2**16  # elements: copying larger leaves together could cost more than it saves
_LESS = "num_envs, rollout_length, the batch size or the network's size"
_REMEDY = f"lower {_LESS}"
_UNITS = ("bytes", "kB", "MB", "GB", "TB")

# The devices that programs are compiled for where they are not the backend's, or their platform
# alone. It is part of the key of what `jax.jit` has traced.
_target = jax.make_user_context(None)


@contextlib.contextmanager
def compiling_for(target: Sequence[jax.Device] | str) -> Iterator[None]:
    """Has programs traced for other devices than the backend's; nothing runs on those.

    A runner keeps its mesh: make a new one within.

    Args:
      target: devices, such as those of `jax.experimental.topologies`, to compile for; or only their
        platform, such as "tpu", which is what `jax.export` needs.
    """
    with _target(target if isinstance(target, str) else tuple(target)):
        yield


def devices(process: int | None = None) -> list[jax.Device]:
    """Returns the devices that programs are compiled for.

    Args:
      process: index of the process that has them; None for those of all processes.
    """
    if isinstance(_target.value, tuple):
        return list(_target.value)
    return jax.devices() if process is None else jax.local_devices(process_index=process)


def platform() -> str:
    """Returns the platform of the program that is being traced: "cpu", "gpu" or "tpu".

    Whatever chooses its form by platform asks here: `jax.default_backend()` is wrong on another
    mesh, and where programs are compiled for another machine.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:  # within `shard_map`
        return getattr(device, "platform", None) or _platform_of(device.device_kind)
    if isinstance(_target.value, str):
        return _target.value
    return _target.value[0].platform if _target.value else jax.default_backend()


def _platform_of(device_kind: str) -> str:
    """Returns the platform of a kind of device, which those of JAX 0.7 do not say."""
    kind = device_kind.lower()
    return kind if kind == "cpu" else "tpu" if kind.startswith("tpu") else "gpu"


def make_mesh(of: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a one-axis mesh over devices, by default every device of every process."""
    return jax.sharding.Mesh(np.array(devices() if of is None else of), (AXIS,))


def axis_index() -> jax.Array:
    """Returns this device's index on the axis, an int32 scalar."""
    return jax.lax.axis_index(AXIS)


def axis_size() -> int:
    """Returns the number of devices on the axis (static)."""
    return jax.lax.axis_size(AXIS)


def check_leading_axis(memory: types.PyTree) -> types.PyTree:
    """Returns an agent's memory, of which every leaf has a first axis to split over devices.

    An axis of its own for the device would be simpler, and costs a copy of the memory each time it
    is taken off or put on (XLA on CPU, jaxlib 0.10).

    Raises:
      errors.UserError: a leaf has no axis.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(memory):
        if leaf.ndim == 0:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise errors.UserError(
                f"init_memory of the agent: expected a first axis in every leaf, and '{name}' is a "
                "scalar: give it the shape (1,)"
            )
    return memory


def placed(shapes: types.PyTree, mesh: jax.sharding.Mesh, layout: types.PyTree) -> types.PyTree:
    """Returns shapes that say where they lie; arrays are traced as these are, and so not again.

    Args:
      shapes: a pytree of `jax.ShapeDtypeStruct`.
      mesh: its devices hold the arrays.
      layout: a prefix of `shapes`, of `PartitionSpec`.
    """

    def place(spec: jax.sharding.PartitionSpec, part: types.PyTree) -> types.PyTree:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, layout, shapes)


def global_sum(tree: types.PyTree) -> types.PyTree:
    """Returns the sum of each leaf over the devices.

    What is small is summed together: between processes, and between the devices of a CPU, a sum of
    a few numbers takes as long as one of many.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    together = collections.defaultdict(list)  # indices of leaves
    for index, leaf in enumerate(leaves):
        together[leaf.dtype, None if leaf.size <= _SMALL else index].append(index)
    for indices in together.values():
        for index, total in zip(indices, _sum_together([leaves[index] for index in indices])):
            leaves[index] = total
    return jax.tree.unflatten(structure, leaves)


def _sum_together(leaves: list[jax.Array]) -> list[jax.Array]:
    """Sums leaves of one dtype over the devices, as one array."""
    if len(leaves) == 1:
        return [jax.lax.psum(leaves[0], AXIS)]
    together, apart = jax.flatten_util.ravel_pytree(leaves)
    return apart(jax.lax.psum(together, AXIS))


def global_mean(mean: types.Mean) -> jax.Array:
    """Returns the mean over all devices; 0 where nothing was counted."""
    total, count = global_sum(mean)
    return total / jnp.maximum(count, 1.0)


def gradient_step(
    loss: Callable[[types.PyTree], tuple[types.Mean, Any]],
    params: types.PyTree,
    optimizer_state: optax.OptState,
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array | float = 1.0,
) -> tuple[types.PyTree, optax.OptState, jax.Array, Any]:
    """Takes one step along the gradient of the global loss.

    Args:
      loss: a function of the parameters that returns the mean loss over this device's part of the
        batch, whose count does not depend on them, and anything else.
      params: equal on all devices.
      optimizer_state: equal on all devices.
      optimizer: an optax transformation that does NOT contain the learning rate; clipping by global
        norm inside it sees the gradient of the global batch.
      learning_rate: a scalar that may be traced.

    Returns:
      `(params, optimizer_state, gradient_norm, auxiliary)`; the norm is of the global gradient,
      before any clipping.
    """

    def total(params: types.PyTree) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        mean, auxiliary = loss(params)
        return mean.total, (mean.count, auxiliary)

    with jax.named_scope("gradient"):
        gradient, (count, auxiliary) = jax.grad(total, has_aux=True)(params)
    # Together: a gradient that waited for the global count would cost a second round of messages.
    gradient, count = global_sum((gradient, count))
    gradient = jax.tree.map(lambda g: (g / jnp.maximum(count, 1.0)).astype(g.dtype), gradient)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    params = jax.tree.map(lambda p, u: (p - learning_rate * u).astype(p.dtype), params, updates)
    return params, optimizer_state, optax.tree.norm(gradient), auxiliary


def memory_usage(
    state: Any,
    observation: types.PyTree,
    num_steps: int,
    devices: Sequence[jax.Device],
    trace: Callable[[], jax.stages.Traced] | None = None,
) -> list[str]:
    """Returns a line on the memory usage of an agent's memory, and one on that of an update.

    The former is left out where it is next to none. The latter counts what is temporary, which XLA
    alone knows, so the update is compiled for it, and the run does not compile it again; on CPU,
    whose memory the host shares, it is left out.

    Args:
      state: a runner's, over all devices; its shapes are enough. Its `learner` lies on each of
        them, the rest is split evenly.
      observation: the specification of one observation.
      num_steps: time steps of a rollout, over all streams of all devices.
      devices: those that hold the state.
      trace: returns one update, traced as the run will; None to count the state alone.

    Raises:
      errors.UserError: the agent's memory, the state and the observations of one rollout, or an
        update with all that is temporary, are more than a device has room for.
    """
    limit, lines = _memory_limit(devices), []
    memory = num_bytes(state.memory) / len(devices)
    if memory >= 1e4:
        line = f"replay and other memory of the agent: {_on_each(memory, devices)}"
        if limit is not None and memory > limit:
            raise errors.UserError(
                f"{line}, which has room for {readable_bytes(limit)}: lower the agent's "
                "replay_capacity, or spread it over more devices"
            )
        lines.append(line if limit is None else f"{line}, of {readable_bytes(limit)}")
    split = num_bytes(state._replace(learner=())) + num_bytes(observation) * num_steps
    each = num_bytes(state.learner) + split / len(devices)
    if limit is not None and each > limit:
        raise errors.UserError(
            f"the state and the observations of a rollout take {_on_each(each, devices)}, which "
            f"has room for {readable_bytes(limit)}: {_REMEDY}"
        )
    if trace is not None and devices[0].platform != "cpu":
        lines.append(_update_usage(trace(), memory, limit, devices))
    return lines


def _update_usage(
    traced: jax.stages.Traced, memory: float, limit: float | None, devices: Sequence[jax.Device]
) -> str:
    """Returns a line on what an update takes; `memory` of it is the agent's, on each device."""
    try:
        analysis = traced.lower().compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        remedy = f"lower the agent's replay_capacity, {_LESS}" if memory >= 1e4 else _REMEDY
        raise errors.UserError(
            f"an update does not fit on each of {_named(devices)}: {reason.rstrip('.')}; {remedy}"
        ) from error
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes
    line = (
        f"an update takes {_on_each(total, devices)}, "
        f"{readable_bytes(analysis.temp_size_in_bytes)} of it for a while"
    )
    if limit is None:
        return line
    if total > limit:
        portion = 1.0 - (total - limit) / memory if memory else 0.0
        remedy = _REMEDY
        if portion > 0.0:
            remedy = f"{portion:.0%} of the agent's replay_capacity would fit"
        raise errors.UserError(f"{line}, which has room for {readable_bytes(limit)}: {remedy}")
    return f"{line}, of {readable_bytes(limit)}"


def num_bytes(tree: types.PyTree) -> int:
    """Returns how many bytes the arrays of a tree take; their shapes and dtypes are enough."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def readable_bytes(count: float) -> str:
    """Returns a number of bytes as people read it."""
    power = 0
    while count >= 1000.0 and power < len(_UNITS) - 1:
        count, power = count / 1000.0, power + 1
    return f"{count:.3g} {_UNITS[power]}"


def num_host_cores() -> int:
    """Returns the number of the host's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _on_each(count: float, devices: Sequence[jax.Device]) -> str:
    return f"{readable_bytes(count)} on each of {_named(devices)}"


def _named(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} {devices[0].device_kind} device{'s' * (len(devices) > 1)}"


def _memory_limit(devices: Sequence[jax.Device]) -> float | None:
    """Returns how many bytes each of this process's devices has room for; None if unknown."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        try:
            # Fake devices share what the machine has.
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(local)
        except (ValueError, OSError):
            return None
    try:
        statistics = local[0].memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # of a device that is only compiled for
        return None
    return statistics.get("bytes_limit")
