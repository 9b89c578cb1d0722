"""Evaluation against slow loops, in JAX environments and on the host, and films."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import catch, gymnasium, probes
from podracers import environment as environment_lib
from podracers import evaluation, parallel, types
from podracers.sebulba import jax_host
from podracers.supervision import pipeline
from tests import faults, streams

NUM_EPISODES = 7
KEY = jax.random.key(1)
PARAMS = {"change": jnp.float32(0.7)}
GAME = streams.RandomEpisodes(end=0.2, reports=True)


class Reporting(gym.Wrapper):
    def step(self, action):
        *values, info = self.env.step(action)
        return *values, {**info, "total": values[1], "steps": 1}


FACTORY = gymnasium.Gymnasium(
    "CartPole-v1",
    {"max_episode_steps": 40},
    wrappers=(Reporting,),
    metrics={"total": "sum", "steps": "sum"},
)


@dataclasses.dataclass(frozen=True, eq=False)
class Alternating:
    """Remembers its last action, and changes it with the probability `params["change"]`.

    Attributes:
      traces: gets an entry for each trace of `act`.
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


@jax.jit
def _changes(episode):
    """Returns whether `Alternating` changes its action at each of the first 200 steps."""
    act_key = jax.random.fold_in(jax.random.fold_in(KEY, 2**31 - 1), episode)
    keys = jax.vmap(lambda time: jax.random.fold_in(act_key, time))(jnp.arange(200))
    return jax.vmap(lambda key: jax.random.bernoulli(key, PARAMS["change"]))(keys)


def _play(episode: int, step: Callable[[int], tuple[float, bool]]) -> list[float]:
    """Returns the rewards of one episode, alone, under `Alternating`."""
    changes = np.asarray(_changes(episode)).tolist()
    rewards, action, ended = [], episode % 2, False
    while not ended:
        action = (action + changes[len(rewards)]) % 2
        reward, ended = step(action)
        rewards.append(reward)
    return rewards


def _play_in_jax(episode: int) -> list[float]:
    game_step = jax.jit(GAME.step)
    state, _ = jax.jit(GAME.reset)(jax.random.fold_in(KEY, episode))

    def step(action):
        nonlocal state
        state, timestep = game_step(state, np.int32(action))
        return float(timestep.reward), bool(timestep.last())

    return _play(episode, step)


def _play_on_host(episode: int) -> list[float]:
    env = gym.make("CartPole-v1", max_episode_steps=40)
    env.reset(seed=int(environment_lib.stream_seeds(KEY, np.arange(NUM_EPISODES))[episode]))

    def step(action):
        _, reward, terminated, truncated, _ = env.step(action)
        return reward, terminated or truncated

    return _play(episode, step)


class Case(NamedTuple):
    evaluator: evaluation.Evaluator
    rewards: list[list[float]]  # of each episode
    lengths: np.ndarray
    returns: list[float]


@pytest.fixture(scope="module", name="case", params=["jax", "host"])
def _case(request):
    environment, play = {"jax": (GAME, _play_in_jax), "host": (FACTORY, _play_on_host)}[
        request.param
    ]
    rewards = [play(episode) for episode in range(NUM_EPISODES)]
    evaluator = evaluation.Evaluator(Alternating(), environment, NUM_EPISODES)
    lengths = np.array([len(episode) for episode in rewards])
    assert max(lengths) > 1.5 * min(lengths)  # so that short ones would restart
    return Case(evaluator, rewards, lengths, [sum(episode) for episode in rewards])


def _assert_played(episodes, case):
    np.testing.assert_array_equal(episodes.lengths, case.lengths)
    np.testing.assert_allclose(episodes.returns, case.returns, rtol=1e-4)
    assert episodes.finished.all()
    assert [leaf.dtype for leaf in episodes[:3]] == [np.float32, np.int32, np.bool_]
    _assert_reported(episodes)


def _assert_reported(episodes):
    """The game reports the return and the length so far."""
    streams.assert_close(episodes.metrics, {"total": episodes.returns, "steps": episodes.lengths})


def test_first_episodes_equal_a_slow_loop(case, monkeypatch):
    """On the host in one batch, or in several that do not divide the episodes; compiled once."""
    for batch in (2, 4, 64) if case.evaluator.environment is FACTORY else (64,):
        monkeypatch.setattr(evaluation, "MAX_BATCH", batch)
        evaluator = dataclasses.replace(case.evaluator, agent=Alternating())
        episodes = evaluator.run(PARAMS, KEY)
        _assert_played(episodes, case)
        other = evaluator.run(PARAMS, jax.random.key(2))
        assert np.any(other.lengths != episodes.lengths)
        assert len(evaluator.agent.traces) == 1
    np.testing.assert_allclose(episodes.mean_return(), np.mean(case.returns), rtol=1e-4)
    error = np.std(case.returns, ddof=1) / math.sqrt(NUM_EPISODES)
    np.testing.assert_allclose(episodes.standard_error(), error, rtol=1e-4)


def test_episodes_that_outlast_the_evaluation_are_flagged(case):
    limit = int(np.median(case.lengths))
    episodes = dataclasses.replace(case.evaluator, max_steps=limit).run(PARAMS, KEY)
    np.testing.assert_array_equal(episodes.finished, case.lengths <= limit)
    assert 0 < episodes.finished.sum() < NUM_EPISODES
    np.testing.assert_array_equal(episodes.lengths, np.minimum(case.lengths, limit))
    partial = [sum(rewards[:limit]) for rewards in case.rewards]
    np.testing.assert_allclose(episodes.returns, partial, rtol=1e-4)
    _assert_reported(episodes)


@pytest.mark.parametrize("count", [2, NUM_EPISODES + 1])
def test_shares_are_the_episodes_of_the_whole(case, count):
    """Also where some have more than others, or none."""
    shares = [case.evaluator.run(PARAMS, KEY, share=(index, count)) for index in range(count)]
    assert max(share.returns.size for share in shares) == -(-NUM_EPISODES // count)
    _assert_played(jax.tree.map(lambda *x: np.concatenate(x), *shares), case)


def test_replicated_parameters_are_used_from_one_device(case, monkeypatch):
    mesh = parallel.make_mesh(jax.devices()[1:])
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params, used, on_one = jax.device_put(PARAMS, replicated), [], evaluation._on_one_device
    monkeypatch.setattr(
        evaluation, "_on_one_device", lambda params: used.append(on_one(params)) or used[-1]
    )
    _assert_played(case.evaluator.run(params, KEY), case)
    assert len(params["change"].devices()) == 3
    assert [x["change"].devices() for x in used] == [{jax.devices()[1]}] * len(used) != []


def test_a_population_plays_the_same_episodes():
    alone = evaluation.Evaluator(Alternating(), GAME, NUM_EPISODES)
    evaluator = dataclasses.replace(alone, population=2)
    values = jnp.array([0.7, 0.2])
    episodes = evaluator.run({"change": values}, KEY)
    assert episodes.returns.shape == (2, NUM_EPISODES)
    for member, value in enumerate(values):
        expected = alone.run({"change": value}, KEY)
        np.testing.assert_array_equal(episodes.lengths[member], expected.lengths)
        np.testing.assert_allclose(episodes.returns[member], expected.returns, rtol=1e-5)
        np.testing.assert_array_equal(episodes.metrics["steps"][member], expected.lengths)
    assert np.any(episodes.returns[0] != episodes.returns[1])
    empty = evaluator.run({"change": values}, KEY, share=(0, 8))
    assert empty.returns.shape == empty.metrics["total"].shape == (2, 0)


def test_acting_uses_no_key_that_the_reset_used():
    @dataclasses.dataclass(frozen=True, eq=False)
    class ShowsItsKeys(streams.RandomEpisodes):
        def reset(self, key):
            state, timestep = super().reset(key)
            keys = jax.random.key_data(jnp.stack([key, *jax.random.split(key, 8)]))
            return (state, keys), timestep._replace(observation=keys)

        def step(self, state, action):
            return state, types.transition(state[1], reward=action, truncated=False)

    class NoticesOldKeys(Alternating):
        def act(self, params, actor_state, timestep, key, evaluation=False):
            old = timestep.observation == jax.random.key_data(key)[:, None]
            return jnp.any(jnp.all(old, axis=-1), axis=-1), actor_state, ()

    evaluator = evaluation.Evaluator(NoticesOldKeys(), ShowsItsKeys(), NUM_EPISODES, max_steps=10)
    np.testing.assert_array_equal(evaluator.run((), KEY).returns, 0.0)


def test_each_evaluation_of_a_run_has_its_own_key():
    keys = [evaluation.run_key(seed, update) for seed in (0, 1) for update in (None, 0, 1, 2)]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == len(keys)
    streams.assert_same(evaluation.run_key(1, 2), keys[-1])


def test_scores_and_errors_of_a_population():
    returns = np.array([[0.0, 2.0], [4.0, 6.0], [5.0, 7.0]], np.float32)
    sampled = evaluation.Episodes(returns, returns.astype(int), returns > -1.0)
    expected = np.std([1.0, 5.0, 6.0], ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(sampled.standard_error(), expected, rtol=1e-6)
    absent = np.where(returns > 4.0, returns, math.nan)
    metrics = {"win": absent, "draw": np.nan * absent}
    greedy = sampled._replace(returns=0.0 * returns, metrics=metrics)
    both = evaluation.Evaluation(sampled, greedy)
    numbers = both.summary([1, 2, 3])
    assert numbers["greedy_metrics"] == {"win": 6.0} and "metrics" not in numbers
    assert both.score == 4.0  # of the sampled evaluation
    assert both.by_prefix() == {"": sampled, "greedy_": greedy}
    assert evaluation.Evaluation(sampled).by_prefix() == {"": sampled}


class Drawn(streams.RandomEpisodes):
    def render(self, state):
        """Draws the bytes of the total, in a JAX array."""
        return jnp.asarray(np.full(3, state.total).view(np.uint8).reshape(1, 4, 3))


def _totals(frames):
    return [float(frame.ravel().view(np.float32)[0]) for frame in frames]


def test_a_film_is_of_the_first_episode_in_jax():
    evaluator = evaluation.Evaluator(Alternating(), Drawn(end=0.2), NUM_EPISODES)
    totals = _totals(evaluator.film(PARAMS, KEY))
    np.testing.assert_allclose(np.diff(totals), _play_in_jax(0), rtol=1e-4, atol=1e-5)
    population = dataclasses.replace(evaluator, population=2)
    frames = population.film({"change": jnp.array([0.7, 0.2])}, KEY)
    assert _totals(frames) == totals
    assert len(dataclasses.replace(evaluator, max_steps=1).film(PARAMS, KEY)) == 2


class Shown(gymnasium.Gymnasium):
    """Draws time steps, not simulators."""

    def render(self, timestep):
        return np.full((1, 1, 3), timestep.observation, np.uint8)


def test_a_film_is_of_the_first_episode_on_the_host():
    name = "tests.environments.own_games:Own/Drawn-v0"
    policy = evaluation.UniformPolicy(gymnasium.Gymnasium(name).spec)
    filmed, shown = (
        evaluation.Evaluator(policy, kind(name), 4) for kind in (gymnasium.Gymnasium, Shown)
    )
    frames, observations = filmed.film((), KEY), shown.film((), KEY)
    assert len(frames) == len(observations) == filmed.run((), KEY).lengths[0] + 1
    for frame, observation in zip(frames, observations):
        assert frame.ndim == 3 and frame[0].sum(-1).argmax() == observation.max()
    assert len(dataclasses.replace(shown, max_steps=1).film((), KEY)) == 2


class Faulty(faults.Faulty):
    def render(self, timestep):
        return np.zeros((1, 1, 3), np.uint8)


def _faulty(*fault, timeout=60.0):
    factory = Faulty(FACTORY, *fault, who="")
    return evaluation.Evaluator(Alternating(), factory, NUM_EPISODES, timeout=timeout)


def test_environments_are_closed_after_every_batch_and_after_a_failure(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_BATCH", 4)
    evaluator = _faulty()
    evaluator.run(PARAMS, KEY)
    evaluator.film(PARAMS, KEY)
    assert [batch.closed for batch in evaluator.environment.batches] == [1, 1, 1]
    evaluator = _faulty(faults.RAISE)
    with pytest.raises(faults.SimulatorError):
        evaluator.run(PARAMS, KEY)
    assert [batch.closed for batch in evaluator.environment.batches] == [1]


@pytest.mark.parametrize("method", ["run", "film"])
def test_a_step_that_takes_too_long_ends_evaluations_and_films(method):
    evaluator = _faulty(faults.HANG, timeout=0.5)
    with pytest.raises(pipeline.WorkerError, match=r"and the limit is 0\.5 s"):
        getattr(evaluator, method)(PARAMS, KEY)
    evaluator.environment.over.set()


def test_the_uniform_policy_plays_legal_actions_on_the_host():
    """The game refuses an illegal action."""
    factory = gymnasium.Gymnasium("tests.environments.own_games:Own/Walk-v0")
    policy = evaluation.UniformPolicy(factory.spec)
    assert evaluation.Evaluator(policy, factory, 8).run((), KEY).finished.all()


@pytest.mark.parametrize("adaptor", [lambda x: x, jax_host.JaxHostEnvironment])
def test_an_episode_of_two_agents_has_two_rows(adaptor, monkeypatch):
    """In one batch or several, in one share or two."""
    monkeypatch.setattr(evaluation, "MAX_BATCH", 3)
    environment = adaptor(probes.TwoAgents())
    evaluator = evaluation.Evaluator(evaluation.UniformPolicy(environment.spec), environment, 5)
    whole = evaluator.run((), KEY)
    parts = [evaluator.run((), KEY, share=(index, 2)) for index in range(2)]
    streams.assert_close(jax.tree.map(lambda *x: np.concatenate(x), *parts), whole)
    assert whole.returns.shape == (10,) and whole.finished.all()
    for numbers in (whole.lengths, whole.metrics["out"]):
        np.testing.assert_array_equal(numbers[::2], numbers[1::2])
    assert len(set(whole.lengths.tolist())) > 1
    assert np.any(whole.returns[::2] != whole.returns[1::2])


def test_each_process_compiles_the_program_of_its_share(monkeypatch):
    monkeypatch.setattr(evaluation.processes, "index", lambda: 1)
    monkeypatch.setattr(evaluation.processes, "count", lambda: 2)
    evaluator = evaluation.Evaluator(Alternating(), streams.RandomEpisodes(), 5)
    vars(evaluator)["_run"] = program = mock.Mock()
    evaluator.lower(evaluation.shapes({"number": 0.7}))  # which is an argument, too
    params, _, env_id = program.lower.call_args.args
    assert params == {"number": 0.7}
    np.testing.assert_array_equal(env_id, [2, 3, 4])


def test_defaults_and_limits_follow_the_kind_of_environment():
    agent = Alternating()
    assert evaluation.Evaluator(agent, catch.Catch()).count == 512
    assert evaluation.Evaluator(agent, FACTORY).count == 64
    assert evaluation.Evaluator(agent, FACTORY).limit == 40
    assert evaluation.Evaluator(agent, FACTORY, max_steps=9).limit == 9
    endless = gymnasium.Gymnasium("Blackjack-v1")
    assert evaluation.Evaluator(agent, endless).limit == evaluation.DEFAULT_MAX_STEPS
