"""Meta-training: an agent like any other to a runner, whose streams are lifetimes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta.lpg import bandit
from podracers import anakin, parallel, sebulba, types
from tests import documented, streams
from tests.agents import experience
from tests.agents.meta.lpg import lifetimes

NUM_LIFETIMES = 8


def _runner(num_devices=4):
    sizes = NUM_LIFETIMES, lifetimes.PERIOD
    return anakin.Anakin(lifetimes.agent(), lifetimes.candidate(), *sizes, num_devices=num_devices)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    """The initial rule, and the state and the report after six updates on four devices.

    The runner is that of `tests/test_golden.py`, so that its program is in the cache.
    """
    runner = _runner()
    state = runner.init(0)
    fresh = jax.device_get(state.learner.train_state.params)
    state, report = runner.step(state, 6)
    return fresh, state, jax.device_get(report)


@pytest.mark.slow
def test_a_rule_is_learnt_and_lifetimes_end(learnt):
    fresh, state, report = learnt
    assert documented.undocumented(report.means) == set()
    assert all(np.isfinite(mean.total) for mean in report.means.values())
    changed = jax.tree.map(lambda x, y: np.any(x != y), fresh, state.learner.train_state.params)
    assert all(jax.tree.leaves(changed))
    # Lifetimes of one to three rollouts, six rollouts: each has ended twice at least.
    assert state.learner.bandit.trials.sum() >= 2 * NUM_LIFETIMES
    age = np.asarray(state.streams.actor_state.time)
    assert len(set(age)) > 1 and set(age % lifetimes.PERIOD) == {0}
    born = np.asarray(state.streams.timestep.first())
    np.testing.assert_array_equal(state.memory.steps[~born], age[~born])


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing(learnt):
    _, expected, _ = learnt
    runner = _runner(1)
    state, _ = runner.step(runner.init(0), 6)
    streams.assert_close(state.learner, expected.learner, rtol=1e-3)
    for x, y in zip(*map(jax.tree.leaves, (state.streams.timestep, expected.streams.timestep))):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_sebulba_learns_the_same_rule():
    runner, sizes = _runner(), (NUM_LIFETIMES, lifetimes.PERIOD)
    state, _ = runner.step(runner.init(0), 3)
    devices = {"actor_devices": (0,), "learner_devices": (0,)}
    host = sebulba.Sebulba(lifetimes.agent(), lifetimes.candidate(), *sizes, **devices, lag=0)
    with contextlib.closing(host):
        other, _ = host.step(host.init(0), 3)
        expected = runner.actor_params(state)
        streams.assert_close(host.actor_params(other), expected, rtol=1e-3)


def _lived(evaluation=False, rollouts=2):
    """Returns an agent, its `act` and, per step: time step, action, states around it, extras."""
    agent, candidate = lifetimes.agent(), lifetimes.candidate(min_periods=3)

    def acting(key, rule):
        learner = agent.init_learner(key)
        learner = learner._replace(train_state=agent._optimizer.init(rule))
        return agent.actor_params(learner), agent.init_actor(jnp.arange(2), 2)

    params, actor_state = jax.jit(acting)(jax.random.key(0), lifetimes.rule_params())
    state, timestep = jax.jit(jax.vmap(candidate.reset))(jax.random.split(jax.random.key(1), 2))
    act = jax.jit(functools.partial(agent.act, evaluation=evaluation))
    step, history = jax.jit(jax.vmap(candidate.step)), []
    for time in range(rollouts * agent.rollout_length + 1):
        before = actor_state
        key = jax.random.split(jax.random.key(time), 2)
        action, actor_state, extras = act(params, actor_state, timestep, key)
        history.append(jax.device_get((timestep, action, before, actor_state, extras)))
        state, timestep = step(state, action)
    return agent, functools.partial(act, params), history


@pytest.fixture(scope="module", name="lived")
def _two_rollouts():
    return _lived()


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [(False, [1, 2, 4, 5]), pytest.param(True, [1, 2, 3], marks=pytest.mark.slow)],
)
def test_agents_learn_after_each_chunk_but_the_last_of_training(lived, evaluation, expected):
    agent, _, history = _lived(evaluation=True, rollouts=1) if evaluation else lived
    changed = [np.any(x[3].agent.policy != x[2].agent.policy) for x in history]
    assert (np.flatnonzero(changed) / agent.chunk_length).tolist() == expected


def test_the_meta_gradient_repeats_the_updates_of_acting(lived):
    agent, act, history = lived
    length = agent.rollout_length
    chunks_of, learn = jax.jit(agent._chunks), jax.jit(agent._learn)
    rule = act.args[0].rule
    for begin in (0, length):
        part = history[begin : begin + length + 1]
        timestep, action, before, _, extras = zip(*part)
        timestep = jax.tree.map(lambda *xs: np.stack(xs), *timestep)
        action, extras = np.stack(action[:-1]), np.stack(extras[:-1])
        rollout = types.Rollout(timestep, action, extras, before[0])
        chunks = jax.device_get(chunks_of(rollout))
        for lifetime in range(2):
            current = jax.tree.map(lambda x, n=lifetime: x[n], rollout.actor_state.agent)
            for update in range(agent.updates):
                chunk = jax.tree.map(lambda x, n=lifetime, k=update: x[n, k], chunks)
                arm = rollout.extras[0, lifetime]
                current, _ = learn(rule, current, chunk, arm)
            acted = part[-2][3].agent
            np.testing.assert_allclose(current.policy, acted.policy[lifetime], atol=1e-5)
            np.testing.assert_allclose(current.prediction, acted.prediction[lifetime], atol=1e-5)


def test_agents_are_reset_where_lifetimes_begin(lived):
    _, act, history = lived
    timestep, _, _, actor_state, _ = history[lifetimes.PERIOD]
    born = timestep._replace(step_type=np.array([types.FIRST, types.MID], np.int8))
    _, state, _ = act(actor_state, born, jax.random.split(jax.random.key(0), 2))
    state = jax.device_get(state)
    assert not state.agent.policy[0].any() and state.agent.policy[1].any()
    assert state.time.tolist() == [1, lifetimes.PERIOD + 2]


def test_the_bandit_prefers_arms_with_more_reward():
    layouts = jax.P(), jax.P(parallel.AXIS)
    add = jax.jit(experience.on_devices(lambda state, lives: state.add(*lives), 2, layouts))
    logits = functools.partial(streams.evaluate, bandit.Bandit.logits)
    state = bandit.Bandit.init(2, 3)
    assert np.ptp(logits(state)) == 0.0
    # Task 0 pays a hundredth of task 1; the last lifetime has not ended.
    task, arm = np.int32([0, 0, 0, 1, 1, 1, 0, 0]), np.int32([0, 1, 2, 0, 1, 2, 1, 0])
    value = np.float32([0.01, 0.02, 0.0, 2.0, 1.0, -1.0, 0.02, 9.0])
    ended = np.arange(8) < 7
    state = add(state, (task, arm, value, ended))
    np.testing.assert_allclose(state.mean, [[0.01, 0.02, 0.0], [2.0, 1.0, -1.0]])
    np.testing.assert_array_equal(state.trials, [[1, 2, 1], [1, 1, 1]])
    prob = np.exp(logits(state))
    prob /= prob.sum(1, keepdims=True)
    assert prob[0].argmax() == 1 and prob[1].argmax() == 0
    assert prob.max(1).min() > 0.9
    for _ in range(40):  # old lifetimes are forgotten
        state = add(state, (task, arm, -value, ended))
    np.testing.assert_allclose(np.asarray(state.mean)[0, 1], -0.02, rtol=1e-2)
    # An untried arm counts as the best.
    (first, second), *_ = logits(bandit.Bandit(np.float32([[1.0, 0.0]]), np.float32([[3.0, 0.0]])))
    assert second > first
