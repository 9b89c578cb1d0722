"""PPO learns what is known of every probe environment, in seconds.

Compiling takes longer than learning, so the probes that look alike are learnt as one environment;
`make test-learning` learns each of them by itself, which is what tells a bug by its name.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import cores, encoders, networks, ppo
from environments import probes
from podracers import anakin, environment, evaluation, types

GAMMA = 0.9
NUM_UPDATES = 80
ALIKE = (
    probes.ConstantReward,
    probes.ObservationReward,
    probes.ActionReward,
    probes.ObservationActionReward,
    probes.DelayedReward,
    probes.Truncation,
    probes.Memory,
)
UNLIKE = (probes.MaskedAction, probes.MultiDiscreteReward, probes.ContinuousReward, probes.Memory)
_WIDTH = 4  # of the widest observation of those that are alike


class _MixtureState(NamedTuple):
    which: jax.Array  # int32
    states: tuple


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Plays one of several probes each episode; the observation tells which, one-hot."""

    parts: tuple

    @property
    def spec(self):
        observation = specs.Array((len(self.parts) + _WIDTH,), np.float32)
        return environment.EnvironmentSpec("Mixture", observation, specs.DiscreteArray(2))

    def reset(self, key):
        which = jax.random.randint(jax.random.fold_in(key, 0), (), 0, len(self.parts))
        pairs = [part.reset(key) for part in self.parts]
        return self._choose(which, pairs)

    def step(self, state, action):
        pairs = [part.step(s, action) for part, s in zip(self.parts, state.states)]
        return self._choose(state.which, pairs)

    def observation(self, which, observation):
        """Returns `[N, F]` from the observations `[N, ...]` of one of the probes."""
        padded = jnp.pad(observation, ((0, 0), (0, _WIDTH - observation.shape[1])))
        label = jnp.arange(len(self.parts)) == which
        return jnp.concatenate([jnp.tile(label, (len(padded), 1)), padded], axis=1)

    def _choose(self, which, pairs):
        timesteps = [
            timestep._replace(observation=self.observation(index, timestep.observation[None])[0])
            for index, (_, timestep) in enumerate(pairs)
        ]
        timestep = jax.tree.map(lambda *xs: jnp.stack(xs)[which], *timesteps)
        return _MixtureState(which, tuple(state for state, _ in pairs)), timestep


def _learn(candidate, core=None, num_envs=32, hidden=16):
    """Returns the agent and what it learnt."""
    rollout_length = 8
    agent = ppo.PPO(
        candidate.spec,
        network=functools.partial(
            networks.actor_critic, encoder=encoders.MLP((hidden,)), core=core
        ),
        learning_rate=0.02,
        anneal_steps=NUM_UPDATES * num_envs * rollout_length,
        gamma=GAMMA,
        entropy_cost=0.001,
    )
    runner = anakin.Anakin(agent, candidate, num_envs, rollout_length, num_devices=1)
    state, _ = runner.step(runner.init(0), NUM_UPDATES)
    return agent, jax.device_get(runner.actor_params(state))


def _values(agent, params, observation):
    """Returns what the agent thinks observations `[N, ...]` are worth at the start."""
    observation = jax.tree.map(jnp.asarray, observation)
    count = len(jax.tree.leaves(observation)[0])
    first = jnp.full((count,), types.FIRST, jnp.int8)
    timestep = types.TimeStep(observation, jnp.zeros(count), jnp.ones(count), first)
    core = agent.init_actor(jnp.arange(count), count)
    keys = jax.random.split(jax.random.key(0), count)
    return agent.act(params, core, timestep, keys, evaluation=True)[2].value


def _learn_alone(probe, core=None):
    """Asserts that a probe's values and returns are learnt."""
    candidate = probe()
    agent, params = _learn(candidate, core)
    values = _values(agent, params, candidate.observations())
    np.testing.assert_allclose(values, candidate.value(GAMMA), rtol=0.05, atol=0.05)
    evaluator = evaluation.Evaluator(agent, candidate, num_episodes=128)
    episodes = evaluator.run(params, jax.random.key(1))
    # Situations are drawn at random, so the best return of a sample varies.
    error = abs(episodes.mean_return() - candidate.optimal_return)
    assert error < 0.05 + 4.0 * episodes.standard_error()


@pytest.fixture(scope="module", name="learnt")
def _learnt():
    """All that are alike, learnt without memory."""
    mixture = Mixture(tuple(probe() for probe in ALIKE))
    return mixture, *_learn(mixture, num_envs=128, hidden=32)


@pytest.mark.parametrize("probe", ALIKE, ids=lambda probe: probe.__name__)
def test_values_of_probes_that_are_alike(learnt, probe):
    mixture, agent, params = learnt
    part = mixture.parts[ALIKE.index(probe)]
    observation = mixture.observation(ALIKE.index(probe), part.observations())
    values, expected = _values(agent, params, observation), part.value(GAMMA)
    if probe is probes.Memory:
        # Without memory every answer is right after one cue and wrong after the other.
        assert abs(np.mean(values) - part.memoryless_return) < 0.3 < np.mean(expected) / 2
    else:
        np.testing.assert_allclose(values, expected, rtol=0.05, atol=0.15)


@pytest.mark.parametrize("probe", UNLIKE, ids=lambda probe: probe.__name__)
def test_probes_that_are_like_no_other(probe):
    _learn_alone(probe, cores.LSTM(16) if probe is probes.Memory else None)


def test_every_probe_is_learnt():
    assert {*ALIKE, *UNLIKE} == set(probes.ALL)


@pytest.mark.learning
@pytest.mark.parametrize("probe", ALIKE[:-1], ids=lambda probe: probe.__name__)
def test_each_probe_by_itself(probe):
    _learn_alone(probe)
