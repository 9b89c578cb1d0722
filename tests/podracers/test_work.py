"""Elements that a function computes, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from podracers import work

VECTOR = jnp.zeros(10)


def test_each_element_of_each_operation_counts():
    assert work.count(lambda x: jnp.sin(x) + x, VECTOR) == 20


def test_loops_count_as_often_as_they_run():
    def scan(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=7)[0]

    assert work.count(scan, VECTOR) == 70

    def search(x):  # nobody knows how often
        return jax.lax.while_loop(lambda c: c[0] < 1.0, jnp.sin, x)

    assert work.count(search, VECTOR) > 10 * work.count(jnp.sin, VECTOR)


def test_functions_within_and_every_branch_count():
    assert work.count(jax.jit(jnp.sin), VECTOR) == 10
    branches = [jnp.sin, lambda x: jnp.cos(jnp.sin(x))]
    assert work.count(lambda i, x: jax.lax.switch(i, branches, x), 0, VECTOR) >= 30


def test_random_numbers_sorting_and_products_cost_more_than_their_results():
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert work.count(lambda k: jax.random.bits(k, (10,)), key) >= 1000
    assert work.count(jnp.sort, jnp.zeros(1024)) >= 1024 * 100
    product = work.count(jnp.matmul, jnp.zeros((3, 5)), jnp.zeros((5, 2)))
    assert product == pytest.approx(30)
