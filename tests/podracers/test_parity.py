"""Anakin and Sebulba on one environment, with equal keys, are one algorithm.

So are any numbers of devices: Anakin has four here, and Sebulba has one. With lag 0 both collect
the same rollouts and reach the same parameters; with lag 1 Sebulba repeats itself, and its lag is
exactly 1.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from agents import muzero
from podracers import runner, sebulba, types
from tests import contract, streams

UPDATES = 10


class Trace(NamedTuple):
    """What came of a run."""

    rollouts: list[types.Rollout]
    learner: object
    means: dict


def _trace(subject: runner.Runner, updates: int = UPDATES) -> Trace:
    state = subject.init(0)
    rollouts = []
    for _ in range(updates):
        state, report = subject.step(state, 1)
        rollouts.append(contract.rollout(state))
    means = {name: mean.result() for name, mean in report.means.items()}
    subject.close()
    return Trace(rollouts, streams.to_numpy(state.learner.inner), streams.to_numpy(means))


def _sebulba(agent, environment, **options) -> sebulba.Sebulba:
    options = {"actor_devices": (0,), "learner_devices": (0,), "lag": 0} | options
    recorder = contract.Recorder(agent)
    return sebulba.Sebulba(
        recorder, environment, contract.NUM_ENVS, contract.ROLLOUT_LENGTH, **options
    )


def _anakin(agent, environment) -> runner.Runner:
    """Returns the runner whose program `tests/test_agents.py` compiles too."""
    return contract.RUNNERS["anakin"].make(contract.Recorder(agent), environment, 4)


# Discrete soft actor-critic is the continuous one but for what `tests/agents` knows. Each algorithm
# once; more of them are for the slow tests.
QUICK = ("ppo_lstm", "impala", "dqn", "pqn_gru", "r2d2", "sac", "muzero")
AGENTS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in contract.AGENTS
    if name != "sac_discrete"
]
# That a seed repeats, with the version that it should, is in every agent's contract; here it is for
# each kind of memory.
LAGGED = [
    "r2d2",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("ppo", "ppo_gru_frames", "impala_lstm")
    ),
]


@pytest.fixture(scope="module", name="made")
def _made(request):
    """An agent and its environment, and what comes of them under Anakin."""
    agent, environment = contract.AGENTS[request.param]()
    return agent, environment, _trace(_anakin(agent, environment))


def _assert_same(actual: Trace, expected: Trace, tolerance: float = 1e-4) -> None:
    """Programs that differ may round differently, and ten updates amplify it a little."""
    for ours, theirs in itertools.islice(zip(actual.rollouts, expected.rollouts), 1):
        streams.assert_same(ours.timestep.step_type, theirs.timestep.step_type)
    for ours, theirs in zip(actual.rollouts, expected.rollouts):
        streams.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    streams.assert_close(actual.learner, expected.learner, rtol=tolerance, atol=tolerance)
    streams.assert_close(actual.means, expected.means, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.exact  # as far as that both step environments on one backend
@pytest.mark.parametrize("made", AGENTS, indirect=True)
def test_without_lag_both_runners_learn_the_same(made):
    agent, environment, expected = made
    # A search divides its values by their range, and so magnifies rounding, by how much depends on
    # the processor and on JAX's version: probabilities have differed by 7e-4.
    tolerance = 2e-3 if isinstance(agent, muzero.MuZero) else 1e-4
    _assert_same(_trace(_sebulba(agent, environment)), expected, tolerance)


_TWO_TO_TWO = {"actor_devices": (0, 1), "learner_devices": (2, 3), "batches_per_actor": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("impala", _TWO_TO_TWO, id="2 to 2"),
        *(
            pytest.param("ppo_lstm", options, id=f"memory, {name}", marks=pytest.mark.slow)
            for name, options in {
                "2 to 2": _TWO_TO_TWO,
                "2 to 1": {"actor_devices": (0, 0), "learner_devices": (1,)},
                "1 to 4, shared": {"actor_devices": (3,), "learner_devices": (0, 1, 2, 3)},
            }.items()
        ),
    ],
)
def test_without_lag_any_split_of_devices_learns_the_same(name, options):
    agent, environment = contract.AGENTS[name]()
    _assert_same(
        _trace(_sebulba(agent, environment, **options), 4),
        _trace(_anakin(agent, environment), 4),
    )


@pytest.mark.parametrize("make", [_anakin, pytest.param(_sebulba, marks=pytest.mark.slow)])
def test_a_recurrent_network_learns_from_what_it_acted_on(make):
    """Previous actions and rewards, over rollouts too: else ratios would not be 1."""
    agent, environment = contract.AGENTS["ppo_lstm"]()
    agent = dataclasses.replace(agent, learning_rate=0.1, epochs=1, num_minibatches=1)
    subject = make(agent, environment)
    state = subject.init(0)
    for _ in range(6):
        state, report = subject.step(state, 1)
        assert abs(report.means["policy/kl"].result()) < 1e-6
    subject.close()
    actions = streams.to_numpy(contract.rollout(state).actor_state.action)
    assert len(np.unique(actions)) > 1


@pytest.mark.exact
@pytest.mark.parametrize("made", LAGGED, indirect=True)
def test_with_a_lag_of_one_a_seed_repeats_and_the_lag_is_exactly_one(made):
    agent, environment, without = made
    subject = _sebulba(agent, environment, lag=1, actor_devices=(1,))
    one, other = _trace(subject), _trace(subject)  # each of them starts the simulators anew
    for update, rollout in enumerate(one.rollouts):
        np.testing.assert_array_equal(rollout.extras.version, max(update - 1, 0))
    for rollout, again in zip(one.rollouts, other.rollouts):
        streams.assert_same(rollout, again)
    streams.assert_same(one.learner, other.learner)
    with pytest.raises(AssertionError):
        streams.assert_close(one.learner, without.learner, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_recorded_lag_is_the_true_one():
    agent, environment = contract.AGENTS["ppo"]()
    for lag in (0, 1):
        subject = _sebulba(agent, environment, lag=lag, actor_devices=(0, 0))
        state, _ = subject.step(subject.init(0), 1)
        subject.diagnostics()  # the first rollout has nothing to be behind of
        state, _ = subject.step(state, 1)
        assert subject._sessions[0].timers.lags == [lag, lag]  # of every actor
        subject.step(state, 4)
        values = subject.diagnostics().values
        subject.close()
        assert values[f"lag/{lag}"] == 1.0
        assert values["lag/mean"] == lag


def test_jax_frees_what_a_closed_runner_held():
    agent, environment = contract.AGENTS["ppo"]()
    subject = _sebulba(agent, environment, lag=1)
    state, _ = subject.step(subject.init(0), 2)
    subject.close()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
