"""Soft actor-critic, for continuous actions and for discrete ones.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018,
https://arxiv.org/abs/1812.05905; the discrete form is that of Christodoulou, "Soft Actor-Critic for
Discrete Action Settings", 2019, https://arxiv.org/abs/1910.07207.

The policy, the critics and the temperature take each step at once, along the gradient of the sum of
three losses, none of which reaches what the others learn. That is three optimizers of one rate.

Axis legend: `T` time, `B` streams, `N` drawn sequences.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from agents import off_policy, options, returns
from agents.networks import encoders, sac_policies
from agents.networks import sac as sac_networks
from podracers import types


class ActorParams(NamedTuple):
    """What acting needs."""

    policy: types.PyTree
    encoder: types.PyTree
    normalizer: Any
    is_random: jax.Array  # bool, whether actions are uniformly random still


class _Moment(NamedTuple):
    """One of the two time steps of a transition, as the networks see it."""

    observation: types.PyTree  # [N, ...]
    mask: jax.Array | None
    key: jax.Array  # [N] typed keys, of what the policy samples there


@dataclasses.dataclass(frozen=True, eq=False)
class SAC(off_policy.OffPolicy):
    """The agent; see `OffPolicy` for the options that it shares.

    Attributes:
      network: `network(spec, kind)` returns a `SACNetwork`; `kind` is that of the actions.
      initial_temperature: the price of entropy at the start, in units of the scaled reward.
      target_entropy: what the temperature is learnt for. Continuous actions: nats for each
        component, taken as a portion of its range (at most log 2, by default -1). Discrete ones:
        the portion of the entropy of the uniform policy over what is legal (at most 1, by default
        0.98).
      random_steps: agent steps over all streams, at the start, in which actions are uniformly
        random.
      greedy_evaluation: whether evaluations take the most probable action (of continuous ones the
        squashed mean); they sample otherwise, as training does. By default True for continuous
        actions, as published, and False for discrete ones.
    """

    learning_rate: float = 3e-4
    batch_size: int = 256
    replay_capacity: int = 1_000_000
    replay_ratio: float = 256.0
    target_rate: float = 0.005
    network: Callable[..., sac_networks.SACNetwork] = sac_networks.sac_network
    initial_temperature: float = 1.0
    target_entropy: float | None = None
    random_steps: int = 0
    greedy_evaluation: bool | None = None

    _POSITIVE: ClassVar = ("initial_temperature", *off_policy.OffPolicy._POSITIVE)

    def __post_init__(self):
        """Refuses impossible options."""
        super().__post_init__()
        if self.greedy_evaluation is None:
            object.__setattr__(self, "greedy_evaluation", self._kind.default_greedy_evaluation)
        most = self._kind.most_target_entropy
        options.expect(
            self,
            "target_entropy",
            self._target_entropy < most,
            f"less than {most:.3g}, the uniform policy's",
        )
        options.expect(
            self,
            "random_steps",
            isinstance(self.random_steps, int) and self.random_steps >= 0,
            "an int, 0 or more",
        )
        _ = self._network

    @functools.cached_property
    def _kind(self) -> sac_policies.Policy:
        return sac_policies.from_spec(self.spec)

    @functools.cached_property
    def _network(self) -> sac_networks.SACNetwork:
        return self.network(self.spec, self._kind)

    @property
    def _target_entropy(self) -> float:
        if self.target_entropy is None:
            return self._kind.default_target_entropy
        return self.target_entropy

    @property
    def _burn_in(self) -> int:
        return self._network.memory_length

    def _init_params(self, key):
        return self._network.init(key, math.log(self.initial_temperature))

    def _init_target(self, params):
        return params.critic

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the latest frames of `B` streams, where the network stacks them."""
        return self._network.initial_core(env_id.shape[0])

    def actor_params(self, learner):
        """Returns the policy, the statistics of the observations, and whether it acts yet."""
        params = learner.params
        encoder = self._network.encoder_params(params.critic)
        is_random = learner.agent_steps < self.random_steps
        return ActorParams(params.policy, encoder, learner.normalizer, is_random)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action, or takes the mode (see `greedy_evaluation`)."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self._normalized(params.normalizer, timestep)
        observation, actor_state = self._network.observe(actor_state, timestep)
        features = self._network.encode(params.encoder, observation)
        outputs = self._network.outputs(params.policy, features)
        action = self._kind.act(outputs, mask, key, mode=evaluation and self.greedy_evaluation)
        if self.random_steps and not evaluation:
            random = self._kind.random(mask, key)
            action = jnp.where(params.is_random, random, action)
        return action, actor_state, ()

    def _loss(self, params, target, sample):
        """Returns the losses of the critics, the policy and the temperature, of `[1, N]` steps."""
        timestep, action = jax.tree.map(
            lambda x: x[self._burn_in :], (sample.rollout.timestep, sample.rollout.action)
        )
        moment_tm1, moment_t = self._moments(timestep, sample)
        frozen = jax.lax.stop_gradient(params)
        price = jnp.exp(frozen.log_temperature)  # of a nat of entropy
        goal = self._goal(frozen, target, timestep, moment_t)
        features = self._network.encode(params.critic, moment_tm1.observation)
        seen = self._kind.to_critics(action[0])
        taken = self._kind.taken(self._network.values(params.critic, features, seen), action[0])
        expected = self._expect(
            params.policy, frozen.critic, *jax.lax.stop_gradient((features, features)), moment_tm1
        )
        wanted = self._kind.target_entropy(self._target_entropy, moment_tm1.mask)
        surplus = jax.lax.stop_gradient(expected.entropy - wanted)
        critic_loss = 0.5 * jnp.sum(jnp.square(taken - goal), axis=0)
        policy_loss = -expected.value - price * expected.entropy
        temperature_loss = jnp.exp(params.log_temperature) * surplus
        weight = returns.weights(timestep)[0]  # [N]
        mean = functools.partial(types.Mean.of, weights=weight)
        metrics = {
            "loss/total": mean(sample.weight * (critic_loss + policy_loss + temperature_loss)),
            "loss/critic": mean(critic_loss),
            "loss/policy": mean(policy_loss),
            "policy/entropy": mean(expected.entropy),
            "policy/temperature": types.Mean.of(price),
            "value/mean": mean(jnp.mean(taken, axis=0)),
            "value/target": mean(goal),
        }
        return off_policy.Learnt(metrics, jnp.mean(jnp.abs(taken - goal), axis=0) * weight)

    def _moments(self, timestep, sample) -> tuple[_Moment, _Moment]:
        """Returns both time steps of the transitions, with the stacks of frames there."""
        observation = self._network.observe_after(sample.rollout.timestep)
        mask = encoders.action_mask(timestep.observation)
        keys = jax.vmap(jax.random.split, out_axes=1)(sample.key)  # [2, N]
        both = _Moment(observation, mask, keys)
        return jax.tree.map(lambda x: x[0], both), jax.tree.map(lambda x: x[1], both)

    def _goal(self, params, target, timestep, moment_t: _Moment) -> jax.Array:
        """Returns what the values `[N]` of the actions that were taken should be.

        No gradient stops here: `params` have to be constants.
        """
        features = self._network.encode(params.critic, moment_t.observation)
        target_features = self._network.encode(target, moment_t.observation)
        expected = self._expect(params.policy, target, features, target_features, moment_t)
        soft = expected.value + jnp.exp(params.log_temperature) * expected.entropy
        # The first time step is where no transition arrives, so its value is never read.
        values = jnp.stack([jnp.zeros_like(soft), soft])
        return returns.n_step(timestep, values, self.gamma, 1)[0]

    def _expect(
        self, policy, critic, features, critic_features, moment: _Moment
    ) -> sac_policies.Expectation:
        """Returns what the policy can expect by the critics; each sees features of its own."""
        outputs = self._network.outputs(policy, features)
        critics = functools.partial(self._network.values, critic, critic_features)
        return self._kind.expect(outputs, moment.mask, moment.key, critics)
