"""Minibatches: every item dealt once, at random, the same way on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import minibatches
from podracers import errors, parallel

P = jax.sharding.PartitionSpec
LENGTH, BATCH, NUM = 6, 24, 3
ITEM = np.arange(LENGTH * BATCH, dtype=np.int32).reshape(LENGTH, BATCH)
TREE = {"item": ITEM, "feature": np.stack([ITEM, -ITEM], axis=-1)}
ROWS = {"row": np.arange(BATCH, dtype=np.int32), "double": 2.0 * np.ones((BATCH, 2))}
ROWS["double"] *= ROWS["row"][:, None]


@functools.cache
def _compiled(function, num_devices):
    columns, rows = P(None, parallel.AXIS), P(parallel.AXIS)
    if function == "time":
        inner, in_specs, out_specs = minibatches.over_time, (columns,), P(None, None, parallel.AXIS)
    else:
        inner, in_specs = minibatches.over_streams, (columns, rows)
        out_specs = (P(None, None, parallel.AXIS), P(None, parallel.AXIS))
    mapped = jax.shard_map(
        lambda key, *trees: inner(*trees, key, NUM),
        mesh=parallel.make_mesh(jax.devices()[:num_devices]),
        in_specs=(P(), *in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped)


def _over_time(num_devices=1, seed=0):
    dealt = _compiled("time", num_devices)(jax.random.key(seed), TREE)
    return jax.tree.map(np.asarray, dealt)


def _over_streams(num_devices=1, seed=0):
    dealt = _compiled("streams", num_devices)(jax.random.key(seed), TREE, ROWS)
    return jax.tree.map(np.asarray, dealt)


def test_over_time_deals_every_transition_once_and_keeps_streams():
    dealt = _over_time()
    assert dealt["item"].shape == (NUM, LENGTH // NUM, BATCH)
    assert dealt["feature"].shape == (NUM, LENGTH // NUM, BATCH, 2)
    np.testing.assert_array_equal(np.sort(dealt["item"].ravel()), ITEM.ravel())
    np.testing.assert_array_equal(
        dealt["item"] % BATCH, np.broadcast_to(np.arange(BATCH), dealt["item"].shape)
    )


def test_over_streams_deals_every_stream_once_and_keeps_time():
    dealt, rows = _over_streams()
    assert dealt["item"].shape == (NUM, LENGTH, BATCH // NUM)
    assert rows["double"].shape == (NUM, BATCH // NUM, 2)
    np.testing.assert_array_equal(np.sort(rows["row"].ravel()), np.arange(BATCH))
    for minibatch in range(NUM):
        expected = ITEM[:, rows["row"][minibatch]]
        np.testing.assert_array_equal(dealt["item"][minibatch], expected)
    np.testing.assert_array_equal(rows["double"][..., 0], 2.0 * rows["row"])


@pytest.mark.parametrize("deal", [_over_time, _over_streams])
def test_leaves_move_together(deal):
    dealt = deal()
    dealt = dealt[0] if isinstance(dealt, tuple) else dealt
    np.testing.assert_array_equal(dealt["feature"][..., 0], dealt["item"])
    np.testing.assert_array_equal(dealt["feature"][..., 1], -dealt["item"])


@pytest.mark.parametrize("deal", [_over_time, _over_streams])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_global_minibatches_do_not_depend_on_the_devices(deal, num_devices):
    jax.tree.map(np.testing.assert_array_equal, deal(num_devices), deal(1))


@pytest.mark.parametrize("deal", [_over_time, _over_streams])
def test_keys_and_groups_differ(deal):
    first, again, other = (jax.tree.leaves(deal(4, seed))[-1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_every_stream_and_every_device_draws_for_itself():
    """With one draw for all streams, or for all devices, columns would repeat."""
    time = _over_time(4)["item"] // BATCH  # [M, T / M, B]
    columns = {column.tobytes() for column in np.moveaxis(time, -1, 0)}
    assert len(columns) > BATCH // 3  # of 36 permutations
    _, rows = _over_streams(4)
    assert len({group.tobytes() for group in rows["row"].T % NUM}) > 2  # of 6


@pytest.mark.parametrize("deal", [_over_time, _over_streams])
def test_each_item_goes_to_each_minibatch_equally_often(deal):
    counts = np.zeros((NUM, ITEM.size))
    seeds = 60
    for seed in range(seeds):
        dealt = deal(1, seed)
        dealt = dealt[0] if isinstance(dealt, tuple) else dealt
        for minibatch in range(NUM):
            counts[minibatch, dealt["item"][minibatch].ravel()] += 1
    np.testing.assert_array_equal(counts.sum(axis=0), seeds)
    # Twenty of sixty are expected, with a deviation of 3.7.
    assert counts.min() > 3 and counts.max() < 38


def test_equal_numbers_still_give_a_permutation():
    ranks = minibatches._ranks(jnp.array([[0.5, 0.1, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3]]))
    np.testing.assert_array_equal(ranks, [[1, 0, 2, 3], [0, 1, 2, 3]])


def test_errors_name_both_numbers():
    with pytest.raises(errors.UserError, match=r"rollout of 6 steps .* 4 minibatches"):
        minibatches.over_time(TREE, jax.random.key(0), 4)
    with pytest.raises(errors.UserError, match=r"24 environments on each device .* 5 minibatches"):
        minibatches.over_streams(TREE, ROWS, jax.random.key(0), 5)
