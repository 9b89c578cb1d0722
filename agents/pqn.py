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

from agents import networks
from agents.networks import encoders, layers
from agents.parts import exploration, inputs, minibatches, optimization, options, returns
from podracers import types

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
class PQN(inputs.NetworkAgent, options.Learning, options.Adam, exploration.EpsilonGreedy):
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
    learning_rate: float = 5e-4
    max_grad_norm: float | None = 10.0

    def __post_init__(self):
        super().__post_init__()
        options.require_discrete(self)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        return optimization.Optimizer.of(self, optax.scale_by_radam(eps=self.adam_epsilon))

    def init_memory(self, rollout):
        """Returns `()`: rollouts are not stored."""
        return ()

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best legal action, or with probability epsilon a random one."""
        timestep = self.preprocess.apply(params.normalizer, timestep)
        timestep = self._step_inputs(actor_state, timestep)
        q_values, core = self.net.step(params.params, actor_state.core, timestep)
        observation = timestep.observation
        action, extras = self._explore(params, q_values, observation, key, evaluation)
        return action, self._next_state(core, action), extras

    def update(self, state, rollout, key):
        """Takes `epochs * num_minibatches` gradient steps on one rollout."""
        learner = state.learner
        timestep = self.preprocess.apply_to_rollout(learner.normalizer, rollout.timestep)
        timestep = self._rollout_inputs(rollout._replace(timestep=timestep))
        core, timestep = self.net.prepare(rollout.actor_state.core, timestep)
        values = self._values(learner.params, core, timestep, rollout.extras)
        target = self.targets(timestep, values)
        current = jax.tree.map(lambda x: x[:-1], timestep)
        batch = _Batch(current, rollout.action, target, returns.weights(timestep))
        deal = minibatches.dealer(self.net, batch, core, self.num_minibatches)
        learner, metrics = self._learn_epochs(learner, deal, jax.random.split(key, self.epochs))
        return types.AgentState(learner.observe(rollout, self.preprocess), ()), metrics

    def _values(self, params, core, timestep, extras):
        """Returns the values `[T + 1, B]` of the best legal actions, once for each rollout."""
        if self.net.is_recurrent:
            q_values = networks.unroll_in_parts(self.net, params, core, timestep, lambda x: x)
            return exploration.best_q_value(q_values, timestep.observation)
        # Acting computed all values but the last.
        timestep = jax.tree.map(lambda x: x[-1], timestep)
        last, _ = self.net.step(params, core, timestep)
        last = exploration.best_q_value(last, timestep.observation)
        return jnp.concatenate([extras.value, last[None]])

    def targets(self, timestep: types.TimeStep, values: jax.Array) -> jax.Array:
        """Returns the targets `[T, B]` of the values of the chosen actions.

        Args:
          timestep: `[T + 1, B]`, with rewards to learn from.
          values: `[T + 1, B]` of the best legal actions there.
        """
        return returns.lambda_returns(timestep, values, self.gamma, self.q_lambda)

    def loss(self, params, minibatch, context):
        """Returns the squared error of the values of the chosen actions."""
        batch, core = minibatch
        q_values, _ = self.net.unroll(params, core, batch.timestep)
        taken = layers.take(q_values, batch.action)
        mean = functools.partial(types.Mean.of, weights=batch.weight)
        loss = mean(optax.losses.l2_loss(taken, batch.target))
        metrics = {"value/mean": mean(taken), "value/target": mean(batch.target)}
        return optimization.LossOutput(loss, metrics, outputs=q_values)
