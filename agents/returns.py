"""Returns and advantages from the values of a rollout, right at terminations and truncations.

A rollout runs through the ends of episodes: LAST, whose action is ignored, is followed by FIRST.
Two rules make any return right there, and no agent has rules of its own:

- the transition out of a LAST time step teaches nothing: its loss weight is zero (`weights`);
- no trace passes a LAST time step (`traces`): the return of the transition into it bootstraps from
  the value of the true final observation if the episode was truncated, and from nothing (its
  discount is 0) if it terminated.

Axis legend: `T` transitions, `B` streams. `_tm1` is where the action was chosen, `_t` on arrival.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracers import types


def weights(timestep: types.TimeStep) -> jax.Array:
    """Returns the loss weights `[T, B]`: 0 where the action was ignored, 1 elsewhere.

    Args:
      timestep: `[T + 1, B]`.
    """
    return (timestep.step_type[:-1] != types.LAST).astype(jnp.float32)


def traces(timestep: types.TimeStep, lambda_: jax.Array | float) -> jax.Array:
    """Returns the trace parameter of each transition, `[T, B]`: 0 into LAST, else `lambda_`.

    Args:
      timestep: `[T + 1, B]`.
      lambda_: in `[0, 1]`.
    """
    return lambda_ * (timestep.step_type[1:] != types.LAST).astype(jnp.float32)


def lambda_returns(
    timestep: types.TimeStep,
    values: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float,
) -> jax.Array:
    """Returns the lambda-returns `[T, B]` (Sutton and Barto, "Reinforcement Learning", ch. 12).

    Gradients pass through; stop them at the call where the returns are targets.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step returns, 1 for Monte Carlo returns that bootstrap at the end.
    """
    return gae(timestep, values, gamma, lambda_) + values[:-1]


def gae(
    timestep: types.TimeStep,
    values: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float,
) -> jax.Array:
    """Returns generalised advantage estimates `[T, B]`.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    https://arxiv.org/abs/1506.02438. What stands at transitions out of LAST is without meaning.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step advantages, 1 for Monte Carlo advantages that bootstrap at the end.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, timestep.reward, timestep.discount, timestep.step_type])
    discount_t = gamma * timestep.discount[1:]
    error_t = timestep.reward[1:] + discount_t * values[1:] - values[:-1]
    decay_t = discount_t * traces(timestep, lambda_)

    def accumulate(advantage: jax.Array, inputs: tuple[jax.Array, jax.Array]):
        error, decay = inputs
        advantage = error + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(
        accumulate, jnp.zeros_like(error_t[0]), (error_t, decay_t), reverse=True
    )
    return advantages


def n_step(
    timestep: types.TimeStep, values: jax.Array, gamma: jax.Array | float, n: int
) -> jax.Array:
    """Returns the n-step returns `[T, B]`; fewer steps where an episode or the rollout ends.

    After a truncation, and at the end, they bootstrap from the value of that time step.
    Gradients pass through; what stands at transitions out of LAST is without meaning.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps, to bootstrap from.
      gamma: the discount of the agent, in `[0, 1]`.
      n: at least 1; `T` and more are Monte Carlo returns that bootstrap at the end.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, timestep.reward, timestep.discount, timestep.step_type])
    discount_t = gamma * timestep.discount[1:]
    last_t = timestep.step_type[1:] == types.LAST
    following = values[1:]
    for steps_left in range(n, 0, -1):
        target = timestep.reward[1:] + discount_t * following
        if steps_left > 1:
            target_t = jnp.concatenate([target[1:], values[-1:]])
            following = jnp.where(last_t, values[1:], target_t)
    return target


class VTrace(NamedTuple):
    """What V-trace makes of a rollout, `[T, B]` each."""

    target: jax.Array  # of the values
    advantage: jax.Array  # of the policy gradient, importance weights included


def vtrace(
    timestep: types.TimeStep,
    values: jax.Array,
    log_ratio: jax.Array,
    gamma: jax.Array | float,
    lambda_: jax.Array | float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
    clip_c: float = 1.0,
) -> VTrace:
    """Returns V-trace's targets and advantages.

    Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures", https://arxiv.org/abs/1802.01561. The targets are its equation 1, with `lambda_`
    in the traces as in its remark 2. The advantage is that of its section 4.2, `rho_s * (r_s +
    gamma * v_{s+1} - V(x_s))`, whatever `lambda_` is, as in the authors' own code and in SEED RL
    (https://arxiv.org/abs/1910.06591). rlax mixes `v_{s+1}` with `V(x_{s+1})` by `lambda_` there,
    which on-policy is generalised advantage estimation; the two agree where `lambda_` is 1. After a
    transition into LAST, `v_{s+1}` is the value of the final observation.

    Gradients pass through; stop them at the call. What stands at transitions out of LAST is without
    meaning.

    Args:
      timestep: `[T + 1, B]`; its rewards and discounts arrive with the observation.
      values: `[T + 1, B]`, of the same time steps, under the policy that learns.
      log_ratio: `[T, B]`, `log pi(a|s) - log mu(a|s)`, of the policy that learns and of that which
        acted.
      gamma: the discount of the agent, in `[0, 1]`.
      lambda_: 0 for one-step targets, 1 for V-trace as it was published.
      clip_rho: the largest importance weight of an error; it decides whose values are learnt.
      clip_pg_rho: the largest importance weight of an advantage.
      clip_c: the largest importance weight of a trace; it decides how fast they are learnt.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, timestep.reward, timestep.discount, timestep.step_type])
    chex.assert_equal_shape([values[1:], log_ratio])
    ratio = jnp.exp(log_ratio)
    discount_t = gamma * timestep.discount[1:]
    error_t = timestep.reward[1:] + discount_t * values[1:] - values[:-1]
    error_t = jnp.minimum(ratio, clip_rho) * error_t
    decay_t = discount_t * traces(timestep, lambda_) * jnp.minimum(ratio, clip_c)

    def accumulate(correction: jax.Array, inputs: tuple[jax.Array, jax.Array]):
        error, decay = inputs
        return error + decay * correction, correction

    # A correction is the target less the value; the scan puts out that of the arrival.
    first, correction_t = jax.lax.scan(
        accumulate, jnp.zeros_like(error_t[0]), (error_t, decay_t), reverse=True
    )
    target = values[:-1] + jnp.concatenate([first[None], correction_t[:-1]])
    following = values[1:] + traces(timestep, 1.0) * correction_t
    action_value = timestep.reward[1:] + discount_t * following
    advantage = jnp.minimum(ratio, clip_pg_rho) * (action_value - values[:-1])
    return VTrace(target, advantage)
