"""What an agent's memory takes is said, and refused where it cannot fit."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from dm_env import specs

from podracers import errors, footprint


def _memory(count):
    return {"ring": jax.ShapeDtypeStruct((4, count), np.uint8), "empty": ()}


def test_bytes_count_shapes_and_dtypes():
    tree = (jax.ShapeDtypeStruct((3, 5), np.float32), jax.ShapeDtypeStruct((), np.int8), ())
    assert footprint.num_bytes(tree) == 61


def test_the_line_says_how_much_each_device_holds():
    (line,) = footprint.describe(_memory(25_000_000), jax.devices()[:2])
    assert "50 MB on each of 2 cpu devices, of " in line
    (line,) = footprint.describe(_memory(250_000), jax.devices()[:1])
    assert "1 MB on each of 1 cpu device, of " in line


def test_no_line_where_there_is_nothing():
    assert footprint.describe((), jax.devices()) == []


def test_more_than_there_is_is_refused():
    with pytest.raises(
        errors.UserError, match="4e\\+03 TB on each of 1 cpu device, which has room"
    ):
        footprint.describe(_memory(10**15), jax.devices()[:1])


class _State(NamedTuple):
    learner: Any
    streams: Any


def test_counts_the_learner_on_each_device_and_shares_of_the_rest():
    learner = jax.ShapeDtypeStruct((10**15,), np.uint8)  # 1000 TB on each device
    streams = jax.ShapeDtypeStruct((10**14,), np.int32)  # 400 TB, 200 TB on each of two
    observation = specs.Array((10, 5), np.float32)  # 200 bytes
    small = _State((), jax.ShapeDtypeStruct((8,), np.int32))
    footprint.require_room(small, observation, 8, jax.devices()[:2])
    for state, num_steps, size in (
        (_State(learner, streams), 0, "1.2e\\+03 TB"),
        (_State(learner, streams), 10**13, "2.2e\\+03 TB"),
        (small, 10**12, "100 TB"),
    ):
        with pytest.raises(errors.UserError, match=f"take {size} on each of 2 cpu devices"):
            footprint.require_room(state, observation, num_steps, jax.devices()[:2])


@pytest.mark.parametrize(
    "count, text", [(12, "12 bytes"), (999, "999 bytes"), (1000, "1 kB"), (2.5e9, "2.5 GB")]
)
def test_numbers_are_readable(count, text):
    assert footprint.readable(count) == text
