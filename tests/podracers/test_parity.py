"""Anakin on four devices and Sebulba on one give equal results, with equal keys and no lag."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from agents import muzero
from podracers import runner, sebulba, types
from tests import contract, streams

UPDATES = 9  # `ppo_scaled` clips at 0 in the tenth, where rounding decides which gradients pass


class Trace(NamedTuple):
    """The results of a run."""

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
    sizes = contract.NUM_ENVS, contract.ROLLOUT_LENGTH
    return sebulba.Sebulba(contract.Recorder(agent), environment, *sizes, **options)


def _anakin(agent, environment) -> runner.Runner:
    """Returns the same runner as `tests/test_agents.py`, so that its program is in the cache."""
    return contract.RUNNERS["anakin"].make(contract.Recorder(agent), environment, 4)


def _assert_same(actual: Trace, expected: Trace, tolerance: float = 1e-4) -> None:
    """Different programs may round differently, and updates amplify the differences."""
    streams.assert_same(
        actual.rollouts[0].timestep.step_type, expected.rollouts[0].timestep.step_type
    )
    for ours, theirs in zip(actual.rollouts, expected.rollouts):
        streams.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    streams.assert_close(actual.learner, expected.learner, rtol=tolerance, atol=tolerance)
    streams.assert_close(actual.means, expected.means, rtol=10 * tolerance, atol=tolerance)


FAST = ("ppo", "dqn")  # without and with a replay
SLOW = (
    "sac",
    "muzero",
    "ppo_gru_frames",
    "ppo_scaled",
    "impala_lstm",
    "rainbow",
    "pqn_gru",
    "r2d2",
)


@pytest.mark.exact  # on one backend
@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_without_lag_both_runners_learn_the_same(name):
    agent, environment = contract.AGENTS[name]()
    # A search divides its values by their range, which magnifies rounding errors: probabilities
    # have differed by 7e-4, depending on the processor and on JAX's version.
    tolerance = 2e-3 if isinstance(agent, muzero.MuZero) else 1e-4
    expected = _trace(_anakin(agent, environment))
    _assert_same(_trace(_sebulba(agent, environment)), expected, tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "ppo",
            {"actor_devices": (0, 1), "learner_devices": (2, 3), "batches_per_actor": 2},
            id="2 to 2",
        ),
        pytest.param(
            "ppo_lstm",
            {"actor_devices": (0, 0), "learner_devices": (1,)},
            id="2 to 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_lag_any_split_of_devices_learns_the_same(name, options):
    agent, environment = contract.AGENTS[name]()
    _assert_same(
        _trace(_sebulba(agent, environment, **options), 4),
        _trace(_anakin(agent, environment), 4),
    )


@pytest.mark.slow
def test_a_recurrent_network_learns_from_what_it_acted_on():
    """Acting and learning see equal actor states, or else the ratios would differ from 1."""
    agent, environment = contract.AGENTS["ppo_lstm"]()
    agent = dataclasses.replace(agent, learning_rate=0.1, epochs=1, num_minibatches=1)
    subject = _anakin(agent, environment)
    state = subject.init(0)
    for _ in range(6):
        state, report = subject.step(state, 1)
        assert abs(report.means["policy/kl"].result()) < 1e-6
    actions = streams.to_numpy(contract.rollout(state).actor_state.action)
    assert len(np.unique(actions)) > 1
