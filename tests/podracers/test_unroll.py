"""Tests of the acting loop against a slow one, and of chunked resets against full resets.

`test_parity.py` tests the keys of acting.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from podracers import errors, unroll
from tests import streams

NUM_STREAMS = 4
LENGTH = 9
GAME = streams.RandomEpisodes(reports=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Counter:
    """Acts at random, and counts the steps of each episode (from FIRST) in its actor state."""

    def init_actor(self, env_id, num_envs, evaluation=False):
        return jnp.zeros(env_id.shape, jnp.int32)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        count = jnp.where(timestep.first(), 0, actor_state) + 1
        action = jax.vmap(lambda k: jax.random.randint(k, (), 0, 3))(key)
        return action, count, (count, timestep.observation + 0.0)


ENVIRONMENT = unroll.BatchedEnvironment(GAME, reset_batch=2)
AGENT = Counter()


@functools.partial(jax.jit, static_argnums=1)
def _two_rollouts(env_id, steps_per_pass=1):
    begin = unroll.init(AGENT, ENVIRONMENT, env_id, NUM_STREAMS, jax.random.key(0))
    act = functools.partial(unroll.unroll, AGENT, ENVIRONMENT, ())
    middle, first = act(begin, jax.random.key(1), LENGTH, steps_per_pass)
    end, second = act(middle, jax.random.key(2), LENGTH, steps_per_pass)
    return middle, first, end, second


ENV_ID = np.arange(NUM_STREAMS, dtype=np.int32)


def test_rollouts_equal_a_slow_loop():
    """Each stream resets at FIRST, with the key of its episode; S1, S3 and S4 hold.

    The action at LAST, drawn as all others, changes nothing. Metrics are tracked, and removed (S6).
    """
    middle, first, end, second = streams.to_numpy(_two_rollouts(ENV_ID))
    timesteps = jax.tree.map(
        lambda x, y: np.concatenate([x[:-1], y]), first.timestep, second.timestep
    )
    actions, counts, observations = (
        np.concatenate(parts)
        for parts in zip((first.action, *first.extras), (second.action, *second.extras))
    )
    reset, step = jax.jit(GAME.reset), jax.jit(GAME.step)
    tracked = end.episodes.ended_metrics
    for stream in range(NUM_STREAMS):
        total = steps = 0.0
        key, episode, count = jax.random.fold_in(jax.random.key(0), stream), 0, 0
        state, timestep = reset(jax.random.fold_in(key, episode))
        for time in range(2 * LENGTH + 1):
            now = jax.tree.map(lambda x, i=(time, stream): x[i], timesteps)
            streams.assert_close(now, timestep._replace(metrics={}))
            if timestep.last():
                total, steps = total + timestep.metrics["total"], steps + timestep.metrics["steps"]
            if time == 2 * LENGTH:
                break
            count = 1 if timestep.first() else count + 1
            assert counts[time, stream] == count
            np.testing.assert_array_equal(observations[time, stream], now.observation)
            if timestep.last():
                episode += 1
                state, timestep = reset(jax.random.fold_in(key, episode))
            else:
                state, timestep = step(state, actions[time, stream])
        assert episode > 1
        np.testing.assert_allclose(tracked["total"].total[stream], total, rtol=1e-4, atol=1e-4)
        assert tracked["steps"].total[stream] == steps
    for border, rollout in ((middle, first), (end, second)):
        streams.assert_same(jax.tree.map(lambda x: x[-1], rollout.timestep), border.timestep)
    streams.assert_same(jax.tree.map(lambda x: x[0], second.timestep), middle.timestep)
    # The actor state is that before the first action.
    np.testing.assert_array_equal(first.actor_state, 0)
    streams.assert_same(second.actor_state, middle.actor_state)


def test_a_stream_begins_other_episodes_after_two_billion():
    state, _ = jax.jit(ENVIRONMENT.init)(jax.random.split(jax.random.key(0), NUM_STREAMS))

    @jax.jit
    def first(episode):
        ended = state._replace(episode=jnp.full_like(state.episode, episode), last=~state.last)
        return ENVIRONMENT.step(ended, jnp.zeros(NUM_STREAMS, jnp.int32))[1]

    episodes = np.int32([-1, errors.INT32_MAX - 1, errors.INT32_MAX, -errors.INT32_MAX])
    timesteps = [first(episode) for episode in episodes]
    assert all(np.all(timestep.first()) for timestep in timesteps)
    assert len({np.asarray(timestep.observation).tobytes() for timestep in timesteps}) == 4


def test_steps_per_pass_reaches_the_loop():
    assert "unroll=4" in str(_two_rollouts.trace(ENV_ID, 4).jaxpr).replace(" ", "")


NUM_BATCHED = 6
# With XLA's default code generator, which conftest.py turns off to compile faster, rounding does
# not depend on shapes.
_FLAG = "xla_cpu_use_fusion_emitters"  # newer versions have no other generator
_EXACT = {_FLAG: True} if _FLAG in os.environ["XLA_FLAGS"] else None


def test_chunked_resets_are_exact_for_every_set_of_ended_streams():
    keys = jax.random.split(jax.random.key(0), NUM_BATCHED)
    state, _ = jax.jit(unroll.BatchedEnvironment(GAME).init)(keys)
    state = state._replace(
        episode=np.arange(NUM_BATCHED, dtype=np.int32)
    )  # each in another episode
    patterns = np.arange(2**NUM_BATCHED)[:, None] >> np.arange(NUM_BATCHED) & 1 == 1
    action = np.ones((NUM_BATCHED,), np.int32)

    def outcomes(reset_batch):
        environment = unroll.BatchedEnvironment(GAME, reset_batch)

        def step(last):
            return environment.step(state._replace(last=last), action)

        # No vmap, which would run the loop over chunks equally often for all patterns.
        run = jax.jit(lambda patterns: jax.lax.map(step, patterns), compiler_options=_EXACT)
        return run(patterns)

    expected = outcomes(None)
    streams.assert_same(outcomes(4), expected)
    np.testing.assert_array_equal(expected[1].first(), patterns)
