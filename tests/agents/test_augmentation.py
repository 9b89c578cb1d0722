"""Random shifts against loops over pixels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import preprocessing

COUNT, HEIGHT, WIDTH = 300, 5, 7


def _padded_and_cut(image, down, right, pixels):
    """Returns what is left of an image that is padded by its edge and cut out elsewhere."""
    found = np.zeros_like(image)
    for row, column in itertools.product(range(HEIGHT), range(WIDTH)):
        source_row = min(max(row - down, 0), HEIGHT - 1)
        source_column = min(max(column - right, 0), WIDTH - 1)
        found[row, column] = image[source_row, source_column]
    padded = np.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
    top, left = pixels - down, pixels - right
    np.testing.assert_array_equal(found, padded[top : top + HEIGHT, left : left + WIDTH])
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_each_image_is_shifted_by_one_of_all_shifts(dtype):
    image = np.random.default_rng(0).permutation(HEIGHT * WIDTH * 2).astype(dtype)
    image = image.reshape(HEIGHT, WIDTH, 2)
    keys = jax.random.split(jax.random.key(0), COUNT)
    observation = {"image": np.tile(image, (COUNT, 1, 1, 1)), "vector": np.ones((COUNT, 3))}
    shifted = jax.jit(preprocessing.random_shifts, static_argnums=1)(observation, 2, keys)
    assert shifted["image"].dtype == dtype
    np.testing.assert_array_equal(shifted["vector"], observation["vector"])
    candidates = {
        _padded_and_cut(image, down, right, 2).tobytes(): (down, right)
        for down, right in itertools.product(range(-2, 3), repeat=2)
    }
    found = [candidates[np.asarray(each).tobytes()] for each in shifted["image"]]
    counts = [found.count(shift) for shift in candidates.values()]
    assert min(counts) >= 2 and max(counts) <= 26  # 12 of each are expected


def test_an_image_depends_on_its_own_key_alone():
    image = jnp.arange(2.0 * HEIGHT * WIDTH).reshape(2, HEIGHT, WIDTH, 1)
    keys = jax.random.split(jax.random.key(1), 2)
    both = preprocessing.random_shifts(image, 4, keys)
    alone = preprocessing.random_shifts(image[1:], 4, keys[1:])
    np.testing.assert_array_equal(both[1:], alone)
