"""Tests of building an experiment's parts, and of refusing those that do not fit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from agents import networks, ppo
from environments import catch, envpool
from podracers import anakin, errors, sebulba
from podracers.training import config, experiment
from tests import processes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    file = processes.config_file(tmp_path_factory.mktemp("experiment"))
    return experiment.load([str(file)], [])


def test_builds_the_parts(tiny):
    parts = tiny.build()
    assert isinstance(parts.environment, catch.Catch)
    assert parts.runner.agent is parts.agent
    assert parts.runner.environment is parts.environment
    assert parts.num_updates == 40
    assert dataclasses.replace(tiny, total_steps=2561).build().num_updates == 41
    experiment.check(parts, 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("total_steps", 0, "expected a positive int, got 0"),
        ("total_steps", 1.5, "expected a positive int, got 1.5"),
        ("log_period", True, "expected a positive int, got True"),
        ("evaluation_max_steps", -5, "expected a positive int, got -5"),
        ("evaluation_episodes", 0, "expected a positive int, got 0"),
        ("greedy_evaluation_episodes", -1, "expected an int of at least 0, got -1"),
        ("seed", -1, "expected an int of at least 0, got -1"),
        ("compute_dtype", "bfloat1", "expected one of .*; did you mean 'bfloat16'"),
        ("matmul_precision", "higest", "expected one of .*; did you mean 'highest'"),
        ("environment", catch.Catch(), "expected a class, uncalled"),
        ("runner", (anakin.Anakin,) * 3, "expected one class, or two, .*, got 3"),
        ("runner", (anakin.Anakin, None), "expected a class, uncalled"),
    ],
)
def test_refuses_values(tiny, field, value, message):
    with pytest.raises(errors.UserError, match=f"Experiment.{field}: {message}"):
        dataclasses.replace(tiny, **{field: value})


def test_parts_are_of_the_configuration_that_they_were_built_from(tmp_path):
    binding = "networks.actor_critic.separate_critic = False"
    file = processes.config_file(tmp_path)
    agent = experiment.load([str(file)], [binding]).build().agent
    experiment.load([str(file)], [])
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    assert "torsos_1" not in learner.params


class OnHost:
    """A recipe that says so without being called."""

    made = 0

    def __init__(self, task_id: str = "CartPole-v1"):
        type(self).made += 1
        self.inner = envpool.EnvPool(task_id)

    @property
    def spec(self):
        return self.inner.spec

    def make(self, key, env_id, num_threads):
        return self.inner.make(key, env_id, num_threads)


def on_host():
    """Makes a recipe, which says nothing before it is called."""
    return OnHost()


@pytest.mark.parametrize(
    ("environment", "runner", "made"),
    [("@catch.Catch", "Anakin", 0), ("@own.OnHost", "Sebulba", 0), ("@own.on_host", "Sebulba", 1)],
)
def test_the_environment_chooses_the_runner(tmp_path, environment, runner, made):
    OnHost.made = 0
    file = processes.config_file(
        tmp_path,
        "import tests.podracers.training.test_experiment as own\nfrom environments import catch\n"
        f"experiment.Experiment.environment = {environment}\n",
    )
    loaded = experiment.load([str(file)], [])
    assert loaded.runner.__name__ == runner
    assert OnHost.made == made
    # The configuration that a run keeps has no choice left, and nothing of the other runner.
    text = config.text()
    other = {"Anakin": "Sebulba", "Sebulba": "Anakin"}[runner]
    assert f".{runner}.num_envs = %NUM_ENVS" in text
    assert f".{other}" not in text
    assert type(loaded.build().runner).__name__ == runner


@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_whoever_names_a_runner_gets_it(tmp_path, runner):
    file = str(processes.config_file(tmp_path))
    name = f"@{runner}.{runner.capitalize()}"
    for files, bindings in (
        ([file, f"gin/runners/{runner}.gin"], ()),
        ([file], (f"RUNNER = {name}",)),
        ([file], (f"Experiment.runner = {name}",)),
    ):
        parts = experiment.load(files, bindings).build()
        assert type(parts.runner).__name__ == runner.capitalize()
        assert (parts.runner.num_envs, parts.runner.rollout_length) == (8, 8)


def test_an_option_of_a_runner_that_does_not_run_is_a_mistake(tmp_path):
    file = str(processes.config_file(tmp_path))
    with pytest.raises(errors.UserError, match=r"nothing uses 'Sebulba.lag': .* has no Sebulba"):
        experiment.load([file], ["Sebulba.lag = 0"])


def test_two_runners_from_python(tiny):
    both = dataclasses.replace(tiny, runner=(tiny.runner, sebulba.Sebulba))
    assert isinstance(both.build().runner, anakin.Anakin)


def test_a_million_may_be_written_as_a_float(tiny):
    total = dataclasses.replace(tiny, total_steps=1e6).total_steps
    assert total == 1_000_000
    assert isinstance(total, int)


@pytest.mark.parametrize(
    ("options", "sampled", "greedy"),
    [
        ({"evaluation_episodes": None}, 512, 512),
        ({}, 8, 8),
        ({"greedy_evaluation_episodes": 4}, 8, 4),
        ({"greedy_evaluation_episodes": 0}, 8, None),
    ],
)
def test_greedy_episodes_are_as_many_as_the_others_unless_told(tiny, options, sampled, greedy):
    parts = dataclasses.replace(tiny, **options).build()
    assert parts.evaluator.num_episodes == sampled
    found = parts.greedy_evaluator
    assert (found and found.num_episodes) == greedy
    if found:
        assert (parts.evaluator.agent, found.environment) == (parts.agent, parts.environment)
        assert (parts.agent.greedy_evaluation, found.agent.greedy_evaluation) == (False, True)


def test_evaluations_that_are_greedy_are_not_played_again(tiny):
    greedy = functools.partial(tiny.agent, greedy_evaluation=True)
    assert dataclasses.replace(tiny, agent=greedy).build().greedy_evaluator is None


def test_the_greedy_agent_is_of_the_configuration_of_its_experiment(tmp_path):
    """Its network is made anew: whatever was loaded since must not count."""
    file = processes.config_file(tmp_path)
    first = experiment.load([str(file)], ["networks.actor_critic.separate_critic = False"])
    experiment.load([str(file)], [])
    agent = first.build().greedy_evaluator.agent
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    assert "torsos_1" not in learner.params


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("environment", ppo.PPO, r"environment: PPO is not an environment \(it needs 'spec'\)"),
        ("environment", dict, r"dict is not an environment \(it has no `reset`, no `spec`"),
        ("agent", catch.Catch, r"agent: Catch is not an agent \(it takes no 'spec'\)"),
        ("runner", catch.Catch, r"runner: Catch is not a runner \(it takes no 'agent'\)"),
        ("runner", anakin.Anakin, "no value for Anakin.num_envs, Anakin.rollout_length"),
    ],
)
def test_refuses_what_is_not_such_a_part(tiny, part, value, message):
    with pytest.raises(errors.UserError, match=message):
        dataclasses.replace(tiny, **{part: value}).build()


class Shapeless(catch.Catch):
    """Returns a reward that is not a scalar."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(reward=jnp.zeros((2,)))


class Broken(catch.Catch):
    """Has a bug."""

    def step(self, state, action):
        return state.velocity


def test_an_environment_that_breaks_the_contract_is_a_mistake(tiny):
    parts = dataclasses.replace(tiny, environment=Shapeless).build()
    with pytest.raises(errors.UserError, match=r"environment Catch: .*reward"):
        experiment.check(parts, 0)


def test_a_bug_keeps_its_traceback(tiny):
    parts = dataclasses.replace(tiny, environment=Broken).build()
    with pytest.raises(AttributeError, match="velocity") as raised:
        experiment.check(parts, 0)
    assert raised.traceback[-1].name == "step"


def test_an_update_that_cannot_be_is_a_mistake(tiny):
    def agent(spec):
        return ppo.PPO(spec, networks.actor_critic, num_minibatches=7)

    parts = dataclasses.replace(tiny, agent=agent).build()
    with pytest.raises(errors.UserError, match="7 minibatches"):
        experiment.check(parts, 0)


def test_a_copy_keeps_the_configuration_of_its_experiment():
    first = experiment.load(["gin/experiments/catch_ppo.gin"], ["PPO.gamma = 0.5"])
    experiment.load(["gin/experiments/pendulum_ppo.gin"], ["PPO.gamma = 0.75"])
    copy = dataclasses.replace(dataclasses.replace(first, seed=8), seed=9)
    parts = copy.build()
    assert (copy.seed, parts.agent.gamma, parts.environment.spec.name) == (9, 0.5, "Catch")
    now = config.text()
    with copy.configured():
        assert "PPO.gamma = 0.5" in config.text()
        assert "from environments import catch" in config.text()
        assert "pendulum" not in config.text()
    assert config.text() == now


def test_an_experiment_keeps_its_configuration_when_another_is_loaded(tmp_path):
    first = experiment.load(["gin/experiments/catch_ppo.gin"], ["PPO.gamma = 0.5"])
    second = experiment.load(["gin/experiments/pendulum_ppo.gin"], ["PPO.gamma = 0.75"])
    assert first.build().agent.gamma == 0.5
    assert second.build().agent.gamma == 0.75
    assert second.build().environment.spec.name != first.build().environment.spec.name
