"""R2D2 learns what is known of the probe environments with one discrete action, memory included."""

import functools

import jax
import pytest

from agents import cores, dqn, networks, r2d2
from environments import probes
from podracers import errors, evaluation
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


CURRICULUM = probe_learning.Curriculum(_make, 200)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe, remembers=True)


@pytest.mark.parametrize("probe", [probes.Memory, probes.MaskedAction])
def test_probes_by_themselves(probe):
    CURRICULUM.assert_learns_alone(probe)


def test_a_feed_forward_network_cannot_learn_the_memory_probe():
    def make(spec, encoder, core, total_steps):
        del core
        network = functools.partial(networks.q_network, encoder=encoder)
        return dqn.DQN(spec, network=network, learning_rate=3e-3, replay_capacity=total_steps)

    candidate = probes.Memory()
    agent, params = probe_learning.Curriculum(make, 50).learn(candidate)
    episodes = evaluation.Evaluator(agent, candidate, 128).run(params, jax.random.key(1))
    error = abs(episodes.mean_return() - candidate.memoryless_return)
    assert error < 0.05 + 4.0 * episodes.standard_error() < 0.5


@pytest.mark.parametrize("probe", [probes.MultiDiscreteReward, probes.ContinuousReward])
def test_other_actions_are_refused(probe):
    with pytest.raises(errors.UserError, match=r"R2D2 needs discrete .* use SAC or PPO"):
        CURRICULUM.learn(probe())


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
