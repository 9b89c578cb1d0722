"""Tests of JAX environments that are stepped on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from podracers import keys, unroll
from podracers.sebulba import jax_host
from tests import streams
from tests.environments import host_contract


def test_contract():
    environment = streams.RandomEpisodes(actions="multi_discrete", masked=True)
    host_contract.check_contract(jax_host.JaxHostEnvironment(environment), 60)


def test_streams_equal_those_of_anakin():
    environment = streams.RandomEpisodes()
    key, env_id = keys.streams(jax.random.key(3)), np.arange(4, 8, dtype=np.int32)
    host = jax_host.JaxHostEnvironment(environment).make(key, env_id, 1)
    batched = unroll.BatchedEnvironment(environment)
    state, expected = jax.jit(batched.init)(jax.vmap(jax.random.fold_in, (None, 0))(key, env_id))
    step = jax.jit(batched.step)
    streams.assert_same(host.reset(), expected)
    for time in range(20):
        action = (np.arange(4, dtype=np.int32) + time) % 3
        host.send(action)
        state, expected = step(state, jnp.asarray(action))
        streams.assert_same(host.recv(), expected)
    host.close()
