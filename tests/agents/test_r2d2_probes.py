"""R2D2 learns what is known of the probe environments with one discrete action, memory included."""

import dataclasses
import functools

import pytest

from agents import networks, r2d2
from agents.networks import cores
from environments import probes
from podracers import errors
from tests.agents import probe_learning


def _make(spec, encoder, core, total_steps):
    core = core if core is not None else cores.LSTM(32)
    return r2d2.R2D2(
        spec,
        network=functools.partial(networks.q_network, encoder=encoder, core=core, dueling=True),
        sequence_length=12,
        burn_in=4,
        n_step=3,
        learning_rate=3e-3,
        gamma=probe_learning.GAMMA,
        batch_size=64,
        replay_ratio=4.0,
        replay_capacity=total_steps // 2,
        min_replay=2048,
        target_period=20,
        epsilon_base=0.6,
        epsilon_exponent=3.0,
    )


CURRICULUM = probe_learning.Curriculum(_make, 120)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe, remembers=True)


@pytest.mark.slow
def test_memory_is_played_right(learnt):
    """Which no feed-forward network does: see `test_dqn_probes.py`."""
    assert learnt.mean_return(probes.Memory) > 0.95


@pytest.mark.parametrize("probe", [probes.MultiDiscreteReward, probes.ContinuousReward])
def test_other_actions_are_refused(probe):
    with pytest.raises(errors.UserError, match=r"R2D2 needs discrete .* use SAC or PPO"):
        CURRICULUM.learn(probe())


@pytest.mark.learning
@pytest.mark.parametrize(
    "probe", [*probe_learning.ALIKE, probes.MaskedAction], ids=lambda probe: probe.__name__
)
def test_each_probe_by_itself(probe):
    dataclasses.replace(CURRICULUM, num_updates=400).assert_learns_alone(probe)
