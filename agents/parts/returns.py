"""Returns and advantages across terminations and truncations, and losses per step.

A rollout contains the ends of episodes: LAST, whose action is ignored, is followed by FIRST. Two
rules make any return correct there, for every agent:

- the transition out of a LAST time step has a loss weight of zero (`weights`), as those of an agent
  that is out have;
- no trace passes a LAST time step (`traces`): the return of the transition into it bootstraps from
  the value of the true final observation if the episode was truncated, and from nothing (its
  discount is 0) if it terminated. So does that of the transition in which an agent goes out.

The recursions are those of rlax, https://github.com/google-deepmind/rlax. Results for transitions
out of LAST have no meaning. Losses are unreduced: the caller weights them and takes one mean over
the global batch.

Axis legend: `T` transitions, `B` streams, `...` any axes, the same for every argument. `_tm1` is
where the action was chosen, `_t` on arrival. In formulas, `r_t`, `d_t` and `v_t` are the reward,
the discount and the value of time step `t`; `γ` is the discount of the agent, and `λ_t` is 0 where
`t` is LAST, else `lambda_`. Recursions run backwards from `T`, the end of the rollout.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from agents.backends import layouts
from podracers import types


def weights(timestep: types.TimeStep) -> jax.Array:
    """Returns the loss weights `[T, B]`: 0 where the action was ignored, 1 elsewhere.

    It was ignored at LAST, and where the stream's agent was out.
    """
    is_learnt = timestep.step_type[:-1] != types.LAST
    if (active := timestep.active()) is not None:
        is_learnt &= active[:-1]
    return is_learnt.astype(jnp.float32)


def traces(timestep: types.TimeStep, lambda_: jax.Array | float) -> jax.Array:
    """Returns the trace parameter of each transition, `[T, B]`: 0 into LAST, else `lambda_`."""
    return lambda_ * (timestep.step_type[1:] != types.LAST).astype(jnp.float32)


@jax.named_scope("returns")
def gae(
    timestep: types.TimeStep,
    values: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float,
) -> jax.Array:
    """Returns generalised advantage estimates `[T, B]`.

    They are, with `A_T = 0`:

        δ_t = r_{t+1} + γ d_{t+1} v_{t+1} - v_t
        A_t = δ_t + γ d_{t+1} λ_{t+1} A_{t+1}

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    https://arxiv.org/abs/1506.02438. Added to `values[:-1]` they are the lambda-returns.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step advantages, 1 for Monte Carlo advantages that bootstrap at the end.
    """
    _check_shapes(timestep, values)
    discount_t = gamma * timestep.discount[1:]
    errors = timestep.reward[1:] + discount_t * values[1:] - values[:-1]
    return layouts.recurrence(errors, discount_t * traces(timestep, lambda_))


@jax.named_scope("returns")
def lambda_returns(
    timestep: types.TimeStep,
    values: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float,
) -> jax.Array:
    """Returns the lambda-returns `[T, B]`.

    They are, with `G_T = v_T`:

        G_t = r_{t+1} + γ d_{t+1} ((1 - λ_{t+1}) v_{t+1} + λ_{t+1} G_{t+1})

    With the values of greedy actions they are the targets of Peng's Q(lambda), in which random
    actions do not cut traces: Peng and Williams, "Incremental Multi-Step Q-Learning", 1996,
    https://doi.org/10.1007/BF00114731. Gradients pass through.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps, to bootstrap from.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step returns, 1 for Monte Carlo returns that bootstrap at the end.
    """
    _check_shapes(timestep, values)
    discount_t, trace_t = gamma * timestep.discount[1:], traces(timestep, lambda_)
    terms = timestep.reward[1:] + discount_t * (1.0 - trace_t) * values[1:]
    return layouts.recurrence(terms, discount_t * trace_t, values[-1])


@jax.named_scope("returns")
def n_step(
    timestep: types.TimeStep, values: jax.Array, gamma: jax.Array | float, n: int
) -> jax.Array:
    """Returns the n-step returns `[T, B]`; fewer steps where an episode or the rollout ends.

    They are `G^n_t`, with `G^0_t = v_t` and `G^k_T = v_T`:

        G^k_t = r_{t+1} + γ d_{t+1} (v_{t+1} if t + 1 is LAST else G^{k-1}_{t+1})

    After a truncation, and at the end, they bootstrap from the value of that time step. Gradients
    pass through.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps, to bootstrap from.
      gamma: the discount of the agent, in `[0, 1]`.
      n: at least 1; `T` and more are Monte Carlo returns that bootstrap at the end.
    """
    _check_shapes(timestep, values)
    length, r_t, v_t = len(values) - 1, timestep.reward[1:], values[1:]
    discount_t, trace_t = gamma * timestep.discount[1:], traces(timestep, 1.0)

    def later(x: jax.Array, steps: int, after: jax.Array | float) -> jax.Array:
        tail = jnp.broadcast_to(after, (min(steps, length), *x.shape[1:]))
        return jnp.concatenate([x[steps:], tail])

    result = later(v_t, n - 1, v_t[-1])
    for i in reversed(range(n)):
        value, trace = later(v_t, i, v_t[-1]), later(trace_t, i, 1.0)
        result = (1.0 - trace) * value + trace * result
        result = later(r_t, i, 0.0) + later(discount_t, i, 1.0) * result
    return result


class Targets(NamedTuple):
    """The targets of an actor-critic, `[T, B]` each."""

    target: jax.Array  # target of the values
    advantage: jax.Array  # advantage of the policy gradient; V-trace's has its importance weight


@jax.named_scope("returns")
def vtrace(
    timestep: types.TimeStep,
    values: jax.Array,
    log_ratio: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> Targets:
    """Returns V-trace's targets `G` and advantages `A`.

    They are, with the ratio `ρ_t = exp(log_ratio_t)` and `G_T = v_T`:

        δ_t = min(ρ_t, clip_rho) (r_{t+1} + γ d_{t+1} v_{t+1} - v_t)
        G_t = v_t + δ_t + γ d_{t+1} λ_{t+1} min(ρ_t, 1) (G_{t+1} - v_{t+1})
        A_t = min(ρ_t, clip_pg_rho) (r_{t+1} + γ d_{t+1} G_{t+1} - v_t)

    In the advantage, `G_{t+1}` is `v_{t+1}` where `t + 1` is LAST.

    Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures", https://arxiv.org/abs/1802.01561. The targets are its equation 1, with `lambda_`
    in the traces as in its remark 2. The advantage is that of its section 4.2, whatever `lambda_`
    is, as in the authors' own code and in SEED RL (https://arxiv.org/abs/1910.06591). Gradients
    pass through; stop them at the call.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps, under the policy that learns.
      log_ratio: `[T, B]`, `log pi(a|s) - log mu(a|s)` of the learning and the acting policy.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step targets, 1 for V-trace as it was published.
      clip_rho: the largest importance weight of an error.
      clip_pg_rho: the largest importance weight of an advantage.
    """
    _check_shapes(timestep, values)
    chex.assert_equal_shape([values[1:], log_ratio])
    v_tm1, v_t, r_t = values[:-1], values[1:], timestep.reward[1:]
    discount_t = gamma * timestep.discount[1:]
    ratio = jnp.exp(log_ratio)
    errors = jnp.minimum(clip_rho, ratio) * (r_t + discount_t * v_t - v_tm1)
    cut = jnp.minimum(1.0, ratio) * traces(timestep, lambda_)
    target = v_tm1 + layouts.recurrence(errors, discount_t * cut)
    # Not `rlax.vtrace_td_error_and_advantage`: it mixes v_{s+1} with V(x_{s+1}) by `lambda_`, which
    # is the published advantage only where `lambda_` is 1.
    target_t = jnp.concatenate([target[1:], v_t[-1:]])
    target_t = jnp.where(timestep.last()[1:], v_t, target_t)
    advantage = jnp.minimum(ratio, clip_pg_rho) * (r_t + discount_t * target_t - v_tm1)
    return Targets(target, advantage)


def _check_shapes(timestep: types.TimeStep, values: jax.Array) -> None:
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, timestep.reward, timestep.discount, timestep.step_type])


def clipped_surrogate(
    log_ratio: jax.Array, advantage: jax.Array, epsilon: jax.Array | float
) -> jax.Array:
    """Returns PPO's clipped policy loss `[...]`.

    It is, with the ratio `ρ = exp(log_ratio)`, the advantage `A` and `epsilon` `ε`:

        -min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)

    Schulman et al., "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347.
    `rlax.clipped_surrogate_pg_loss` averages over time, which leaves no room for weights.

    `log_ratio` is `log pi(a|s) - log mu(a|s)` of the learning and the acting policy; no gradient
    passes through the advantage.
    """
    chex.assert_equal_shape([log_ratio, advantage])
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def clipped_value(
    prediction: jax.Array, target: jax.Array, behaviour: jax.Array, epsilon: jax.Array | float
) -> jax.Array:
    """Returns the worse of the value losses with and without clipping, `[...]`.

    It is, with the prediction `v`, the target `G`, the behaviour `b` and the distance `ε`:

        max((v - G)², (b + clip(v - b, -ε, ε) - G)²) / 2

    No gradient passes through `target` and `behaviour`, which is the value at the time of acting.
    """
    chex.assert_equal_shape([prediction, target, behaviour])
    behaviour = jax.lax.stop_gradient(behaviour)
    clipped = behaviour + jnp.clip(prediction - behaviour, -epsilon, epsilon)
    target = jax.lax.stop_gradient(target)
    l2_loss = optax.losses.l2_loss
    return jnp.maximum(l2_loss(prediction, target), l2_loss(clipped, target))


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """Returns an unbiased estimate of `KL(mu || pi)` that is never negative, `[...]`.

    It is, with the ratio `ρ = exp(log_ratio)`:

        ρ - 1 - log ρ

    Estimator `k3` of Schulman, "Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html. `log_ratio` is `log pi(a|s) - log mu(a|s)` of actions
    that `mu` sampled; of actions of another policy, importance weights must multiply it.
    """
    return jnp.exp(log_ratio) - 1.0 - log_ratio
