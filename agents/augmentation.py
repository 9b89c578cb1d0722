"""Random shifts of images, which keep what learns from replay from fitting its pixels.

Kostrikov, Yarats and Fergus, "Image Augmentation Is All You Need: Regularizing Deep Reinforcement
Learning from Pixels", 2020, https://arxiv.org/abs/2004.13649.

Axis legend: `N` images, `H` `W` `C` height, width and channels.
"""

import jax
import jax.numpy as jnp

from podracers import types

_IMAGE_RANK = 3


def has_image(observation: types.PyTree) -> bool:
    """Returns whether a leaf of one observation is an image, `[H, W, C]`."""
    return any(len(leaf.shape) == _IMAGE_RANK for leaf in jax.tree.leaves(observation))


def random_shifts(observation: types.PyTree, pixels: int, key: jax.Array) -> types.PyTree:
    """Returns observations whose images are shifted, each in both directions at random.

    What a shift leaves empty is filled with the nearest pixels of the edge. All channels of an
    image are shifted alike, stacked frames among them, and so are several images of one
    observation; other leaves stay as they are.

    Args:
      observation: leaves `[N, ...]`.
      pixels: largest shift; all from `-pixels` to `pixels` are equally probable.
      key: `[N]` typed keys.
    """
    shift = jax.vmap(lambda k: jax.random.randint(k, (2,), -pixels, pixels + 1))(key)  # [N, 2]

    def shifted(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.ndim != _IMAGE_RANK + 1 else jax.vmap(_shift)(leaf, shift)

    return jax.tree.map(shifted, observation)


def _shift(image: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns an image `[H, W, C]`, shifted by whole pixels `[2]` down and to the right."""
    for axis, size in enumerate(image.shape[:2]):
        source = jnp.clip(jnp.arange(size) - shift[axis], 0, size - 1)
        image = jnp.take(image, source, axis=axis)
    return image
