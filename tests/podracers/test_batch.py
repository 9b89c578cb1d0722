"""Restarted episodes: exact whatever the chunk, distinct over streams and episodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import batch
from tests import streams

NUM_STREAMS = 6
NUM_STEPS = 60
CHUNKS = [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(50, marks=pytest.mark.slow)]
# Bit for bit, if the compiler does not round by shape: the code generator of users, which
# conftest.py turns off to compile faster, does not.
_EXACT = {"xla_cpu_use_fusion_emitters": True} if jax.default_backend() == "cpu" else None


def _batched(reset_batch, end=0.3):
    return batch.BatchedEnvironment(streams.RandomEpisodes(end), reset_batch)


def _keys(seed=0):
    stream = jnp.arange(NUM_STREAMS)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), stream)


@functools.cache
def _episodes(reset_batch):
    """Returns states and time steps `[T, B]` under random actions, and the first time step."""
    environment = _batched(reset_batch)

    @functools.partial(jax.jit, compiler_options=_EXACT)
    def run(keys):
        state, first = environment.init(keys)
        action = jax.random.randint(jax.random.key(1), (NUM_STEPS, NUM_STREAMS), 0, 3)

        def step(state, action):
            state, timestep = environment.step(state, action)
            return state, (state, timestep)

        return first, jax.lax.scan(step, state, action)[1]

    return run(_keys())


@pytest.mark.parametrize("reset_batch", CHUNKS)
def test_chunked_resets_are_exact_over_many_episodes(reset_batch):
    streams.assert_same(_episodes(reset_batch), _episodes(None))


@pytest.mark.parametrize("reset_batch", CHUNKS)
def test_chunked_resets_are_exact_for_every_set_of_ended_streams(reset_batch):
    _, (states, _) = _episodes(None)
    state = jax.tree.map(lambda x: x[7], states)
    patterns = jnp.arange(2**NUM_STREAMS)[:, None] >> jnp.arange(NUM_STREAMS) & 1 == 1
    action = jnp.ones((NUM_STREAMS,), jnp.int32)

    def outcomes(environment):
        # One after the other: under vmap, the loop over chunks would run as often as the longest.
        step = lambda last: environment.step(state._replace(last=last), action)  # noqa: E731
        run = lambda patterns: jax.lax.map(step, patterns)  # noqa: E731
        return jax.jit(run, compiler_options=_EXACT)(patterns)

    actual, expected = outcomes(_batched(reset_batch)), outcomes(_batched(None))
    streams.assert_same(actual, expected)
    np.testing.assert_array_equal(expected[1].first(), patterns)


def test_last_is_followed_by_first_and_nothing_else_is():
    first, (states, timestep) = _episodes(None)
    assert first.first().all()
    np.testing.assert_array_equal(timestep.first()[1:], timestep.last()[:-1])
    np.testing.assert_array_equal(states.last, timestep.last())
    assert timestep.last().sum() > 50
    np.testing.assert_array_equal(timestep.reward[timestep.first()], 0.0)


def test_the_final_observation_is_the_true_one():
    """The state and time step at LAST are those of the environment's own step."""
    _, (states, timestep) = _episodes(None)
    environment = streams.RandomEpisodes()
    time, stream = np.argwhere(timestep.last()[1:])[0] + [1, 0]
    before = jax.tree.map(lambda x: x[time - 1, stream], states.environment)
    action = jax.random.randint(jax.random.key(1), (NUM_STEPS, NUM_STREAMS), 0, 3)[time, stream]
    _, expected = environment.step(before, action)
    streams.assert_close(jax.tree.map(lambda x: x[time, stream], timestep), expected)


def test_the_action_at_last_is_ignored():
    environment = _batched(None, end=1.0)
    step = jax.jit(environment.step)
    state, _ = jax.jit(environment.init)(_keys())
    state, timestep = step(state, jnp.zeros((NUM_STREAMS,), jnp.int32))
    assert timestep.last().all()
    actions = [jnp.full((NUM_STREAMS,), action, jnp.int32) for action in (0, 2)]
    streams.assert_same(step(state, actions[0]), step(state, actions[1]))


@pytest.mark.parametrize("reset_batch", [None, 4])
def test_every_episode_of_every_stream_is_another_one(reset_batch):
    first, (states, timestep) = _episodes(reset_batch)
    begun = np.asarray(timestep.first())
    beginnings = np.concatenate([first.observation, timestep.observation[begun]])
    assert len(np.unique(beginnings, axis=0)) == NUM_STREAMS + begun.sum()
    np.testing.assert_array_equal(states.episode[-1], begun.sum(axis=0))


def test_a_stream_does_not_depend_on_its_neighbours():
    environment = _batched(2)
    action = jax.random.randint(jax.random.key(2), (12, NUM_STREAMS), 0, 3)

    @jax.jit
    def run(keys, action):
        return jax.lax.scan(environment.step, environment.init(keys)[0], action)[1]

    whole, part = run(_keys(), action), run(_keys()[2:5], action[:, 2:5])
    streams.assert_close(part, jax.tree.map(lambda x: x[:, 2:5], whole))
