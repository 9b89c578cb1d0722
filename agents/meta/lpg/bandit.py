"""Bandit over combinations of agents' hyper-parameters, for each kind of task.

Axis legend: `B` lifetimes of one device, `K` kinds of tasks, `H` combinations of hyper-parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracers import parallel

_MEMORY = 10.0  # lifetimes in the moving mean
_BONUS = 0.2
_TEMPERATURE = 0.1


class Bandit(NamedTuple):
    """Mean results of lifetimes by task and arm; equal on all devices."""

    mean: jax.Array  # [K, H] over about the last ten lifetimes
    trials: jax.Array  # [K, H] float32

    @classmethod
    def init(cls, num_tasks: int, num_arms: int) -> "Bandit":
        """Returns a bandit without trials."""
        zeros = jnp.zeros((num_tasks, num_arms))
        return cls(zeros, zeros)

    def logits(self) -> jax.Array:
        """Returns the logits by which arms are drawn, `[K, H]`.

        Means are divided by the largest of their task, so that all tasks have one scale. An untried
        arm has the value of the best one.
        """
        tried = self.trials > 0
        scale = jnp.max(jnp.abs(self.mean), axis=1, keepdims=True)
        value = jnp.where(tried, self.mean / jnp.maximum(scale, 1e-8), 1.0)
        return (value + _BONUS / jnp.sqrt(jnp.maximum(self.trials, 1.0))) / _TEMPERATURE

    def add(self, task: jax.Array, arm: jax.Array, value: jax.Array, ended: jax.Array) -> "Bandit":
        """Adds the results of lifetimes that ended; runs under the mapped axis.

        Means are exponential; the order of lifetimes that end together does not matter.

        Args:
          task: `[B]` int32.
          arm: `[B]` int32.
          value: `[B]` float32, in the same unit for all lifetimes of a task.
          ended: `[B]` bool; other lifetimes are ignored.
        """
        cells, weight = jnp.zeros_like(self.mean).at[task, arm], ended.astype(jnp.float32)
        count, total = parallel.global_sum((cells.add(weight), cells.add(weight * value)))
        # Below `_MEMORY` trials, the mean is over all lifetimes so far.
        remembered = jnp.minimum(self.trials, _MEMORY)
        kept = remembered * (1.0 - 1.0 / _MEMORY) ** count
        kept = jnp.where(self.trials < _MEMORY, remembered, kept)
        mean = (kept * self.mean + total) / jnp.maximum(kept + count, 1.0)
        return Bandit(jnp.where(count > 0, mean, self.mean), self.trials + count)
