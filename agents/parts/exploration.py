"""Epsilon-greedy exploration, and action masks of Q-values.

Axis legend: `B` streams, `A` actions.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agents.networks import heads
from agents.parts import optimization, options
from podracers import environment, types


class Extras(NamedTuple):
    """The data of each step that acting reports."""

    value: jax.Array  # [T, B] of the best legal action


def best_q_value(q_values: jax.Array, observation: types.PyTree) -> jax.Array:
    """Returns the largest of `heads.legal_values`, `[...]`, by the mask of an observation."""
    return jnp.max(heads.legal_values(q_values, environment.action_mask(observation)), axis=-1)


def epsilon_greedy(
    q_values: jax.Array, observation: types.PyTree, epsilon: jax.typing.ArrayLike, key: jax.Array
) -> jax.Array:
    """Returns the best legal action, or with probability `epsilon` any legal one, int32 `[B]`.

    The action mask of the observation, if it has one, marks the legal ones of the actions
    `[B, A]`; `epsilon` is `[B]` or a scalar, and there is a key `[B]` for each stream.
    """
    # Networks with `num_atoms` return logits [B, A, Z], of which DQN takes the mean.
    if len(getattr(q_values, "shape", ())) != 2:
        raise options.wrong_output(q_values, "values of actions [B, A]")

    def draw(key):
        choose_key, explore_key = jax.random.split(key)
        noise = jax.random.uniform(explore_key, q_values.shape[-1:])
        return jax.random.uniform(choose_key), noise

    mask = environment.action_mask(observation)
    if isinstance(epsilon, float) and not epsilon:
        return heads.legal_argmax(q_values, mask)
    uniform, noise = jax.vmap(draw)(key)
    # Each legal action has the largest noise with equal probability.
    random, best = (heads.legal_argmax(values, mask) for values in (noise, q_values))
    return jnp.where(uniform < epsilon, random, best)


def ladder(env_id: jax.Array, num_envs: int, base: float, exponent: float) -> jax.Array:
    """Returns the epsilons `[B]` of the streams `env_id`, which explore to different degrees.

    They are `base ** (1 + exponent * i / (N - 1))` of the global index `i` out of `N = num_envs`;
    Horgan et al., "Distributed Prioritized Experience Replay", 2018,
    https://arxiv.org/abs/1803.00933.
    """
    # A table, not a formula, so that every compiler gives the same numbers.
    portion = np.arange(num_envs) / max(num_envs - 1, 1)
    return jnp.asarray(base ** (1.0 + exponent * portion), jnp.float32)[env_id]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EpsilonGreedy(optimization.GradientAgent):
    """Options and acting of agents with one epsilon for all streams; see `agents.parts.options`."""

    epsilon: float = options.fraction(0.05)
    epsilon_steps: int = options.count(10_000)
    evaluation_epsilon: float = options.fraction(0.0)

    def actor_params(self, learner: optimization.Learner) -> optimization.ActorParams:
        """Returns the parameters, the statistics of the observations, and epsilon."""
        epsilon = optax.linear_schedule(1.0, self.epsilon, self.epsilon_steps)(learner.agent_steps)
        return optimization.ActorParams(learner.params, learner.normalizer, epsilon)

    def _explore(self, params, q_values, observation, key, evaluation):
        """Returns the actions of `epsilon_greedy`, and `Extras`."""
        epsilon = self.evaluation_epsilon if evaluation else params.exploration
        action = epsilon_greedy(q_values, observation, epsilon, key)
        return action, Extras(best_q_value(q_values, observation))
