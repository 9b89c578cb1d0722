"""The sum tree: exact after any number of writes, and equal items are drawn equally.

Axis legend: `R` rows, `I` items, `N` writes or draws.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import sum_tree

MILLIONS = 2_000_000
WRITES, EACH = 200, 1024  # 200k random writes


def _keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


_write = jax.jit(sum_tree.write)
_draw = jax.jit(sum_tree.draw)


@functools.partial(jax.jit, static_argnums=2)
def _draw_many(tree, key, num_draws):
    """Returns so many items of row 0."""
    rows = jnp.zeros((num_draws,), jnp.int32)
    return sum_tree.draw(tree, rows, jax.random.split(key, num_draws))


def _assert_sums(tree, items, rtol):
    """Asserts that every level of a tree is what float64 makes of `items` `[R, I]`."""
    sums = np.asarray(items, np.float64)
    for level in tree.levels:
        padding = level.shape[1] - sums.shape[1]
        sums = np.pad(sums, ((0, 0), (0, padding)))
        np.testing.assert_allclose(level, sums, rtol=rtol)
        sums = sums.reshape(len(sums), -1, 64).sum(-1)
    np.testing.assert_allclose(tree.total(), sums[:, 0], rtol=rtol)


@pytest.mark.parametrize("num_items", [1, 64, 65, 64**2 + 1])
def test_writes_of_any_size_give_the_sums(num_items):
    rng = np.random.default_rng(num_items)
    tree = sum_tree.init(3, num_items)
    items = np.zeros((3, num_items))
    for _ in range(4):
        row, item = rng.integers(3, size=50), rng.integers(num_items, size=50)
        value = rng.integers(5, size=50) * rng.random(50)
        value = value.astype(np.float32)
        tree = _write(tree, row, item, value)
        items[row, item] = value  # of what is written twice, the last
        _assert_sums(tree, items, rtol=1e-6)
        np.testing.assert_array_equal(tree.levels[0][:, :num_items], items.astype(np.float32))


def test_no_item_is_written_twice(monkeypatch):
    """On a GPU a scatter keeps any of two writes: a CPU would show nothing."""
    order, written = sum_tree._in_order, []

    def note(row, item, value):
        made = order(row, item, value)
        written.append([np.asarray(part)[np.asarray(made[-1])] for part in made[:-1]])
        return made

    monkeypatch.setattr(sum_tree, "_in_order", note)
    row, item = jnp.array([0, 1, 0, 0, 1, 0]), jnp.array([3, 3, 3, 4, 3, 2])
    tree = sum_tree.write(sum_tree.init(2, 5), row, item, jnp.arange(1.0, 7.0))
    rows, items, values = written[0]
    assert list(zip(rows, items, values)) == [(0, 2, 6), (0, 3, 3), (0, 4, 4), (1, 3, 5)]
    np.testing.assert_array_equal(tree.levels[0][:, :5], [[0, 0, 6, 3, 4], [0, 0, 0, 5, 0]])


@pytest.fixture(scope="module", name="worn")
def _worn():
    """A tree of millions after many random writes, of sizes over eight orders of magnitude."""

    def step(tree, key):
        item_key, value_key = jax.random.split(key)
        item = jax.random.randint(item_key, (EACH,), 0, MILLIONS)
        value = 10.0 ** jax.random.uniform(value_key, (EACH,), minval=-4.0, maxval=4.0)
        return sum_tree.write(tree, jnp.zeros_like(item), item, value), None

    tree = sum_tree.init(1, MILLIONS)
    keys = _keys(WRITES)
    return jax.jit(lambda tree: jax.lax.scan(step, tree, keys)[0], donate_argnums=0)(tree)


def test_sums_do_not_drift_over_many_writes_to_millions_of_items(worn):
    items = np.asarray(worn.levels[0])[:, :MILLIONS]
    assert np.count_nonzero(items) > 150_000
    _assert_sums(worn, items, rtol=1e-6)


def test_what_falls_to_zero_leaves_no_rest(worn):
    """The usual tree, which adds differences, ends at what rounding left over."""
    (item,) = np.nonzero(np.asarray(worn.levels[0][0]))
    tree = _write(worn, jnp.zeros_like(item), jnp.asarray(item), jnp.zeros(item.shape))
    assert all(np.all(np.asarray(level) == 0.0) for level in tree.levels)


@pytest.mark.slow
def test_millions_of_equal_items_are_drawn_equally():
    items = jnp.arange(MILLIONS)
    tree = sum_tree.init(1, MILLIONS)
    tree = _write(tree, jnp.zeros_like(items), items, jnp.ones(MILLIONS))
    draws, bins = 300_000, 1_000
    item, probability = _draw_many(tree, jax.random.key(1), draws)
    np.testing.assert_allclose(probability, 1.0 / MILLIONS, rtol=1e-5)
    assert item.max() < MILLIONS
    # Neighbours in bins; and what is left over within blocks of 64, where one number would fail.
    for label, count in ((item // (MILLIONS // bins), bins), (item % 64, 64)):
        expected = draws / count
        chi_square = np.sum((np.bincount(label, minlength=count) - expected) ** 2 / expected)
        freedom = count - 1
        assert abs(chi_square - freedom) < 5.0 * np.sqrt(2.0 * freedom)
    # Of so many equal items, a Poisson number is drawn more than once.
    times = np.bincount(np.bincount(item, minlength=MILLIONS))
    rate = draws / MILLIONS
    poisson = MILLIONS * np.exp(-rate) * np.array([1.0, rate, rate**2 / 2, rate**3 / 6])
    assert np.all(np.abs(times[:4] - poisson) < 5.0 * np.sqrt(poisson))


def test_draws_are_in_proportion_and_never_of_zero():
    rng = np.random.default_rng(2)
    items = rng.exponential(size=300).astype(np.float32) * (rng.random(300) < 0.5)
    tree = sum_tree.init(1, 300)
    tree = _write(tree, jnp.zeros(300, jnp.int32), jnp.arange(300), items)
    draws = 100_000
    item, probability = _draw_many(tree, jax.random.key(3), draws)
    exact = items.astype(np.float64) / items.sum(dtype=np.float64)
    np.testing.assert_allclose(probability, exact[item], rtol=1e-5)
    counts = np.bincount(item, minlength=300)
    assert np.all(counts[items == 0.0] == 0)
    kept = items > 0.0
    chi_square = np.sum((counts - draws * exact)[kept] ** 2 / (draws * exact[kept]))
    freedom = kept.sum() - 1
    assert abs(chi_square - freedom) < 5.0 * np.sqrt(2.0 * freedom)


def test_a_single_item_is_always_drawn():
    """At the edges of blocks, and whatever its size."""
    for only, value in itertools.product([0, 63, 64, 4095, 4999], [1e-30, 1.0, 1e30]):
        tree = sum_tree.init(2, 5000)
        tree = _write(tree, jnp.array([1]), jnp.array([only]), jnp.array([value]))
        item, probability = _draw(tree, jnp.ones(64, jnp.int32), _keys(64))
        np.testing.assert_array_equal(item, only)
        np.testing.assert_array_equal(probability, 1.0)


def test_rounding_never_chooses_a_zero():
    """Not even with a number that is none of `[0, 1)`: the product may round to the sum."""
    choose = jax.jit(sum_tree._choose)
    rng = np.random.default_rng(4)
    terms = rng.random((200, 64)).astype(np.float32) * (rng.random((200, 64)) < 0.3)
    terms[:, 7] = 1e-20
    for uniform in (0.0, 0.5, 1.0 - 2.0**-24, 1.0):
        chosen = choose(terms, jnp.full((200,), uniform))
        assert np.all(np.take_along_axis(terms, np.asarray(chosen)[:, None], axis=1) > 0.0)


def test_rows_are_trees_of_their_own():
    rows, items = jnp.repeat(jnp.arange(4), 100), jnp.tile(jnp.arange(100), 4)
    # Row r has only the items that are r modulo 4.
    tree = _write(sum_tree.init(4, 100), rows, items, (items % 4 == rows) * 1.0)
    np.testing.assert_allclose(tree.total(), 25.0)
    item, probability = _draw(tree, rows, _keys(400))
    np.testing.assert_array_equal(item % 4, rows)
    np.testing.assert_allclose(probability, 1.0 / 25.0)


def test_a_draw_depends_on_its_key_alone():
    rows, items = jnp.repeat(jnp.arange(4), 100), jnp.tile(jnp.arange(100), 4)
    tree = _write(sum_tree.init(4, 100), rows, items, items + 1.0)
    keys = _keys(400)
    item, _ = _draw(tree, rows, keys)
    other, _ = _draw(tree, rows[::-1], keys[::-1])
    np.testing.assert_array_equal(other[::-1], item)
