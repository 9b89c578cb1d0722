"""Tests of the acting loop against a slow one, and of chunked resets against full resets."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import unroll
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


ENVIRONMENT = unroll.BatchedEnvironment(streams.RandomEpisodes(), reset_batch=2)
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
    acting = ~np.stack([first.timestep.last()[:-1], second.timestep.last()[:-1]])  # [2, T, B]
    action = np.stack([first.action, second.action])
    for one, other in itertools.combinations(range(NUM_STREAMS), 2):
        both = acting[..., one] & acting[..., other]
        assert np.any(action[both, one] != action[both, other])
    for stream in range(NUM_STREAMS):
        assert len(np.unique(action[acting[..., stream], stream])) > 1
    both = acting[0] & acting[1]
    assert np.any(action[0][both] != action[1][both])


def test_a_stream_depends_on_its_global_index_alone(run):
    """Not on its device or on other streams."""
    _, _, first, _, second = run
    env_id = jnp.array([2, 3], jnp.int32)
    _, part_first, _, part_second = _two_rollouts(_init(env_id), 0)
    for part, whole in ((part_first, first), (part_second, second)):
        streams.assert_close(part.timestep, jax.tree.map(lambda x: x[:, 2:], whole.timestep))
        np.testing.assert_array_equal(part.action, whole.action[:, 2:])


def test_episodes_are_counted_across_rollouts(run):
    _, middle, first, end, second = run
    both = jax.tree.map(lambda x, y: np.concatenate([x[:-1], y]), first.timestep, second.timestep)
    returns, lengths = np.zeros(NUM_STREAMS), np.zeros(NUM_STREAMS)
    ended_returns, ended_lengths = [], []
    for time, stream in itertools.product(range(1, 2 * LENGTH + 1), range(NUM_STREAMS)):
        if both.first()[time, stream]:
            returns[stream] = lengths[stream] = 0.0
            continue
        returns[stream] += both.reward[time, stream]
        lengths[stream] += 1
        if both.last()[time, stream]:
            ended_returns.append(returns[stream])
            ended_lengths.append(lengths[stream])
    flushed, means = end.episodes.flush()
    count = means["episode/return"].count
    assert count == means["episode/length"].count == len(ended_returns) > 5
    np.testing.assert_allclose(means["episode/return"].total, sum(ended_returns), rtol=1e-5)
    np.testing.assert_allclose(means["episode/length"].total, sum(ended_lengths))
    np.testing.assert_allclose(flushed.running_return, end.episodes.running_return)
    assert middle.episodes.ended.sum() < count


NUM_BATCHED = 6
NUM_STEPS = 60
# With XLA's default code generator, which conftest.py turns off to compile faster, rounding does
# not depend on shapes.
_EXACT = {"xla_cpu_use_fusion_emitters": True} if jax.default_backend() == "cpu" else None


def _batched(reset_batch):
    return unroll.BatchedEnvironment(streams.RandomEpisodes(), reset_batch)


def _keys(seed=0):
    stream = jnp.arange(NUM_BATCHED)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), stream)


@functools.cache
def _episodes(reset_batch):
    """Returns states and time steps `[T, B]` under random actions, and the first time step."""
    environment = _batched(reset_batch)

    @functools.partial(jax.jit, compiler_options=_EXACT)
    def run(keys):
        state, first = environment.init(keys)
        action = jax.random.randint(jax.random.key(1), (NUM_STEPS, NUM_BATCHED), 0, 3)

        def step(state, action):
            state, timestep = environment.step(state, action)
            return state, (state, timestep)

        return first, jax.lax.scan(step, state, action)[1]

    return run(_keys())


def test_chunked_resets_are_exact_over_many_episodes():
    streams.assert_same(_episodes(4), _episodes(None))


def test_chunked_resets_are_exact_for_every_set_of_ended_streams():
    _, (states, _) = _episodes(None)
    state = jax.tree.map(lambda x: x[7], states)
    patterns = jnp.arange(2**NUM_BATCHED)[:, None] >> jnp.arange(NUM_BATCHED) & 1 == 1
    action = jnp.ones((NUM_BATCHED,), jnp.int32)

    def outcomes(environment):
        # No vmap, which would run the loop over chunks equally often for all patterns.
        step = lambda last: environment.step(state._replace(last=last), action)  # noqa: E731
        run = lambda patterns: jax.lax.map(step, patterns)  # noqa: E731
        return jax.jit(run, compiler_options=_EXACT)(patterns)

    actual, expected = outcomes(_batched(4)), outcomes(_batched(None))
    streams.assert_same(actual, expected)
    np.testing.assert_array_equal(expected[1].first(), patterns)


def test_steps_per_pass_does_not_change_the_rollout():
    def rollout(steps_per_pass):
        begin, key = _start(), jax.random.key(1)
        return unroll.unroll(AGENT, ENVIRONMENT, 0, begin, key, LENGTH, steps_per_pass)

    text = str(jax.make_jaxpr(lambda: rollout(4))())
    assert "unroll=4" in text.replace(" ", "")
    streams.assert_close(jax.jit(rollout, static_argnums=0)(4), _two_rollouts(_start(), 0)[:2])


def test_last_has_the_final_observation():
    """The state and time step at LAST are those of the environment's own step."""
    _, (states, timestep) = _episodes(None)
    environment = streams.RandomEpisodes()
    time, stream = np.argwhere(timestep.last()[1:])[0] + [1, 0]
    before = jax.tree.map(lambda x: x[time - 1, stream], states.environment)
    action = jax.random.randint(jax.random.key(1), (NUM_STEPS, NUM_BATCHED), 0, 3)[time, stream]
    _, expected = environment.step(before, action)
    streams.assert_close(jax.tree.map(lambda x: x[time, stream], timestep), expected)


def test_first_follows_last_and_episodes_differ():
    first, (states, timestep) = _episodes(None)
    np.testing.assert_array_equal(timestep.first()[1:], timestep.last()[:-1])
    np.testing.assert_array_equal(states.last, timestep.last())
    begun = np.asarray(timestep.first())
    beginnings = np.concatenate([first.observation, timestep.observation[begun]])
    assert len(np.unique(beginnings, axis=0)) == NUM_BATCHED + begun.sum()
    np.testing.assert_array_equal(states.episode[-1], begun.sum(axis=0))
