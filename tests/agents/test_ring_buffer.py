"""Rows of any shape against arrays that are indexed; which of them are padded.

Axis legend: `C` time steps in the ring, `T` of a rollout, `B` streams, `N` sequences.
"""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from agents import ring_buffer
from podracers import parallel, types
from tests import streams

SETTINGS = hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
STEPS, CHUNKS, STREAMS, LENGTH = 3, 5, 4, 7  # T, C / T, B, L
CAPACITY = STEPS * CHUNKS
# Scalars, vectors, odd images, whole lanes, images that are padded, nothing at all.
SHAPES = [(), (3,), (5, 7), (128,), (2, 64), (37, 31), (84, 84, 1), (0,)]


def _elements(time, shape=(), dtype=np.float32):
    """Returns elements `[*time.shape, B, *shape]`, which differ by time, stream and place."""
    number = np.asarray(time)[..., None] * STREAMS + np.arange(STREAMS)
    number = number.reshape(*number.shape, *[1] * len(shape))
    place = np.arange(math.prod(shape)).reshape(shape)
    return ((101 * number + 13 * place) % 251).astype(dtype)


def _rollout(begin: int, length: int = STEPS) -> types.Rollout:
    """Returns `length` transitions from time `begin` on."""
    time = begin + np.arange(length + 1)
    observation = {str(s): _elements(time, s, np.uint8) for s in SHAPES}
    reward, step_type = _elements(time), _elements(time, (), np.uint8)
    return types.Rollout(
        timestep=types.TimeStep(observation, reward, -reward, step_type),
        action=_elements(time[:-1], (2,)),
        extras=_elements(time[:-1], (9,)) % 2 > 0,
        actor_state={str(s): _elements(begin, s) for s in SHAPES},
    )


@pytest.fixture(scope="module")
def rings():
    """The ring after each of many rollouts, which fill it twice."""
    write = jax.jit(ring_buffer.write, donate_argnums=0)
    ring, found = ring_buffer.zeros(_rollout(0), CHUNKS), []
    for number in range(2 * CHUNKS + 2):
        ring = write(ring, _rollout(number * STEPS), jnp.int32(number * STEPS % CAPACITY))
        found.append(streams.to_numpy(ring))
    return found


@functools.cache
def _cut(platform):
    """Both ways of reading run on a CPU."""
    with parallel.compiling_for(platform):
        return jax.jit(ring_buffer.cut, static_argnums=3)


@SETTINGS
@hypothesis.given(
    strategies.integers(CHUNKS - 1, 2 * CHUNKS + 1),
    strategies.lists(strategies.integers(0, STREAMS - 1), min_size=3, max_size=3),
    strategies.sampled_from(["cpu", "tpu"]),
)
def test_a_sequence_equals_the_written_steps(rings, number, stream, platform):
    begin = (number - LENGTH // STEPS) * STEPS
    with parallel.compiling_for(platform):
        start = np.full(3, begin % CAPACITY)
        actual = _cut(platform)(rings[number], start, np.array(stream), LENGTH)
    *steps, state = _rollout(begin, LENGTH)
    streams.assert_same(actual[:-1], jax.tree.map(lambda x: x[:, stream], tuple(steps)))
    streams.assert_same(actual.actor_state, jax.tree.map(lambda x: x[stream], state))


@pytest.mark.parametrize(
    ("capacity", "shape", "axes"),
    [
        (15, (3,), (45,)),
        (15, (2, 64), (15, 128)),
        (15, (37, 31), (15, 1152)),
        (2**26, (31,), (31 * 2**26,)),
        (2**26, (33,), (2**26, 128)),  # end to end, places would not fit into int32
    ],
)
def test_only_elements_of_nearly_whole_lanes_are_padded(capacity, shape, axes):
    rows = jax.eval_shape(lambda: ring_buffer.Rows.zeros(2, capacity, shape, jnp.uint8))
    assert rows.data.shape == (2, *axes)
