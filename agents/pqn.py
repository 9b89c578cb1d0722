"""Parallelised Q-learning: Q(lambda) from fresh rollouts, without replay or target parameters.

Gallici et al., "Simplifying Deep Temporal Difference Learning", 2024,
https://arxiv.org/abs/2407.04811; code: https://github.com/mttga/purejaxql. Many streams and layer
normalisation replace replay and target parameters, so the network should have `layer_norm` in its
encoders and cores, as the default network does. A recurrent network gets the previous action and
reward, and learns from whole streams.

The loss of a step, with the lambda-return `G` (`returns.lambda_returns`) of the values
`v(s) = max_a q(s, a)`:

    (q(s, a) - G)² / 2

Axis legend: `T` time, `B` streams of one device, `M` minibatches, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import rlax

from agents import (
    exploration,
    inputs,
    minibatches,
    networks,
    optimization,
    options,
    preprocessing,
    returns,
)
from agents.networks import encoders, layers
from podracers import environment, types

_NORMALIZED = functools.partial(
    networks.q_network, encoder=encoders.MLP((128, 128), "relu", layer_norm=True)
)


class _Batch(NamedTuple):
    """The data of the loss: a rollout, or a minibatch of it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    action: jax.Array
    target: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PQN(options.Learning):
    """Parallelised Q-network.

    `options.Learning` describes the options that are not listed here. The optimizer is rectified
    Adam (Liu et al., 2019, https://arxiv.org/abs/1908.03265).

    Attributes:
      network: `network(spec, num_actions)` returns a network with output `[..., A]`.
      q_lambda: trace parameter of the targets; 0 for one-step Q-learning.
      epochs: passes over each rollout.
      num_minibatches: gradient steps of each pass.
    """

    network: Callable[..., networks.Network] = _NORMALIZED
    q_lambda: float = options.fraction(0.65)
    epochs: int = options.count(2, most=10_000)
    num_minibatches: int = options.count(4)
    epsilon: float = options.fraction(0.05)
    epsilon_steps: int = options.count(10_000)
    evaluation_epsilon: float = options.fraction(0.0)
    learning_rate: float = 5e-4
    adam_epsilon: float = options.positive(1e-8, most=1e3)
    max_grad_norm: float | None = 10.0

    def __post_init__(self):
        options.check(self)
        options.require_discrete(self)
        _ = self._network  # built now, while gin's bindings are those of the configuration

    @functools.cached_property
    def _network(self) -> networks.Network:
        return options.make(self, "network", self._network_spec, self.spec.action.num_values)

    @functools.cached_property
    def _network_spec(self) -> environment.EnvironmentSpec:
        """The environment's spec, with the network's observations."""
        return inputs.extended_spec(self.spec) if self._is_recurrent else self.spec

    @functools.cached_property
    def _is_recurrent(self) -> bool:
        return options.make(self, "network", self.spec, self.spec.action.num_values).is_recurrent

    _preprocess = functools.cached_property(preprocessing.Preprocess.of)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        radam = optax.scale_by_radam(eps=self.adam_epsilon)
        schedule = self.learning_rate, self.anneal_steps
        return optimization.Optimizer(radam, *schedule, self.max_grad_norm)

    def init_learner(self, key):
        params = self._network.init(key, networks.zero_timestep(self._network_spec))
        normalizer = self._preprocess.init(self.spec.observation)
        return optimization.ReplayLearner.create(self._optimizer.init(params), (), normalizer)

    def init_memory(self, rollout):
        """Returns `()`: rollouts are not stored."""
        return ()

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams, with the previous action for recurrent networks."""
        count = env_id.shape[0]
        action = inputs.zero_action(self.spec.action, count) if self._is_recurrent else ()
        return inputs.ActorState(self._network.initial_core(count), action)

    def actor_params(self, learner):
        """Returns the parameters, the statistics of the observations, and epsilon."""
        epsilon = optax.linear_schedule(1.0, self.epsilon, self.epsilon_steps)
        return exploration.ActorParams(
            learner.params, learner.normalizer, epsilon(learner.agent_steps)
        )

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best legal action, or with probability epsilon a random one."""
        timestep = self._preprocess.apply(params.normalizer, timestep)
        if self._is_recurrent:
            timestep = inputs.extended(timestep, actor_state.action, self.spec.action)
        q_values, core = self._network.step(params.params, actor_state.core, timestep)
        epsilon = self.evaluation_epsilon if evaluation else params.epsilon
        action = exploration.epsilon_greedy(q_values, timestep.observation, epsilon, key)
        actor_state = inputs.ActorState(core, action if self._is_recurrent else ())
        best = exploration.best_q_value(q_values, timestep.observation)
        return action, actor_state, exploration.Extras(best)

    def update(self, state, rollout, key):
        """Takes `epochs * num_minibatches` gradient steps on one rollout."""
        learner = state.learner
        timestep = self._preprocess.apply_to_rollout(learner.normalizer, rollout.timestep)
        if self._is_recurrent:
            seen = rollout._replace(timestep=timestep)
            timestep = inputs.extended_rollout(seen, self.spec.action)
        core, timestep = self._network.prepare(rollout.actor_state.core, timestep)
        values = self._values(learner.params, core, timestep, rollout.extras)
        target = returns.lambda_returns(timestep, values, self.gamma, self.q_lambda)
        current = jax.tree.map(lambda x: x[:-1], timestep)
        batch = _Batch(current, rollout.action, target, returns.weights(timestep))
        learning_rate = self._optimizer.learning_rate_at(learner.agent_steps)
        deal = minibatches.dealer(self._network, batch, core, self.num_minibatches)

        def minibatch_step(learner, minibatch):
            train_state, output = self._optimizer.gradient_step(
                self._loss, learner.train_state, minibatch, learning_rate
            )
            return learner.step(train_state, ()), output.metrics

        def epoch(learner, epoch_key):
            return jax.lax.scan(minibatch_step, learner, deal(epoch_key))

        learner, metrics = jax.lax.scan(epoch, learner, jax.random.split(key, self.epochs))
        metrics = jax.tree.map(jnp.sum, metrics)
        return types.AgentState(learner.observe(rollout, self._preprocess), ()), metrics

    def _values(self, params, core, timestep, extras):
        """Returns the values `[T + 1, B]` of the best legal actions, once for each rollout."""
        if self._is_recurrent:
            q_values = networks.unroll_in_parts(self._network, params, core, timestep, lambda x: x)
            return exploration.best_q_value(q_values, timestep.observation)
        # Acting computed all values but the last.
        timestep = jax.tree.map(lambda x: x[-1], timestep)
        last, _ = self._network.step(params, core, timestep)
        last = exploration.best_q_value(last, timestep.observation)
        return jnp.concatenate([extras.value, last[None]])

    def _loss(self, params, minibatch):
        """Returns the squared error of the values of the chosen actions."""
        batch, core = minibatch
        q_values, _ = self._network.unroll(params, core, batch.timestep)
        taken = layers.take(q_values, batch.action)
        mean = functools.partial(types.Mean.of, weights=batch.weight)
        return optimization.LossOutput(
            {
                "loss/total": mean(rlax.l2_loss(taken, batch.target)),
                "value/mean": mean(taken),
                "value/target": mean(batch.target),
            }
        )
