"""Preprocessing of time steps before an agent acts on them or learns from them.

Observations are normalised by their running mean and variance, the same on every device; rewards
are divided by the running standard deviation of their discounted returns, scaled and clipped.
Floating leaves of observations are normalised, except for reserved keys. Images from replay can be
shifted at random (`random_shifts`).

Axis legend: `T` time, `B` streams of one device, `...` the axes of one observation; `N` images,
`H` `W` `C` height, width and channels.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, parallel, types

_EPSILON = 1e-8  # added to the variance
_CLIP = 10.0  # largest absolute value of normalised observations and rewards
_MAX_BATCHES = 2**17  # batches that count; float32 adds no small number to a large one
_IMAGE_RANK = 3


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Normalisation of observations and rewards, scaling and clipping of rewards.

    Attributes:
      normalize_observations: see `agents.parts.options`, as `reward_scale` and `reward_clip`.
      return_discount: discount of the returns by whose standard deviation rewards are divided
        before they are scaled, and then clipped at 10; None for no division.
    """

    normalize_observations: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None
    return_discount: float | None = None

    def init(self, observation_spec: types.PyTree) -> Any:
        """Returns empty statistics for a pytree of `dm_env.specs`; `()` without normalisation."""
        observation = init(observation_spec) if self.normalize_observations else ()
        if self.return_discount is None:
            return observation
        return Normalizer(observation, init(specs.Array((), np.float32)))

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns running returns `[B]` of zeros for rollouts `[T, B, ...]`.

        Without normalisation of rewards, returns `()`.
        """
        if self.return_discount is None:
            return ()
        return jnp.zeros(rollout.timestep.reward.shape[1:])

    def apply(self, statistics: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns time steps `[..., B]` with observations and rewards to learn from."""
        observation, reward = timestep.observation, timestep.reward
        if self.return_discount is not None:
            statistics, returns = statistics
            factor = _inverse_deviation(returns.count, returns.squares)
            reward = jnp.clip(factor * reward, -_CLIP, _CLIP)
        if self.normalize_observations:
            observation = normalize(statistics, observation)
        reward = self.reward_scale * reward
        if self.reward_clip is not None:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        return timestep._replace(observation=observation, reward=reward)

    def apply_to_rollout(self, statistics: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns the time steps `[T + 1, B]` of a rollout to learn from; under the mapped axis.

        The statistics of observations are those of acting, so the first ratios of PPO are 1 with a
        lag of 0. Empty ones count the rollout first: then it is normalised for learning, though its
        actions (and their probabilities and values) are those of observations as they were.
        """
        if jax.tree.leaves(statistics):
            added = self.update_statistics(statistics, timestep)
            added, _ = self.update_returns(added, jnp.zeros_like(timestep.reward[0]), timestep)
            empty = jax.tree.leaves(statistics)[0] == 0.0  # the number of observations or returns
            select = functools.partial(jnp.where, empty)
            statistics = jax.tree.map(select, added, statistics)
        return self.apply(statistics, timestep)

    def update_statistics(self, statistics: Any, timestep: types.TimeStep) -> Any:
        """Adds the observations of a rollout on all devices; runs under the mapped axis.

        Time steps are those `[T + 1, B]` before `apply`; the last belongs to the next rollout.
        """
        if not self.normalize_observations:
            return statistics
        observation = jax.tree.map(lambda x: x[:-1], timestep.observation)
        weights = jnp.ones_like(timestep.reward[1:])
        if self.return_discount is None:
            return update(statistics, observation, weights)
        added = update(statistics.observation, observation, weights)
        return statistics._replace(observation=added)

    def update_returns(
        self, statistics: Any, running: Any, timestep: types.TimeStep
    ) -> tuple[Any, Any]:
        """Adds the discounted returns of a rollout on all devices; runs under the mapped axis.

        The return after a step is the discounted sum of the rewards since the episode began, as in
        "VecNormalize" of OpenAI baselines (https://github.com/openai/baselines); Engstrom et al.,
        "Implementation Matters in Deep Policy Gradients", 2020, https://arxiv.org/abs/2005.12729.

        Args:
          statistics: equal on all devices.
          running: `[B]`, the returns at the first time step, of this device's streams.
          timestep: `[T + 1, B]` before `apply`.

        Returns:
          The new statistics, and the returns at the last time step.
        """
        if self.return_discount is None:
            return statistics, running
        first = timestep.first()

        def step(running: jax.Array, arrival: tuple[jax.Array, jax.Array]):
            reward, first = arrival
            running = jnp.where(first, 0.0, self.return_discount * running + reward)
            return running, running

        # After a resume, simulators begin new episodes where the saved ones were unfinished.
        running = jnp.where(first[0], 0.0, running)
        running, returns = jax.lax.scan(step, running, (timestep.reward[1:], first[1:]))
        weights = 1.0 - first[1:].astype(jnp.float32)
        added = update(statistics.returns, returns, weights)
        return statistics._replace(returns=added), running


def of(agent: Any) -> Preprocess:
    """Returns the preprocessing that an agent's options of the same names ask for.

    Only agents that call `update_returns` have the option `normalize_rewards`.
    """
    return_discount = agent.gamma if getattr(agent, "normalize_rewards", False) else None
    options = agent.normalize_observations, agent.reward_scale, agent.reward_clip
    return Preprocess(*options, return_discount)


class Statistics(NamedTuple):
    """Running statistics: trees like the observation, with None where nothing is normalised."""

    count: jax.Array  # float32, number of observations; earlier ones fade, see `update`
    mean: types.PyTree  # [...]
    squares: types.PyTree  # [...] the sum of squared deviations from the mean


class Normalizer(NamedTuple):
    """Statistics where rewards are normalised; equal on all devices."""

    observation: Any  # `Statistics` of the observations; () where they are not normalised
    returns: Statistics  # statistics of the discounted returns, []


def init(observation_spec: types.PyTree) -> Statistics:
    """Returns empty statistics for a pytree of `dm_env.specs` arrays."""

    def zeros(path, spec):
        reserved = bool(path) and getattr(path[0], "key", None) in environment.RESERVED
        if reserved or not np.issubdtype(spec.dtype, np.floating):
            return None
        return jnp.zeros(spec.shape, jnp.float32)

    mean = jax.tree_util.tree_map_with_path(zeros, observation_spec)
    # Two buffers, not one twice: the learner's state is donated, and a buffer only once.
    return Statistics(jnp.zeros((), jnp.float32), mean, jax.tree.map(jnp.zeros_like, mean))


def update(statistics: Statistics, observation: types.PyTree, weights: jax.Array) -> Statistics:
    """Merges the observations of all devices; runs under the mapped axis.

    Two passes over the batch and a merge of deviations (Chan, Golub and LeVeque, "Algorithms for
    Computing the Sample Variance", 1983): nothing cancels where the mean is large. After 131,072
    batches, each further one lowers the weights of earlier observations.

    Args:
      statistics: equal on all devices, as the new ones are.
      observation: `[T, B, ...]`, this device's share.
      weights: `[T, B]`, 0 for observations to leave out, otherwise 1.
    """
    added = parallel.global_sum(jnp.sum(weights))
    count = statistics.count + added
    portion = added / jnp.maximum(count, 1.0)
    kept = jnp.minimum(count, float(_MAX_BATCHES * weights.size * parallel.axis_size()))
    fading = kept / jnp.maximum(count, 1.0)

    def expand(leaf):  # weights [T, B, 1, ...] that broadcast against [T, B, ...]
        return weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim))

    def deviation(mean, leaf):
        if mean is None:
            return None
        # Measured from the old mean, and selected, not multiplied: left-out values may be NaN.
        return jnp.where(expand(leaf) > 0.0, leaf.astype(jnp.float32) - mean, 0.0)

    def total(leaf):
        return jnp.sum(expand(leaf) * leaf, axis=(0, 1))

    deviations = jax.tree.map(  # [T, B, ...]
        deviation, statistics.mean, observation, is_leaf=lambda x: x is None
    )
    totals = parallel.global_sum(jax.tree.map(total, deviations))
    shift = jax.tree.map(lambda x: x / jnp.maximum(added, 1.0), totals)  # [...]
    spread = jax.tree.map(lambda x, s: total(jnp.square(x - s)), deviations, shift)
    spread = parallel.global_sum(spread)
    mean = jax.tree.map(lambda m, s: m + s * portion, statistics.mean, shift)
    squares = jax.tree.map(
        lambda old, new, s: fading * (old + new + jnp.square(s) * statistics.count * portion),
        statistics.squares,
        spread,
        shift,
    )
    return Statistics(kept, mean, squares)


def normalize(statistics: Statistics, observation: types.PyTree) -> types.PyTree:
    """Returns the observation `[...]` with mean 0 and variance 1, clipped at 10.

    While the statistics are empty, observations are only clipped.
    """

    def scale(mean, squares, leaf):
        if mean is None:
            return leaf
        factor = _inverse_deviation(statistics.count, squares)
        return jnp.clip((leaf - mean) * factor, -_CLIP, _CLIP)

    return jax.tree.map(
        scale, statistics.mean, statistics.squares, observation, is_leaf=lambda x: x is None
    )


def _inverse_deviation(count: jax.Array, squares: jax.Array) -> jax.Array:
    """Returns 1 over the standard deviation, and 1 while the statistics are empty."""
    variance = squares / jnp.maximum(count, 1.0)
    variance = jnp.where(count > 0.0, variance, 1.0)
    return jax.lax.rsqrt(variance + _EPSILON)


def random_shifts(observation: types.PyTree, pixels: int, key: jax.Array) -> types.PyTree:
    """Returns observations whose images are shifted at random, down and to the right.

    Kostrikov, Yarats and Fergus, "Image Augmentation Is All You Need: Regularizing Deep
    Reinforcement Learning from Pixels", 2020, https://arxiv.org/abs/2004.13649. The nearest pixels
    of the edge fill the gap. All channels (and stacked frames) of an image and all images of one
    observation `[N, ...]` are shifted alike; other leaves are unchanged. All shifts from `-pixels`
    to `pixels` are equally probable. There is a key `[N]` for each observation.
    """
    if not pixels:
        return observation
    shift = jax.vmap(lambda k: jax.random.randint(k, (2,), -pixels, pixels + 1))(key)  # [N, 2]

    def shift_one(image, shift):
        for axis, size in enumerate(image.shape[:2]):
            source = jnp.clip(jnp.arange(size) - shift[axis], 0, size - 1)
            image = jnp.take(image, source, axis=axis)
        return image

    def shifted(leaf):
        return leaf if leaf.ndim != _IMAGE_RANK + 1 else jax.vmap(shift_one)(leaf, shift)

    return jax.tree.map(shifted, observation)
