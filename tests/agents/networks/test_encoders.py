"""What encoders make of observations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import encoders, layers, tables
from podracers import errors


def test_images_and_vectors_are_told_apart_and_scaled():
    observation = {
        "action_mask": jnp.ones((2, 4), bool),
        "frame": jnp.full((2, 5, 6, 3), 51, jnp.uint8),
        "nested": {"count": jnp.array([7, -7]), "flag": jnp.array([[True], [False]])},
        "wide": jnp.ones((2, 2, 2)),
    }
    image, vector = encoders.split_image(observation)
    assert image.shape == (2, 5, 6, 3)
    assert image.dtype == jnp.uint8
    np.testing.assert_array_equal(vector, [[7, 1, 1, 1, 1, 1], [-7, 0, 1, 1, 1, 1]])
    assert vector.dtype == jnp.float32
    np.testing.assert_array_equal(encoders.action_mask(observation), observation["action_mask"])
    assert encoders.action_mask(vector) is None


def test_a_grid_without_channels_is_an_image_and_two_images_are_none():
    image, vector = encoders.split_image(jnp.ones((2, 5, 6), bool))
    assert image.shape == (2, 5, 6, 1)
    assert vector is None
    image, _ = encoders.split_image({"a": jnp.ones((2, 5, 6, 1)), "b": jnp.ones((2, 5, 6, 1))})
    assert image is None


def test_the_mask_is_no_feature():
    mlp = encoders.MLP((3,))
    observation = {"x": jnp.ones((2, 4)), "action_mask": jnp.ones((2, 5), bool)}
    params = jax.eval_shape(mlp.init, jax.random.key(0), observation)["params"]
    assert params["Dense_0"]["kernel"].shape == (4, 3)


def test_vectors_join_after_the_convolutions():
    observation = {"frame": jnp.ones((2, 36, 36, 1)), "speed": jnp.array([[3.0], [4.0]])}
    for encoder in (encoders.NatureCNN(8), encoders.ImpalaResNet((2,), 8)):
        features, _ = jax.jit(encoder.init_with_output)(jax.random.key(0), observation)
        assert features.shape == (2, 9)
        np.testing.assert_array_equal(features[:, 8], [3.0, 4.0])


def moved(params):
    """Returns parameters away from the ones and zeros that layer normalisation begins with."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize("for_cpu", [False, True])
@pytest.mark.parametrize(
    ("encoder", "last"),
    [
        (encoders.MLP((6, 5), "relu", layer_norm=True), "LayerNorm_1"),
        (encoders.CNN((3,), hidden_sizes=(5,), layer_norm=True), "LayerNorm_0"),
    ],
)
def test_layers_are_normalised_before_the_activation(monkeypatch, encoder, last, for_cpu):
    monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
    images = jax.random.normal(jax.random.key(0), (4, 5, 5, 2))
    params = encoder.init(jax.random.key(1), images)["params"]
    # With a bias far above it, the ReLU cuts nothing off.
    params = params | {last: {"scale": jnp.ones(5), "bias": jnp.full(5, 10.0)}}
    features = encoder.apply({"params": params}, images) - 10.0
    np.testing.assert_allclose(jnp.mean(features, axis=-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(jnp.var(features, axis=-1), 1.0, atol=1e-3)

    def larger(path, x):
        return x if "LayerNorm" in jax.tree_util.keystr(path) else 7.0 * x

    params = jax.tree_util.tree_map_with_path(larger, params)
    np.testing.assert_allclose(
        encoder.apply({"params": params}, images) - 10.0, features, atol=1e-3
    )


@pytest.mark.parametrize(
    ("encoder", "dtype"),
    [
        (encoders.ImpalaResNet((2, 3), 8, layer_norm=True), np.float32),
        (encoders.CNN((8, 6), padding="VALID", layer_norm=True), np.uint8),
        (encoders.ResidualImage(encoders.ResidualTrunk(8, 1, (2, 2))), np.uint8),
    ],
)
def test_both_forms_of_an_encoder_agree(monkeypatch, encoder, dtype):
    """On CPU images are taken a few at a time: 7 of them in 3 chunks, which is no factor.

    The expected form is XLA's own convolution of all images at once.
    """
    frames = np.random.default_rng(0).integers(0, 256, (7, 37, 36, 2), np.uint8)
    frames = frames if dtype == np.uint8 else frames.astype(dtype) / 255.0
    monkeypatch.setattr(layers, "_MIN_IMAGES", 3)
    monkeypatch.setattr(layers, "_PIXELS", 1)

    def features_and_gradient(for_cpu):
        monkeypatch.setattr(layers, "use_cpu_kernels", lambda: for_cpu)
        params = moved(jax.jit(encoder.init)(jax.random.key(1), frames[:1]))

        def loss(params):
            features = encoder.apply(params, frames)
            return jnp.sum(jnp.sin(features)), features

        gradient, features = jax.jit(jax.grad(loss, has_aux=True))(params)
        return params, gradient, features

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        features_and_gradient(True),
        features_and_gradient(False),
    )


def test_simba_is_a_sum_of_blocks_that_is_normalised_at_the_end():
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    encoder = encoders.SimBa(5, 2)
    params = moved(encoder.init(jax.random.key(0), rows)["params"])

    def dense(index, x):
        return x @ params[f"Dense_{index}"]["kernel"] + params[f"Dense_{index}"]["bias"]

    def norm(index, x):
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
        return x * params[f"LayerNorm_{index}"]["scale"] + params[f"LayerNorm_{index}"]["bias"]

    x = dense(0, rows)
    for block in range(2):
        wide = np.maximum(dense(1 + 2 * block, norm(block, x)), 0.0)
        assert wide.shape == (4, 20)
        x = x + dense(2 + 2 * block, wide)
    features = encoder.apply({"params": params}, rows)
    np.testing.assert_allclose(features, norm(2, x), rtol=1e-4, atol=1e-5)


def test_a_stride_for_each_convolution():
    image = jnp.ones((1, 6, 6, 1))
    encoder = encoders.CNN((2, 3), hidden_sizes=(), strides=(1, 2))
    features, _ = jax.jit(encoder.init_with_output)(jax.random.key(0), image)
    assert features.shape == (1, 3 * 3 * 3)
    with pytest.raises(errors.UserError, match=r"CNN.padding: expected 'SAME' or 'VALID', got 'Va"):
        encoders.CNN((2, 3), padding="Valid").init(jax.random.key(0), image)
    with pytest.raises(errors.UserError, match="one stride for each"):
        encoders.CNN((2, 3), strides=(1,)).init(jax.random.key(0), image)


def test_integers_are_told_apart_and_nothing_else_is_coded():
    board = np.array([[[-1, 0], [2, 3]], [[1, 1], [-1, 9]]])
    observation = {
        "board": jnp.asarray(board),
        "place": jnp.array([0, 2]),
        "speed": jnp.array([[0.5], [0.25]]),
        "walls": jnp.array([[True], [False]]),
        "action_mask": jnp.ones((2, 4), bool),
    }
    encoder = encoders.OneHot(encoders.MLP(()), num_values=4, minimum=-1)
    features = encoder.apply({}, observation)
    assert features.shape == (2, 2 * 2 * 4 + 4 + 1 + 1)
    codes = board[..., None] == np.arange(-1, 3)  # 3 and 9 are beyond
    place = np.array([[0, 1, 0, 0], [0, 0, 0, 1]])
    others = [[0.5, 1.0], [0.25, 0.0]]
    expected = np.concatenate([codes.reshape(2, -1), place, others], axis=1)
    np.testing.assert_array_equal(features, expected)
    # A grid becomes an image, and one with channels stays one.
    for leaf, channels in ((observation["board"], 4), (jnp.zeros((2, 5, 5, 3), jnp.int32), 12)):
        encoder = encoders.OneHot(encoders.CNN((6,), kernel=2, hidden_sizes=(3,)), 4, -1)
        params = encoder.init(jax.random.key(0), leaf)["params"]["encoder"]
        assert params["_Convolutions_0"]["Conv_0"]["kernel"].shape == (2, 2, channels, 6)
    with pytest.raises(errors.UserError, match="num_values: expected a positive int, got 0"):
        encoders.OneHot(encoders.MLP(), num_values=0)


@pytest.mark.parametrize(
    ("encoder", "named"),
    [
        (encoders.MLP((8, 0)), "Dense.features"),
        (encoders.MLP(activation="rellu"), "'relu'"),
        (encoders.CNN((4, -1)), "Conv.features"),
        (encoders.CNN((4,), kernel=0), "Conv.kernel"),
        (encoders.CNN((4,), kernel=1000), "Conv.kernel"),
        (encoders.CNN((4,), strides=(0,)), "Conv.stride"),
        (encoders.ImpalaResNet(hidden=0), "Dense.features"),
        (encoders.NatureCNN(), "36 x 36"),
        (tables.Table(3), "integers"),
    ],
)
def test_a_user_error_names_the_option(encoder, named):
    with pytest.raises(errors.UserError, match=named):
        jax.eval_shape(encoder.init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))


@pytest.mark.parametrize("encoder", [encoders.CNN(), encoders.NatureCNN(), encoders.ImpalaResNet()])
def test_convolutions_need_an_image(encoder):
    with pytest.raises(errors.UserError, match="exactly one image"):
        jax.eval_shape(encoder.init, jax.random.key(0), jnp.zeros((1, 8)))


def test_rows_of_a_table_are_summed_and_numbers_beyond_it_are_none():
    table = jnp.arange(8.0).reshape(4, 2)
    rows = jnp.array([[0, 1], [3, 4], [4, 9]])
    np.testing.assert_array_equal(tables.sum_rows(table, rows), [[2, 4], [6, 7], [0, 0]])
    gradient = jax.grad(lambda t: jnp.sum(tables.sum_rows(t, rows)))(table)
    np.testing.assert_array_equal(gradient, [[1, 1], [1, 1], [0, 0], [1, 1]])
    observation = {"rows": jnp.array([[1], [3]]), "action_mask": jnp.ones((2, 2), bool)}
    features = tables.Table(4, 2).apply({"params": {"table": table}}, observation)
    np.testing.assert_array_equal(features, table[np.array([1, 3])])
