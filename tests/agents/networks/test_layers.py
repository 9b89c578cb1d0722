"""Each layer has a form for CPU and one for accelerators: both are the same function."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from agents.backends import layouts
from agents.networks import layers
from podracers import parallel
from tests import streams
from tests.agents import experience


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "in_trunk"),
    [
        (3, 1, "SAME", True),
        (4, 2, "VALID", False),
        (3, 2, "SAME", True),
        (8, 4, "VALID", True),
        (6, 3, "SAME", False),
    ],
)
def test_both_forms_of_a_convolution_agree(kernel, stride, padding, in_trunk):
    images = jax.random.normal(jax.random.key(0), (2, 13, 11, 3))
    layer = layers.Conv(5, kernel, stride, padding)

    def results(in_trunk):
        params = jax.jit(layer.init)(jax.random.key(1), images)

        def apply(params, images):
            bound = layer.bind(params)
            return layouts.on_images(bound, images) if in_trunk else bound(images)

        return params, experience.value_and_gradient(apply, params, images)

    on_cpu = results(in_trunk)
    with parallel.compiling_for("gpu"):
        streams.assert_close(on_cpu, results(False), atol=1e-4)


def test_cells_share_the_weights_of_a_linear_layer():
    inputs = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    layer = layers.Dense(8, num_cells=4)  # 3 features and 2 outputs of each cell
    params = jax.device_get(jax.jit(layer.init)(jax.random.key(0), inputs))
    params = jax.tree.map(lambda x: x + 0.5, params)
    kernel, bias = (params["params"][name] for name in ("kernel", "bias"))
    parts = [inputs[..., 3 * cell : 3 * cell + 3] @ kernel + bias for cell in range(4)]
    expected = np.concatenate(parts, axis=-1)
    np.testing.assert_allclose(layer.apply(params, inputs), expected, rtol=1e-5, atol=1e-6)
    noisy = layers.NoisyDense(8, num_cells=4)
    keys = jax.random.split(jax.random.key(1), 3)
    outputs, params = jax.eval_shape(noisy.init_with_output, jax.random.key(0), inputs, keys)
    shapes = jax.tree.map(jnp.shape, params["params"])
    assert shapes == {name: {"kernel": (3, 2), "bias": (2,)} for name in ("mean", "deviation")}
    assert outputs.shape == (2, 3, 8)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_bias_after_pooling_is_the_bias_before_it(platform):
    images = jax.random.normal(jax.random.key(0), (2, 7, 8, 3))
    params = jax.jit(layers.Conv(5).init)(jax.random.key(1), images)
    params["params"]["bias"] += np.arange(5.0, dtype=np.float32)

    def pooled(*inputs):
        return nn.max_pool(layers.Conv(5).apply(*inputs), (3, 3), (2, 2), "SAME")

    with parallel.compiling_for(platform):
        actual, expected = (
            experience.value_and_gradient(apply, params, images)
            for apply in (layers.Conv(5, pool=True).apply, pooled)
        )
    np.testing.assert_array_equal(actual[0], expected[0])
    streams.assert_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("kernel", [4, 8])
def test_a_convolution_of_packed_frames_is_that_of_their_bytes(kernel):
    images = np.random.default_rng(0).integers(0, 256, (2, 20, 16, 3), np.uint8)
    layer = layers.Conv(5, kernel, 4, "VALID")
    params = jax.jit(layer.init)(jax.random.key(1), images)

    def results(images):
        apply = lambda params: layouts.on_images(layer.bind(params), images)  # noqa: E731
        return experience.value_and_gradient(apply, params)

    expected = results(images)
    with parallel.compiling_for("tpu"):
        packed = layouts.pack(images[None])[0]
        assert packed.dtype == jnp.uint32
        actual = results(packed)
        shapes = jax.eval_shape(layer.init, jax.random.key(1), packed)
    streams.assert_close(actual, expected, atol=1e-4)
    assert shapes == jax.eval_shape(lambda: params)


def test_a_rectifier_on_a_tpu_has_the_same_derivative():
    values = jnp.array([-1.0, -0.0, 0.0, 1e-30, 2.0, 1.0 + 1e-7])

    expected = experience.value_and_gradient(layouts.relu, values)
    with parallel.compiling_for("tpu"):
        actual = experience.value_and_gradient(layouts.relu, values)
        program = jax.make_jaxpr(layouts.relu)(values)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert str(program) != str(jax.make_jaxpr(layouts.relu)(values))  # another form


def test_an_export_for_a_tpu_has_the_form_for_accelerators():
    images = np.zeros((2, 8, 8, 3), np.float32)
    layer = layers.Conv(5, 4, 2)
    apply = jax.jit(layer.apply)  # traced for this machine first, as a policy that acts
    params = jax.jit(layer.init)(jax.random.key(1), images)
    apply(params, images)
    with parallel.compiling_for("tpu"):
        exported = jax.export.export(apply, platforms=["tpu"])(params, images)
    assert "stablehlo.convolution" in exported.mlir_module()
    on_cpu = jax.export.export(apply)(params, images)
    assert "stablehlo.convolution" not in on_cpu.mlir_module()


def test_noisy_weights_are_products_of_a_factor_for_each_input_and_output():
    inputs = jax.random.normal(jax.random.key(0), (3, 2, 4))
    layer = layers.NoisyDense(5)
    params = jax.jit(layer.init)(jax.random.key(1), inputs)["params"]
    np.testing.assert_array_equal(params["deviation"]["kernel"], np.full((4, 5), 0.25))
    np.testing.assert_array_equal(params["deviation"]["bias"], np.full(5, 0.25))
    moved = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape) / 10.0, params)
    key = jax.random.split(jax.random.key(2), 2)
    outputs = jax.jit(layer.apply)({"params": moved}, inputs, key)
    mean, deviation = moved["mean"], moved["deviation"]
    for row in range(2):
        noise = np.asarray(jax.random.normal(key[row], (9,)))
        noise = np.sign(noise) * np.sqrt(np.abs(noise))
        kernel = mean["kernel"] + deviation["kernel"] * np.outer(noise[:4], noise[4:])
        bias = mean["bias"] + deviation["bias"] * noise[4:]
        expected = inputs[:, row] @ kernel + bias
        np.testing.assert_allclose(outputs[:, row], expected, rtol=1e-4, atol=1e-5)
    quiet = inputs @ mean["kernel"] + mean["bias"]
    np.testing.assert_allclose(layer.apply({"params": moved}, inputs), quiet, rtol=1e-4, atol=1e-5)


def test_chosen_values_have_the_gradient_of_an_indexing_without_a_scatter():
    values = jnp.array([[1.0, -jnp.inf, 3.0], [4.0, 5.0, 6.0]])
    index = jnp.array([2, 0])
    np.testing.assert_array_equal(layers.take(values, index), [3.0, 4.0])
    np.testing.assert_array_equal(layers.take(values[None], index), [[3.0, 4.0]])
    gradient = jax.grad(lambda v: jnp.sum(layers.take(v, index)))
    np.testing.assert_array_equal(gradient(values), [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert "scatter" not in str(jax.make_jaxpr(gradient)(values))
