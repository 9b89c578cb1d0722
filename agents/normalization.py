"""Running mean and variance of observations, the same on every device.

Floating leaves are normalised; bytes, integers, booleans and reserved keys are left alone.

Axis legend: `T` time, `B` streams of one device, `...` the axes of one observation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import environment, parallel, types

_EPSILON = 1e-8  # added to the variance


class Statistics(NamedTuple):
    """What was seen so far; trees like the observation, with None for leaves left alone."""

    count: jax.Array  # float32, how many observations; batches are added whole, so it is exact
    mean: types.PyTree  # [...]
    squares: types.PyTree  # [...] the sum of squared deviations from the mean


def _is_none(leaf) -> bool:
    return leaf is None


def init(observation_spec: types.PyTree) -> Statistics:
    """Returns statistics of nothing.

    Args:
      observation_spec: a pytree of `dm_env.specs` arrays.
    """

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
    Computing the Sample Variance", 1983): nothing cancels where the mean is large.

    Args:
      statistics: equal on all devices.
      observation: `[T, B, ...]`, this device's share.
      weights: `[T, B]`, 0 for observations to leave out, otherwise 1.

    Returns:
      The new statistics, equal on all devices.
    """
    added = parallel.global_sum(jnp.sum(weights))
    count = statistics.count + added
    portion = added / jnp.maximum(count, 1.0)

    def deviation(mean, leaf):
        # Measured from the old mean, and without what a zero weight hides: it may be NaN.
        return jnp.where(_expand(weights, leaf) > 0.0, leaf.astype(jnp.float32) - mean, 0.0)

    def total(leaf):
        return jnp.sum(_expand(weights, leaf) * leaf, axis=(0, 1))

    observation = jax.tree.map(
        lambda mean, leaf: None if mean is None else leaf,
        statistics.mean,
        observation,
        is_leaf=_is_none,
    )
    deviations = jax.tree.map(deviation, statistics.mean, observation)  # [T, B, ...]
    totals = parallel.global_sum(jax.tree.map(total, deviations))
    shift = jax.tree.map(lambda x: x / jnp.maximum(added, 1.0), totals)  # [...]
    spread = jax.tree.map(lambda x, s: total(jnp.square(x - s)), deviations, shift)
    spread = parallel.global_sum(spread)
    mean = jax.tree.map(lambda m, s: m + s * portion, statistics.mean, shift)
    squares = jax.tree.map(
        lambda old, new, s: old + new + jnp.square(s) * statistics.count * portion,
        statistics.squares,
        spread,
        shift,
    )
    return Statistics(count, mean, squares)


def _expand(weights: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns weights `[T, B, 1, ...]` that broadcast against `leaf` `[T, B, ...]`."""
    return weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim))


def normalize(
    statistics: Statistics, observation: types.PyTree, clip: float = 10.0
) -> types.PyTree:
    """Returns the observation with mean 0 and variance 1, clipped.

    Args:
      statistics: before anything was seen, they leave the observation as it is, but for clipping.
      observation: any leading axes.
      clip: the largest absolute value.
    """

    def scale(mean, squares, leaf):
        if mean is None:
            return leaf
        variance = squares / jnp.maximum(statistics.count, 1.0)
        variance = jnp.where(statistics.count > 0.0, variance, 1.0)
        return jnp.clip((leaf - mean) * jax.lax.rsqrt(variance + _EPSILON), -clip, clip)

    return jax.tree.map(scale, statistics.mean, statistics.squares, observation, is_leaf=_is_none)
