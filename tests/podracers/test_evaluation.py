"""Evaluation against a slow loop; recordings show what evaluation counts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import errors, evaluation, parallel, types
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


def test_a_recording_is_of_the_first_episode(expected):
    states = evaluation.record(AGENT, ENVIRONMENT, 1, KEY)
    assert len(states) == len(expected[0]) + 1
    totals = [float(state.total) for state in states]
    np.testing.assert_allclose(np.diff(totals), expected[0], rtol=1e-4, atol=1e-5)
    assert [int(state.time) for state in states] == list(range(len(states)))


def test_a_recording_stops_at_its_limit(expected):
    assert len(expected[0]) > 1
    assert len(evaluation.record(AGENT, ENVIRONMENT, 1, KEY, max_steps=1)) == 2


def test_the_limit_is_that_of_the_environment_unless_given():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Limited(streams.RandomEpisodes):
        @property
        def spec(self):
            return dataclasses.replace(super().spec, max_episode_steps=9)

    assert EVALUATOR.limit == evaluation.DEFAULT_MAX_STEPS
    assert evaluation.Evaluator(AGENT, Limited(), 1).limit == 9
    assert evaluation.Evaluator(AGENT, Limited(), 1, max_steps=4).limit == 4


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

    def run(params, key):
        found.append(compiled(params, key))
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


def test_no_episodes_is_an_error():
    with pytest.raises(errors.UserError, match="0 episodes"):
        evaluation.Evaluator(AGENT, ENVIRONMENT, 0)


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
