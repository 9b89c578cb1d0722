"""The mesh, its one axis, and the only place where gradients cross devices.

Losses are means over the GLOBAL batch, so the number of devices never changes an update: every
device computes its share (a local sum over a global count), and shares are added, not averaged.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from podracers import errors, types

AXIS = "data"
_SMALL = 2**16  # elements: copying larger leaves together could cost more than it saves


def make_mesh(devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a one-axis mesh over `devices`, by default every device of every process."""
    return jax.sharding.Mesh(np.array(devices if devices is not None else jax.devices()), (AXIS,))


def axis_index() -> jax.Array:
    """Returns this device's index on the axis, an int32 scalar."""
    return jax.lax.axis_index(AXIS)


def axis_size() -> int:
    """Returns the number of devices on the axis (static)."""
    return jax.lax.axis_size(AXIS)


def side_by_side(memory: types.PyTree) -> types.PyTree:
    """Returns this device's memory, once it is sure that it can lie beside those of others.

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


def share(mean: types.Mean) -> jax.Array:
    """Returns this device's share of a global mean: summed over devices, the shares are the mean.

    The count is a constant of the data, so the gradient of the summed shares is the gradient of the
    global mean.
    """
    count = jax.lax.stop_gradient(global_sum(mean.count))
    return mean.total / jnp.maximum(count, 1.0)


def gradient_step(
    loss: Callable[[types.PyTree], tuple[jax.Array, Any]],
    params: types.PyTree,
    optimizer_state: optax.OptState,
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array | float = 1.0,
) -> tuple[types.PyTree, optax.OptState, jax.Array, Any]:
    """Takes one step along the gradient of the global loss.

    Args:
      loss: a function of the parameters that returns this device's share of the loss (see `share`)
        and anything else.
      params: equal on all devices.
      optimizer_state: equal on all devices.
      optimizer: an optax transformation that does NOT contain the learning rate; clipping by global
        norm inside it sees the gradient of the global batch.
      learning_rate: a scalar that may be traced.

    Returns:
      `(params, optimizer_state, gradient_norm, auxiliary)`; the norm is of the global gradient,
      before any clipping.
    """
    with jax.named_scope("gradient"):
        gradient, auxiliary = jax.grad(loss, has_aux=True)(params)
    gradient = global_sum(gradient)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    params = jax.tree.map(lambda p, u: (p - learning_rate * u).astype(p.dtype), params, updates)
    return params, optimizer_state, optax.tree.norm(gradient), auxiliary
