"""SAC learns what is known of the probe environments, with discrete actions and continuous ones."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from agents import sac
from agents.networks import encoders, sac_heads
from agents.networks import sac as sac_networks
from environments import probes
from podracers import errors, types
from tests.agents import probe_learning


class _ActorParams(NamedTuple):
    acting: sac.ActorParams
    critic: types.PyTree


class _Extras(NamedTuple):
    value: Any  # [B]


@dataclasses.dataclass(frozen=True, eq=False)
class _Valuing:
    """SAC whose extras tell the value of a time step; acting itself needs no critics."""

    agent: sac.SAC
    greedy_evaluation: bool = False

    def __getattr__(self, name):
        return getattr(self.agent, name)

    def actor_params(self, learner):
        return _ActorParams(self.agent.actor_params(learner), learner.params.critic)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        agent = dataclasses.replace(self.agent, greedy_evaluation=self.greedy_evaluation)
        action, state, _ = agent.act(params.acting, actor_state, timestep, key, evaluation)
        seen = self.agent._kind.to_critics(action)
        features = encoders.without_mask(timestep.observation)
        values = self.agent._network.values(params.critic, features, seen)
        value = jnp.min(self.agent._kind.taken(values, action), axis=0)
        return action, state, _Extras(value)


def _make(spec, encoder, core, total_steps):
    del encoder, core
    target_entropy = (
        0.05 if isinstance(sac_heads.head_from_spec(spec), sac_heads.Discrete) else -4.0
    )
    agent = sac.SAC(
        spec,
        network=functools.partial(
            sac_networks.sac_network, hidden_sizes=(32, 32), activation="tanh"
        ),
        learning_rate=3e-3,
        anneal_steps=total_steps,
        gamma=probe_learning.GAMMA,
        batch_size=128,
        replay_ratio=4.0,
        replay_capacity=total_steps // 4,
        min_replay=1024,
        target_rate=0.05,
        initial_temperature=0.1,
        target_entropy=target_entropy,
    )
    return _Valuing(agent)


CURRICULUM = probe_learning.Curriculum(_make, 200)


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    return CURRICULUM.learn_together()


@pytest.mark.slow
@pytest.mark.parametrize("probe", probe_learning.ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    learnt.assert_values(probe)


@pytest.mark.slow
@pytest.mark.parametrize("probe", [probes.MaskedAction, probes.ContinuousReward])
def test_probes_by_themselves(probe):
    CURRICULUM.assert_learns_alone(probe)


def test_other_actions_are_refused():
    with pytest.raises(errors.UserError, match="SAC needs continuous actions or one discrete"):
        CURRICULUM.learn(probes.MultiDiscreteReward())


@pytest.mark.learning
@pytest.mark.parametrize("probe", probe_learning.ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    CURRICULUM.assert_learns_alone(probe)
