"""Each layer has a form for CPU and one for accelerators: both are the same function."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import networks
from agents.networks import cpu_kernels, encoders, heads, layers
from podracers import environment, parallel, types


@pytest.mark.parametrize("in_trunk", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(3, 1, "SAME"), (4, 2, "VALID"), (3, 2, "SAME"), (8, 4, "VALID"), (6, 3, "SAME")],
)
def test_both_forms_of_a_convolution_agree(monkeypatch, kernel, stride, padding, in_trunk):
    """The form for CPU, by itself or as a trunk, is XLA's own convolution."""
    images = jax.random.normal(jax.random.key(0), (2, 13, 11, 3))
    layer = layers.Conv(5, kernel, stride, padding)

    def value_and_gradient(for_cpu, in_trunk):
        monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
        params = layer.init(jax.random.key(1), images)

        def loss(params, images):
            bound = layer.bind(params)
            output = layers.on_images(bound, images) if in_trunk else bound(images)
            return jnp.sum(jnp.sin(output)), output

        gradient, output = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, images)
        return params, gradient, output

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        value_and_gradient(True, in_trunk),
        value_and_gradient(False, False),
    )


@pytest.mark.parametrize("for_cpu", [False, True])
def test_bytes_count_as_255ths(monkeypatch, for_cpu):
    monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    layer = layers.Conv(5, 4, 2)
    params = layer.init(jax.random.key(1), images)
    np.testing.assert_allclose(
        layer.apply(params, images),
        layer.apply(params, images.astype(np.float32) / 255.0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("shape", [(2, 7, 8, 3), (1, 4, 5, 1)])
def test_both_forms_of_pooling_agree(monkeypatch, shape):
    images = jax.random.normal(jax.random.key(0), shape)

    def value_and_gradient(for_cpu, max_pool=layers.max_pool):
        monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)

        def loss(x):
            pooled = max_pool(x)
            return jnp.sum(jnp.square(pooled)), pooled

        return jax.jit(jax.grad(loss, has_aux=True))(images)

    in_trunk = functools.partial(layers.on_images, layers.max_pool)
    expected = value_and_gradient(False)
    jax.tree.map(np.testing.assert_array_equal, value_and_gradient(True), expected)
    jax.tree.map(np.testing.assert_array_equal, value_and_gradient(True, in_trunk), expected)


@pytest.mark.parametrize("width", [5, 40])  # narrower, and wider, than the first layer
def test_both_forms_of_a_dense_network_agree(monkeypatch, width):
    spec = environment.EnvironmentSpec(
        "test", specs.Array((width,), np.float32), specs.DiscreteArray(3)
    )
    network = networks.actor_critic(
        spec, heads.Categorical(3), encoder=encoders.MLP((16, 8), "relu")
    )
    zeros = jnp.zeros(9)
    observation = jax.random.normal(jax.random.key(0), (9, width))
    timestep = types.TimeStep(observation, zeros, zeros, zeros.astype(jnp.int8))

    def value_and_gradient(for_cpu):
        monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
        params = jax.jit(network.init)(jax.random.key(1), timestep)

        def loss(params, observation):
            output, _ = network.step(params, (), timestep._replace(observation=observation))
            return jnp.sum(jnp.sin(output.value)) + jnp.sum(jnp.sin(output.policy)), output

        gradient, output = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, observation)
        return params, gradient, output

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        value_and_gradient(True),
        value_and_gradient(False),
    )


def test_inputs_wider_than_outputs_enter_as_rows():
    """The form for wide inputs has the value and the derivatives of the plain product."""
    kernel = jax.random.normal(jax.random.key(0), (7, 3))
    inputs = jax.random.normal(jax.random.key(1), (5, 7))

    def value_and_gradients(product):
        def loss(kernel, inputs):
            return jnp.sum(jnp.sin(product(kernel, inputs)))

        return product(kernel, inputs), jax.grad(loss, (0, 1))(kernel, inputs)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        value_and_gradients(cpu_kernels.dense_of_rows),
        value_and_gradients(lambda kernel, inputs: (inputs @ kernel).T),
    )


def test_the_product_has_second_derivatives_and_maps():
    kernel = jax.random.normal(jax.random.key(0), (3, 2))
    inputs = jax.random.normal(jax.random.key(1), (3, 5))

    def penalty(product, kernel):
        def loss(kernel):
            return jnp.sum(jnp.tanh(product(kernel, inputs)) ** 2)

        return jnp.sum(jax.grad(loss)(kernel) ** 2)

    second = jax.grad(lambda k: penalty(cpu_kernels.dense, k))
    expected = jax.grad(lambda k: penalty(lambda w, x: w.T @ x, k))
    np.testing.assert_allclose(second(kernel), expected(kernel), rtol=1e-4, atol=1e-5)
    stacked = jnp.stack([kernel, 2.0 * kernel])
    np.testing.assert_allclose(
        jax.vmap(second)(stacked), jax.vmap(expected)(stacked), rtol=1e-4, atol=1e-5
    )


def test_what_is_exported_for_a_tpu_has_the_form_for_accelerators():
    images = np.zeros((2, 8, 8, 3), np.float32)
    layer = layers.Conv(5, 4, 2)
    apply = jax.jit(layer.apply)  # traced for this machine first, as a policy that acts
    params = layer.init(jax.random.key(1), images)
    apply(params, images)
    with parallel.compiling_for("tpu"):
        exported = jax.export.export(apply, platforms=["tpu"])(params, images)
    assert "stablehlo.convolution" in exported.mlir_module()
    on_cpu = jax.export.export(apply)(params, images)
    assert "stablehlo.convolution" not in on_cpu.mlir_module()


def test_noisy_weights_are_products_of_a_factor_for_each_input_and_output():
    """What is computed is a product with weights of each row, and without a key with their mean."""
    inputs = jax.random.normal(jax.random.key(0), (3, 2, 4))
    layer = layers.NoisyDense(5)
    params = layer.init(jax.random.key(1), inputs)["params"]
    np.testing.assert_array_equal(params["deviation"]["kernel"], np.full((4, 5), 0.25))
    np.testing.assert_array_equal(params["deviation"]["bias"], np.full(5, 0.25))
    moved = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape) / 10.0, params)
    key = jax.random.split(jax.random.key(2), 2)
    outputs = layer.apply({"params": moved}, inputs, key)
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
