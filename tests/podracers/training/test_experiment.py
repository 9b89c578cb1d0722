"""Experiments: building their parts, and choosing the runner."""

import dataclasses
import functools

import jax
import pytest

from environments import cartpole, catch, envpool, randomized
from podracers import anakin, errors, sebulba
from podracers import contract as contract_lib
from podracers.training import experiment
from tests import contract, processes


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


def test_numbers_of_64_bits_are_refused(tiny):
    jax.config.update("jax_enable_x64", True)
    try:
        for make in (
            lambda: dataclasses.replace(tiny, seed=1),
            lambda: contract_lib.environment_faults(catch.Catch()),
        ):
            with pytest.raises(errors.UserError, match="JAX_ENABLE_X64: expected false"):
                make()
    finally:
        jax.config.update("jax_enable_x64", False)


class OnHost(envpool.EnvPool):
    """A factory of host environments that counts its instances."""

    count_made = 0

    def __init__(self):
        super().__init__("CartPole-v1")
        OnHost.count_made += 1


def on_host():
    """Returns a factory, whose kind is unknown before the call."""
    return OnHost()


@pytest.mark.parametrize(
    ("environment", "runner", "count"),
    [("@catch.Catch", "Anakin", 0), ("@own.OnHost", "Sebulba", 0), ("@own.on_host", "Sebulba", 1)],
)
def test_the_environment_chooses_the_runner(tmp_path, environment, runner, count):
    OnHost.count_made = 0
    file = processes.config_file(
        tmp_path,
        "import tests.podracers.training.test_experiment as own\nfrom environments import catch\n"
        f"experiment.Experiment.environment = {environment}\n",
    )
    loaded = experiment.load([str(file)], [])
    assert loaded.runner.__name__ == runner
    assert OnHost.count_made == count
    # The configuration that a run keeps has no choice left, and nothing of the other runner.
    text = loaded.text()
    other = {"Anakin": "Sebulba", "Sebulba": "Anakin"}[runner]
    assert f".{runner}.num_envs = %NUM_ENVS" in text
    assert f".{other}" not in text
    assert type(loaded.build().runner).__name__ == runner


@pytest.mark.parametrize(
    ("files", "bindings"),
    [
        (["gin/runners/sebulba.gin"], []),
        ([], ["RUNNER = @sebulba.Sebulba"]),
        ([], ["Experiment.runner = @sebulba.Sebulba"]),
    ],
)
def test_a_runner_may_be_named(tmp_path, files, bindings):
    files = [str(processes.config_file(tmp_path)), *files]
    parts = experiment.load(files, [*bindings, "Sebulba.timeout = 7.0"]).build()
    assert isinstance(parts.runner, sebulba.Sebulba)
    assert (parts.runner.num_envs, parts.runner.rollout_length) == (8, 8)
    assert parts.evaluator.timeout == 7.0  # of films, too


def test_two_runners_and_floats_from_python(tiny):
    both = dataclasses.replace(tiny, runner=(tiny.runner, sebulba.Sebulba), total_steps=1e10)
    assert isinstance(both.build().runner, anakin.Anakin)
    assert both.total_steps == 10**10
    assert isinstance(both.total_steps, int)


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
    assert parts.evaluator.count == sampled
    evaluator = parts.greedy_evaluator
    assert (evaluator and evaluator.count) == greedy
    if evaluator:
        assert (parts.evaluator.agent, evaluator.environment) == (parts.agent, parts.environment)
        assert (parts.agent.greedy_evaluation, evaluator.agent.greedy_evaluation) == (False, True)


def test_evaluations_play_the_nominal_environment(tiny):
    def random():
        return randomized.Randomized(cartpole.CartPole, {"pole_mass": (0.2, 20.0)})

    def mass(part):
        state, _ = part.environment.reset(jax.random.key(0))
        return state.factors["pole_mass"]

    parts = dataclasses.replace(tiny, environment=random).build()
    assert mass(parts.evaluator) == mass(parts.greedy_evaluator) == 1.0 != mass(parts.runner)


def test_agents_without_a_greedy_option_have_one_evaluation(tiny):
    def foreign(spec):
        return contract.Recorder(tiny.agent(spec=spec))

    for agent in (functools.partial(tiny.agent, greedy_evaluation=True), foreign):
        assert dataclasses.replace(tiny, agent=agent).build().greedy_evaluator is None


class Broken(catch.Catch):
    def step(self, state, action):
        return state.velocity


def test_a_bug_of_a_part_is_found_by_tracing_and_keeps_its_traceback(tiny):
    with pytest.raises(AttributeError, match="velocity"):
        experiment.check(dataclasses.replace(tiny, environment=Broken).build(), 0)


def test_an_experiment_keeps_its_configuration_when_another_is_loaded(tmp_path):
    file = str(processes.config_file(tmp_path))
    first = experiment.load([file], ["PPO.gamma = 0.5", "actor_critic.separate_critic = False"])
    # Arguments from Python replace bound ones.
    other = dataclasses.replace(first, agent=functools.partial(first.agent, gamma=0.25)).build()
    assert other.agent.gamma == 0.25
    second = experiment.load(["gin/experiments/pendulum_ppo.gin"], ["PPO.gamma = 0.75"])
    copy = dataclasses.replace(dataclasses.replace(first, seed=8), seed=9)
    parts = copy.build()
    assert (copy.seed, parts.agent.gamma, parts.environment.spec.name) == (9, 0.5, "Catch")
    # Agents make their network at its first use.
    member = dataclasses.replace(parts.agent, gamma=0.75)  # as of a population
    for agent in (parts.agent, parts.greedy_evaluator.agent, member):
        params = jax.eval_shape(agent.init_learner, jax.random.key(0)).params
        assert "torsos_1" not in params
    text = copy.texts.bindings
    assert "PPO.gamma = 0.5" in text and "pendulum" not in text
    assert second.build().environment.spec.name == "Pendulum"
