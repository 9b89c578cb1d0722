"""Features of observations, by encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import encoders, layers, tables
from podracers import errors
from tests import streams


def test_images_and_vectors_are_separated_and_scaled_without_the_mask():
    observation = {
        "action_mask": jnp.ones((2, 4), bool),
        "frame": jnp.full((2, 5, 6, 3), 51, jnp.uint8),
        "nested": {"count": jnp.array([7, -7]), "flag": jnp.array([[True], [False]])},
        "wide": jnp.ones((2, 2, 2)),
    }
    image, vector = encoders.split_image(observation)
    assert image.shape == (2, 5, 6, 3) and image.dtype == jnp.uint8
    np.testing.assert_array_equal(vector, [[7, 1, 1, 1, 1, 1], [-7, 0, 1, 1, 1, 1]])
    assert vector.dtype == jnp.float32
    np.testing.assert_array_equal(encoders.action_mask(observation), observation["action_mask"])
    assert encoders.action_mask(vector) is None
    flat = encoders.MLP(()).apply({}, observation)
    np.testing.assert_allclose(flat, np.c_[np.full((2, 90), 0.2), vector], rtol=1e-6)


def test_a_grid_without_channels_is_an_image_and_two_images_are_none():
    image, vector = encoders.split_image(jnp.ones((2, 5, 6), bool))
    assert image.shape == (2, 5, 6, 1) and vector is None
    image, _ = encoders.split_image({"a": jnp.ones((2, 5, 6, 1)), "b": jnp.ones((2, 5, 6, 1))})
    assert image is None


@pytest.mark.parametrize("encoder", [encoders.NatureCNN(8), encoders.ImpalaResNet((2,), 8)])
def test_vectors_join_after_the_convolutions(encoder):
    observation = {"frame": jnp.ones((2, 36, 36, 1)), "speed": jnp.array([[3.0], [4.0]])}
    features, _ = jax.jit(encoder.init_with_output)(jax.random.key(0), observation)
    assert features.shape == (2, 9)
    np.testing.assert_array_equal(features[:, 8], [3.0, 4.0])


def _moved(params):
    """Returns parameters away from the ones and zeros that layer normalisation begins with."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize(
    ("encoder", "dtype"),
    [
        (encoders.ImpalaResNet((2, 3), 8, layer_norm=True), np.float32),
        (encoders.CNN((8, 6), padding="VALID", layer_norm=True), np.uint8),
        (encoders.ResidualImage(encoders.ResidualTrunk(8, 1, (2, 2))), np.uint8),
    ],
)
def test_both_forms_of_an_encoder_agree(monkeypatch, encoder, dtype):
    """On CPU 7 images pass in 3 chunks; the expected form is XLA's, of all images at once."""
    frames = np.random.default_rng(0).integers(0, 256, (7, 37, 36, 2), np.uint8)
    frames = frames if dtype == np.uint8 else frames.astype(dtype) / 255.0
    monkeypatch.setattr(layers, "_MIN_IMAGES", 3)
    monkeypatch.setattr(layers, "_PIXELS", 1)

    def features_and_gradient(for_cpu):
        monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
        params = _moved(jax.jit(encoder.init)(jax.random.key(1), frames[:1]))

        def loss(params):
            features = encoder.apply(params, frames)
            return jnp.sum(jnp.sin(features)), features

        gradient, features = jax.jit(jax.grad(loss, has_aux=True))(params)
        return params, gradient, features

    streams.assert_close(features_and_gradient(True), features_and_gradient(False), atol=1e-4)


@pytest.mark.parametrize(
    "encoder", [encoders.SimBa(5, 2), encoders.MLP((5, 6), "relu", layer_norm=True)]
)
def test_normalised_layers_equal_their_equations(encoder):
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params = _moved(encoder.init(jax.random.key(0), rows)["params"])

    def dense(index, x):
        return x @ params[f"Dense_{index}"]["kernel"] + params[f"Dense_{index}"]["bias"]

    def norm(index, x):
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
        return x * params[f"LayerNorm_{index}"]["scale"] + params[f"LayerNorm_{index}"]["bias"]

    x = rows
    if isinstance(encoder, encoders.MLP):
        for layer in range(2):
            x = np.maximum(norm(layer, dense(layer, x)), 0.0)
    else:
        x = dense(0, rows)
        for block in range(2):
            wide = np.maximum(dense(1 + 2 * block, norm(block, x)), 0.0)
            assert wide.shape == (4, 20)
            x = x + dense(2 + 2 * block, wide)
        x = norm(2, x)
    np.testing.assert_allclose(encoder.apply({"params": params}, rows), x, rtol=1e-4, atol=1e-5)


def test_integers_become_one_hot_codes_and_other_leaves_stay():
    board = np.array([[[-1, 0], [2, 3]], [[1, 1], [-1, 9]]])
    observation = {
        "board": jnp.asarray(board),
        "place": jnp.array([0, 2]),
        "speed": jnp.array([[0.5], [0.25]]),
        "walls": jnp.array([[True], [False]]),
        "action_mask": jnp.ones((2, 4), bool),
    }
    encoder = encoders.OneHot(encoders.MLP(()), num_values=4, minimum=-1)
    codes = board[..., None] == np.arange(-1, 3)  # 3 and 9 are beyond
    place = np.array([[0, 1, 0, 0], [0, 0, 0, 1]])
    others = [[0.5, 1.0], [0.25, 0.0]]
    expected = np.concatenate([codes.reshape(2, -1), place, others], axis=1)
    np.testing.assert_array_equal(encoder.apply({}, observation), expected)


@pytest.mark.parametrize(("shape", "channels"), [((2, 5, 5), 4), ((2, 5, 5, 3), 12)])
def test_one_hot_codes_are_channels_of_a_convolution_with_strides(shape, channels):
    cnn = encoders.CNN((2, 3), kernel=2, hidden_sizes=(), strides=(1, 2))
    encoder, codes = encoders.OneHot(cnn, 4, -1), jnp.zeros(shape, jnp.int32)
    features, variables = jax.jit(encoder.init_with_output)(jax.random.key(0), codes)
    kernel = variables["params"]["encoder"]["_Convolutions_0"]["Conv_0"]["kernel"]
    assert kernel.shape == (2, 2, channels, 2)
    assert features.shape == (2, 3 * 3 * 3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: encoders.MLP((8, 0)), "Dense.features"),
        (lambda: encoders.MLP(activation="rellu"), "'relu'"),
        (lambda: encoders.CNN((4, -1)), "Conv.features"),
        (lambda: encoders.CNN((4,), kernel=0), "Conv.kernel"),
        (lambda: encoders.CNN((4,), strides=(0,)), "Conv.stride"),
        (lambda: encoders.CNN((4, 4), strides=(1,)), "one stride for each"),
        (lambda: encoders.CNN(padding="Valid"), "CNN.padding: expected 'SAME' or 'VALID'"),
        (encoders.NatureCNN, "36 x 36"),
        (lambda: encoders.OneHot(encoders.MLP(), num_values=0), "num_values: expected a positive"),
        (lambda: tables.Table(3), "integers"),
        (lambda: encoders.OneHot(encoders.CNN(), 4), "exactly one image"),
    ],
)
def test_a_user_error_names_the_option(make, named):
    observation = jnp.zeros((1, 8) if "image" in named else (1, 8, 8, 1))
    with pytest.raises(errors.UserError, match=named):
        jax.eval_shape(make().init, jax.random.key(0), observation)


def test_rows_of_a_table_are_summed_and_numbers_beyond_it_are_none():
    table = jnp.arange(8.0).reshape(4, 2)
    rows = jnp.array([[0, 1], [3, 4], [4, 9]])
    np.testing.assert_array_equal(tables.sum_rows(table, rows), [[2, 4], [6, 7], [0, 0]])
    gradient = jax.grad(lambda t: jnp.sum(tables.sum_rows(t, rows)))(table)
    np.testing.assert_array_equal(gradient, [[1, 1], [1, 1], [0, 0], [1, 1]])
    observation = {"rows": jnp.array([[1], [3]]), "action_mask": jnp.ones((2, 2), bool)}
    features = tables.Table(4, 2).apply({"params": {"table": table}}, observation)
    np.testing.assert_array_equal(features, table[np.array([1, 3])])
