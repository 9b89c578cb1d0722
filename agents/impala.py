"""IMPALA: an actor-critic that learns from slightly old policies, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018, https://arxiv.org/abs/1802.01561. Any action head, any network with or without
memory; V-trace unrolls it over all `T + 1` time steps, from the core that acting began with.

Losses are means over the global batch, where the paper sums them over a batch of N transitions: an
optimizer that divides by the size of the gradient does not notice, but `max_grad_norm` and
`optimizer_epsilon` are those of a sum divided by N (by N squared where the epsilon stands inside
the root).

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rlax

from agents import (
    losses,
    minibatches,
    networks,
    optimization,
    options,
    policy,
    preprocessing,
    returns,
)
from agents.networks import encoders
from podracers import environment, errors, types

_OPTIMIZERS = ("adam", "rmsprop")

# Time steps `[T + 1, B, ...]` and extras `[T, B, ...]`; the cores `[B, ...]` before them.
_Minibatch = tuple[tuple[types.TimeStep, policy.Extras], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class IMPALA:
    """Importance-weighted actor-learner with V-trace targets.

    Attributes:
      spec: specification of the environment.
      network: `network(spec, head)` returns a network that puts out `ActorCriticOutput`.
      head: kind of the action head, None for the usual one of the action's specification.
      learning_rate: learning rate of the optimizer.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      max_grad_norm: norm to which the gradient of the global batch is scaled down; None for no
        clipping.
      gamma: discount.
      num_minibatches: 1 to learn from all streams at once; else each gradient step learns from some
        of the streams, one after the other, with targets of their own from the newest parameters.
      value_cost: weight of the value loss.
      entropy_cost: weight of the entropy bonus.
      normalize_observations: whether observations are scaled to mean 0 and variance 1 over all that
        was observed, and clipped at 10.
      reward_scale: factor of the rewards that are learnt from.
      reward_clip: largest absolute value of scaled rewards; None for no bound.
      greedy_evaluation: whether evaluations take the most probable action; they sample otherwise,
        as training does.
      previous_action_and_reward: whether the network sees the previous action and reward beside the
        observation, see `agents.inputs`; None for networks that are recurrent.
      optimizer: name of the optimizer, "rmsprop" or "adam".
      optimizer_epsilon: constant that is added to what the optimizer divides by.
      rmsprop_decay: decay of the running mean of squared gradients.
      rmsprop_initial_scale: what that mean begins at: 0, or more for smaller first steps, as
        TensorFlow's has it; in the square of the unit of a gradient.
      rmsprop_epsilon_in_sqrt: whether the epsilon is added to the mean of squares, as TensorFlow
        does it, or to its root, as PyTorch does it.
      vtrace_lambda: trace parameter of the targets; 1 is the paper's.
      clip_rho: largest importance weight of a temporal-difference error.
      clip_pg_rho: largest importance weight of a policy gradient.
    """

    spec: environment.EnvironmentSpec
    network: Callable[..., networks.Network] = networks.actor_critic
    head: str | None = None
    learning_rate: float = options.positive(6e-4)
    anneal_steps: float | None = options.optional_positive(None)
    max_grad_norm: float | None = options.optional_positive(0.5)
    gamma: float = options.fraction(0.99)
    num_minibatches: int = options.count(1)
    value_cost: float = options.number(0.5)
    entropy_cost: float = options.number(0.01)
    normalize_observations: bool = False
    reward_scale: float = options.number(1.0)
    reward_clip: float | None = options.optional_positive(None)
    greedy_evaluation: bool = False
    previous_action_and_reward: bool | None = None
    optimizer: str = "rmsprop"
    optimizer_epsilon: float = options.positive(1e-5)
    rmsprop_decay: float = options.fraction(0.99)
    rmsprop_initial_scale: float = options.non_negative(0.0)
    rmsprop_epsilon_in_sqrt: bool = False
    vtrace_lambda: float = options.fraction(1.0)
    clip_rho: float = options.positive(1.0)
    clip_pg_rho: float = options.positive(1.0)

    def __post_init__(self):
        """Checks the options."""
        if self.optimizer not in _OPTIMIZERS:
            near = errors.nearest(str(self.optimizer), _OPTIMIZERS)
            raise errors.UserError(f"IMPALA.optimizer: no optimizer {self.optimizer!r}{near}")
        options.check(self)
        # Built now: gin's bindings may be others by the time that the network is first used.
        _ = self._policy.network

    @functools.cached_property
    def _policy(self) -> policy.Policy:
        return policy.Policy(self.spec, self.network, self.head, self.previous_action_and_reward)

    _preprocess = functools.cached_property(preprocessing.Preprocess.of)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        if self.optimizer == "adam":
            transformation = optax.scale_by_adam(eps=self.optimizer_epsilon)
        else:
            transformation = optax.scale_by_rms(
                decay=self.rmsprop_decay,
                eps=self.optimizer_epsilon,
                initial_scale=self.rmsprop_initial_scale,
                eps_in_sqrt=self.rmsprop_epsilon_in_sqrt,
            )
        return optimization.Optimizer(
            transformation, self.learning_rate, self.anneal_steps, self.max_grad_norm
        )

    def init_learner(self, key: jax.Array) -> policy.Learner:
        """Returns fresh parameters."""
        train_state = self._optimizer.init(self._policy.init(key))
        normalizer = self._preprocess.init(self.spec.observation)
        return policy.Learner(train_state, normalizer, jnp.zeros((), jnp.int32))

    def init_memory(self, rollout: types.Rollout) -> tuple[()]:
        """Returns `()`: each rollout is forgotten after it."""
        return ()

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the core of the network and the previous action of `B` streams."""
        return self._policy.initial_state(env_id.shape[0])

    def actor_params(self, learner: policy.Learner) -> policy.ActorParams:
        """Returns the parameters and the statistics of the observations."""
        return policy.ActorParams(learner.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        timestep = self._preprocess.apply(params.normalizer, timestep)
        greedy = evaluation and self.greedy_evaluation
        return self._policy.act(params.params, actor_state, timestep, key, greedy)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes `num_minibatches` gradient steps, on whole streams each."""
        learner = state.learner
        timestep = self._preprocess.apply(learner.normalizer, rollout.timestep)
        timestep = self._policy.network_inputs(rollout._replace(timestep=timestep))
        learning_rate = self._optimizer.learning_rate_at(policy.agent_steps(learner, rollout))

        def minibatch_step(train_state, minibatch):
            return self._optimizer.gradient_step(self._loss, train_state, minibatch, learning_rate)

        train_state, output = jax.lax.scan(
            minibatch_step,
            learner.train_state,
            minibatches.over_streams(
                (timestep, rollout.extras), rollout.actor_state.core, key, self.num_minibatches
            ),
        )
        metrics = jax.tree.map(jnp.sum, output.metrics)
        normalizer = self._preprocess.update_statistics(learner.normalizer, rollout.timestep)
        learner = policy.Learner(train_state, normalizer, learner.update + 1)
        return types.AgentState(learner, state.memory), metrics

    def _loss(self, params: types.PyTree, minibatch: _Minibatch) -> optimization.LossOutput:
        (timestep, extras), core = minibatch
        output, _ = self._policy.network.unroll(params, core, timestep)  # [T + 1, B]
        outputs, mask = jax.tree.map(
            lambda x: x[:-1], (output.policy, encoders.action_mask(timestep.observation))
        )
        head = self._policy.head
        log_prob = head.log_prob(outputs, mask, extras.raw)
        log_ratio = log_prob - extras.log_prob
        vtrace = returns.vtrace(
            timestep,
            *jax.lax.stop_gradient((output.value, log_ratio)),
            self.gamma,
            self.vtrace_lambda,
            self.clip_rho,
            self.clip_pg_rho,
        )
        values = output.value[:-1]
        policy_loss = -log_prob * vtrace.advantage
        value_loss = rlax.l2_loss(values, vtrace.target)
        entropy = head.entropy(outputs, mask)
        total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        mean = functools.partial(types.Mean.of, weights=returns.weights(timestep))
        return optimization.LossOutput(
            {
                "loss/total": mean(total),
                "loss/policy": mean(policy_loss),
                "loss/value": mean(value_loss),
                "policy/entropy": mean(entropy),
                "policy/kl": mean(losses.kl_estimate(log_ratio)),
                # Not how many are clipped: on-policy that would be decided by rounding.
                "policy/rho": mean(jnp.minimum(jnp.exp(log_ratio), self.clip_rho)),
                "value/mean": mean(values),
                "value/target": mean(vtrace.target),
            }
        )
