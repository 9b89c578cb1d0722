"""MuZero learns what is known of the probe environments with one discrete action."""

import functools

import pytest

from agents import muzero, tree_search
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import probes
from podracers import errors
from tests.agents import probe_learning


def _make(spec, encoder, core, total_steps):
    if core is None:
        encoder = encoders.MLP((32,), "relu")
    return muzero.MuZero(
        spec,
        network=functools.partial(
            muzero_networks.model, encoder=encoder, core=core, latent_size=32, hidden_sizes=(32,)
        ),
        search=functools.partial(tree_search.Search, num_simulations=8, max_depth=4),
        gamma=probe_learning.GAMMA,
        support=4.0,
        support_atoms=33,
        unroll_steps=3,
        n_steps=3,
        learning_rate=4e-3,
        batch_size=256,
        replay_ratio=4.0,
        replay_capacity=total_steps // 4,
        min_replay=1024,
        final_temperature=0.5,
        temperature_steps=total_steps,
    )


CURRICULUM = probe_learning.Curriculum(_make, 220)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.learning
def test_masked_actions():
    CURRICULUM.assert_learns_alone(probes.MaskedAction)


@pytest.mark.parametrize("probe", [probes.MultiDiscreteReward, probes.ContinuousReward])
def test_other_actions_are_refused(probe):
    with pytest.raises(errors.UserError, match=r"MuZero needs discrete actions.*use SAC"):
        CURRICULUM.learn(probe())


def test_a_recurrent_network_is_refused():
    with pytest.raises(errors.UserError, match="use R2D2"):
        CURRICULUM.assert_learns_alone(probes.Memory)


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
