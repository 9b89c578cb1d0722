"""Encoders: from an observation to a vector of features.

An encoder is a Flax module that maps an observation (an array or a nested dict, one leading axis)
to features. Every leaf but the action mask takes part: one leaf may be the image, which a
convolutional encoder sees as such; all others are flattened and concatenated.

XLA's CPU backend is far slower at some forms of the same arithmetic, so layers choose their form by
backend when they are traced. Parameters and results are the same in every form.

Axis legend: `N` rows, `F` features, `H` `W` `C` height, width and channels.
"""

from collections.abc import Sequence
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracers import environment
from podracers import errors
from podracers import types

_ACTIVATIONS = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def _activation(name: str):
    if name not in _ACTIVATIONS:
        raise errors.UserError(f"no activation '{name}'{errors.nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def without_mask(observation: types.PyTree) -> types.PyTree:
    """Returns the observation without its action mask."""
    if not isinstance(observation, dict):
        return observation
    return {k: v for k, v in observation.items() if k != environment.ACTION_MASK}


def action_mask(observation: types.PyTree) -> jax.Array | None:
    """Returns the action mask of an observation, or None where it has none."""
    return observation.get(environment.ACTION_MASK) if isinstance(observation, dict) else None


def _to_float(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.uint8:
        return leaf.astype(jnp.float32) / 255.0
    return leaf.astype(jnp.float32)


def split_image(observation: types.PyTree) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the image and the vector of an observation, in float32.

    The image is the only leaf of rank three, or else the only one of rank two (`[H, W]`, without
    channels). Bytes are divided by 255.

    Args:
      observation: leaves `[N, ...]`.

    Returns:
      `(image, vector)`, `[N, H, W, C]` and `[N, F]`; None for either where there is none.
    """
    leaves = jax.tree.leaves(without_mask(observation))
    image = None
    for rank in (3, 2):
        fitting = [i for i, leaf in enumerate(leaves) if leaf.ndim == rank + 1]
        if fitting:
            image = leaves.pop(fitting[0]) if len(fitting) == 1 else None
            break
    if image is not None:
        image = _to_float(image if image.ndim == 4 else image[..., None])
    return image, _flatten(leaves)


def _flatten(leaves: Sequence[jax.Array]) -> jax.Array | None:
    flat = [_to_float(leaf).reshape(leaf.shape[0], -1) for leaf in leaves]
    return jnp.concatenate(flat, axis=-1) if flat else None


def _image_or_error(observation: types.PyTree, encoder: str):
    image, vector = split_image(observation)
    if image is None:
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(without_mask(observation))]
        raise errors.UserError(
            f"{encoder} needs exactly one image, of shape [height, width, channels] or "
            f"[height, width], in the observation; its shapes are {shapes}; use MLP for vectors"
        )
    return image, vector


def _join(features: jax.Array, vector: jax.Array | None) -> jax.Array:
    return features if vector is None else jnp.concatenate([features, vector], axis=-1)


def orthogonal(scale: float) -> nn.initializers.Initializer:
    """Returns an orthogonal initializer, flattened over all but the last axis."""
    return nn.initializers.orthogonal(scale)


class Dense(nn.Module):
    """A linear layer with orthogonal weights, `[N, F]` to `[N, features]`.

    Attributes:
      features: the size of the output.
      scale: of the orthogonal initializer.
    """

    features: int
    scale: float = math.sqrt(2.0)

    @nn.compact
    def __call__(self, inputs):
        """Returns `inputs @ kernel + bias`."""
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return inputs @ kernel + bias


class MLP(nn.Module):
    """Dense layers, with the activation after each of them.

    Images are flattened.

    Attributes:
      hidden_sizes: the size of each layer; the last is that of the features.
      activation: "tanh", "relu", "elu", "gelu" or "silu".
    """

    hidden_sizes: Sequence[int] = (64, 64)
    activation: str = "tanh"

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden_sizes[-1]]`."""
        activation = _activation(self.activation)
        features = _flatten(jax.tree.leaves(without_mask(observation)))
        for size in self.hidden_sizes:
            features = activation(Dense(size)(features))
        return features


class Conv(nn.Module):
    """A two-dimensional convolution, `[N, H, W, C]` to `[N, H', W', features]`.

    On CPU it is written as slices and one matrix product: XLA's own convolution is 15 to 25 times
    slower there inside a scan or a while loop, which is where acting and learning happen.

    Attributes:
      features: output channels.
      kernel: its side.
      stride: in both directions.
      padding: "SAME" or "VALID".
      scale: of the orthogonal initializer.
      as_matmul: which form; None chooses by backend.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    scale: float = math.sqrt(2.0)
    as_matmul: bool | None = None

    @nn.compact
    def __call__(self, inputs):
        """Returns the convolution plus bias."""
        shape = (self.kernel, self.kernel, inputs.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        as_matmul = self.as_matmul
        if as_matmul is None:
            as_matmul = jax.default_backend() == "cpu"
        if as_matmul:
            return self._patches(inputs) @ kernel.reshape(-1, self.features) + bias
        strides = (self.stride, self.stride)
        dimensions = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(
                inputs, kernel, strides, self.padding, dimension_numbers=dimensions
            )
            + bias
        )

    def _patches(self, inputs: jax.Array) -> jax.Array:
        """Returns `[N, H', W', kernel * kernel * C]`."""
        pads = jax.lax.padtype_to_pads(
            inputs.shape[1:3], (self.kernel,) * 2, (self.stride,) * 2, self.padding
        )
        inputs = jnp.pad(inputs, ((0, 0), *pads, (0, 0)))
        height, width = ((side - self.kernel) // self.stride + 1 for side in inputs.shape[1:3])
        rows = [
            slice(i, i + (height - 1) * self.stride + 1, self.stride) for i in range(self.kernel)
        ]
        columns = [
            slice(i, i + (width - 1) * self.stride + 1, self.stride) for i in range(self.kernel)
        ]
        return jnp.concatenate([inputs[:, r, c] for r in rows for c in columns], axis=-1)


class CNN(nn.Module):
    """A small convolutional network for grids; then dense layers, all with rectifiers.

    Attributes:
      channels: of each convolution.
      kernel: the side of every kernel.
      hidden_sizes: of the dense layers.
    """

    channels: Sequence[int] = (32, 32)
    kernel: int = 3
    hidden_sizes: Sequence[int] = (128,)

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden_sizes[-1]]`; the vector joins before the dense layers."""
        image, vector = _image_or_error(observation, "CNN")
        for channels in self.channels:
            image = jax.nn.relu(Conv(channels, self.kernel)(image))
        features = _join(image.reshape(image.shape[0], -1), vector)
        for size in self.hidden_sizes:
            features = jax.nn.relu(Dense(size)(features))
        return features


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer.

    Mnih et al., "Human-level control through deep reinforcement learning",
    https://doi.org/10.1038/nature14236.

    Attributes:
      hidden: the size of the dense layer.
    """

    hidden: int = 512

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden]`, and the vector of the observation after them."""
        image, vector = _image_or_error(observation, "NatureCNN")
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            if min(image.shape[1:3]) < kernel:
                raise errors.UserError("NatureCNN needs images of at least 36 x 36; use CNN")
            image = jax.nn.relu(Conv(channels, kernel, stride, "VALID")(image))
        features = jax.nn.relu(Dense(self.hidden)(image.reshape(image.shape[0], -1)))
        return _join(features, vector)


class ImpalaResNet(nn.Module):
    """Residual blocks with pooling, and a dense layer.

    Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures", https://arxiv.org/abs/1802.01561.

    Attributes:
      channels: of each section: a convolution, a pooling and two residual blocks.
      hidden: the size of the dense layer.
    """

    channels: Sequence[int] = (16, 32, 32)
    hidden: int = 256

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden]`, and the vector of the observation after them."""
        image, vector = _image_or_error(observation, "ImpalaResNet")
        for channels in self.channels:
            image = Conv(channels)(image)
            image = nn.max_pool(image, (3, 3), (2, 2), "SAME")
            for _ in range(2):
                block = Conv(channels)(jax.nn.relu(image))
                image = image + Conv(channels)(jax.nn.relu(block))
        image = jax.nn.relu(image)
        features = jax.nn.relu(Dense(self.hidden)(image.reshape(image.shape[0], -1)))
        return _join(features, vector)
