"""Gradient steps: an optimizer with its norm clip and learning-rate schedule.

The learning rate stands outside of the optax transformation: its schedule counts agent steps, not
gradient steps, and agents log it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import preprocessing
from podracers import parallel, types


class TrainState(NamedTuple):
    """Parameters and optimizer state; equal on all devices."""

    params: types.PyTree
    optimizer_state: optax.OptState


class LossOutput(NamedTuple):
    """The result of a loss function.

    Each metric is a mean over this device's part of the minibatch, and "loss/total" among them is
    the mean to minimise.
    """

    metrics: dict[str, types.Mean]
    priority: jax.Array | None = None  # [N] new priorities, of `replay.Replay.update_priorities`


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation, the norm clip before it and the learning rate after it.

    Attributes:
      transformation: optax transformation without a learning rate, such as `optax.scale_by_adam()`.
      learning_rate: initial learning rate.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      max_grad_norm: norm to which the gradient of the global batch is scaled down; None for no
        clipping.
    """

    transformation: optax.GradientTransformation
    learning_rate: float
    anneal_steps: float | None = None
    max_grad_norm: float | None = None

    @functools.cached_property
    def chain(self) -> optax.GradientTransformation:
        """The norm clip and the transformation."""
        clip = optax.identity()
        if self.max_grad_norm is not None:
            clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, self.transformation)

    def init(self, params: types.PyTree) -> TrainState:
        """Returns the state before the first gradient step."""
        return TrainState(params, self.chain.init(params))

    def learning_rate_at(self, agent_steps: jax.Array) -> jax.Array:
        """Returns the learning rate, a float32 scalar, after `agent_steps` over all streams."""
        final = None if self.anneal_steps is None else 0.0
        return annealed(self.learning_rate, final, self.anneal_steps, agent_steps)

    def gradient_step(
        self,
        loss_fn: Callable[[types.PyTree, types.PyTree], LossOutput],
        train_state: TrainState,
        minibatch: types.PyTree,
        learning_rate: jax.Array,
    ) -> tuple[TrainState, LossOutput]:
        """Takes one step along the gradient of the mean over the global minibatch.

        Args:
          loss_fn: `loss_fn(params, minibatch)`, whose counts do not depend on `params`.
          train_state: equal on all devices.
          minibatch: this device's part of it.
          learning_rate: a scalar that may be traced.

        Returns:
          The new state, and the output of `loss_fn` with "gradient_norm" (of the global gradient,
          before clipping) and "learning_rate" among its metrics.
        """

        def loss(params: types.PyTree) -> tuple[types.Mean, LossOutput]:
            output = loss_fn(params, minibatch)
            return output.metrics["loss/total"], output

        params, optimizer_state, norm, output = parallel.gradient_step(
            loss, train_state.params, train_state.optimizer_state, self.chain, learning_rate
        )
        metrics = output.metrics | {
            "gradient_norm": types.Mean.of(norm),
            "learning_rate": types.Mean.of(learning_rate),
        }
        return TrainState(params, optimizer_state), output._replace(metrics=metrics)


def annealed(
    initial: float, final: float | None, anneal_steps: float | None, agent_steps: jax.Array
) -> jax.Array:
    """Returns a number that changes linearly with the agent steps, a float32 scalar.

    Args:
      initial: the number at the beginning.
      final: the number from `anneal_steps` on; None for one that stays as it is.
      anneal_steps: agent steps, over all streams, until then; None where nothing changes.
      agent_steps: those before now, over all streams.
    """
    if final is None:
        return jnp.float32(initial)
    schedule = optax.linear_schedule(initial, final, float(anneal_steps))
    return schedule(agent_steps.astype(jnp.float32))


def adam(
    learning_rate: float,
    anneal_steps: float | None = None,
    epsilon: float = 1e-8,
    max_grad_norm: float | None = None,
    weight_decay: float = 0.0,
    decayed: types.PyTree = True,
) -> Optimizer:
    """Returns Adam (Kingma and Ba, 2014, https://arxiv.org/abs/1412.6980); see `Optimizer`.

    Args:
      learning_rate: initial learning rate.
      anneal_steps: agent steps in which it falls linearly to 0; None for a constant one.
      epsilon: constant that is added to the root of the second moment.
      max_grad_norm: norm to which the gradient is scaled down; None for no clipping.
      weight_decay: portion of the parameters that, times the learning rate, each step takes off
        (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017,
        https://arxiv.org/abs/1711.05101).
      decayed: a tree, or the beginning of one, of which parameters decay.
    """
    transformation = optax.scale_by_adam(eps=epsilon)
    if weight_decay:
        decay = optax.add_decayed_weights(weight_decay, decayed)
        transformation = optax.chain(transformation, decay)
    return Optimizer(transformation, learning_rate, anneal_steps, max_grad_norm)


def radam(
    learning_rate: float,
    anneal_steps: float | None = None,
    epsilon: float = 1e-8,
    max_grad_norm: float | None = None,
) -> Optimizer:
    """Returns rectified Adam (Liu et al., 2019, https://arxiv.org/abs/1908.03265); see `adam`."""
    transformation = optax.scale_by_radam(eps=epsilon)
    return Optimizer(transformation, learning_rate, anneal_steps, max_grad_norm)


def count_steps(agent_steps: jax.Array, rollout: types.Rollout) -> jax.Array:
    """Returns the agent steps over all streams after a rollout; runs under the mapped axis.

    Args:
      agent_steps: those before it, int32; it stops at the largest there is.
      rollout: this device's, `[T, B]`.
    """
    added = rollout.timestep.reward[1:].size * parallel.axis_size()
    return jnp.minimum(agent_steps, jnp.iinfo(jnp.int32).max - added) + added


class ReplayLearner(NamedTuple):
    """The learner of an agent with replay; equal on all devices."""

    train_state: TrainState
    target: types.PyTree  # older parameters, that targets are computed with; () where none
    normalizer: Any  # statistics of the observations; () where they are not normalised
    update: jax.Array  # int32, rollouts stored
    agent_steps: jax.Array  # int32, over all streams; it stops at the largest there is
    gradient_steps: jax.Array  # int32

    @property
    def params(self) -> types.PyTree:
        """The online parameters."""
        return self.train_state.params

    @classmethod
    def create(
        cls, train_state: TrainState, target: types.PyTree, normalizer: Any
    ) -> "ReplayLearner":
        """Returns the learner before the first rollout.

        Args:
          train_state: fresh parameters and the state of their optimizer.
          target: those of the parameters that there are older copies of.
          normalizer: statistics of no observations.
        """
        return cls(
            train_state=train_state,
            # Copies: the learner's state is donated, and a buffer only once.
            target=jax.tree.map(jnp.copy, target),
            normalizer=normalizer,
            update=jnp.zeros((), jnp.int32),
            agent_steps=jnp.zeros((), jnp.int32),
            gradient_steps=jnp.zeros((), jnp.int32),
        )

    def observe(
        self, rollout: types.Rollout, preprocess: preprocessing.Preprocess
    ) -> "ReplayLearner":
        """Counts the steps `[T, B]` of this device's rollout, and adds to the statistics of it."""
        return self._replace(
            normalizer=preprocess.update_statistics(self.normalizer, rollout.timestep),
            update=self.update + 1,
            agent_steps=count_steps(self.agent_steps, rollout),
        )

    def next_target(self, params: types.PyTree, period: int, rate: float) -> types.PyTree:
        """Returns the target parameters after the gradient step that led to `params`.

        Args:
          params: those of the new parameters that there are older copies of.
          period: gradient steps between updates of the target parameters.
          rate: step size of such an update; 1 copies.
        """
        is_due = (self.gradient_steps + 1) % period == 0
        return optax.incremental_update(params, self.target, jnp.where(is_due, rate, 0.0))

    def step(self, train_state: TrainState, target: types.PyTree) -> "ReplayLearner":
        """Returns the learner after a gradient step."""
        return self._replace(
            train_state=train_state, target=target, gradient_steps=self.gradient_steps + 1
        )
