"""Proximal policy optimisation.

Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347,
with generalised advantage estimation. Any action head, any network with or without memory.

The loss of a step, with the ratio `r = π(a|s) / p(a|s)` of the learning and the proximal policy,
the importance weight `ρ` of `actor_critic.GeneralizedAdvantage` (where the newest policy acted, it
is the proximal one, and `ρ` is 1), the normalised advantage `A`, and the target `G`, the raw
advantage plus the value before the update (of the parameters that acted, or with a core of the
newest ones):

    -ρ min(r A, clip(r, 1 - clip_epsilon, 1 + clip_epsilon) A)
      + value_cost (v(s) - G)² / 2 - entropy_cost H(π(·|s))

Axis legend: `T` time, `B` streams of one device, `M` minibatches.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.backends import layouts
from agents.networks import popart
from agents.parts import actor_critic, minibatches, optimization, options, returns
from podracers import environment, parallel, types


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PPO(actor_critic.GeneralizedAdvantage, options.Adam):
    """Proximal policy optimisation with generalised advantages.

    `actor_critic.GeneralizedAdvantage` describes the options that are not listed here.

    Attributes:
      entropy_cost_final: end of its linear schedule over `anneal_steps`; None if constant.
      normalize_rewards: whether rewards are divided by the standard deviation of all discounted
        returns so far, and clipped at 10, before they are scaled.
      epochs: passes over each rollout.
      clip_epsilon: distance from 1 at which the ratio of policies is clipped.
      clip_epsilon_final: end of its linear schedule over `anneal_steps`; None if constant.
      value_clip_epsilon: distance from the value at the time of acting at which a value is clipped,
        in the unit of the returns, or with `popart_rate` of their standard deviation; None for no
        clipping.
      normalize_advantages: whether advantages have mean 0 and variance 1 over the global batch.
    """

    learning_rate: float = 2.5e-4
    max_grad_norm: float | None = 0.5
    num_minibatches: int = 4
    entropy_cost: float = options.number(0.01)
    entropy_cost_final: float | None = options.non_negative(None)
    normalize_rewards: bool = False
    adam_epsilon: float = 1e-5
    epochs: int = options.count(4, most=10_000)
    clip_epsilon: float = options.positive(0.2)
    clip_epsilon_final: float | None = options.non_negative(None)
    value_clip_epsilon: float | None = options.positive(None)
    normalize_advantages: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("entropy_cost_final", "clip_epsilon_final"):
            has_end = getattr(self, name) is None or self.anneal_steps is not None
            options.expect(self, name, has_end, "None where there are no anneal_steps")

    _optimizer = functools.cached_property(optimization.adam_of)

    def check_run(self, num_envs: int, rollout_length: int, num_updates: int) -> None:
        """Raises a `UserError` if normalised advantages are always 0."""
        several = not self.normalize_advantages or num_envs * rollout_length > 1
        expected = "False, because an update has one transition, whose advantage would be 0"
        options.expect(self, "normalize_advantages", several, expected)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes `epochs * num_minibatches` gradient steps on one rollout."""
        learner = state.learner
        timestep = self._learning_inputs(learner.normalizer, rollout)
        core, timestep = self.net.prepare(rollout.actor_state.core, timestep)
        extras, rho = self._proximal(learner.params, core, timestep, rollout)
        params, batch, metrics = self._batch(learner.params, core, timestep, extras, rho)
        learner = learner.with_params(params)
        deal = minibatches.dealer(self.net, batch, core, self.num_minibatches)
        learner, means = self._learn_epochs(learner, deal, jax.random.split(key, self.epochs))
        learner = learner.observe(rollout, self.preprocess)
        normalizer, memory = self.preprocess.update_returns(
            learner.normalizer, state.memory, rollout.timestep
        )
        return types.AgentState(learner._replace(normalizer=normalizer), memory), metrics | means

    def _batch(
        self,
        params: types.PyTree,
        core: Any,
        timestep: types.TimeStep,
        extras: actor_critic.Extras,
        rho: jax.Array,
    ) -> tuple[types.PyTree, actor_critic.Batch, dict[str, types.Mean]]:
        """Returns parameters that know the targets, the rollout with them, and their metrics."""
        if self.net.is_recurrent:
            values = networks.unroll_in_parts(self.net, params, core, timestep, lambda x: x.value)
        else:  # acting computed all values but the last
            last, _ = self.net.step(params, core, jax.tree.map(lambda x: x[-1], timestep))
            values = jnp.concatenate([extras.value, last.value[None]])
        target, advantage = self.targets(timestep, values)
        weight = returns.weights(timestep)
        metrics = {
            "value/mean": types.Mean.of(values[:-1], weight),
            "value/target": types.Mean.of(target, weight),
        }
        params = self._renormalized(params, target, weight)
        if self.normalize_advantages:
            mean = parallel.global_mean(types.Mean.of(advantage, weight))
            square = jnp.square(advantage - mean)
            variance = parallel.global_mean(types.Mean.of(square, weight))
            advantage = (advantage - mean) * jax.lax.rsqrt(variance + 1e-8)
        else:
            advantage /= popart.std(params)
        current = jax.tree.map(lambda x: x[:-1], timestep)
        return params, actor_critic.Batch(current, extras, advantage, target, weight, rho), metrics

    def loss(
        self,
        params: types.PyTree,
        minibatch: tuple[actor_critic.Batch, Any],
        context: optimization.Context,
    ) -> optimization.LossOutput:
        """Returns the loss of a minibatch, which comes with the cores `[B, ...]` before it."""
        batch, core = minibatch
        clip_epsilon = optimization.annealed(
            self.clip_epsilon, self.clip_epsilon_final, self.anneal_steps, context.agent_steps
        )
        entropy_cost = optimization.annealed(
            self.entropy_cost, self.entropy_cost_final, self.anneal_steps, context.agent_steps
        )
        head = self.action_head
        mask = environment.action_mask(batch.timestep.observation)
        output, _ = self.net.unroll(params, core, batch.timestep)
        log_prob = head.log_prob(output.policy, mask, batch.extras.raw)
        log_ratio = log_prob - batch.extras.log_prob
        entropy = head.entropy(output.policy, mask)
        unit = popart.std(params)
        if self.value_clip_epsilon is None:
            value_loss = optax.losses.l2_loss(output.value, batch.target)
        else:
            epsilon = self.value_clip_epsilon * unit
            value_loss = returns.clipped_value(
                output.value, batch.target, batch.extras.value, epsilon
            )
        policy_loss = returns.clipped_surrogate(log_ratio, batch.advantage, clip_epsilon)
        policy_loss *= batch.rho
        value_loss /= unit**2
        kl = batch.rho * returns.kl_estimate(log_ratio)
        total = policy_loss + self.value_cost * value_loss - entropy_cost * entropy
        clipped = jnp.abs(jnp.exp(log_ratio) - 1.0) > clip_epsilon
        terms = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            "policy/kl": kl,
            "policy/clip_fraction": clipped,
            "policy/rho": batch.rho,
        }
        metrics = layouts.means(terms, batch.weight)
        loss = types.Mean.of(total, batch.weight)
        return optimization.LossOutput(loss, metrics, outputs=output)
