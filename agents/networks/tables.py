"""Tables: features of observations that are numbers of rows.

Axis legend: `N` observations, `F` rows of each, `D` features.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import encoders
from podracers import errors


def sum_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the sums `[..., D]` of rows `[..., F]` of a table `[S, D]`; no row for `S` and more.

    Rows are gathered, since a product of one-hot rows with a table would multiply mostly zeros.
    """
    gathered = jnp.take(table, rows, axis=0, mode="fill", fill_value=0.0)
    return jnp.sum(gathered, axis=-2)


class Table(nn.Module):
    """A row of learnt features for each number in the observation, summed.

    Attributes:
      num_rows: `S`, numbers that there are.
      features: `D`.
    """

    num_rows: int
    features: int = 64
    reads_integers = True  # see `network.Composed`

    def __post_init__(self):
        errors.require_count(self, "num_rows", "features")
        super().__post_init__()

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, D]`."""
        leaves = jax.tree.leaves(encoders.without_mask(observation))
        if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves):
            raise errors.UserError(
                f"Table needs observations that are integers, got {[str(x.dtype) for x in leaves]}"
            )
        rows = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)
        initializer = nn.initializers.normal(1.0)
        table = self.param("table", initializer, (self.num_rows, self.features))
        return sum_rows(table, rows)
