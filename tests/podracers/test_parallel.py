"""Tests of gradient steps on several devices, and of devices to compile for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import parallel, types

P = jax.sharding.PartitionSpec
ROWS = P(parallel.AXIS)


def _mapped(function, num_devices=4, out_specs=ROWS):
    """Returns a function that is mapped over the rows of its arguments."""
    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    return lambda *arguments: parallel.mapped(function, mesh, (ROWS,) * len(arguments), out_specs)(
        *arguments
    )


def test_the_axis_and_the_mean_of_nothing():
    def where(x):
        return x + parallel.axis_index() * 10 + parallel.axis_size()

    np.testing.assert_array_equal(_mapped(where)(jnp.zeros(4, jnp.int32)), [4, 14, 24, 34])
    assert parallel.make_mesh().devices.tolist() == jax.devices()
    mean = _mapped(lambda x: parallel.global_mean(types.Mean.of(x, x))[None])
    np.testing.assert_array_equal(mean(jnp.zeros(4)), 0.0)


def test_small_leaves_are_summed_together_and_large_ones_alone():
    rng = np.random.default_rng(0)
    tree = {
        "count": rng.integers(0, 9, (4,), np.int32),
        "large": rng.normal(size=(4, 100_000)).astype(np.float32),
        "matrix": rng.normal(size=(4, 2, 3)).astype(np.float32),
        "nothing": (),
        "steps": rng.integers(0, 9, (4, 2), np.int32),
    }
    run = _mapped(
        lambda tree: parallel.global_sum(jax.tree.map(lambda x: x[0], tree)), out_specs=P()
    )
    for leaf, total in zip(jax.tree.leaves(tree), jax.tree.leaves(run(tree)), strict=True):
        assert (total.shape, total.dtype) == (leaf.shape[1:], leaf.dtype)
        np.testing.assert_allclose(total, leaf.sum(axis=0), rtol=1e-5, atol=1e-6)
    # One for the small floats, one for the integers, and one for the large leaf.
    assert jax.jit(run).lower(tree).as_text().count('"stablehlo.all_reduce"') == 3


def _replicated(*copies):
    """Returns an array whose copy on each device is given, though it is called replicated."""
    mesh = parallel.make_mesh(jax.devices()[: len(copies)])
    shards = [jax.device_put(copy, device) for copy, device in zip(copies, jax.devices())]
    sharding = jax.sharding.NamedSharding(mesh, P())
    return jax.make_array_from_single_device_arrays(shards[0].shape, sharding, shards)


@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.int8, np.bool_, np.uint32, np.complex64], ids=str
)
def test_one_element_of_one_copy_that_differs_is_found(dtype):
    equal = np.arange(12).reshape(3, 4).astype(dtype)
    for index in np.ndindex(equal.shape):
        other = equal.copy()
        other[index] = not equal[index] if dtype == np.bool_ else 100
        if dtype == np.complex64:
            other[index] = equal[index] + 1j
        tree = {"a": _replicated(equal, equal, equal), "b": [_replicated(equal, equal, other)]}
        assert "'b/0' differ" in parallel.unequal_replicas(tree)


def test_only_replicated_leaves_are_compared():
    nan, other = np.full(2, np.nan, np.float32), np.zeros(2, np.float32)
    mesh = parallel.make_mesh(jax.devices()[:2])
    split = jax.device_put(np.arange(2), jax.sharding.NamedSharding(mesh, ROWS))
    keys = [jax.random.key(0), jax.random.key(1)]
    tree = {"nan": _replicated(nan, nan), "split": split, "one": jnp.ones(2)}
    assert parallel.unequal_replicas({**tree, "key": _replicated(keys[0], keys[0])}) is None
    tree |= {"key": _replicated(*keys), "x": _replicated(nan, other)}
    assert "'key' (and 1 more) differ" in parallel.unequal_replicas(tree)
    assert parallel.unequal_replicas({"numpy": other, "int": 3}) is None


def test_programs_for_other_devices_are_traced_for_their_platform():
    traced = []

    @jax.jit
    def program(x):
        traced.append(parallel.platform())
        return x

    program(1.0)
    with parallel.compiling_for("tpu"):
        program.trace(1.0)  # not what was traced before
        # The mesh that a program is mapped over is nearer.
        mesh = parallel.make_mesh(jax.devices()[:2])
        parallel.mapped(program, mesh, P(), P()).trace(1.0)
    program(1.0)
    assert traced == ["cpu", "tpu", "cpu"]
    with parallel.compiling_for(jax.devices()[1:3]):
        assert parallel.devices() == parallel.devices(0) == jax.devices()[1:3]
        assert parallel.make_mesh().devices.tolist() == jax.devices()[1:3]
        assert parallel.platform() == "cpu"
    assert parallel.devices() == parallel.devices(0) == jax.devices()
