"""Gradient steps: an optimizer with its norm clip and learning-rate schedule.

The learning rate stands outside of the optax transformation: its schedule counts agent steps, not
gradient steps, and agents log it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracers import parallel, types


class TrainState(NamedTuple):
    """What a gradient step changes; equal on all devices."""

    params: types.PyTree
    optimizer_state: optax.OptState


class LossOutput(NamedTuple):
    """What a loss function returns.

    Each metric is a mean over this device's part of the minibatch, and "loss/total" among them is
    the mean to minimise.
    """

    metrics: dict[str, types.Mean]
    priority: jax.Array | None = None  # [N] new priorities of replayed sequences, not negative


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
        if self.anneal_steps is None:
            return jnp.float32(self.learning_rate)
        schedule = optax.linear_schedule(self.learning_rate, 0.0, float(self.anneal_steps))
        return schedule(agent_steps.astype(jnp.float32))

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
          before clipping) among its metrics.
        """

        def share(params: types.PyTree) -> tuple[jax.Array, LossOutput]:
            output = loss_fn(params, minibatch)
            return parallel.share(output.metrics["loss/total"]), output

        params, optimizer_state, norm, output = parallel.gradient_step(
            share, train_state.params, train_state.optimizer_state, self.chain, learning_rate
        )
        metrics = output.metrics | {"gradient_norm": types.Mean.of(norm)}
        return TrainState(params, optimizer_state), output._replace(metrics=metrics)
