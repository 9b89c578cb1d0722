"""Epsilon-greedy exploration, and action masks of Q-values.

Axis legend: `B` streams, `A` actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents import options
from agents.networks import encoders, heads
from podracers import types


class ActorParams(NamedTuple):
    """The part of a Q-learner that acting needs."""

    params: types.PyTree
    normalizer: Any  # statistics of the observations; () where they are not normalised
    epsilon: jax.typing.ArrayLike  # float32, probability of a random action


class Extras(NamedTuple):
    """The data of each step that acting reports."""

    value: jax.Array  # [T, B] of the best legal action


def best_q_value(q_values: jax.Array, observation: types.PyTree) -> jax.Array:
    """Returns the largest of `heads.legal_values`, `[...]`, by the mask of an observation."""
    return jnp.max(heads.legal_values(q_values, encoders.action_mask(observation)), axis=-1)


def epsilon_greedy(
    q_values: jax.Array, observation: types.PyTree, epsilon: jax.typing.ArrayLike, key: jax.Array
) -> jax.Array:
    """Returns the best legal action, or with probability `epsilon` any legal one, int32 `[B]`.

    Args:
      q_values: `[B, A]`.
      observation: `[B, *]`; its action mask, if it has one, marks the legal actions.
      epsilon: `[B]` or a scalar, in `[0, 1]`.
      key: `[B]` typed keys.
    """
    # Networks with `num_atoms` return logits [B, A, Z], of which DQN takes the mean.
    if len(getattr(q_values, "shape", ())) != 2:
        raise options.wrong_output(q_values, "values of actions [B, A]")

    def draw(key):
        choose_key, explore_key = jax.random.split(key)
        noise = jax.random.uniform(explore_key, q_values.shape[-1:])
        return jax.random.uniform(choose_key), noise

    uniform, noise = jax.vmap(draw)(key)
    mask = encoders.action_mask(observation)
    # Each legal action has the largest noise with equal probability.
    random, best = (heads.legal_argmax(values, mask) for values in (noise, q_values))
    return jnp.where(uniform < epsilon, random, best)


def ladder(env_id: jax.Array, num_envs: int, base: float = 0.4, exponent: float = 7.0) -> jax.Array:
    """Returns the epsilons `[B]` of streams that explore to different degrees.

    `base ** (1 + exponent * i / (N - 1))`, Horgan et al., "Distributed Prioritized Experience
    Replay", 2018, https://arxiv.org/abs/1803.00933.

    Args:
      env_id: int32 `[B]`, global indices.
      num_envs: `N`, streams in all.
      base: epsilon of the first stream.
      exponent: the last stream has `base ** (1 + exponent)`.
    """
    # A table, not a formula, so that every compiler gives the same numbers.
    portion = np.arange(num_envs) / max(num_envs - 1, 1)
    return jnp.asarray(base ** (1.0 + exponent * portion), jnp.float32)[env_id]
