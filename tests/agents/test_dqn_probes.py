"""Deep Q-learning learns what is known of the probe environments with one discrete action."""

import functools

import pytest

from agents import dqn, networks
from agents.networks import heads
from environments import probes
from podracers import errors
from tests.agents import probe_learning


def _make(spec, encoder, core, total_steps, **options):
    return dqn.DQN(
        spec,
        network=functools.partial(networks.q_network, encoder=encoder, core=core),
        learning_rate=3e-3,
        gamma=probe_learning.GAMMA,
        batch_size=256,
        replay_ratio=4.0,
        replay_capacity=total_steps // 4,
        min_replay=1024,
        target_period=20,
        epsilon=0.2,
        epsilon_steps=total_steps // 2,
        **options,
    )


CURRICULUM = probe_learning.Curriculum(_make, 200)
RAINBOW = probe_learning.Curriculum(
    functools.partial(
        _make,
        distribution=heads.CategoricalReturn(-2.0, 2.0, 41),
        noisy=True,
        priority_exponent=0.5,
        importance_exponent=0.4,
        importance_steps=10_000,
    ),
    200,
)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.slow
def test_memory_cannot_be_learnt(learnt):
    """No feed-forward network can; R2D2 does: see `test_r2d2_probes.py`."""
    assert abs(learnt.mean_return(probes.Memory)) < 0.4


@pytest.mark.slow
def test_masked_actions():
    CURRICULUM.assert_learns_alone(probes.MaskedAction)


@pytest.mark.slow
def test_masked_actions_with_distributions_and_noise():
    RAINBOW.assert_learns_alone(probes.MaskedAction)


@pytest.mark.parametrize("probe", [probes.MultiDiscreteReward, probes.ContinuousReward])
def test_other_actions_are_refused(probe):
    with pytest.raises(errors.UserError, match="DQN needs discrete actions"):
        CURRICULUM.learn(probe())


def test_a_recurrent_network_is_refused():
    with pytest.raises(errors.UserError, match="use R2D2"):
        CURRICULUM.assert_learns_alone(probes.Memory)


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
