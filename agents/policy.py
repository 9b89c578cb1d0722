"""A stochastic policy with a value function, of PPO, IMPALA and V-MPO.

Axis legend: `T` time, `B` streams of one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import inputs, networks, optimization, options, preprocessing
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

    raw: jax.Array  # action in units of the bounds, before squashing or clipping
    log_prob: jax.Array  # [T, B] of `raw`, under the acting policy
    value: jax.Array  # [T, B], from the acting parameters


class Batch(NamedTuple):
    """The data of a loss: a rollout, or a minibatch of it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    extras: Extras
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ActorCritic(options.Learning):
    """Options and acting of agents with a policy and a value; a subclass has `_optimizer`.

    Attributes:
      network: `network(spec, head)` returns a network with output `ActorCriticOutput`.
      head: kind of the action head; None for the default of the action's specification.
      num_minibatches: gradient steps of each pass over a rollout.
      value_cost: weight of the value loss, which is half of the squared error.
      greedy_evaluation: see `agents.options`.
      previous_action_and_reward: whether the network gets the previous action and reward beside the
        observation, see `agents.inputs`; by default only if it is recurrent.
    """

    network: Callable[..., networks.Network] = networks.actor_critic
    head: str | None = None
    num_minibatches: int = options.count(1)
    value_cost: float = options.non_negative(0.5, most=1e6)
    greedy_evaluation: bool = False
    previous_action_and_reward: bool | None = None

    def __post_init__(self):
        options.check(self)
        _ = self._policy.network  # built now, while gin's bindings are those of the configuration

    @functools.cached_property
    def _policy(self) -> "Policy":
        network = functools.partial(options.make, self, "network")
        return Policy(self.spec, network, self.head, self.previous_action_and_reward)

    _preprocess = functools.cached_property(preprocessing.of)

    @property
    def _optimizer(self) -> optimization.Optimizer:
        raise NotImplementedError

    def init_learner(self, key: jax.Array) -> Any:
        train_state = self._optimizer.init(self._policy.init(key))
        normalizer = self._preprocess.init(self.spec.observation)
        return Learner(train_state, normalizer, jnp.zeros((), jnp.int32))

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns the running returns that normalise rewards; `()` without normalisation."""
        return self._preprocess.init_memory(rollout)

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the core of the network and the previous action of `B` streams."""
        return self._policy.initial_state(env_id.shape[0])

    def actor_params(self, learner: Any) -> ActorParams:
        """Returns the parameters and the statistics of observations and returns."""
        return ActorParams(learner.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        timestep = self._preprocess.apply(params.normalizer, timestep)
        greedy = evaluation and self.greedy_evaluation
        return self._policy.act(params.params, actor_state, timestep, key, greedy)


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A network with an action head, for preprocessed time steps.

    Attributes:
      spec: specification of the environment.
      make_network: `make_network(spec, head)` returns a network with output `ActorCriticOutput`.
      head_kind: option `head` of `ActorCritic`.
    """

    spec: environment.EnvironmentSpec
    make_network: Callable[..., networks.Network]
    head_kind: str | None = None
    previous_action_and_reward: bool | None = None

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
