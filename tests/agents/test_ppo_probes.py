"""PPO learns what is known of every probe environment, in seconds."""

import pytest

from agents import ppo
from environments import probes
from tests.agents import probe_learning

CURRICULUM = probe_learning.Curriculum(probe_learning.actor_critic(ppo.PPO, learning_rate=0.02), 80)


# Another kind of action; the rest is for the slow tests.
QUICK = (probes.ContinuousReward,)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, id=probe.__name__, marks=() if probe in QUICK else pytest.mark.slow)
        for probe in probe_learning.UNLIKE
    ],
)
def test_probes_that_are_like_no_other(probe):
    CURRICULUM.assert_learns_alone(probe)


def test_every_probe_is_learnt():
    assert {*probe_learning.ALIKE, *probe_learning.UNLIKE} == set(probes.ALL)


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
