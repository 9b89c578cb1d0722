"""Gradient steps: an optimizer with its norm clip and learning-rate schedule.

The learning rate is applied outside of the optax transformation, because its schedule counts agent
steps, not gradient steps, and agents log it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax

from agents.backends import layouts
from agents.parts import options, preprocessing
from podracers import parallel, types


class TrainState(NamedTuple):
    """Parameters and optimizer state; equal on all devices."""

    params: types.PyTree
    optimizer_state: optax.OptState


class Context(NamedTuple):
    """The constants of an update that a loss may depend on, beside its minibatch."""

    agent_steps: jax.Array  # float32, over all streams, for schedules
    target: types.PyTree = ()  # target parameters; () where an agent has none


class LossOutput(NamedTuple):
    """The result of an agent's `loss`; means are over this device's part of the minibatch."""

    loss: types.Mean  # minimised, and logged as "loss/total"
    metrics: dict[str, types.Mean]  # further logs
    priority: jax.Array | None = None  # [N] new priorities for `Replay.update_priorities`
    outputs: Any = ()  # the network's, from which a subclass computes further terms of the loss


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation, the norm clip before it and the learning rate after it.

    Attributes:
      transformation: optax transformation without a learning rate, such as `optax.scale_by_adam()`.
      learning_rate: initial learning rate.
      anneal_steps: see `options.Optimized`, as `max_grad_norm`.
    """

    transformation: optax.GradientTransformation
    learning_rate: float
    anneal_steps: float | None = None
    max_grad_norm: float | None = None

    @classmethod
    def of(cls, agent: options.Optimized, base: optax.GradientTransformation) -> "Optimizer":
        """Returns the optimizer that an agent's options ask for; `base` is the algorithm's own."""
        if callable(agent.optimizer):
            descent = options.make(agent, "optimizer", learning_rate=1.0)
            # Optimizers of optax descend; `gradient_step` subtracts.
            parts: dict[Any, Any] = {True: optax.chain(descent, optax.scale(-1.0)), False: base}
            is_all = agent._is_weight is True
            base = parts[True] if is_all else optax.partition(parts, agent._is_weight)
        return cls(base, agent.learning_rate, agent.anneal_steps, agent.max_grad_norm)

    @functools.cached_property
    def chain(self) -> optax.GradientTransformation:
        """The norm clip and the transformation."""
        clip = optax.identity()
        if self.max_grad_norm is not None:
            clip = optax.stateless(functools.partial(_clip, self.max_grad_norm))
        return optax.chain(clip, self.transformation)

    def init(self, params: types.PyTree) -> TrainState:
        """Returns the state before the first gradient step."""
        return TrainState(params, self.chain.init(params))

    def learning_rate_at(self, agent_steps: jax.Array) -> jax.Array:
        """Returns the learning rate, a float32 scalar, after `agent_steps` over all streams."""
        return annealed(self.learning_rate, 0.0, self.anneal_steps, agent_steps)

    def gradient_step(
        self,
        loss_fn: Callable[[types.PyTree, types.PyTree], LossOutput],
        train_state: TrainState,
        minibatch: types.PyTree,
        learning_rate: jax.Array,
    ) -> tuple[TrainState, LossOutput]:
        """Takes one step along the gradient of the mean over the global minibatch.

        Args:
          loss_fn: `loss_fn(params, minibatch)`; its counts must not depend on `params`.
          train_state: equal on all devices.
          minibatch: this device's part of the minibatch.
          learning_rate: a scalar that may be traced.

        Returns:
          The new state, and the output of `loss_fn`, with "loss/total", "gradient_norm" (of the
          global gradient, before clipping) and "learning_rate" among its metrics, and without the
          network's outputs.
        """

        def total(params: types.PyTree) -> tuple[jax.Array, LossOutput]:
            output = loss_fn(params, minibatch)
            return output.loss.total, output._replace(outputs=())

        params, optimizer_state = train_state
        with jax.named_scope("gradient"):
            gradient, output = jax.grad(total, has_aux=True)(params)
        with jax.named_scope("optimizer"):
            # One sum for both: a gradient that waits for the global count costs a second one.
            gradient = parallel.global_mean(types.Mean(gradient, output.loss.count))
            updates, optimizer_state = self.chain.update(gradient, optimizer_state, params)
            params = jax.tree.map(
                lambda p, u: (p - learning_rate * u).astype(p.dtype), params, updates
            )
            norm = layouts.norm(gradient)  # merged with that of the clip
        metrics = output.metrics | {
            "loss/total": output.loss,
            "gradient_norm": types.Mean.of(norm),
            "learning_rate": types.Mean.of(learning_rate),
        }
        return TrainState(params, optimizer_state), output._replace(metrics=metrics)


def _clip(max_norm: float, gradient: types.PyTree, _: types.PyTree) -> types.PyTree:
    """Clips as `optax.clip_by_global_norm`, by the norm of `layouts`."""
    norm = layouts.norm(gradient)
    return jax.tree.map(
        lambda x: jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm), gradient
    )


def annealed(
    initial: float, final: float | None, anneal_steps: float | None, agent_steps: jax.Array
) -> jax.Array:
    """Returns a float32 scalar that changes linearly from `initial` to `final`.

    It arrives after `anneal_steps` agent steps over all streams; it is constant where this number
    or `final` is None.
    """
    if final is None or anneal_steps is None:
        return jnp.float32(initial)
    # pyrefly: ignore[bad-argument-type]  # optax annotates an int, and divides by any number
    schedule: Callable[..., Any] = optax.linear_schedule(initial, final, float(anneal_steps))
    return schedule(agent_steps.astype(jnp.float32))


def adam_of(agent: options.Adam, weight_decay: float = 0.0) -> Optimizer:
    """Returns Adam (Kingma and Ba, 2014, https://arxiv.org/abs/1412.6980) with an agent's options.

    Weight decay is decoupled (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017,
    https://arxiv.org/abs/1711.05101).
    """
    adam = optax.scale_by_adam(eps=agent.adam_epsilon)
    if weight_decay:
        adam = optax.chain(adam, optax.add_decayed_weights(weight_decay, agent._is_weight))
    return Optimizer.of(agent, adam)


class ActorParams(NamedTuple):
    """The part of the learner that acting needs."""

    params: types.PyTree
    normalizer: Any  # the learner's
    exploration: Any = ()  # an epsilon, a temperature, or whether actions are random; () if none


class Learner(NamedTuple):
    """The learner of an agent; equal on all devices."""

    train_state: TrainState
    target: types.PyTree  # the source of targets, such as older parameters; () where none is used
    normalizer: Any  # statistics of observations and returns, see `preprocessing`; or ()
    update: jax.Array  # int32, rollouts so far
    agent_steps: jax.Array  # float32, over all streams
    gradient_steps: jax.Array  # int32, which wraps around

    @property
    def params(self) -> types.PyTree:
        """The online parameters."""
        return self.train_state.params

    @property
    def context(self) -> Context:
        """The constants of a gradient step."""
        return Context(self.agent_steps, self.target)

    def observe(self, rollout: types.Rollout, preprocess: preprocessing.Preprocess) -> "Learner":
        """Counts the steps of this device's rollout `[T, B]` and updates the statistics."""
        return self._replace(
            normalizer=preprocess.update_statistics(self.normalizer, rollout.timestep),
            update=self.update + 1,
            # A product, not a sum, which would stop at 24 bits.
            agent_steps=(self.update + 1).astype(jnp.float32)
            * (rollout.timestep.reward[1:].size * parallel.axis_size()),
        )

    def with_params(self, params: types.PyTree) -> "Learner":
        """Returns the learner with other parameters, and the optimizer's state of the old ones."""
        return self._replace(train_state=self.train_state._replace(params=params))

    def step(
        self, train_state: TrainState, params: types.PyTree, period: int = 1, rate: float = 1.0
    ) -> "Learner":
        """Returns the learner after a gradient step, whose result is `train_state`.

        `params` is the part of the new parameters that has target parameters, () if none has. Their
        updates have a period in gradient steps, and a step size, of which 1 copies.
        """
        gradient_steps = self.gradient_steps + 1
        step_size = jnp.where(gradient_steps % period == 0, rate, 0.0)
        target = optax.incremental_update(params, self.target, step_size)
        return self._replace(train_state=train_state, target=target, gradient_steps=gradient_steps)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientAgent(options.Optimized):
    """Agents that learn by gradient steps.

    A subclass has `_optimizer`, `init_params` and `loss(params, minibatch, context)`, whose result
    is a `LossOutput`. It may have target parameters.
    """

    @property
    def _optimizer(self) -> Optimizer:
        raise NotImplementedError

    @property
    def target_period(self) -> int:
        """See `agents.parts.options`; an option of agents with target parameters."""
        return 1

    @property
    def target_rate(self) -> float:
        """See `agents.parts.options`; an option of agents with target parameters."""
        return 1.0

    def init_params(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters."""
        raise NotImplementedError

    def loss(self, params: Any, minibatch: Any, /, context: Context) -> LossOutput:
        """Returns the loss of this device's part of a minibatch."""
        raise NotImplementedError

    def target_params(self, params: types.PyTree) -> types.PyTree:
        """Returns the part of the parameters that has target parameters; () if none has."""
        return ()

    def init_learner(self, key: jax.Array) -> Learner:
        """Returns the learner before the first rollout."""
        return self._learner(self.init_params(key), self.preprocess.init(self.spec.observation))

    def restart(self, learner: Learner) -> Learner:
        """Returns a fresh learner with the parameters and statistics of another; see `Agent`."""
        return self._learner(learner.params, learner.normalizer)

    def _learner(self, params: types.PyTree, normalizer: Any) -> Learner:
        # Copies, because the learner's state is donated, and a buffer can be donated only once.
        target = jax.tree.map(jnp.copy, self.target_params(params))
        counters = (jnp.zeros((), dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32))
        return Learner(self._optimizer.init(params), target, normalizer, *counters)

    def actor_params(self, learner: Learner) -> ActorParams:
        """Returns the parameters and the statistics."""
        return ActorParams(learner.params, learner.normalizer)

    def _step(
        self, learner: Learner, minibatch: types.PyTree, learning_rate: jax.Array
    ) -> tuple[Learner, LossOutput]:
        """Takes one gradient step, and updates the target parameters if due."""
        loss = functools.partial(self.loss, context=learner.context)
        train_state, output = self._optimizer.gradient_step(
            loss, learner.train_state, minibatch, learning_rate
        )
        target = self.target_params(train_state.params)
        return learner.step(train_state, target, self.target_period, self.target_rate), output

    def _learn_epochs(
        self, learner: Learner, deal: Callable[[jax.Array], types.PyTree], keys: jax.Array
    ) -> tuple[Learner, dict[str, types.Mean]]:
        """Takes a gradient step for each minibatch of each epoch.

        Args:
          learner: the learner before the rollout is counted.
          deal: returns the minibatches `[M, ...]` of an epoch by its key, see `minibatches`.
          keys: `[E]` typed keys, one for each epoch, equal on all devices.

        Returns:
          The learner, and metrics whose totals and counts are summed over all steps.
        """
        learning_rate = self._optimizer.learning_rate_at(learner.agent_steps)
        unravel: Any = None

        def step(learner: Learner, minibatch: types.PyTree):
            nonlocal unravel
            learner, output = self._step(learner, minibatch, learning_rate)
            # One vector, because the loop would store each of the metrics by itself.
            flat, unravel = jax.flatten_util.ravel_pytree(output.metrics)
            return learner, flat

        def epoch(learner: Learner, key: jax.Array):
            return jax.lax.scan(step, learner, deal(key))

        learner, metrics = jax.lax.scan(epoch, learner, keys)
        return learner, unravel(jnp.sum(metrics, axis=(0, 1)))
