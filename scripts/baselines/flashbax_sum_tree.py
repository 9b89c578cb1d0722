"""Prioritised sums and draws of flashbax 0.1.3 and of agents/sum_tree.py, side by side.

    pip install --target /tmp/flashbax --no-deps flashbax==0.1.3
    PYTHONPATH=/tmp/flashbax:. JAX_PLATFORMS=cpu python scripts/baselines/flashbax_sum_tree.py

flashbax is no dependency of the project: `docs/replay.md` has what this prints, and why.
"""

import inspect
import time

import flashbax as fbx
import jax
import jax.numpy as jnp
import numpy as np
from flashbax.buffers import sum_tree as theirs

from agents import sum_tree as ours

ITEMS, WRITES, EACH = 1_000_000, 2_000, 512  # about 1e6 random writes


def random_writes(write, tree):
    """Writes priorities as replay would: sizes of errors to the power of 0.9, over three orders."""

    def step(tree, key):
        item_key, value_key = jax.random.split(key)
        item = jax.random.randint(item_key, (EACH,), 0, ITEMS)
        exponent = jax.random.uniform(value_key, (EACH,), minval=-3.0, maxval=0.0)
        return write(tree, item, (10.0**exponent) ** 0.9), None

    keys = jax.random.split(jax.random.key(0), WRITES)
    start = time.time()
    tree = jax.block_until_ready(jax.jit(lambda t: jax.lax.scan(step, t, keys)[0])(tree))
    return tree, time.time() - start


def drift():
    """The root against a float64 sum of the leaves; then everything is set to zero."""
    # What flashbax takes on a CPU.
    flash, seconds = random_writes(theirs.set_batch_scan, theirs.init(ITEMS))
    first = 2**flash.tree_depth - 1
    leaves = np.asarray(flash.nodes[first : first + ITEMS], np.float64)
    print("flashbax  root error (relative):", float(flash.nodes[0]) / leaves.sum() - 1.0)
    parents = np.asarray(flash.nodes[(first - 1) // 2 : first], np.float64)
    pairs = np.asarray(flash.nodes[first:], np.float64).reshape(-1, 2).sum(1)
    print(
        "flashbax  worst lowest sum (relative):",
        np.max(np.abs(parents - pairs)[pairs > 0] / pairs[pairs > 0]),
    )
    print("flashbax  parents of nothing that are not zero:", np.count_nonzero(parents[pairs == 0]))
    items = jnp.arange(ITEMS)
    flash = jax.jit(theirs.set_batch_scan)(flash, items, jnp.zeros(ITEMS))
    print("flashbax  root once all is zero:", float(flash.nodes[0]), "seconds:", seconds)

    def write(tree, item, value):
        return ours.write(tree, jnp.zeros_like(item), item, value)

    tree, seconds = random_writes(write, ours.init(1, ITEMS))
    leaves = np.asarray(tree.levels[0][0, :ITEMS], np.float64)
    print("ours      root error (relative):", float(tree.total()[0]) / leaves.sum() - 1.0)
    tree = jax.jit(write)(tree, items, jnp.zeros(ITEMS))
    print("ours      root once all is zero:", float(tree.total()[0]), "seconds:", seconds)


def chi_square(counts, expected):
    """Returns by how many standard deviations the counts are less even than chance."""
    freedom = len(counts) - 1
    return (np.sum((counts - expected) ** 2 / expected) - freedom) / np.sqrt(2.0 * freedom)


def uniformity(items=4_000_000, draws=2**18, rounds=128):
    """Draws among equal priorities: 8 an item. All of both trees' sums are exact."""
    state = theirs.init(items)
    level, levels = np.zeros(2**state.tree_depth, np.float32), []
    level[:items] = 1.0
    while level.size:
        levels.append(level)
        level = level.reshape(-1, 2).sum(1) if level.size > 1 else level[:0]
    state = state.replace(nodes=jnp.asarray(np.concatenate(levels[::-1])))
    tree = ours.init(1, items)
    write = jax.jit(
        lambda t: ours.write(t, jnp.zeros(items, jnp.int32), jnp.arange(items), jnp.ones(items))
    )
    tree = write(tree)

    def flash_draw(key):
        # As its buffers do, for batches of 512.
        keys = jax.random.split(key, draws // 512)
        return jax.vmap(lambda k: theirs.stratified_sample(state, 512, k))(keys).ravel()

    def our_draw(key):
        keys = jax.random.split(key, draws)
        return ours.draw(tree, jnp.zeros(draws, jnp.int32), keys)[0]

    for name, draw in (("flashbax", flash_draw), ("ours", our_draw)):
        counts = np.zeros(items, np.int64)
        jitted, start = jax.jit(draw), time.time()
        for number in range(rounds):
            index = np.asarray(jitted(jax.random.key(number)))
            counts += np.bincount(index, minlength=items)[:items]
        mean = counts.mean()
        print(
            f"{name:9s} {draws * rounds} draws of {items} equal items: mean {mean:.2f}, variance "
            f"/ mean {counts.var() / mean:.4f} (1 is chance), "
            f"{chi_square(counts, mean):.1f} standard deviations, never drawn "
            f"{np.count_nonzero(counts == 0)} (chance: {items * np.exp(-mean):.1f}), "
            f"{time.time() - start:.0f} s"
        )
        halves = counts.reshape(-1, 2).sum(0) / counts.sum()
        print(
            f"{name:9s} share of even items {halves[0]:.5f}; of the first half "
            f"{counts[: items // 2].sum() / counts.sum():.5f}"
        )


def interface():
    """What `add` takes and returns."""
    buffer = fbx.make_prioritised_trajectory_buffer(
        add_batch_size=2,
        sample_batch_size=2,
        sample_sequence_length=4,
        period=4,
        min_length_time_axis=4,
        max_length_time_axis=16,
    )
    print("add takes", inspect.signature(buffer.add))
    state = buffer.init({"x": jnp.zeros(())})
    try:
        buffer.sample(state, jax.random.key(0))
        print(
            "sampling an empty buffer raises nothing; can_sample:", bool(buffer.can_sample(state))
        )
    except Exception as error:
        print("sampling an empty buffer:", type(error).__name__)
    state = buffer.add(state, {"x": jnp.ones((2, 8))})
    print("add returns", type(state).__name__, "and no indices")


if __name__ == "__main__":
    print("jax", jax.__version__, jax.devices()[0].device_kind)
    interface()
    drift()
    uniformity()
