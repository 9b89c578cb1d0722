"""The sum tree: exact after any number of writes, and equal items are drawn equally.

Axis legend: `R` rows, `I` items, `N` writes or draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.replay import sum_tree

MILLIONS = 2_000_000
ROWS, ITEMS, WRITES = 3, 64**2 + 1, 50  # three levels, the last of which is nearly empty

_write = jax.jit(sum_tree.write)


@functools.partial(jax.jit, static_argnums=2)
def _draw_many(tree, key, num_draws):
    """Returns draws from row 0."""
    rows = jnp.zeros((num_draws,), jnp.int32)
    return sum_tree.draw(tree, rows, jax.random.split(key, num_draws))


def _assert_sums(tree, items):
    """Asserts that every level of a tree has the sums of `items` `[R, I]` in float64."""
    sums = np.asarray(items, np.float64)
    for level in tree.levels:
        sums = np.pad(sums, ((0, 0), (0, level.shape[1] - sums.shape[1])))
        np.testing.assert_allclose(level, sums, rtol=1e-6)
        sums = sums.reshape(len(sums), -1, 64).sum(-1)
    np.testing.assert_allclose(tree.total(), sums[:, 0], rtol=1e-6)


def _assert_even(counts, expected):
    """Asserts by chi-square that counts differ from their expectation by chance only."""
    freedom = len(counts) - 1
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - freedom) < 5.0 * np.sqrt(2.0 * freedom)


def test_writes_give_the_sums():
    """Of repeated items the last write counts; what falls to zero leaves nothing behind."""
    rng = np.random.default_rng(0)
    tree, items = sum_tree.init(ROWS, ITEMS), np.zeros((ROWS, ITEMS))
    for _ in range(20):
        row = rng.integers(0, ROWS, WRITES)
        item = rng.choice([0, 1, 63, 64, 65, 4095, 4096], WRITES)
        value = rng.choice(np.float32([0.0, 1e-4, 0.5, 1.0, 3.0, 1e4]), WRITES)
        tree = _write(tree, row, item, value)
        for write in zip(row, item, value):
            items[write[:2]] = write[2]
        _assert_sums(tree, items)
        np.testing.assert_array_equal(tree.levels[0][:, :ITEMS], items.astype(np.float32))


def test_no_item_is_written_twice(monkeypatch):
    """On a GPU a scatter keeps any of two writes; a CPU would show nothing."""
    order, written = sum_tree._in_order, []

    def record(row, item, value):
        ordered = order(row, item, value)
        written.append([np.asarray(part)[np.asarray(ordered[-1])] for part in ordered[:-1]])
        return ordered

    monkeypatch.setattr(sum_tree, "_in_order", record)
    row, item = jnp.array([0, 1, 0, 0, 1, 0]), jnp.array([3, 4, 3, 4, 4, 2])
    sum_tree.write(sum_tree.init(2, 5), row, item, jnp.arange(1.0, 7.0))
    assert list(zip(*written[0])) == [(0, 2, 6), (0, 3, 3), (0, 4, 4), (1, 4, 5)]


@pytest.mark.slow
def test_millions_of_equal_items_are_drawn_equally():
    items = jnp.arange(MILLIONS)
    tree = _write(sum_tree.init(1, MILLIONS), 0 * items, items, jnp.ones(MILLIONS))
    draws = 300_000
    item, probability = _draw_many(tree, jax.random.key(1), draws)
    np.testing.assert_allclose(probability, 1.0 / MILLIONS, rtol=1e-5)
    assert item.max() < MILLIONS
    # Neighbours in bins; and positions within blocks of 64, where a single number would fail.
    for label, count in ((item // 2_000, 1_000), (item % 64, 64)):
        _assert_even(np.bincount(label, minlength=count), draws / count)
    # Few items are drawn more than once, a Poisson number.
    rate, repeated = draws / MILLIONS, np.sum(np.bincount(item) > 1)
    expected = MILLIONS * (1.0 - np.exp(-rate) * (1.0 + rate))
    assert abs(repeated - expected) < 5.0 * np.sqrt(expected)


def test_draws_are_in_proportion_and_never_of_zero():
    rng = np.random.default_rng(2)
    items = rng.exponential(size=300).astype(np.float32) * (rng.random(300) < 0.5)
    tree = _write(sum_tree.init(1, 300), jnp.zeros(300, jnp.int32), jnp.arange(300), items)
    item, probability = _draw_many(tree, jax.random.key(3), 100_000)
    exact = items.astype(np.float64) / items.sum(dtype=np.float64)
    np.testing.assert_allclose(probability, exact[item], rtol=1e-5)
    counts = np.bincount(item, minlength=300)
    assert np.all(counts[items == 0.0] == 0)
    _assert_even(counts[items > 0.0], 100_000 * exact[items > 0.0])
    # Not even rounding chooses a zero, with a product that rounds to the sum.
    terms = rng.random((200, 64)).astype(np.float32) * (rng.random((200, 64)) < 0.3)
    terms[:, 7] = 1e-20
    for uniform in (0.0, 1.0 - 2.0**-24, 1.0):
        chosen = jax.jit(sum_tree._choose)(terms, jnp.full((200,), uniform))
        assert np.all(np.take_along_axis(terms, np.asarray(chosen)[:, None], axis=1) > 0.0)
