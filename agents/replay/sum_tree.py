"""A sum tree without drift, for millions of priorities in float32.

The usual sum tree has two faults. It adds differences to its sums, so rounding errors accumulate
with every write; here each sum is computed anew from all its terms. And it looks up one random
number in the running sum of all priorities; with 2**24 float32 numbers between 0 and 1 and millions
of equal items, some items are drawn twice as often as others and some never. Here each level of the
tree draws its own number. An item of priority zero is never drawn.

Several trees of one size are one structure, with a row for each.

Axis legend: `R` rows (trees), `I` items of each, `F` the fan-out, `N` draws or writes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_FAN_OUT = 64


class SumTree(NamedTuple):
    """Sums of sums; the first level holds the priorities themselves, padded with zeros."""

    levels: tuple[jax.Array, ...]  # each `[R, F * n]` float32; the last is `[R, F]`

    def total(self) -> jax.Array:
        """Returns the sum of each row, `[R]`."""
        return jnp.sum(self.levels[-1], axis=-1)


def init(num_rows: int, num_items: int) -> SumTree:
    """Returns trees of zeros."""
    levels, size = [], num_items
    while True:
        blocks = -(-size // _FAN_OUT)
        levels.append(jnp.zeros((num_rows, blocks * _FAN_OUT), jnp.float32))
        if blocks == 1:
            return SumTree(tuple(levels))
        size = blocks


def write(tree: SumTree, row: jax.Array, item: jax.Array, value: jax.Array) -> SumTree:
    """Sets the priorities of items `[N]` of rows `[N]` to values `[N]`, which are not negative.

    Of repeated items, the last value is kept.
    """
    row, item, value, is_last = _in_order(row, item, value)
    nowhere = tree.levels[0].shape[1]
    once = jnp.where(is_last, item, nowhere)
    levels = [tree.levels[0].at[row, once].set(value, mode="drop")]
    for above in tree.levels[1:]:
        item = item // _FAN_OUT
        sums = jnp.sum(_blocks(levels[-1], row, item), axis=-1)
        levels.append(above.at[row, item].set(sums))
    return SumTree(tuple(levels))


def draw(tree: SumTree, row: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws items in proportion to their priorities, with replacement.

    Args:
      tree: trees with a positive priority in each row that is drawn from.
      row: `[N]` int32.
      key: `[N]` typed keys.

    Returns:
      `[N]` int32 items and `[N]` float32, the probability of each within its row.
    """
    block = jnp.zeros(key.shape, jnp.int32)
    for depth, level in enumerate(reversed(tree.levels)):
        level_key = jax.vmap(jax.random.fold_in, (0, None))(key, depth)
        uniform = jax.vmap(jax.random.uniform)(level_key)
        block = block * _FAN_OUT + _choose(_blocks(level, row, block), uniform)
    return block, tree.levels[0][row, block] / tree.total()[row]


def _in_order(
    row: jax.Array, item: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns writes `[N]` sorted by row and item, and whether each is the last to its item.

    A scatter with two writes to one place keeps the last one on a CPU, but any of them on a GPU.
    """
    row, item, value = jax.lax.sort((row, item, value), num_keys=2, is_stable=True)
    is_last = (row[1:] != row[:-1]) | (item[1:] != item[:-1])
    return row, item, value, jnp.append(is_last, True)


def _blocks(level: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    """Returns the entries `[N, F]` of blocks of a level."""
    return level.reshape(level.shape[0], -1, _FAN_OUT)[row, block]


def _choose(terms: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the index `[N]` of the term `[N, F]` that `uniform` `[N]` in `[0, 1)` falls on."""
    sums = jnp.cumsum(terms, axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    passed = jnp.sum(sums <= target, axis=-1, dtype=jnp.int32)
    # Rounding may put the target at the very end: then the last term above zero is chosen.
    last = _FAN_OUT - 1 - jnp.argmax(terms[:, ::-1] > 0.0, axis=-1).astype(jnp.int32)
    return jnp.minimum(passed, last)
