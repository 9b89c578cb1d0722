"""Tables of features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import tables
from podracers import environment, errors


def test_rows_are_summed_and_those_beyond_are_none():
    table = jnp.arange(8.0).reshape(4, 2)
    rows = jnp.array([[0, 1], [3, 4], [4, 9]])
    np.testing.assert_array_equal(tables.sum_rows(table, rows), [[2, 4], [6, 7], [0, 0]])
    gradient = jax.grad(lambda t: jnp.sum(tables.sum_rows(t, rows)))(table)
    np.testing.assert_array_equal(gradient, [[1, 1], [1, 1], [0, 0], [1, 1]])


def test_the_encoder_reads_integers_alone():
    encoder = tables.Table(num_rows=5, features=3)
    observation = {"rows": jnp.array([[1], [4]]), environment.ACTION_MASK: jnp.ones((2, 2), bool)}
    params = encoder.init(jax.random.key(0), observation)
    features = encoder.apply(params, observation)
    np.testing.assert_array_equal(features, params["params"]["table"][np.array([1, 4])])
    with pytest.raises(errors.UserError, match="integers"):
        encoder.init(jax.random.key(0), {"rows": jnp.ones((2, 1))})
