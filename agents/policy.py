"""A stochastic policy with a value function, of PPO, IMPALA and V-MPO.

Axis legend: `T` time, `B` streams of one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from agents import inputs, networks, optimization, options
from agents.networks import encoders, heads
from podracers import environment, types


class Learner(NamedTuple):
    """The learner of an actor-critic; equal on all devices."""

    train_state: optimization.TrainState
    normalizer: Any  # statistics of observations and returns, see `preprocessing`; or ()
    update: jax.Array  # int32, number of rollouts so far

    @property
    def params(self) -> types.PyTree:
        """The parameters of the network."""
        return self.train_state.params


class ActorParams(NamedTuple):
    """The part of the learner that acting needs."""

    params: types.PyTree
    normalizer: Any


class Extras(NamedTuple):
    """The data of each step that acting stores for learning."""

    raw: jax.Array  # action before squashing or clipping
    log_prob: jax.Array  # [T, B] of `raw`, under the acting policy
    value: jax.Array  # [T, B], from the acting parameters


class Batch(NamedTuple):
    """The data of a loss: a rollout, or a minibatch of it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    extras: Extras
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A network with an action head, for preprocessed time steps.

    Attributes:
      spec: specification of the environment.
      make_network: `make_network(spec, head)` returns a network with output `ActorCriticOutput`.
      head_kind: option `head` of an agent; see `agents.options`, as `previous_action_and_reward`.
    """

    spec: environment.EnvironmentSpec
    make_network: Callable[..., networks.Network]
    head_kind: str | None = None
    previous_action_and_reward: bool | None = None

    @classmethod
    def of(cls, agent: Any) -> "Policy":
        """Returns the policy with an agent's options `network`, `head` and the last one."""
        network = functools.partial(options.make, agent, "network")
        return cls(agent.spec, network, agent.head, agent.previous_action_and_reward)

    @functools.cached_property
    def head(self) -> heads.ActionHead:
        """The action head, which reads the network's policy output."""
        return heads.from_spec(self.spec.action, self.head_kind)

    @functools.cached_property
    def network(self) -> networks.Network:
        """The network, for observations with its additional inputs."""
        return self.make_network(self._network_spec, self.head)

    @functools.cached_property
    def _network_spec(self) -> environment.EnvironmentSpec:
        return inputs.extended_spec(self.spec) if self._extends_inputs else self.spec

    @functools.cached_property
    def _extends_inputs(self) -> bool:
        if self.previous_action_and_reward is None:
            return self.make_network(self.spec, self.head).is_recurrent
        return self.previous_action_and_reward

    def init(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters of the network."""
        return self.network.init(key, networks.zero_timestep(self._network_spec))

    def initial_state(self, batch_size: int) -> inputs.ActorState:
        """Returns the actor state of `B` streams before their first time step."""
        core = self.network.initial_core(batch_size)
        if not self._extends_inputs:
            return inputs.ActorState(core, ())
        return inputs.ActorState(core, inputs.zero_action(self.spec.action, batch_size))

    def act(
        self,
        params: types.PyTree,
        actor_state: inputs.ActorState,
        timestep: types.TimeStep,
        key: jax.Array,
        greedy: bool = False,
    ) -> tuple[types.PyTree, inputs.ActorState, Extras]:
        """Samples an action for each stream, or takes the most probable one if `greedy` (static).

        Returns `(action, actor_state, extras)`, each `[B, ...]`; `key` is `[B]` typed keys.
        """
        mask = encoders.action_mask(timestep.observation)
        if self._extends_inputs:
            timestep = inputs.extended(timestep, actor_state.action, self.spec.action)
        output, core = self.network.step(params, actor_state.core, timestep)
        is_pair = isinstance(output, networks.ActorCriticOutput)
        options.require_output(is_pair, output, "an ActorCriticOutput")
        if greedy:
            raw = self.head.mode(output.policy, mask)
        else:
            raw = self.head.sample(output.policy, mask, key)
        log_prob = self.head.log_prob(output.policy, mask, raw)
        action = self.head.to_action(raw)
        actor_state = inputs.ActorState(core, action if self._extends_inputs else ())
        return action, actor_state, Extras(raw, log_prob, output.value)

    def network_inputs(self, rollout: types.Rollout) -> types.TimeStep:
        """Returns the time steps `[T + 1, B]` of a rollout with the network's inputs in acting."""
        if self._extends_inputs:
            return inputs.extended_rollout(rollout, self.spec.action)
        return rollout.timestep
