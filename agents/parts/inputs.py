"""Network inputs beside the observation: the previous action and the reward that followed it.

Recurrent agents of IMPALA and R2D2 see both (Espeholt et al., 2018,
https://arxiv.org/abs/1802.01561; Kapturowski et al., 2019,
https://openreview.net/forum?id=r1lyTjAqYX), and agents that adapt within an episode need both (Duan
et al., "RL²", 2016, https://arxiv.org/abs/1611.02779). Both are zero at the first time step of an
episode.

Axis legend: `T` time, `B` streams, `D` parts of a multi-discrete action, `F` features.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from agents import networks
from agents.networks import encoders, heads
from agents.parts import options
from podracers import environment, types


class ActorState(NamedTuple):
    """The actor state of a stream."""

    core: Any  # [B, ...] of the network
    action: Any  # [B, ...] the previous action; () if the network does not see it


def zero_action(action_spec: specs.BoundedArray, batch_size: int) -> jax.Array:
    """Returns zeros `[B, ...]` in the shape and dtype of an agent's actions."""
    dtype = jnp.float32 if np.issubdtype(action_spec.dtype, np.floating) else jnp.int32
    return jnp.zeros((batch_size, *action_spec.shape), dtype)


def extended(
    timestep: types.TimeStep, action: jax.Array, action_spec: specs.BoundedArray
) -> types.TimeStep:
    """Returns time steps `[..., B]` with the previous action and reward in their observations.

    Rewards are preprocessed; `action` is the environment's, before each time step. In a game of two
    players the reward is that of the player to move, the negative of the reward of the other one.
    """
    first = timestep.first()
    action = jnp.where(first[..., None], 0.0, heads.features(action, action_spec))
    reward = jnp.where(timestep.discount < 0.0, -timestep.reward, timestep.reward)
    reward = jnp.where(first, 0.0, reward)
    return timestep._replace(observation=_beside(timestep.observation, action, reward))


def _beside(observation: types.PyTree, action: Any, reward: Any) -> dict[str, Any]:
    """Puts the previous action and reward beside an observation; reserved parts stay outermost."""
    inputs = {
        "observation": encoders.without_mask(observation),
        "previous_action": action,
        "previous_reward": reward,
    }
    kept = (environment.ACTION_MASK, environment.ACTIVE) if isinstance(observation, dict) else ()
    return inputs | {key: observation[key] for key in kept if key in observation}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NetworkAgent(options.Optimized):
    """Agents whose option `network` is a function of a specification and of `_outputs`."""

    @property
    def previous_action_and_reward(self) -> bool | None:
        """Whether the network gets both; None if only a recurrent network does."""
        return None

    @property
    def _outputs(self) -> Any:
        """The argument of `network` that decides its outputs."""
        return self.spec.num_actions

    @functools.cached_property
    def net(self) -> Any:
        """The network that the option `network` makes."""
        return options.make(self, "network", self._network_spec, self._outputs)

    @functools.cached_property
    def _network_spec(self) -> environment.EnvironmentSpec:
        if not self._is_extended:
            return self.spec
        action, reward = self.spec.action, specs.Array((), np.float32)
        shape = jax.eval_shape(lambda: heads.features(zero_action(action, 1), action)).shape
        observation = _beside(self.spec.observation, specs.Array(shape[1:], np.float32), reward)
        return dataclasses.replace(self.spec, observation=observation)

    @functools.cached_property
    def _is_extended(self) -> bool:
        if self.previous_action_and_reward is None:
            return options.make(self, "network", self.spec, self._outputs).is_recurrent
        return self.previous_action_and_reward

    def init_params(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters of the network."""
        return self.net.init(key, networks.zero_timestep(self._network_spec))

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the cores of `B` streams, and the previous actions that the network sees."""
        batch_size = env_id.shape[0]
        action = zero_action(self.spec.action, batch_size) if self._is_extended else ()
        return ActorState(self.net.initial_core(batch_size), action)

    def _next_state(self, core: Any, action: jax.Array) -> ActorState:
        """Returns the actor state of `B` streams after an action `[B, ...]`."""
        return ActorState(core, action if self._is_extended else ())

    def _step_inputs(self, actor_state: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns time steps `[B]` with the network's inputs in acting."""
        if not self._is_extended:
            return timestep
        return extended(timestep, actor_state.action, self.spec.action)

    def _rollout_inputs(self, rollout: types.Rollout) -> types.TimeStep:
        """Returns the time steps `[T + 1, B]` of a rollout with the network's inputs in acting.

        The rollout's `actor_state` holds the action before its first time step.
        """
        if not self._is_extended:
            return rollout.timestep
        action = jnp.concatenate([rollout.actor_state.action[None], rollout.action])
        return extended(rollout.timestep, action, self.spec.action)
