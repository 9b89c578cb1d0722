"""Rows of any shape against arrays that are indexed; which of them are padded.

Axis legend: `C` time steps in the ring, `T` of a rollout, `B` streams, `N` sequences.
"""

import functools

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


def _rollout(number: int) -> types.Rollout:
    """Returns random steps `[T, B, ...]`, of which the first time step is that of the last one."""

    def draw(name, time, shape, dtype):
        seed = [number * STEPS + time, *name.encode()]
        return np.random.default_rng(seed).integers(0, 100, (STREAMS, *shape)).astype(dtype)

    def steps(name, count, shape=(), dtype=np.float32):
        return np.stack([draw(name, time, shape, dtype) for time in range(count)])

    observation = {str(s): steps(str(s), STEPS + 1, s, np.uint8) for s in SHAPES}
    numbers = [steps(name, STEPS + 1) for name in ("reward", "discount")]
    return types.Rollout(
        timestep=types.TimeStep(observation, *numbers, steps("type", STEPS + 1, (), np.int8)),
        action=steps("action", STEPS, (2,)),
        extras=steps("legal", STEPS, (9,), bool),
        actor_state={str(s): draw(f"state{s}", 0, s, np.float32) for s in SHAPES},
    )


@pytest.fixture(scope="module")
def rings():
    """The ring after each of many rollouts, which fill it twice."""
    write = jax.jit(ring_buffer.write, donate_argnums=0)
    ring, found = ring_buffer.zeros(_rollout(0), CHUNKS), []
    for number in range(2 * CHUNKS + 2):
        ring = write(ring, _rollout(number), jnp.int32(number * STEPS % CAPACITY))
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
    begin = number - LENGTH // STEPS  # number of the first rollout of the sequence
    start = np.full(3, begin * STEPS % CAPACITY)
    with parallel.compiling_for(platform):
        actual = _cut(platform)(rings[number], start, np.array(stream), LENGTH)
    parts = [_rollout(n) for n in range(begin, number + 1)]

    def joined(*xs, length=LENGTH):
        return np.concatenate([*(x[:STEPS] for x in xs), xs[-1][STEPS:]])[:length][:, stream]

    time = jax.tree.map(functools.partial(joined, length=LENGTH + 1), *(p.timestep for p in parts))
    streams.assert_same(actual.timestep, time)
    streams.assert_same(actual.action, joined(*(p.action for p in parts)))
    streams.assert_same(actual.extras, joined(*(p.extras for p in parts)))
    state = jax.tree.map(lambda x: x[stream], parts[0].actor_state)
    streams.assert_same(actual.actor_state, state)


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
