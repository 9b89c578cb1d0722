"""Deep Q-learning: the shortest complete agent here, and the one to begin a new one from.

Mnih et al., "Human-level control through deep reinforcement learning", 2015,
https://doi.org/10.1038/nature14236, with the target of van Hasselt et al., "Deep Reinforcement
Learning with Double Q-learning", 2015, https://arxiv.org/abs/1509.06461, as an option.

Axis legend: `T` time, `B` streams, `N` drawn sequences, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from agents import exploration, networks, off_policy, returns
from agents.networks import encoders
from podracers import errors, types


class ActorParams(NamedTuple):
    """What acting needs."""

    params: types.PyTree
    normalizer: types.PyTree
    epsilon: jax.Array  # float32, how often an action is random


class Extras(NamedTuple):
    """What acting remembers of each step."""

    value: jax.Array  # [T, B] of the best action


@dataclasses.dataclass(frozen=True, eq=False)
class DQN(off_policy.OffPolicy):
    """The agent; see `OffPolicy` for the options that it shares.

    Attributes:
      network: `network(spec, num_actions)` returns a network that puts out `[..., A]`.
      double: whether the parameters that learn choose the action whose value the target takes.
      huber: errors larger than this count linearly.
      epsilon: how often an action is random, in the end.
      epsilon_steps: agent steps, over all streams, in which it falls linearly from 1 to that.
      evaluation_epsilon: how often an action is random in evaluation.
    """

    network: Callable[..., networks.Network] = networks.q_network
    double: bool = True
    huber: float = 1.0
    epsilon: float = 0.05
    epsilon_steps: int = 10_000
    evaluation_epsilon: float = 0.0

    _COUNTS: ClassVar = ("epsilon_steps", *off_policy.OffPolicy._COUNTS)
    _PORTIONS: ClassVar = ("epsilon", "evaluation_epsilon", *off_policy.OffPolicy._PORTIONS)
    _POSITIVE: ClassVar = ("huber", *off_policy.OffPolicy._POSITIVE)

    def __post_init__(self):
        """Refuses impossible options."""
        super().__post_init__()
        if not isinstance(self.spec.action, specs.DiscreteArray):
            raise errors.UserError(
                f"DQN needs discrete actions, and those of {self.spec.name} are "
                f"{self.spec.action!r}: use SAC or PPO"
            )
        if self._network.memory_length is None:
            raise errors.UserError("DQN learns no recurrent network from replay: use R2D2")

    @functools.cached_property
    def _network(self) -> networks.Network:
        return self.network(self.spec, self.spec.action.num_values)

    @property
    def _burn_in(self) -> int:
        return self._network.memory_length

    def _init_params(self, key):
        return self._network.init(key, networks.zero_timestep(self.spec))

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams: their latest frames, where the network stacks them."""
        return self._network.initial_core(env_id.shape[0])

    def actor_params(self, learner):
        """Returns the parameters, the statistics of the observations, and how much to explore."""
        epsilon = optax.linear_schedule(1.0, self.epsilon, self.epsilon_steps)
        return ActorParams(learner.params, learner.normalizer, epsilon(learner.agent_steps))

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best action, or at times a random one."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self._normalized(params.normalizer, timestep)
        q_values, actor_state = self._network.step(params.params, actor_state, timestep)
        epsilon = self.evaluation_epsilon if evaluation else params.epsilon
        action = exploration.epsilon_greedy(q_values, mask, epsilon, key)
        return action, actor_state, Extras(exploration.legal_max(q_values, mask))

    def _loss(self, params, target, sample):
        """Returns the error of the values `[1, N]` of the actions that were taken."""
        timestep, action = sample.rollout.timestep, sample.rollout.action
        mask = encoders.action_mask(timestep.observation)
        unroll = functools.partial(
            networks.unroll_after,
            self._network,
            core=self._network.initial_core(sample.weight.shape[0]),
            timestep=timestep,
            burn_in=self._burn_in,
        )
        q_values, q_target = unroll(params), unroll(target)  # [2, N, A]
        timestep, action, mask = jax.tree.map(
            lambda x: x[self._burn_in :], (timestep, action, mask)
        )
        best = exploration.legal_argmax(q_values if self.double else q_target, mask)
        values = jnp.take_along_axis(q_target, best[..., None], axis=-1)[..., 0]
        goal = jax.lax.stop_gradient(returns.n_step(timestep, values, self.gamma, 1))
        taken = jnp.take_along_axis(q_values[:-1], action[..., None], axis=-1)[..., 0]
        loss = optax.huber_loss(taken, goal, delta=self.huber)
        weight = returns.weights(timestep)
        metrics = {
            "loss/total": types.Mean.of(sample.weight * loss, weight),
            "value/mean": types.Mean.of(taken, weight),
            "value/target": types.Mean.of(goal, weight),
        }
        return off_policy.Learnt(metrics, jnp.abs(taken - goal)[0] * weight[0])
