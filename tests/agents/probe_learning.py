"""How an agent learns the probe environments, for the tests of every algorithm.

Compiling takes longer than learning, so the probes that look alike are learnt as one environment;
`make test-learning` learns each of them by itself, which is what tells a bug by its name.

Axis legend: `N` observations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from agents import networks
from agents.networks import cores, encoders
from environments import probes
from podracers import agent as agent_lib
from podracers import anakin, environment, evaluation, types

GAMMA = 0.9
ALIKE = (
    probes.ConstantReward,
    probes.ObservationReward,
    probes.ActionReward,
    probes.ObservationActionReward,
    probes.DelayedReward,
    probes.Truncation,
    probes.Memory,
)
RECURRENT = (probes.Memory, probes.Bandit)
UNLIKE = (
    probes.MaskedAction,
    probes.MultiDiscreteReward,
    probes.ContinuousReward,
    *RECURRENT,
)
ROLLOUT_LENGTH = 8
_WIDTH = 4  # of the widest observation of those that are alike


class _MixtureState(NamedTuple):
    which: jax.Array  # int32
    states: tuple


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Plays one of several probes each episode; the observation tells which, one-hot.

    Attributes:
      parts: the probes.
      only: the index of the one that is always played; None for any of them.
    """

    parts: tuple
    only: int | None = None

    @property
    def spec(self):
        observation = specs.Array((len(self.parts) + _WIDTH,), np.float32)
        return environment.EnvironmentSpec("Mixture", observation, specs.DiscreteArray(2))

    def reset(self, key):
        which = jax.random.randint(jax.random.fold_in(key, 0), (), 0, len(self.parts))
        which = which if self.only is None else jnp.full_like(which, self.only)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Curriculum:
    """How long an algorithm takes over the probes, and with which settings.

    Attributes:
      make: `make(spec, encoder=, core=, total_steps=)` returns the agent; its discount is `GAMMA`.
      num_updates: how many rollouts are learnt from.
    """

    make: Callable[..., agent_lib.Agent]
    num_updates: int

    def learn(self, candidate: Any, core=None, num_envs: int = 32, hidden: int = 16):
        """Returns the agent, with greedy evaluations, and what it learnt."""
        agent = self.make(
            candidate.spec,
            encoder=encoders.MLP((hidden,)),
            core=core,
            total_steps=self.num_updates * num_envs * ROLLOUT_LENGTH,
        )
        runner = anakin.Anakin(agent, candidate, num_envs, ROLLOUT_LENGTH, num_devices=1)
        state, _ = runner.step(runner.init(0), self.num_updates)
        return agent_lib.greedy(agent) or agent, jax.device_get(runner.actor_params(state))

    def learn_together(self) -> "Learnt":
        """Learns all that are alike, without memory."""
        mixture = Mixture(tuple(probe() for probe in ALIKE))
        return Learnt(mixture, *self.learn(mixture, num_envs=128, hidden=32))

    def assert_learns_alone(self, probe: type) -> None:
        """Asserts that a probe's values and returns are learnt."""
        candidate = probe()
        agent, params = self.learn(candidate, cores.LSTM(16) if probe in RECURRENT else None)
        values = _values(agent, params, candidate.observations())
        np.testing.assert_allclose(values, candidate.value(GAMMA), rtol=0.05, atol=0.05)
        evaluator = evaluation.Evaluator(agent, candidate, num_episodes=128)
        episodes = evaluator.run(params, jax.random.key(1))
        # Situations are drawn at random, so the best return of a sample varies.
        error = abs(episodes.mean_return() - candidate.optimal_return)
        assert error < 0.05 + 4.0 * episodes.standard_error()


def actor_critic(algorithm: Callable[..., agent_lib.Agent], **options) -> Callable:
    """Returns the `make` of a curriculum for an actor-critic."""

    def make(spec, encoder, core, total_steps):
        return algorithm(
            spec,
            network=functools.partial(networks.actor_critic, encoder=encoder, core=core),
            anneal_steps=total_steps,
            gamma=GAMMA,
            entropy_cost=0.001,
            **options,
        )

    return make


class Learnt(NamedTuple):
    """An agent that learnt a mixture."""

    mixture: Mixture
    agent: agent_lib.Agent
    params: Any

    def assert_values(self, probe: type, remembers: bool = False) -> None:
        """Asserts that the values of one probe of the mixture are known.

        Args:
          probe: which one.
          remembers: whether the agent has memory. Then it knows the cue, but time steps from the
            middle of an episode, shown as its start, are like nothing that it has seen.
        """
        index = ALIKE.index(probe)
        part = self.mixture.parts[index]
        observation = self.mixture.observation(index, part.observations())
        values, expected = _values(self.agent, self.params, observation), part.value(GAMMA)
        if remembers and probe is probes.DelayedReward:
            values, expected = values[:1], expected[:1]
        if probe is probes.Memory and not remembers:
            # Without memory every answer is right after one cue and wrong after the other.
            assert abs(np.mean(values) - part.memoryless_return) < 0.3 < np.mean(expected) / 2
        else:
            np.testing.assert_allclose(values, expected, rtol=0.05, atol=0.15)

    def mean_return(self, probe: type) -> float:
        """Returns what 128 episodes of one probe of the mixture pay on average."""
        candidate = dataclasses.replace(self.mixture, only=ALIKE.index(probe))
        evaluator = evaluation.Evaluator(self.agent, candidate, num_episodes=128)
        return evaluator.run(self.params, jax.random.key(1)).mean_return()


def _values(agent, params, observation):
    """Returns what the agent thinks observations `[N, ...]` are worth at the start."""
    observation = jax.tree.map(jnp.asarray, observation)
    count = len(jax.tree.leaves(observation)[0])
    first = jnp.full((count,), types.FIRST, jnp.int8)
    timestep = types.TimeStep(observation, jnp.zeros(count), jnp.ones(count), first)
    core = agent.init_actor(jnp.arange(count), count)
    keys = jax.random.split(jax.random.key(0), count)
    act = jax.jit(functools.partial(agent.act, evaluation=True))
    return act(params, core, timestep, keys)[2].value
