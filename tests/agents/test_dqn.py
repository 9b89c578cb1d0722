"""DQN's update, with the parts that every agent with replay holds: rhythm, targets, rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import dqn, optimization, replay
from podracers import errors, parallel, types
from tests import streams

NUM_ENVS, LENGTH = 4, 5
ENVIRONMENT = streams.RandomEpisodes()


@pytest.fixture(autouse=True)
def _counting_loss(monkeypatch):
    """A loss with a gradient of -1: each gradient step of Adam adds the learning rate."""

    def init_learner(self, key):
        params = {"w": jnp.zeros(())}
        return optimization.ReplayLearner.create(self._optimizer.init(params), params, ())

    def loss(self, params, sample, target):
        reward = sample.rollout.timestep.reward[1:]
        loss = jnp.broadcast_to(-params["w"], reward.shape)
        metrics = {"loss/total": types.Mean.of(loss), "reward": types.Mean.of(reward)}
        return optimization.LossOutput(metrics, jnp.ones(sample.weight.shape))

    monkeypatch.setattr(dqn.DQN, "init_learner", init_learner)
    monkeypatch.setattr(dqn.DQN, "_loss", loss)


def _rollout(rewards):
    """Returns a rollout `[T, B]` of a long episode."""
    shape = (LENGTH + 1, NUM_ENVS)
    observation = jax.tree.map(
        lambda spec: jnp.zeros((*shape, *spec.shape), spec.dtype), ENVIRONMENT.spec.observation
    )
    timestep = types.TimeStep(
        observation, rewards, jnp.ones(shape), jnp.full(shape, types.MID, jnp.int8)
    )
    return types.Rollout(timestep, jnp.zeros((LENGTH, NUM_ENVS), jnp.int32), (), ())


def _agent(**options):
    options = {"batch_size": 4, "replay_capacity": 200, "min_replay": 1} | options
    return dqn.DQN(ENVIRONMENT.spec, learning_rate=0.5, **options)


def _run(agent, updates, reward=0.0):
    """Returns the learner and the metrics after each rollout."""
    rollout = _rollout(jnp.full((LENGTH + 1, NUM_ENVS), reward))
    mesh = parallel.make_mesh(jax.devices()[:1])
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )

    def init(key):
        return types.AgentState(agent.init_learner(key), agent.init_memory(rollout))

    update = jax.jit(mapped(agent.update))
    state = jax.jit(mapped(init))(jax.random.key(0))
    history = []
    for index in range(updates):
        state, metrics = update(state, rollout, jax.random.key(index))
        history.append((state.learner, {k: float(m.result()) for k, m in metrics.items()}))
    return history


@pytest.mark.parametrize(
    "ratio, expected",
    [
        (1.0, [5, 5, 5, 5]),  # twenty transitions a rollout, in batches of four
        (0.5, [2, 3, 2, 3]),
        (0.1, [0, 1, 0, 1]),
        (1.3, [6, 7, 6, 7]),
    ],
)
def test_the_replay_ratio_decides_how_many_gradient_steps_follow(ratio, expected):
    history = _run(_agent(replay_ratio=ratio), 4)
    assert [metrics["replay/gradient_steps"] for _, metrics in history] == expected
    learner, _ = history[-1]
    assert int(learner.gradient_steps) == sum(expected)
    assert int(learner.agent_steps) == 4 * NUM_ENVS * LENGTH
    np.testing.assert_allclose(learner.params["w"], 0.5 * sum(expected), rtol=1e-4)


def test_nothing_is_learnt_before_there_is_enough():
    history = _run(_agent(min_replay=60, replay_ratio=1.0), 4)
    steps = [metrics["replay/gradient_steps"] for _, metrics in history]
    assert steps == [0, 0, 5, 5]
    assert [metrics["replay/size"] for _, metrics in history] == [20, 40, 60, 80]
    assert float(history[1][0].params["w"]) == 0.0
    assert np.isnan(history[1][1]["loss/total"])  # nothing was counted


def test_rewards_are_scaled_then_clipped():
    agent = _agent(replay_ratio=1.0, reward_scale=0.5, reward_clip=1.0)
    assert _run(agent, 1, reward=1.0)[0][1]["reward"] == 0.5
    assert _run(agent, 1, reward=-7.0)[0][1]["reward"] == -1.0


def test_targets_are_copied_now_and_then():
    history = _run(_agent(replay_ratio=0.4, target_period=3), 4)  # two steps a rollout
    targets = [float(learner.target["w"]) for learner, _ in history]
    np.testing.assert_allclose(targets, [0.0, 1.5, 3.0, 3.0], rtol=1e-4)


def test_targets_follow_slowly():
    history = _run(_agent(replay_ratio=0.2, target_rate=0.25), 3)
    params, target = 0.0, 0.0
    for learner, _ in history:
        params += 0.5
        target += 0.25 * (params - target)
        np.testing.assert_allclose(learner.target["w"], target, rtol=1e-4)


def test_the_learning_rate_falls_to_zero():
    history = _run(_agent(replay_ratio=0.2, anneal_steps=40), 3)
    weights = [float(learner.params["w"]) for learner, _ in history]
    np.testing.assert_allclose(weights, [0.25, 0.25, 0.25], rtol=1e-4)


def test_the_importance_exponent_rises_to_one(monkeypatch):
    exponents = []
    sample = replay.Replay.sample

    def recorded(self, memory, key, exponent):
        jax.debug.callback(lambda x: exponents.append(float(x)), exponent)
        return sample(self, memory, key, exponent)

    monkeypatch.setattr(replay.Replay, "sample", recorded)
    _run(
        _agent(
            replay_ratio=0.2, priority_exponent=0.5, importance_exponent=0.4, importance_steps=40
        ),
        3,
    )
    jax.effects_barrier()
    np.testing.assert_allclose(exponents, [0.7, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "DQN.batch_size: expected a positive int, got 0"),
        ({"target_period": 10**30}, "DQN.target_period: expected at most 2147483647, got 10"),
        ({"max_grad_norm": 10**400}, "DQN.max_grad_norm: expected a positive number or None"),
        ({"gamma": 1.5}, r"DQN.gamma: expected a number in \[0, 1\], got 1.5"),
        ({"replay_ratio": 0.0}, "DQN.replay_ratio: expected a positive number, got 0.0"),
        ({"target_rate": -1.0}, "DQN.target_rate: expected a number in"),
        ({"replay_capacity": 3}, "replay_capacity = 3 transitions is too small"),
        ({"batch_size": 400}, "replay_capacity = 200 transitions is smaller than one batch"),
        ({"min_replay": 197}, "min_replay = 197: expected at most 196"),
        ({"replay_ratio": 1e-9}, "replay_ratio = 1e-09: .* never be a gradient step"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(errors.UserError, match=message):
        _run(_agent(**options), 1)
