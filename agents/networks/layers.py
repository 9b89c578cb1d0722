"""Dense layers, convolutions and pooling, of rows `[..., F]` and images `[N, H, W, C]`.

Layers compute in the dtype of their inputs, which encoders make with `as_floats`; parameters are
float32.

Axis legend: `N` rows, `F` features, `O` outputs, `H` `W` `C` height, width and channels.
"""

import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from agents.backends import layouts
from podracers import errors, precision

# The logit of a masked choice: its probability is exactly zero (or all are equal, where everything
# is masked), and no gradient through it is NaN.
MASKED = -1e9


class Dense(nn.Module):
    """A linear layer with orthogonal weights.

    Attributes:
      features: number of outputs, `O`.
      scale: scale of the orthogonal initializer.
      constant: initial value of all weights and biases; None for orthogonal weights and zero
        biases.
      num_cells: number of equal parts of the inputs that give a part of the outputs each, by the
        same weights: cells of an image, or items; 1 for a dense layer.
    """

    features: int
    scale: float = math.sqrt(2.0)
    constant: float | None = None
    num_cells: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns `inputs @ kernel + bias`, `[..., O]`, of inputs `[..., F]`, in their dtype."""
        if self.is_initializing():
            errors.require_count(self, "features", "num_cells")
        initializers = nn.initializers.orthogonal(self.scale), nn.initializers.zeros
        if self.constant is not None:
            initializers = (nn.initializers.constant(self.constant),) * 2
        size, cells = inputs.shape[-1], self.num_cells
        if size % cells or self.features % cells:
            raise errors.UserError(
                f"num_cells: {cells} cells do not divide {size} features and {self.features} "
                "outputs; use an encoder without dense layers, and no vectors beside it"
            )
        shape = size // cells, self.features // cells
        kernel = self.param("kernel", initializers[0], shape)
        bias = self.param("bias", initializers[1], shape[1:])
        if self.num_cells > 1:
            inputs = inputs.reshape(*inputs.shape[:-1], self.num_cells, shape[0])
        outputs = inputs @ kernel.astype(inputs.dtype) + bias.astype(inputs.dtype)
        return outputs if self.num_cells == 1 else outputs.reshape(*outputs.shape[:-2], -1)


class NoisyDense(nn.Module):
    """A linear layer with noise of learnt scale on its weights, for exploration.

    Fortunato et al., "Noisy Networks for Exploration", 2018, https://arxiv.org/abs/1706.10295, with
    factorised Gaussian noise, independent for each row. The factors multiply the inputs and the
    outputs of a second layer, so no row needs weights of its own.

    Attributes:
      features: number of outputs, `O`.
      scale: scale of the orthogonal initializer of the mean.
      num_cells: see `Dense`; each cell has noise of its own.
    """

    features: int
    scale: float = math.sqrt(2.0)
    num_cells: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns `[..., B, O]` for inputs `[..., B, F]`; without keys `[B]`, the mean."""
        num_inputs = inputs.shape[-1]
        make = functools.partial(Dense, self.features, num_cells=self.num_cells)
        mean = make(self.scale, name="mean")(inputs)
        constant = 0.5 / math.sqrt(num_inputs / self.num_cells)  # the published one
        deviation = make(constant=constant, name="deviation")
        if key is None:
            if self.is_initializing():
                deviation(inputs)
            return mean
        noise = jax.vmap(lambda k: jax.random.normal(k, (num_inputs + self.features,)))(key)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        noise_in, noise_out = jnp.split(noise.astype(inputs.dtype), [num_inputs], axis=-1)
        return mean + noise_out * deviation(noise_in * inputs)


def one_hot(numbers: jax.Array, num_values: np.ndarray) -> jax.Array:
    """Returns float32 codes `[..., sum(num_values)]` of integers `[..., D]`, part after part.

    Part `d` has `num_values[d]` values; the code of a number that is not in its range is zero.
    """
    part = np.repeat(np.arange(len(num_values)), num_values)
    value = np.concatenate([np.arange(size) for size in num_values])
    return (numbers[..., part] == value).astype(jnp.float32)


def mlp(
    inputs: jax.Array,
    sizes: Sequence[int],
    activation: Callable[[jax.Array], jax.Array],
    name: str | None = None,
    layer_norm: bool = False,
) -> jax.Array:
    """Applies dense layers, with the activation after each of them; call it in a compact method.

    Args:
      inputs: `[..., F]`.
      sizes: number of outputs of each layer; the inputs are returned if there are none.
      activation: elementwise function.
      name: prefix of the layers' names, `{name}_0` and so on; by default Flax chooses them.
      layer_norm: see `activate`.
    """
    for i, size in enumerate(sizes):
        layer = Dense(size, name=name and f"{name}_{i}")
        inputs = activate(layer(inputs), activation, layer_norm)
    return inputs


def activate(
    values: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    layer_norm: bool,
) -> jax.Array:
    """Applies layer normalisation, if requested, and an activation; call it in a compact method.

    Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450, over the
    features of a row, or the channels of a place in an image (`layouts.feature_axis`).
    """
    if layer_norm:
        axis = layouts.feature_axis()
        norm = nn.LayerNorm(reduction_axes=axis, feature_axes=axis, dtype=values.dtype)
        values = norm(values)
    return activation(values)


class Conv(nn.Module):
    """A two-dimensional convolution with orthogonal weights.

    Attributes:
      features: number of outputs, `O`.
      kernel: side of the kernel.
      stride: stride in both directions.
      padding: "SAME" or "VALID".
      pool: whether a maximum over windows of 3 x 3, two apart, follows, before the bias: the same
        outputs, and the bias adds up the gradients of a quarter of the pixels.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    pool: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the convolution of images `[N, H, W, C]` plus bias, `[N, H', W', O]`.

        Images are floats, or bytes as 255ths; those of `layouts.pack` for a stride of 4 without
        padding.
        """
        if self.is_initializing():
            errors.require_count(self, "features", "kernel", "stride")
        height, width, channels = layouts.image_shape(images)
        if self.padding == "VALID" and min(height, width) < self.kernel:
            raise errors.UserError(
                f"an image of {height} x {width}, without padding, is smaller than a kernel of "
                f"{self.kernel} x {self.kernel}; use encoders.CNN with padding = 'SAME'"
            )
        shape = (self.kernel, self.kernel, channels, self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(math.sqrt(2.0)), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        dtype = precision.compute_dtype()
        kernel, bias = kernel.astype(dtype), bias.astype(dtype)
        return layouts.convolve(images, kernel, bias, self.stride, self.padding, self.pool)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `values[..., index]` of `[..., A]`, such as those of the actions that were taken.

    The gradient of an indexing is a scatter, which is slow on a CPU, and which a TPU executes
    number by number; that of this selection is a selection. `index` broadcasts to `[...]`.
    """
    chosen = index[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(chosen, values, 0.0), axis=-1)


def as_floats(values: jax.Array) -> jax.Array:
    """Returns values in the compute dtype, float32 or bfloat16; bytes are divided by 255."""
    floats = values.astype(jnp.float32)
    if values.dtype == jnp.uint8:
        floats = floats / 255.0
    return floats.astype(precision.compute_dtype())
