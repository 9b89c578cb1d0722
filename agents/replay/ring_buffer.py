"""A ring: the latest time steps of streams, written in place, from which sequences are cut.

A ring is a `types.Rollout` of `Rows`. For `[B, C, 84, 84, 1]`, XLA orders the axes in a TPU's
memory differently to write time steps and to gather them, so every update would copy the whole
ring. Flat rows are written and gathered in one order.

Axis legend: `C` time steps in the ring, `T` of a rollout, `L` transitions of a sequence, `B`
streams, `N` sequences, `F` numbers of one element (such as an observation), `R` of a padded row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from agents.backends import layouts
from podracers import errors, types

_LANES = 128  # numbers that a TPU keeps side by side; XLA pads the last axis to whole lanes
_PADDING_FRACTION = 8  # an element gets a row of its own if padding is at most 1/8 of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The elements `[B, C]` of one leaf of the stored rollouts.

    Attributes:
      data: `[B, C, R]` for elements that fill whole lanes or nearly so, as frames do; otherwise
        `[B, C * F]`, elements end to end, because padding would multiply the size of short vectors.
      shape: shape of one element (static).
    """

    data: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, num_streams: int, capacity: int, shape: tuple[int, ...], dtype) -> "Rows":
        """Returns `[B, C]` elements of zeros."""
        size = math.prod(shape)
        padding = -size % _LANES
        # End to end, an int32 has to index numbers, not elements.
        if size and (padding * _PADDING_FRACTION <= size or capacity * size > errors.INT32_MAX):
            axes = (num_streams, capacity, size + padding)
        else:
            axes = (num_streams, capacity * size)
        return cls(jnp.zeros(axes, dtype), tuple(shape))

    @property
    def size(self) -> int:
        """Numbers of one element, `F`."""
        return math.prod(self.shape)

    @property
    def capacity(self) -> int:
        """Time steps, `C`; 0 for elements without numbers."""
        return self.data.shape[1] // (1 if self._is_padded else max(self.size, 1))

    @property
    def _is_padded(self) -> bool:
        return self.data.ndim == 3

    def write(self, values: jax.Array, slot: jax.Array) -> "Rows":
        """Returns the rows with `values` `[T, B, ...]` in slots `slot` to `slot + T - 1`."""
        values = jnp.swapaxes(values, 0, 1).astype(self.data.dtype)  # [B, T, ...]
        streams, length = values.shape[:2]
        if self._is_padded:
            values = values.reshape(streams, length, self.size)
            padding = self.data.shape[-1] - self.size
            values = jnp.pad(values, ((0, 0), (0, 0), (0, padding)))
        else:
            values = values.reshape(streams, length * self.size)
            slot = slot * self.size
        data = jax.lax.dynamic_update_slice_in_dim(self.data, values, slot, axis=1)
        return dataclasses.replace(self, data=data)

    def read(self, stream: jax.Array, slot: jax.Array) -> jax.Array:
        """Returns elements `[*slot.shape, *shape]`; `stream` and `slot` have one shape."""
        if self._is_padded:
            elements = self.data[stream, slot][..., : self.size]
        else:
            elements = layouts.slices(self.data, stream, slot * self.size, self.size)
        return elements.reshape(*slot.shape, *self.shape)


Ring = types.PyTree  # a `types.Rollout` whose leaves are `Rows`


def zeros(rollout: types.Rollout, chunks: int) -> Ring:
    """Returns an empty ring of `C / T = chunks` rollouts; of `rollout` only shapes are used."""
    length, streams = rollout.timestep.reward.shape
    length -= 1

    def steps(x: jax.Array) -> Rows:
        return Rows.zeros(streams, chunks * length, x.shape[2:], x.dtype)

    def states(x: jax.Array) -> Rows:
        return Rows.zeros(streams, chunks, x.shape[1:], x.dtype)

    ring = jax.tree.map(steps, rollout._replace(actor_state=(), age=()))
    return ring._replace(actor_state=jax.tree.map(states, rollout.actor_state))


def num_streams(ring: Ring) -> int:
    """Returns `B`."""
    return ring.timestep.reward.data.shape[0]


def capacity(ring: Ring) -> int:
    """Returns `C`."""
    return ring.timestep.reward.capacity


def period(ring: Ring) -> int:
    """Returns the steps between starts of sequences: `T` with stored actor states, else 1."""
    states = map_rows(lambda rows: rows.capacity, ring.actor_state)
    return capacity(ring) // max(jax.tree.leaves(states), default=capacity(ring))


def write(ring: Ring, rollout: types.Rollout, slot: jax.Array) -> Ring:
    """Returns the ring with a rollout `[T, B, ...]` from slot `slot` on, which `T` divides."""
    length = rollout.timestep.reward.shape[0] - 1
    final = (slot + length) % capacity(ring)  # the slot of the last time step; 0 after a full round

    def put(rows: types.PyTree, values: types.PyTree, slot: jax.Array) -> types.PyTree:
        return map_rows(lambda r, x: r.write(x, slot), rows, values)

    timestep = put(ring.timestep, jax.tree.map(lambda x: x[:-1], rollout.timestep), slot)
    # The last time step is the first one of the next rollout, which writes the same values again.
    timestep = put(timestep, jax.tree.map(lambda x: x[-1:], rollout.timestep), final)
    state = jax.tree.map(lambda x: x[None], rollout.actor_state)
    return types.Rollout(
        timestep=timestep,
        action=put(ring.action, rollout.action, slot),
        extras=put(ring.extras, rollout.extras, slot),
        actor_state=put(ring.actor_state, state, slot // length),
    )


def end_episodes(ring: Ring, slot: jax.Array, ended: jax.Array) -> Ring:
    """Marks slot `slot` of streams `ended` `[B]` as the last time step of an episode.

    Its discount is kept, so the episode counts as truncated unless it terminated there.
    """
    rows = ring.timestep.step_type
    stream = jnp.arange(num_streams(ring))
    stored = rows.read(stream, jnp.broadcast_to(slot, stream.shape))
    marked = rows.write(jnp.where(ended, types.LAST, stored)[None], slot)
    return ring._replace(timestep=ring.timestep._replace(step_type=marked))


def cut(ring: Ring, start: jax.Array, stream: jax.Array, length: int) -> types.Rollout:
    """Returns sequences `[L, N, ...]` of streams `[N]` from slots `[N]` on."""
    start = start % capacity(ring)
    slot = (start + jnp.arange(length + 1)[:, None]) % capacity(ring)  # [L + 1, N]
    stream = jnp.broadcast_to(stream, slot.shape)
    timestep = map_rows(lambda rows: rows.read(stream, slot), ring.timestep)
    action, extras = map_rows(
        lambda rows: rows.read(stream[:-1], slot[:-1]), (ring.action, ring.extras)
    )
    chunk = start // period(ring)  # the rollout that begins there
    state = map_rows(lambda rows: rows.read(stream[0], chunk), ring.actor_state)
    return types.Rollout(timestep, action, extras, state)


def map_rows(function, tree: types.PyTree, *rest: types.PyTree) -> types.PyTree:
    """Returns the tree with `function(rows, *others)` in place of each `Rows` of it."""
    return jax.tree.map(function, tree, *rest, is_leaf=lambda x: isinstance(x, Rows))
