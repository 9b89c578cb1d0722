"""PopArt: a value head whose outputs are normalised by running statistics of its targets.

Van Hasselt et al., "Learning values across many orders of magnitude", 2016,
https://arxiv.org/abs/1602.07714, as Hessel et al., "Multi-task Deep Reinforcement Learning with
PopArt", 2018, https://arxiv.org/abs/1809.04474, use it for one task. With the mean `μ` and the
standard deviation `σ` of the targets, the layer "value" of the network computes `n`, and the value
is `v = σ n + μ`. When the statistics move, its weights move so that no value changes.

The statistics are among the parameters of the network, but have no gradient and no optimizer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracers import parallel, types

NAME = "value_statistics"  # key of a network's parameters
_MIN_STD, _MAX_STD = 1e-4, 1e6
_PRECISION = 1e-3  # smallest standard deviation, in units of the root of the mean square


class Moments(NamedTuple):
    """Running moments of the targets, float32 scalars."""

    mean: jax.Array
    square: jax.Array  # mean of the squares
    updates: jax.Array

    @property
    def std(self) -> jax.Array:
        """The standard deviation, within bounds."""
        # A lower variance would be the rounding error of the difference.
        least = jnp.maximum(_MIN_STD**2, _PRECISION**2 * self.square)
        variance = self.square - jnp.square(self.mean)
        return jnp.sqrt(jnp.clip(variance, least, _MAX_STD**2))


def init(params: dict) -> dict:
    """Returns parameters of a network with statistics of no targets, which change no value."""
    zero, one = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    return {**params, NAME: Moments(zero, one, jnp.copy(zero))}


def std(params: dict) -> jax.Array | float:
    """Returns the unit of values and advantages in a loss; 1 without statistics."""
    return jax.lax.stop_gradient(params[NAME].std) if NAME in params else 1.0


def value(statistics: Moments, normalized: jax.Array) -> jax.Array:
    """Returns values `[...]` of the outputs of the layer "value"."""
    std, mean = jax.lax.stop_gradient((statistics.std, statistics.mean))
    return std * normalized + mean


def is_weight(params: dict) -> dict:
    """Returns whether parameters are weights, by name."""
    return {name: name != NAME for name in params}


def update(params: dict, target: jax.Array, weight: jax.Array, rate: float) -> dict:
    """Moves the statistics towards those of a batch, and the weights so that all values stay.

    Runs under the mapped axis; `target` and `weight` `[T, B]` are this device's part of the batch.
    `rate` is the step size; the first steps are larger, so that the first batches count equally.
    """
    old, layer = params[NAME], params["value"]
    updates = old.updates + 1.0
    step = jnp.maximum(rate, 1.0 / updates)

    def moved(moment: jax.Array, values: jax.Array) -> jax.Array:
        return moment + step * (parallel.global_mean(types.Mean.of(values, weight)) - moment)

    new = Moments(moved(old.mean, target), moved(old.square, jnp.square(target)), updates)
    layer = {
        "kernel": layer["kernel"] * (old.std / new.std),
        "bias": (layer["bias"] * old.std + old.mean - new.mean) / new.std,
    }
    return {**params, "value": layer, NAME: new}
