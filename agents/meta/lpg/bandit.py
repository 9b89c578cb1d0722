"""Which hyper-parameters suit which task: a bandit over a few combinations, for each kind of task.

Axis legend: `B` lifetimes of one device, `K` kinds of tasks, `H` combinations of hyper-parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracers import parallel

_MEMORY = 10.0  # lifetimes that a mean remembers
_BONUS = 0.2
_TEMPERATURE = 0.1


class Bandit(NamedTuple):
    """What lifetimes reached; equal on all devices."""

    mean: jax.Array  # [K, H] of about the last ten lifetimes
    trials: jax.Array  # [K, H] float32

    @classmethod
    def init(cls, num_tasks: int, num_arms: int) -> "Bandit":
        """Returns a bandit that has tried nothing."""
        zeros = jnp.zeros((num_tasks, num_arms))
        return cls(zeros, zeros)

    def logits(self) -> jax.Array:
        """Returns what arms are drawn by, `[K, H]`.

        Means are divided by the largest of their task, so that all tasks are of one scale. What was
        not tried counts as if it were best.
        """
        tried = self.trials > 0
        scale = jnp.max(jnp.abs(self.mean), axis=1, keepdims=True)
        value = jnp.where(tried, self.mean / jnp.maximum(scale, 1e-8), 1.0)
        return (value + _BONUS / jnp.sqrt(jnp.maximum(self.trials, 1.0))) / _TEMPERATURE

    def add(self, task: jax.Array, arm: jax.Array, value: jax.Array, ended: jax.Array) -> "Bandit":
        """Adds what lifetimes reached that ended; runs under the mapped axis.

        Means are exponential, so that it does not matter in which order lifetimes end together.

        Args:
          task: `[B]` int32.
          arm: `[B]` int32.
          value: `[B]` float32, in one unit for each task.
          ended: `[B]` bool, the others do not count.
        """
        zeros, weight = jnp.zeros_like(self.mean), ended.astype(jnp.float32)
        count, total = parallel.global_sum(
            (zeros.at[task, arm].add(weight), zeros.at[task, arm].add(weight * value))
        )
        # A young mean is that of all lifetimes so far.
        remembered = jnp.minimum(self.trials, _MEMORY)
        kept = remembered * (1.0 - 1.0 / _MEMORY) ** count
        kept = jnp.where(self.trials < _MEMORY, remembered, kept)
        mean = (kept * self.mean + total) / jnp.maximum(kept + count, 1.0)
        return Bandit(jnp.where(count > 0, mean, self.mean), self.trials + count)
