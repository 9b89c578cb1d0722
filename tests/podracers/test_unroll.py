"""The acting loop against a slow one, and across the borders of rollouts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import batch, unroll
from tests import streams

NUM_STREAMS = 4
LENGTH = 9


@dataclasses.dataclass(frozen=True, eq=False)
class Counter:
    """Acts at random, and counts the steps of each episode (from FIRST) in its actor state."""

    def init_actor(self, env_id, num_envs, evaluation=False):
        return jnp.zeros(env_id.shape, jnp.int32)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        count = jnp.where(timestep.first(), 0, actor_state) + 1
        action = jax.vmap(lambda k: jax.random.randint(k, (), 0, 3))(key)
        action = jnp.where(timestep.last(), params, action)
        return action, count, (count, timestep.observation + 0.0)


ENVIRONMENT = batch.BatchedEnvironment(streams.RandomEpisodes(), reset_batch=2)
AGENT = Counter()


@jax.jit
def _init(env_id):
    return unroll.init(AGENT, ENVIRONMENT, env_id, NUM_STREAMS, jax.random.key(0))


def _start():
    return _init(jnp.arange(NUM_STREAMS, dtype=jnp.int32))


@jax.jit
def _two_rollouts(begin, action_at_last):
    middle, first = unroll.unroll(
        AGENT, ENVIRONMENT, action_at_last, begin, jax.random.key(1), LENGTH
    )
    end, second = unroll.unroll(
        AGENT, ENVIRONMENT, action_at_last, middle, jax.random.key(2), LENGTH
    )
    return middle, first, end, second


@pytest.fixture(scope="module", name="run")
def _run():
    return _start(), *_two_rollouts(_start(), 0)


def test_shapes(run):
    _, _, rollout, _, _ = run
    assert rollout.timestep.observation.shape == (LENGTH + 1, NUM_STREAMS, 3)
    assert rollout.timestep.step_type.shape == (LENGTH + 1, NUM_STREAMS)
    assert rollout.action.shape == rollout.extras[0].shape == (LENGTH, NUM_STREAMS)
    assert rollout.actor_state.shape == (NUM_STREAMS,)


def test_a_rollout_equals_a_slow_loop(run):
    begin, _, rollout, _, _ = run
    state, timestep, count = begin.environment, begin.timestep, begin.actor_state
    step = jax.jit(ENVIRONMENT.step)
    for time in range(LENGTH):
        now = jax.tree.map(lambda x, time=time: x[time], rollout.timestep)
        streams.assert_close(now, timestep)
        count = np.where(timestep.first(), 0, count) + 1
        np.testing.assert_array_equal(rollout.extras[0][time], count)
        np.testing.assert_array_equal(rollout.extras[1][time], now.observation)
        state, timestep = step(state, rollout.action[time])
    streams.assert_close(jax.tree.map(lambda x: x[-1], rollout.timestep), timestep)


def test_a_rollout_begins_where_the_last_one_ended(run):
    _, middle, first, end, second = run
    for border, before, after in ((middle, first, second), (end, second, None)):
        streams.assert_same(jax.tree.map(lambda x: x[-1], before.timestep), border.timestep)
        if after is not None:
            streams.assert_same(jax.tree.map(lambda x: x[0], after.timestep), border.timestep)
            streams.assert_same(after.actor_state, border.actor_state)
    # The actor state is that before the first action.
    np.testing.assert_array_equal(first.actor_state, 0)
    np.testing.assert_array_equal(
        np.where(second.timestep.first()[0], 0, second.actor_state) + 1, second.extras[0][0]
    )


def test_the_action_at_last_is_ignored(run):
    _, middle, first, end, second = run
    other_middle, other_first, other_end, other_second = _two_rollouts(_start(), 2)
    assert np.any(first.action != other_first.action)
    streams.assert_same(first.timestep, other_first.timestep)
    streams.assert_same(second.timestep, other_second.timestep)
    streams.assert_same((middle, end), (other_middle, other_end))


def test_streams_steps_and_rollouts_draw_different_actions(run):
    _, _, first, _, second = run
    acting = ~np.concatenate([first.timestep.last()[:-1], second.timestep.last()[:-1]])
    action = np.concatenate([first.action, second.action])
    for one, other in itertools.combinations(range(NUM_STREAMS), 2):
        both = acting[:, one] & acting[:, other]
        assert np.any(action[both, one] != action[both, other])
    for stream in range(NUM_STREAMS):
        assert len(np.unique(action[acting[:, stream], stream])) > 1
    both = acting[:LENGTH] & acting[LENGTH:]
    assert np.any(action[:LENGTH][both] != action[LENGTH:][both])


def test_a_stream_is_what_its_global_index_says(run):
    """The same rows on another device, with other neighbours, do the same."""
    _, _, first, _, second = run
    env_id = jnp.array([2, 3], jnp.int32)
    _, part_first, _, part_second = _two_rollouts(_init(env_id), 0)
    for part, whole in ((part_first, first), (part_second, second)):
        streams.assert_close(part.timestep, jax.tree.map(lambda x: x[:, 2:], whole.timestep))
        np.testing.assert_array_equal(part.action, whole.action[:, 2:])


def test_episodes_are_counted_across_rollouts(run):
    _, middle, first, end, second = run
    timestep = jax.tree.map(
        lambda x, y: np.concatenate([x[:-1], y]), first.timestep, second.timestep
    )
    returns, lengths = np.zeros(NUM_STREAMS), np.zeros(NUM_STREAMS)
    ended, total_return, total_length = 0, 0.0, 0.0
    for time in range(1, 2 * LENGTH + 1):
        for stream in range(NUM_STREAMS):
            if timestep.first()[time, stream]:
                returns[stream] = lengths[stream] = 0.0
                continue
            returns[stream] += timestep.reward[time, stream]
            lengths[stream] += 1
            if timestep.last()[time, stream]:
                ended += 1
                total_return += returns[stream]
                total_length += lengths[stream]
    assert ended > 5
    flushed, means = end.episodes.flush()
    assert means["episode/return"].count == means["episode/length"].count == ended
    np.testing.assert_allclose(means["episode/return"].total, total_return, rtol=1e-5)
    np.testing.assert_allclose(means["episode/length"].total, total_length)
    np.testing.assert_allclose(flushed.running_return, end.episodes.running_return)
    assert middle.episodes.ended.sum() < ended
