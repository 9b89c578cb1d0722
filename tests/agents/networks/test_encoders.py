"""Features of observations, by encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.backends import layouts
from agents.networks import encoders, tables
from podracers import environment, parallel
from tests import streams
from tests.agents import experience


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
    np.testing.assert_array_equal(environment.action_mask(observation), observation["action_mask"])
    assert environment.action_mask(vector) is None
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


@pytest.mark.parametrize(
    ("encoder", "dtype"),
    [
        # Two channels would make layer normalisation a step function, which rounding can flip.
        pytest.param(
            encoders.ImpalaResNet((4, 5), 8, layer_norm=True), np.float32, marks=pytest.mark.slow
        ),
        (encoders.CNN((8, 6), padding="VALID", layer_norm=True), np.uint8),
    ],
)
def test_both_forms_of_an_encoder_agree(monkeypatch, encoder, dtype):
    """On CPU 7 images pass in 3 chunks; the expected form is XLA's, of all images at once."""
    frames = np.random.default_rng(0).integers(0, 256, (7, 21, 20, 2), np.uint8)
    frames = frames if dtype == np.uint8 else frames.astype(dtype) / 255.0
    monkeypatch.setattr(layouts, "_MIN_IMAGES", 3)
    monkeypatch.setattr(layouts, "_PIXELS", 1)

    def results():
        params = experience.moved(jax.jit(encoder.init)(jax.random.key(1), frames[:1]), 0.1, seed=1)
        return params, experience.value_and_gradient(lambda p: encoder.apply(p, frames), params)

    on_cpu = results()
    with parallel.compiling_for("gpu"):
        streams.assert_close(on_cpu, results(), atol=1e-3)  # gradients are up to 40


@pytest.mark.parametrize(
    "encoder", [encoders.SimBa(5, 2), encoders.MLP((5, 6), "relu", layer_norm=True)]
)
def test_normalised_layers_equal_their_equations(encoder):
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params = jax.jit(encoder.init)(jax.random.key(0), rows)["params"]
    params = jax.device_get(experience.moved(params, 0.1, seed=1))

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
    outputs = streams.evaluate(encoder.apply, {"params": params}, rows)
    np.testing.assert_allclose(outputs, x, rtol=1e-4, atol=1e-5)


def test_integers_become_one_hot_codes_and_other_leaves_stay():
    board = np.array([[[-1, 0], [2, 3]], [[1, 1], [-1, 9]]])
    observation = {
        "board": jnp.asarray(board),
        "place": jnp.array([255, 2], jnp.uint8),
        "speed": jnp.array([[0.5], [0.25]]),
        "walls": jnp.array([[True], [False]]),
        "action_mask": jnp.ones((2, 4), bool),
    }
    encoder = encoders.OneHot(encoders.MLP(()), num_values=4, minimum=-1)
    codes = board[..., None] == np.arange(-1, 3)  # 3, 9 and 255 are beyond
    place = np.array([[0, 0, 0, 0], [0, 0, 0, 1]])
    others = [[0.5, 1.0], [0.25, 0.0]]
    expected = np.concatenate([codes.reshape(2, -1), place, others], axis=1)
    codes = streams.evaluate(encoder.apply, {}, observation)
    np.testing.assert_array_equal(codes, expected)
    pair = streams.evaluate(
        encoder.apply, {}, (observation["board"], observation["speed"])
    )  # leaves without names
    np.testing.assert_array_equal(pair, np.delete(expected, [*range(16, 20), 21], axis=1))


def test_places_become_planes_after_the_codes_of_the_grid():
    rng = np.random.default_rng(0)
    size, rows = np.array([4, 6]), 3
    board = rng.integers(0, 3, (rows, *size))
    agents = rng.integers(-1, 7, (rows, 2, 2))  # some outside
    goal = rng.integers(0, 6, (rows, 2))
    observation = {
        "agents_locations": agents,
        "board": board,
        "goal": {"col": goal[:, 1], "row": goal[:, 0].astype(np.uint8)},
        "position": np.full((rows, 2), 0.5, np.float32),  # no place
        "speed": {"row": np.ones((rows, 1), np.float32)},
        "step_count": np.full((rows,), 7),
        "action_mask": np.ones((rows, 5), bool),
    }

    def slow(observation):
        image = np.zeros((rows, *size, 3 + 2 + 1))
        for n, row, col in np.ndindex(rows, *size):
            image[n, row, col, board[n, row, col]] = 1
            image[n, row, col, 3:5] = np.all(agents[n] == [row, col], axis=-1)
            image[n, row, col, 5] = np.all(goal[n] == [row, col])
        return image

    def read(observation, **options):
        encoder = encoders.OneHot(encoders.MLP(()), **options)
        return streams.evaluate(encoder.apply, {}, observation)

    places = {"ignored": ("step_count",), "places": ("agents_locations", "goal")}
    options = {"num_values": 3, **places}
    flat = read(observation, **options)
    vector = np.repeat([[0.5, 0.5, 1.0]], rows, axis=0)
    expected = np.concatenate([slow(observation).reshape(rows, -1), vector], axis=1)
    np.testing.assert_array_equal(flat, expected)
    assert np.sum(slow(observation)[..., 3:5]) < 2 * rows  # one is outside
    inputs = {"observation": encoders.without_mask(observation)}
    nested = read(inputs, **options)
    np.testing.assert_array_equal(nested, expected)
    # Without codes, the grid is one channel.
    flat = read(observation, **places)
    image = np.concatenate([board[..., None], slow(observation)[..., 3:]], axis=-1)
    np.testing.assert_array_equal(flat[:, :-3], image.reshape(rows, -1))


def test_items_are_treated_alike_and_see_their_mean():
    rng = np.random.default_rng(0)
    observation = {
        "packed": rng.random((2, 5)) > 0.5,
        "sizes": rng.normal(size=(2, 5, 2)).astype(np.float32),
    }
    encoder = encoders.DeepSets((4, 3))
    params = jax.jit(encoder.init)(jax.random.key(0), observation)["params"]
    params = jax.device_get(experience.moved(params, 0.1, seed=1))
    items = np.concatenate([observation["packed"][..., None], observation["sizes"]], axis=-1)
    for layer in (0, 2):
        item, shared = (params[f"Dense_{layer + i}"] for i in (0, 1))
        mean = items.mean(axis=1, keepdims=True)
        items = items @ item["kernel"] + item["bias"] + mean @ shared["kernel"] + shared["bias"]
        items = np.maximum(items, 0.0)
    features, gradient = experience.value_and_gradient(
        lambda p: encoder.apply({"params": p}, observation), params
    )
    np.testing.assert_allclose(features, items.reshape(2, -1), rtol=1e-5, atol=1e-6)
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(gradient))


def test_values_spread_over_cells_and_are_read_around_a_place():
    rng = np.random.default_rng(0)
    image = np.concatenate([rng.random((2, 4, 5, 1)), np.zeros((2, 4, 5, 1))], axis=-1)
    places = [(0, 2), (3, 4)]
    for n, place in enumerate(places):
        image[n, *place, 1] = 1.0
    encoder = encoders.ValuePropagation(1, num_steps=3, num_maps=2, channels=4, hidden_sizes=())
    image = image.astype(np.float32)
    params = experience.moved(
        jax.jit(encoder.init)(jax.random.key(0), image)["params"], 0.1, seed=1
    )
    larger = jax.eval_shape(encoder.init, jax.random.key(0), np.zeros((2, 9, 7, 2), np.float32))
    assert jax.tree.map(np.shape, larger["params"]) == jax.tree.map(np.shape, params)  # curricula
    conv, dense, norm = (params[k] for k in ("_Convolutions_0", "Dense_0", "LayerNorm_0"))
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = []
    for n, (row, col) in enumerate(places):
        reward, spread = np.zeros((2, 4, 5, 2))
        for r, c in np.ndindex(4, 5):
            patch = padded[n, r : r + 3, c : c + 3].reshape(-1)
            hidden = patch @ conv["Conv_0"]["kernel"].reshape(-1, 4) + conv["Conv_0"]["bias"]
            cell = np.maximum(hidden, 0.0) @ dense["kernel"] + dense["bias"]
            reward[r, c] = 1.0 / (1.0 + np.exp(-cell[:2]))
            spread[r, c] = 1.0 / (1.0 + np.exp(-cell[2:] - 2.0))
        values, beside = reward, ((-1, 0), (0, -1), (0, 1), (1, 0))

        def at(r, c, values):
            inside = 0 <= r < 4 and 0 <= c < 5
            return values[r, c] if inside else np.zeros(2)

        for _ in range(3):
            raised = values.copy()
            for r, c in np.ndindex(4, 5):
                around = np.max([at(r + dr, c + dc, values) for dr, dc in beside], axis=0)
                new = reward[r, c] + spread[r, c] * (around - reward[r, c])
                raised[r, c] = np.maximum(values[r, c], new)
            values = raised
        read = np.stack([at(row + r, col + c, values) for r, c in ((0, 0), *beside)], axis=-1)
        scaled = (read - read.mean(1, keepdims=True)) / read.std(1, keepdims=True)
        scaled = scaled * norm["scale"] + norm["bias"]
        expected.append(np.concatenate([read, scaled], axis=1).reshape(-1))

    outputs, gradient = experience.value_and_gradient(
        lambda p: encoder.apply({"params": p}, image), params
    )
    np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-3)
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("shape", "channels"), [((2, 5, 5), 4), ((2, 5, 5, 3), 12)])
def test_one_hot_codes_are_channels_of_a_convolution_with_strides(shape, channels):
    cnn = encoders.CNN((2, 3), kernel=2, hidden_sizes=(), strides=(1, 2))
    encoder, codes = encoders.OneHot(cnn, 4, -1), jnp.zeros(shape, jnp.int32)
    features, variables = jax.jit(encoder.init_with_output)(jax.random.key(0), codes)
    kernel = variables["params"]["encoder"]["_Convolutions_0"]["Conv_0"]["kernel"]
    assert kernel.shape == (2, 2, channels, 2)
    assert features.shape == (2, 3 * 3 * 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_and_boards_with_many_planes_are_images(dtype):
    for shape in ((84, 84, 4), (16, 31, 40), (8, 8, 119), (2, 50, 3), (40, 30)):
        image, vector = encoders.image_or_error(np.zeros((1, *shape), dtype), "CNN")
        assert (image.shape, vector) == ((1, *shape, 1)[:4], None)


def test_rows_of_a_table_are_summed_and_numbers_beyond_it_are_none():
    table = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    rows = np.array([[0, 1], [3, 4], [4, 9]])
    summed = streams.evaluate(tables.sum_rows, table, rows)
    np.testing.assert_array_equal(summed, [[2, 4], [6, 7], [0, 0]])
    gradient = streams.evaluate(jax.grad(lambda t: jnp.sum(tables.sum_rows(t, rows))), table)
    np.testing.assert_array_equal(gradient, [[1, 1], [1, 1], [0, 0], [1, 1]])
    observation = {"rows": jnp.array([[1], [3]]), "action_mask": jnp.ones((2, 2), bool)}
    features = tables.Table(4, 2).apply({"params": {"table": table}}, observation)
    np.testing.assert_array_equal(features, table[np.array([1, 3])])
