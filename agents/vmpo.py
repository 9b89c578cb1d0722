"""V-MPO: on-policy maximum a posteriori policy optimisation.

Song et al., "V-MPO: On-Policy Maximum a Posteriori Policy Optimization for Discrete and Continuous
Control", 2019, https://arxiv.org/abs/1909.12238. Any action head, any network with or without
memory. The gradient steps of an update share the value targets. The better
half of the advantages is that of all devices.

The loss of a step, with the advantage `A`, the lambda-return `G`, the temperature `η`, and for each
divergence `KL_k` of the policy from the target policy the multiplier `α_k` and its bound `ε_k`:

    -ψ log π(a|s) + value_cost (v(s) - G)² / 2
      + η (ε_η + log mean(exp(A / η)))
      + Σ_k (stop_gradient(α_k) KL_k + α_k (ε_k - stop_gradient(KL_k)))

The mean is over the better half of the advantages, with the importance weights `ρ` of
`actor_critic.GeneralizedAdvantage`, which are 1 on-policy. There `ψ` is proportional to
`ρ exp(A / η)`, elsewhere it is 0, and its mean over all steps is 1.

Axis legend: `T` time, `B` streams of one device, `D` devices, `K` divergences.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.networks import heads, popart
from agents.parts import actor_critic, minibatches, optimization, options, returns
from podracers import environment, parallel, types

_LOWEST_TEMPERATURE = 1e-8
_EXCLUDED = -1e30  # scaled advantage; finite, because gradients at infinity are NaN


class Params(NamedTuple):
    """The parameters of the network and of the Lagrangian."""

    network: types.PyTree
    log_temperature: jax.Array  # []
    log_multipliers: jax.Array  # [K]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VMPO(actor_critic.GeneralizedAdvantage, options.Adam):
    """V-MPO with lambda-returns.

    `actor_critic.GeneralizedAdvantage` describes the options that are not listed here.

    Attributes:
      num_minibatches: gradient steps of each pass over a rollout; each weights its own better half.
      value_cost: see `actor_critic.ActorCritic`; 1 in the paper, whose loss has the same half.
      epochs: passes over each rollout; 1 in the paper.
      gae_lambda: trace parameter of the returns; 1 for the n-step returns of the paper.
      target_period: gradient steps between copies of the parameters to the target policy, which
        acts; data is on-policy if it is a multiple of `epochs * num_minibatches`.
      initial_temperature: initial eta, in units of the advantages.
      initial_multiplier: initial alpha, the weight of a divergence.
      epsilon_temperature: bound in nats for which eta is learnt, of the weights' divergence.
      epsilon_kl: bound in nats for which alpha is learnt, of the divergence of discrete actions.
      epsilon_mean: the same of the means of continuous actions.
      epsilon_std: the same of their standard deviations.
    """

    learning_rate: float = 1e-4
    gae_lambda: float = options.fraction(1.0)
    epochs: int = options.count(1, most=10_000)
    target_period: int = options.count(10)
    initial_temperature: float = options.positive(1.0, most=1e6)
    initial_multiplier: float = options.positive(5.0, most=1e6)
    epsilon_temperature: float = options.positive(0.02, most=1e3)
    epsilon_kl: float = options.positive(0.01, most=1e3)
    epsilon_mean: float = options.positive(0.01, most=1e3)
    epsilon_std: float = options.positive(5e-5, most=1e3)

    @property
    def _is_weight(self) -> Any:
        of_network = super()._is_weight
        if of_network is True:
            return Params._make((True, False, False))
        return lambda params: Params._make((of_network(params.network), False, False))

    @property
    def _bounds(self) -> dict[str, float]:
        """The bound of each divergence of the action head, by the ending of its metrics."""
        if isinstance(self.action_head, heads.Gaussian):
            return {"_mean": self.epsilon_mean, "_std": self.epsilon_std}
        return {"": self.epsilon_kl}

    _optimizer = functools.cached_property(optimization.adam_of)

    def init_params(self, key: jax.Array) -> Params:
        """Returns fresh parameters of the network and of the Lagrangian."""
        multipliers = jnp.full((len(self._bounds),), self.initial_multiplier, jnp.float32)
        log_temperature = jnp.log(jnp.float32(self.initial_temperature))
        return Params(super().init_params(key), log_temperature, jnp.log(multipliers))

    def target_params(self, params: Params) -> types.PyTree:
        return params.network

    def actor_params(self, learner: optimization.Learner) -> optimization.ActorParams:
        """Returns the target network and the statistics of the observations."""
        return optimization.ActorParams(learner.target, learner.normalizer)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes `epochs * num_minibatches` gradient steps on one rollout."""
        learner = state.learner
        timestep = self._learning_inputs(learner.normalizer, rollout)
        core, timestep = self.net.prepare(rollout.actor_state.core, timestep)
        # The values of acting are those of the target network.
        values = networks.unroll_in_parts(
            self.net, learner.params.network, core, timestep, lambda output: output.value
        )
        target, advantage = self.targets(timestep, values)
        current, weight = jax.tree.map(lambda x: x[:-1], timestep), returns.weights(timestep)
        # The target policy is the proximal one.
        extras, rho = self._proximal(learner.target, core, timestep, rollout)
        batch = actor_critic.Batch(current, extras, advantage, target, weight, rho)
        network = self._renormalized(learner.params.network, target, weight)
        learner = learner.with_params(learner.params._replace(network=network))
        deal = minibatches.dealer(self.net, batch, core, self.num_minibatches)
        learner, metrics = self._learn_epochs(learner, deal, jax.random.split(key, self.epochs))
        return types.AgentState(learner.observe(rollout, self.preprocess), ()), metrics

    def loss(
        self,
        params: Params,
        minibatch: tuple[actor_critic.Batch, Any],
        context: optimization.Context,
    ) -> optimization.LossOutput:
        """Returns the loss of a minibatch, which comes with the cores `[B, ...]` before it."""
        batch, core = minibatch
        head = self.action_head
        mask = environment.action_mask(batch.timestep.observation)
        output, _ = self.net.unroll(params.network, core, batch.timestep)
        target_output, _ = self.net.unroll(context.target, core, batch.timestep)
        temperature = jnp.exp(params.log_temperature) + _LOWEST_TEMPERATURE
        std = popart.std(params.network)
        psi, log_mean = best_half(batch.advantage / std, batch.weight * batch.rho, temperature)
        policy_loss = -psi * head.log_prob(output.policy, mask, batch.extras.raw)
        temperature_loss = temperature * (self.epsilon_temperature + log_mean)
        value_loss = optax.losses.l2_loss(output.value, batch.target) / std**2
        total = policy_loss + self.value_cost * value_loss + temperature_loss
        mean = functools.partial(types.Mean.of, weights=batch.weight)
        metrics = {
            "loss/policy": mean(policy_loss),
            "loss/value": mean(value_loss),
            "policy/entropy": mean(head.entropy(output.policy, mask)),
            "policy/rho": mean(batch.rho),
            "policy/temperature": types.Mean.of(temperature),
            "value/mean": mean(output.value),
            "value/target": mean(batch.target),
        }
        divergences = head.kl(target_output.policy, output.policy, mask)
        multipliers = jnp.exp(params.log_multipliers)
        for (name, bound), kl, alpha in zip(self._bounds.items(), divergences, multipliers):
            penalty = jax.lax.stop_gradient(alpha) * kl
            total += penalty + alpha * (bound - jax.lax.stop_gradient(kl))
            metrics[f"policy/kl{name}"] = mean(kl)
            metrics[f"policy/kl_multiplier{name}"] = types.Mean.of(alpha)
        return optimization.LossOutput(mean(total), metrics, outputs=output)


def best_half(
    advantage: jax.Array, weight: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of the E-step over the steps of all devices; under the mapped axis.

    Not `rlax.vmpo_loss`: its half counts excluded steps, and its sums over devices would multiply
    the gradient of the temperature by their number.

    Args:
      advantage: `[T, B]` of this device's steps.
      weight: `[T, B]`, 0 for excluded steps, otherwise the importance weight, 1 on-policy.
      temperature: a scalar; gradients pass through the second result only.

    Returns:
      Weights `[T, B]` of mean 1, which are 0 outside of the better half; and the logarithm of the
      weighted mean of `exp(advantage / temperature)` over that half. Equals of its lowest belong to
      it.
    """
    advantage = jnp.where(weight > 0.0, jax.lax.stop_gradient(advantage), -jnp.inf)
    everywhere = jax.lax.all_gather(advantage, parallel.AXIS).ravel()  # [D * T * B]
    count = jnp.sum(everywhere > -jnp.inf)
    # Without any step the index is past the end, where JAX takes the last element: -inf.
    lowest = jnp.sort(everywhere)[everywhere.size - (count + 1) // 2]
    lowest = jnp.maximum(lowest, jnp.finfo(jnp.float32).min)

    def scaled(advantage, weight):
        is_best = advantage >= lowest
        advantage = jnp.where(is_best, advantage, 0.0) / temperature
        return jnp.where(is_best, advantage + jnp.log(jnp.where(is_best, weight, 1.0)), _EXCLUDED)

    weights = jax.lax.all_gather(weight, parallel.AXIS).ravel()
    log_sum = jax.nn.logsumexp(scaled(everywhere, weights))
    log_mean = log_sum - jnp.log(jnp.sum(weights, where=everywhere >= lowest))
    psi = count * jnp.exp(scaled(advantage, weight) - log_sum)
    return jax.lax.stop_gradient(psi), jnp.where(count > 0, log_mean, 0.0)
