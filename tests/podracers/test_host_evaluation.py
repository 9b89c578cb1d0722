"""Evaluation on host environments against a slow loop over Gymnasium's own environments."""

import dataclasses
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import catch, envpool, gymnasium
from podracers import environment, errors, evaluation, evaluators, host_evaluation, parallel
from podracers.sebulba import jax_host

NUM_EPISODES = 7
FACTORY = gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 40})
KEY = jax.random.key(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Alternating:
    """Remembers its last action, draws whether to change it; the parameter says how often.

    Attributes:
      traces: gets an entry for each time that acting is traced.
    """

    traces: list = dataclasses.field(default_factory=list)

    def init_actor(self, env_id, num_envs, evaluation=False):
        assert num_envs in (NUM_EPISODES, 1)
        return jnp.where(env_id < num_envs, env_id % 2, 1000) + (0 if evaluation else 1000)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        assert evaluation
        self.traces.append(timestep.observation.shape)
        change = jax.vmap(lambda k: jax.random.bernoulli(k, params["change"]))(key)
        action = (actor_state + change) % 2
        return action, action, ()


PARAMS = {"change": jnp.float32(0.7)}


@pytest.fixture(scope="module", name="expected")
def _expected():
    """Each episode on its own: its observations, from the reset to the last one."""
    draw = jax.jit(
        lambda key, time: jax.random.bernoulli(jax.random.fold_in(key, time), PARAMS["change"])
    )
    seeds = environment.stream_seeds(KEY, np.arange(NUM_EPISODES))
    episodes = []
    for episode in range(NUM_EPISODES):
        act_key = jax.random.fold_in(jax.random.fold_in(KEY, 2**31 - 1), episode)
        env = gym.make("CartPole-v1", max_episode_steps=40)
        observation, _ = env.reset(seed=int(seeds[episode]))
        observations, action, ended = [observation], episode % 2, False
        while not ended:
            action = (action + int(draw(act_key, len(observations) - 1))) % 2
            observation, _, terminated, truncated, _ = env.step(action)
            observations.append(observation)
            ended = terminated or truncated
        episodes.append(observations)
    return episodes


def _assert_expected(episodes, expected):
    lengths = [len(observations) - 1 for observations in expected]
    assert min(lengths) < max(lengths)
    np.testing.assert_array_equal(episodes.lengths, lengths)
    np.testing.assert_array_equal(episodes.returns, lengths)  # CartPole pays 1 for each step
    assert episodes.finished.all()
    assert [leaf.dtype for leaf in episodes] == [np.float32, np.int32, np.bool_]


@pytest.mark.parametrize("most", [2, 4, 64])
def test_first_episodes_equal_a_slow_loop(expected, monkeypatch, most):
    """In one batch, and in several that do not divide the episodes: all of one compiled size."""
    monkeypatch.setattr(host_evaluation, "MAX_BATCH", most)
    agent = Alternating()
    evaluator = evaluators.make(agent, FACTORY, NUM_EPISODES)
    _assert_expected(evaluator.run(PARAMS, KEY), expected)
    _assert_expected(evaluator.run(PARAMS, KEY), expected)
    assert len(agent.traces) == 1
    other = evaluator.run(PARAMS, jax.random.key(2))
    assert np.any(other.lengths != evaluator.run(PARAMS, KEY).lengths)


def test_parameters_on_several_devices_are_acted_with_on_one(expected):
    mesh = parallel.make_mesh(jax.devices()[1:])
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(PARAMS, replicated)
    assert len(params["change"].sharding.device_set) == 3
    evaluator = evaluators.make(Alternating(), FACTORY, NUM_EPISODES)
    _assert_expected(evaluator.run(params, jax.device_put(KEY, replicated)), expected)
    first = evaluation.first_shard(params["change"])
    assert first.devices() == {jax.devices()[1]}


def test_episodes_that_outlast_the_evaluation_are_flagged(expected):
    lengths = np.array([len(observations) - 1 for observations in expected])
    limit = int(np.median(lengths))
    evaluator = evaluators.make(Alternating(), FACTORY, NUM_EPISODES, max_steps=limit)
    episodes = evaluator.run(PARAMS, KEY)
    np.testing.assert_array_equal(episodes.finished, lengths <= limit)
    assert 0 < episodes.finished.sum() < NUM_EPISODES
    np.testing.assert_array_equal(episodes.lengths, np.minimum(lengths, limit))
    np.testing.assert_array_equal(episodes.returns, np.minimum(lengths, limit))


def test_a_recording_is_of_the_first_episode(expected):
    timesteps = evaluators.record(Alternating(), FACTORY, PARAMS, KEY)
    observations = np.stack([timestep.observation for timestep in timesteps])
    np.testing.assert_array_equal(observations, expected[0])
    assert timesteps[0].first() and timesteps[-1].last()
    assert len(evaluators.record(Alternating(), FACTORY, PARAMS, KEY, max_steps=3)) == 4


def test_a_film_is_of_the_episode_that_is_evaluated():
    factory = gymnasium.Gymnasium("tests.environments.own_games:Own/Drawn-v0")
    policy = evaluation.UniformPolicy(factory.spec)
    episodes = evaluators.make(policy, factory, 4).run((), KEY)
    timesteps = evaluators.record(policy, factory, (), KEY)
    frames = evaluators.film(policy, factory, (), KEY)
    assert len(frames) == len(timesteps) == episodes.lengths[0] + 1
    for frame, timestep in zip(frames, timesteps):
        assert frame[0].sum(-1).argmax() == timestep.observation[0]
    assert sum(timestep.reward for timestep in timesteps) == episodes.returns[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
    """Counts how many batches of environments were made and closed, and may fail in a step."""

    fail: bool = False
    events: list[str] = dataclasses.field(default_factory=list)

    @property
    def spec(self):
        return FACTORY.spec

    def make(self, key, env_id, num_threads):
        self.events.append("made")
        assert num_threads >= 1
        return _Counted(FACTORY.make(key, env_id, num_threads), self)


@dataclasses.dataclass
class _Counted:
    inner: Any
    factory: Counted

    def reset(self):
        return self.inner.reset()

    def send(self, action):
        self.inner.send(action)

    def recv(self):
        if self.factory.fail:
            raise ArithmeticError("a fault of the simulator")
        return self.inner.recv()

    def close(self):
        self.factory.events.append("closed")
        self.inner.close()


def test_environments_are_closed_one_batch_after_the_other(monkeypatch):
    monkeypatch.setattr(host_evaluation, "MAX_BATCH", 4)
    factory = Counted()
    evaluators.make(Alternating(), factory, NUM_EPISODES).run(PARAMS, KEY)
    assert factory.events == ["made", "closed"] * 2
    evaluators.record(Alternating(), factory, PARAMS, KEY)
    assert factory.events == ["made", "closed"] * 3


def test_environments_are_closed_after_a_failure():
    factory = Counted(fail=True)
    with pytest.raises(ArithmeticError):
        evaluators.make(Alternating(), factory, NUM_EPISODES).run(PARAMS, KEY)
    assert factory.events == ["made", "closed"]


def test_the_uniform_policy_plays():
    policy = evaluation.UniformPolicy(FACTORY.spec)
    episodes = evaluators.make(policy, FACTORY, 32).run((), KEY)
    assert 15.0 < episodes.mean_return() < 30.0  # about 22: the pole falls


def test_the_uniform_policy_keeps_to_legal_actions():
    factory = gymnasium.Gymnasium("tests.environments.own_games:Own/Walk-v0")
    # The game itself refuses an action that is not legal.
    episodes = evaluators.make(evaluation.UniformPolicy(factory.spec), factory, 8).run((), KEY)
    assert episodes.finished.all()


def test_a_jax_environment_on_the_host_is_judged_alike():
    factory = jax_host.JaxHostEnvironment(catch.Catch())
    policy = evaluation.UniformPolicy(factory.spec)
    episodes = evaluators.make(policy, factory, 16).run((), KEY)
    assert set(episodes.returns) <= {-1.0, 1.0}
    assert set(episodes.lengths) == {9}


def test_the_right_evaluator_is_made():
    agent = Alternating()
    assert isinstance(evaluators.make(agent, catch.Catch(), 3), evaluation.Evaluator)
    assert evaluators.make(agent, catch.Catch(), 3, 2, 5).population == 2
    assert evaluators.make(agent, catch.Catch()).num_episodes == 512
    assert evaluators.make(agent, FACTORY).num_episodes == 64
    host = evaluators.make(agent, FACTORY, 3)
    assert isinstance(host, host_evaluation.HostEvaluator)
    assert host.limit == 40
    assert evaluators.make(agent, FACTORY, 3, max_steps=9).limit == 9
    endless = gymnasium.Gymnasium("Blackjack-v1")
    assert evaluators.make(agent, endless, 3).limit == evaluation.DEFAULT_MAX_STEPS
    with pytest.raises(errors.UserError, match="population = 1, got 2"):
        evaluators.make(agent, FACTORY, 3, 2)
    with pytest.raises(errors.UserError, match="0 episodes"):
        evaluators.make(agent, FACTORY, 0)


def test_envpool_is_judged_alike():
    factory = envpool.EnvPool("CartPole-v1", max_episode_steps=40)
    evaluator = evaluators.make(Alternating(), factory, NUM_EPISODES)
    episodes = evaluator.run(PARAMS, KEY)
    np.testing.assert_array_equal(episodes.returns, episodes.lengths)
    assert episodes.finished.all() and len(set(episodes.lengths)) > 1
    np.testing.assert_array_equal(evaluator.run(PARAMS, KEY).lengths, episodes.lengths)
    timesteps = evaluators.record(Alternating(), factory, PARAMS, KEY)
    assert len(timesteps) == episodes.lengths[0] + 1


def test_atari_is_recorded_as_it_is_drawn():
    factory = envpool.EnvPool("Pong-v5")
    policy = evaluation.UniformPolicy(factory.spec)
    timesteps = evaluators.record(policy, factory, (), KEY, max_steps=8)
    images = [factory.render(timestep) for timestep in timesteps]
    assert len(images) == 9
    assert all(image.dtype == np.uint8 and image.shape[-1] == 3 for image in images)
    assert np.any(images[0] != images[-1])
