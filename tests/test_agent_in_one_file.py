"""The agent in one file of docs/extending.md, and agents whose devices learn differently."""

import functools
import pathlib
import tempfile
import types

import pytest

from environments import catch
from podracers import agent_contract, anakin, errors, sebulba
from podracers.training import experiment, run
from tests import contract, documented

PAGE = documented.DOCS / "extending.md"
GLOBAL_MEAN = "parallel.global_mean(types.Mean(gradient, mean.count))"
LOCAL_MEAN = "jax.tree.map(lambda g: g / mean.count, gradient)"
# Devices differ after the third gradient step.
LATE = (
    "jax.tree.map(lambda g: g + (optimizer_state[1][0].count > 1) * parallel.axis_index(), "
    f"{GLOBAL_MEAN})"
)

# No gradient in the first two updates.
AFTER_TWO = f"jax.tree.map(lambda g: g * (optimizer_state[1][0].count > 1), {LOCAL_MEAN})"


@functools.cache
def _source() -> str:
    with tempfile.TemporaryDirectory() as folder:
        documented.write_files(pathlib.Path(folder))
        return pathlib.Path(folder, "actor_critic.py").read_text()


@functools.cache
def _actor_critic(old: str = "", new: str = "") -> type:
    """Returns the agent of one file, with a part of its text replaced."""
    source = _source()
    assert old in source
    module = types.ModuleType("actor_critic")
    exec(source.replace(old, new), module.__dict__)
    return module.ActorCritic


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GLOBAL_MEAN, f"jax.lax.pmean({LOCAL_MEAN}, parallel.AXIS)", "by other amounts"),
        pytest.param(
            "advantage = target",
            "target -= jnp.mean(target)\n        advantage = target",
            "by other amounts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GLOBAL_MEAN,
            LOCAL_MEAN,
            "copies of 'learner/params/params/Dense_0/bias'",
            marks=pytest.mark.slow,
        ),
        pytest.param(GLOBAL_MEAN, AFTER_TWO, "copies of", marks=pytest.mark.slow),
    ],
    ids=["mean of means", "statistic of a device", "gradient of a device", "later"],
)
def test_a_mean_of_one_device_is_found_before_a_run(old, new, message):
    with pytest.raises(errors.UserError, match=f"ActorCritic: .*{message}.*global_mean"):
        agent_contract.check_agent(_actor_critic(old, new), catch.Catch())


def test_an_array_that_an_agent_keeps_from_a_trace_is_found_before_it_compiles():
    agent = _actor_critic("optax.adam(self.learning_rate)", "optax.adam(jnp.float32(3e-3) * 1)")
    with pytest.raises(errors.UserError, match=r"ActorCritic\._optimizer keeps an array of a JAX"):
        agent_contract.check_agent(agent, catch.Catch())


@pytest.mark.parametrize(
    ("make", "new", "update"),
    [
        pytest.param(anakin.Anakin, LATE, 6, marks=pytest.mark.slow),
        (sebulba.Sebulba, LOCAL_MEAN, 1),
    ],
    ids=["anakin", "sebulba"],
)
def test_a_run_whose_devices_differ_ends(make, new, update, tmp_path):
    """After the first update, or at the next checkpoint."""
    settings = experiment.Experiment(
        agent=_actor_critic(GLOBAL_MEAN, new),
        environment=catch.Catch,
        runner=functools.partial(make, num_envs=8, rollout_length=4),
        seed=0,
        total_steps=32 * 10,
        checkpoint_period=6,
        evaluation_episodes=8,
    )
    with pytest.raises(errors.RunFailure, match=rf"after update {update}, copies of 'learner/"):
        run.train(settings, tmp_path / "run")


@pytest.mark.slow
def test_the_agent_of_the_page_passes_the_check():
    agent_contract.check_agent(_actor_critic(), catch.Catch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_scaled", "dqn"])
def test_agents_with_statistics_or_replay_pass_the_check(name):
    sizes = contract.NUM_ENVS, contract.ROLLOUT_LENGTH
    agent_contract.check_agent(*contract.AGENTS[name](), *sizes)
