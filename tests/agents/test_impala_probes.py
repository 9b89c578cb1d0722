"""IMPALA learns what is known of every probe environment, in seconds."""

import pytest

from agents import impala
from tests.agents import probe_learning

CURRICULUM = probe_learning.Curriculum(
    probe_learning.actor_critic(impala.IMPALA, learning_rate=0.02, optimizer="adam"), 800
)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.UNLIKE, ids=lambda probe: probe.__name__)
def test_probes_that_are_like_no_other(probe):
    CURRICULUM.assert_learns_alone(probe)


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
