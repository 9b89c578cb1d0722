"""Evaluation against slow loops, of JAX environments and on the host; recordings show the same."""

import dataclasses
import math
import threading
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import catch, envpool, gymnasium
from podracers import environment as environment_lib
from podracers import errors, evaluation, parallel, types
from podracers.sebulba import jax_host
from podracers.supervision import pipeline
from tests import streams

NUM_EPISODES = 6
ENVIRONMENT = streams.RandomEpisodes(end=0.2, masked=True)
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Alternating:
    """Remembers its last action, draws the next, and repeats it if the parameter says so."""

    def init_actor(self, env_id, num_envs, evaluation=False):
        return jnp.zeros(env_id.shape, jnp.int32) + (0 if evaluation else 100)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        drawn = jax.vmap(lambda k: jax.random.randint(k, (), 0, 3))(key)
        action = jnp.where(timestep.first(), drawn, (actor_state + drawn + params) % 3)
        return action, action + (0 if evaluation else 100), ()


AGENT = Alternating()
EVALUATOR = evaluation.Evaluator(AGENT, ENVIRONMENT, NUM_EPISODES)


@pytest.fixture(scope="module", name="expected")
def _expected():
    """Each episode on its own, in a Python loop: rewards, one list an episode."""
    step, reset = jax.jit(ENVIRONMENT.step), jax.jit(ENVIRONMENT.reset)
    rewards = []
    for episode in range(NUM_EPISODES):
        act_key = jax.random.fold_in(jax.random.fold_in(KEY, 2**31 - 1), episode)
        state, timestep = reset(jax.random.fold_in(KEY, episode))
        action, rewards_of_episode = None, []
        while not timestep.last():
            step_key = jax.random.fold_in(act_key, len(rewards_of_episode))
            drawn = int(jax.random.randint(step_key, (), 0, 3))
            action = drawn if action is None else (action + drawn + 1) % 3
            state, timestep = step(state, jnp.int32(action))
            rewards_of_episode.append(float(timestep.reward))
        rewards.append(rewards_of_episode)
    return rewards


def test_first_episodes_equal_a_slow_loop(expected):
    episodes = EVALUATOR.run(1, KEY)
    lengths = [len(rewards) for rewards in expected]
    assert max(lengths) > 2 * min(lengths)  # so that short ones would restart
    np.testing.assert_array_equal(episodes.lengths, lengths)
    np.testing.assert_allclose(episodes.returns, [sum(r) for r in expected], rtol=1e-4)
    assert episodes.finished.all()
    returns = [sum(rewards) for rewards in expected]
    np.testing.assert_allclose(episodes.mean_return(), np.mean(returns), rtol=1e-4)
    error = np.std(returns, ddof=1) / math.sqrt(NUM_EPISODES)
    np.testing.assert_allclose(episodes.standard_error(), error, rtol=1e-4)


def test_episodes_that_outlast_the_evaluation_are_flagged(expected):
    limit = sorted(len(rewards) for rewards in expected)[NUM_EPISODES // 2]
    evaluator = dataclasses.replace(EVALUATOR, max_steps=limit)
    episodes = evaluator.run(1, KEY)
    lengths = np.array([len(rewards) for rewards in expected])
    np.testing.assert_array_equal(episodes.finished, lengths <= limit)
    assert 0 < episodes.finished.sum() < NUM_EPISODES
    np.testing.assert_array_equal(episodes.lengths, np.minimum(lengths, limit))
    partial = [sum(rewards[:limit]) for rewards in expected]
    np.testing.assert_allclose(episodes.returns, partial, rtol=1e-4)


def test_a_population_plays_the_same_episodes():
    evaluator = dataclasses.replace(EVALUATOR, population=2)
    episodes = evaluator.run(jnp.array([1, 2]), KEY)
    assert episodes.returns.shape == (2, NUM_EPISODES)
    assert episodes.mean_return().shape == (2,)
    for member, params in enumerate((1, 2)):
        alone = EVALUATOR.run(params, KEY)
        np.testing.assert_array_equal(episodes.lengths[member], alone.lengths)
        np.testing.assert_allclose(episodes.returns[member], alone.returns, rtol=1e-5)
    assert np.any(episodes.returns[0] != episodes.returns[1])


def test_shares_are_the_episodes_of_the_whole(expected):
    shares = [EVALUATOR.run(1, KEY, share=(index, 2)) for index in range(2)]
    assert {share.returns.shape for share in shares} == {(NUM_EPISODES // 2,)}
    whole = evaluation.Episodes.join(shares)
    np.testing.assert_array_equal(whole.lengths, [len(rewards) for rewards in expected])
    np.testing.assert_allclose(whole.returns, [sum(r) for r in expected], rtol=1e-4)


def test_a_share_may_be_empty():
    evaluator = dataclasses.replace(EVALUATOR, num_episodes=1, population=2)
    none, one = (evaluator.run(jnp.array([1, 2]), KEY, share=(index, 2)) for index in range(2))
    assert none.returns.shape == (2, 0)
    whole = evaluation.Episodes.join([none, one])
    for leaf, other in zip(whole, one, strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other)


def test_a_recording_is_of_the_first_episode(expected):
    states = EVALUATOR.record(1, KEY)
    assert len(states) == len(expected[0]) + 1
    totals = [float(state.total) for state in states]
    np.testing.assert_allclose(np.diff(totals), expected[0], rtol=1e-4, atol=1e-5)
    assert [int(state.time) for state in states] == list(range(len(states)))
    assert len(dataclasses.replace(EVALUATOR, max_steps=1).record(1, KEY)) == 2


def test_acting_uses_no_key_that_the_reset_used():
    @dataclasses.dataclass(frozen=True, eq=False)
    class ShowsItsKeys(streams.RandomEpisodes):
        def reset(self, key):
            state, timestep = super().reset(key)
            keys = jax.random.key_data(jnp.stack([key, *jax.random.split(key, 8)]))
            return (state, keys), timestep._replace(observation=keys)

        def step(self, state, action):
            timestep = types.transition(state[1], reward=action, truncated=False)
            return state, timestep

    @dataclasses.dataclass(frozen=True, eq=False)
    class NoticesOldKeys(Alternating):
        def act(self, params, actor_state, timestep, key, evaluation=False):
            old = timestep.observation == jax.random.key_data(key)[:, None]
            return jnp.any(jnp.all(old, axis=-1), axis=-1), actor_state, ()

    evaluator = evaluation.Evaluator(NoticesOldKeys(), ShowsItsKeys(), 4, max_steps=10)
    np.testing.assert_array_equal(evaluator.run((), KEY).returns, 0.0)


def test_replicated_parameters_are_evaluated_on_one_device(expected):
    mesh = parallel.make_mesh(jax.devices()[1:])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    evaluator = dataclasses.replace(EVALUATOR)
    found = []
    compiled = evaluator._run

    def run(*arguments):
        found.append(compiled(*arguments))
        return found[-1]

    evaluator.__dict__["_run"] = run
    episodes = evaluator.run(jax.device_put(jnp.int32(1), sharding), KEY)
    assert {leaf.sharding.device_set == {jax.devices()[1]} for leaf in found[0]} == {True}
    np.testing.assert_array_equal(episodes.lengths, [len(rewards) for rewards in expected])


def test_each_evaluation_of_a_run_has_a_key_of_its_own():
    keys = [evaluation.run_key(seed, update) for seed in (0, 1) for update in (None, 0, 1, 2)]
    data = [tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys]
    assert len(set(data)) == len(data)
    again = evaluation.run_key(1, 2)
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys[-1]))


@pytest.mark.parametrize("actions", ["discrete", "multi_discrete"])
def test_the_uniform_policy_plays_every_legal_action_and_no_other(actions):
    environment = streams.RandomEpisodes(actions=actions, masked=True)
    policy = evaluation.UniformPolicy(environment.spec)
    _, timestep = environment.reset(jax.random.key(0))
    count = 200
    timestep = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), timestep)
    action, _, _ = policy.act((), (), timestep, jax.random.split(KEY, count))
    mask = np.asarray(timestep.observation["action_mask"][0]).reshape(-1, 3)
    action = np.asarray(action).reshape(count, -1)
    for part, legal in enumerate(mask):
        assert set(action[:, part]) == set(np.flatnonzero(legal))


def test_the_error_of_a_population_is_that_over_its_members():
    returns = np.array([[0.0, 2.0], [4.0, 6.0], [5.0, 7.0]], np.float32)
    episodes = evaluation.Episodes(returns, returns.astype(int), returns > -1.0)
    expected = np.std([1.0, 5.0, 6.0], ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(episodes.standard_error(), expected, rtol=1e-6)


def test_checkpoints_are_ranked_by_the_agents_own_evaluation():
    ones, zeros = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    own, greedy = (
        evaluation.Episodes(returns, ones.astype(int), ones > 0) for returns in (ones, zeros)
    )
    both = evaluation.Evaluation(own, greedy)
    assert both.score == 1.0
    assert both.by_prefix() == {"": own, "greedy_": greedy}
    assert evaluation.Evaluation(own, None).by_prefix() == {"": own}


HOST_EPISODES = 7
FACTORY = gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 40})
HOST_KEY = jax.random.key(1)


@dataclasses.dataclass(frozen=True, eq=False)
class HostAlternating:
    """Remembers its last action, draws whether to change it; the parameter says how often.

    Attributes:
      traces: gets an entry for each time that acting is traced.
    """

    traces: list = dataclasses.field(default_factory=list)

    def init_actor(self, env_id, num_envs, evaluation=False):
        assert num_envs in (HOST_EPISODES, 1)
        return jnp.where(env_id < num_envs, env_id % 2, 1000) + (0 if evaluation else 1000)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        assert evaluation
        self.traces.append(timestep.observation.shape)
        change = jax.vmap(lambda k: jax.random.bernoulli(k, params["change"]))(key)
        action = (actor_state + change) % 2
        return action, action, ()


PARAMS = {"change": jnp.float32(0.7)}
HOST_EVALUATOR = evaluation.Evaluator(HostAlternating(), FACTORY, HOST_EPISODES)


@pytest.fixture(scope="module", name="played")
def _played():
    """Each episode on its own: its observations, from the reset to the last one."""
    draw = jax.jit(
        lambda key, time: jax.random.bernoulli(jax.random.fold_in(key, time), PARAMS["change"])
    )
    seeds = environment_lib.stream_seeds(HOST_KEY, np.arange(HOST_EPISODES))
    episodes = []
    for episode in range(HOST_EPISODES):
        act_key = jax.random.fold_in(jax.random.fold_in(HOST_KEY, 2**31 - 1), episode)
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


def _assert_played(episodes, played):
    lengths = [len(observations) - 1 for observations in played]
    assert min(lengths) < max(lengths)
    np.testing.assert_array_equal(episodes.lengths, lengths)
    np.testing.assert_array_equal(episodes.returns, lengths)  # CartPole pays 1 for each step
    assert episodes.finished.all()
    assert [leaf.dtype for leaf in episodes] == [np.float32, np.int32, np.bool_]


@pytest.mark.parametrize("most", [2, 4, 64])
def test_first_episodes_on_the_host_equal_a_slow_loop(played, monkeypatch, most):
    """In one batch, and in several that do not divide the episodes: all of one compiled size."""
    monkeypatch.setattr(evaluation, "MAX_BATCH", most)
    agent = HostAlternating()
    evaluator = evaluation.Evaluator(agent, FACTORY, HOST_EPISODES)
    _assert_played(evaluator.run(PARAMS, HOST_KEY), played)
    _assert_played(evaluator.run(PARAMS, HOST_KEY), played)
    assert len(agent.traces) == 1
    other = evaluator.run(PARAMS, jax.random.key(2))
    assert np.any(other.lengths != evaluator.run(PARAMS, HOST_KEY).lengths)


def test_shares_on_the_host_are_the_episodes_of_the_whole(played):
    """Also where some have more than others, or none."""
    for count in (2, 3, HOST_EPISODES + 1):
        shares = [
            HOST_EVALUATOR.run(PARAMS, HOST_KEY, share=(index, count)) for index in range(count)
        ]
        _assert_played(evaluation.Episodes.join(shares), played)


def test_parameters_on_several_devices_are_acted_with_on_one(played):
    mesh = parallel.make_mesh(jax.devices()[1:])
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(PARAMS, replicated)
    assert len(params["change"].sharding.device_set) == 3
    found, act = [], HOST_EVALUATOR._jitted_act

    def noted_act(*arguments):
        found.append(act(*arguments)[0])
        return act(*arguments)

    evaluator = dataclasses.replace(HOST_EVALUATOR)
    evaluator.__dict__["_jitted_act"] = noted_act
    _assert_played(evaluator.run(params, jax.device_put(HOST_KEY, replicated)), played)
    assert {device for action in found for device in action.devices()} == {jax.devices()[1]}


def test_episodes_on_the_host_that_outlast_the_evaluation_are_flagged(played):
    lengths = np.array([len(observations) - 1 for observations in played])
    limit = int(np.median(lengths))
    episodes = dataclasses.replace(HOST_EVALUATOR, max_steps=limit).run(PARAMS, HOST_KEY)
    np.testing.assert_array_equal(episodes.finished, lengths <= limit)
    assert 0 < episodes.finished.sum() < HOST_EPISODES
    np.testing.assert_array_equal(episodes.lengths, np.minimum(lengths, limit))
    np.testing.assert_array_equal(episodes.returns, np.minimum(lengths, limit))


def test_a_recording_on_the_host_is_of_the_first_episode(played):
    timesteps = HOST_EVALUATOR.record(PARAMS, HOST_KEY)
    observations = np.stack([timestep.observation for timestep in timesteps])
    np.testing.assert_array_equal(observations, played[0])
    assert timesteps[0].first() and timesteps[-1].last()
    cut = dataclasses.replace(HOST_EVALUATOR, max_steps=3)
    assert len(cut.record(PARAMS, HOST_KEY)) == 4


def test_a_film_is_of_the_episode_that_is_evaluated():
    factory = gymnasium.Gymnasium("tests.environments.own_games:Own/Drawn-v0")
    policy = evaluation.UniformPolicy(factory.spec)
    evaluator = evaluation.Evaluator(policy, factory, 4)
    episodes = evaluator.run((), HOST_KEY)
    timesteps, frames = evaluator.record((), HOST_KEY), evaluator.film((), HOST_KEY)
    assert len(frames) == len(timesteps) == episodes.lengths[0] + 1
    for frame, timestep in zip(frames, timesteps):
        assert frame[0].sum(-1).argmax() == timestep.observation[0]
    assert sum(timestep.reward for timestep in timesteps) == episodes.returns[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
    """Counts how many batches of environments were made and closed; a step may fail, or hang."""

    fail: bool = False
    hang: threading.Event | None = None  # until it is set
    events: list[str] = dataclasses.field(default_factory=list)

    @property
    def spec(self):
        return FACTORY.spec

    def filmed(self):
        return self

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
        if self.factory.hang:
            self.factory.hang.wait(30.0)
        return self.inner.recv()

    def render(self):
        return [np.zeros((2, 2, 3), np.uint8)]

    def close(self):
        self.factory.events.append("closed")
        self.inner.close()


def test_environments_are_closed_after_every_batch_and_after_a_failure(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_BATCH", 4)
    factory = Counted()
    evaluator = dataclasses.replace(HOST_EVALUATOR, environment=factory)
    evaluator.run(PARAMS, HOST_KEY)
    assert factory.events == ["made", "closed"] * 2
    evaluator.record(PARAMS, HOST_KEY)
    assert factory.events == ["made", "closed"] * 3
    factory = Counted(fail=True)
    with pytest.raises(ArithmeticError):
        dataclasses.replace(HOST_EVALUATOR, environment=factory).run(PARAMS, HOST_KEY)
    assert factory.events == ["made", "closed"]


@pytest.mark.parametrize("method", ["run", "record", "film"])
def test_a_step_that_takes_too_long_ends_evaluations_and_recordings(method):
    factory = Counted(hang=threading.Event())
    evaluator = dataclasses.replace(HOST_EVALUATOR, environment=factory, timeout=0.5)
    with pytest.raises(pipeline.WorkerError, match=r"and the limit is 0\.5 s"):
        getattr(evaluator, method)(PARAMS, HOST_KEY)
    factory.hang.set()


def test_the_uniform_policy_plays_on_the_host_and_keeps_to_legal_actions():
    factory = gymnasium.Gymnasium("tests.environments.own_games:Own/Walk-v0")
    # The game itself refuses an action that is not legal.
    policy = evaluation.UniformPolicy(factory.spec)
    episodes = evaluation.Evaluator(policy, factory, 8).run((), HOST_KEY)
    assert episodes.finished.all()
    policy = evaluation.UniformPolicy(FACTORY.spec)
    episodes = evaluation.Evaluator(policy, FACTORY, 32).run((), HOST_KEY)
    assert 15.0 < episodes.mean_return() < 30.0  # about 22: the pole falls


def test_a_jax_environment_on_the_host_is_evaluated_alike():
    factory = jax_host.JaxHostEnvironment(catch.Catch())
    policy = evaluation.UniformPolicy(factory.spec)
    episodes = evaluation.Evaluator(policy, factory, 16).run((), HOST_KEY)
    assert set(episodes.returns) <= {-1.0, 1.0}
    assert set(episodes.lengths) == {9}


def test_defaults_and_limits_follow_the_kind_of_environment():
    agent = HostAlternating()
    assert evaluation.Evaluator(agent, catch.Catch()).num_episodes == 512
    assert evaluation.Evaluator(agent, FACTORY).num_episodes == 64
    assert evaluation.Evaluator(agent, FACTORY, 3).limit == 40
    assert evaluation.Evaluator(agent, FACTORY, 3, max_steps=9).limit == 9
    endless = gymnasium.Gymnasium("Blackjack-v1")
    assert evaluation.Evaluator(agent, endless, 3).limit == evaluation.DEFAULT_MAX_STEPS
    with pytest.raises(errors.UserError, match="population = 1, got 2"):
        evaluation.Evaluator(agent, FACTORY, 3, 2)
    for some in (FACTORY, ENVIRONMENT):
        with pytest.raises(errors.UserError, match="0 episodes"):
            evaluation.Evaluator(agent, some, 0)


def test_atari_is_recorded_as_it_is_drawn():
    factory = envpool.EnvPool("Pong-v5")
    policy = evaluation.UniformPolicy(factory.spec)
    timesteps = evaluation.Evaluator(policy, factory, max_steps=8).record((), HOST_KEY)
    images = [factory.render(timestep) for timestep in timesteps]
    assert len(images) == 9
    assert all(image.dtype == np.uint8 and image.shape[-1] == 3 for image in images)
    assert np.any(images[0] != images[-1])
