"""PQN learns what is known of the probe environments with one discrete action, memory included."""

import dataclasses
import functools

import pytest

from agents import networks, pqn
from agents.networks import encoders
from environments import probes
from tests.agents import probe_learning


def _make(spec, encoder, core, total_steps):
    encoder = encoders.MLP(encoder.hidden_sizes, "relu", layer_norm=True)
    return pqn.PQN(
        spec,
        network=functools.partial(networks.q_network, encoder=encoder, core=core),
        learning_rate=1e-2,
        anneal_steps=total_steps,
        gamma=probe_learning.GAMMA,
        epsilon=0.2,
        epsilon_steps=total_steps // 2,
    )


CURRICULUM = probe_learning.Curriculum(_make, 120)
# How many rollouts it takes over those that are like no other.
ALONE = {probes.MaskedAction: 120, probes.Memory: 300}


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ALONE, ids=lambda probe: probe.__name__)
def test_probes_that_are_like_no_other(probe):
    dataclasses.replace(CURRICULUM, num_updates=ALONE[probe]).assert_learns_alone(probe)


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
