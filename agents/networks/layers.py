"""Dense layers, convolutions and pooling, each in the form that the backend runs fastest.

Inputs, outputs and parameters are the same on every backend: rows `[..., F]` and images
`[N, H, W, C]`. On CPU the arithmetic is that of `cpu_kernels`, with features first and rows last;
`mlp` and `on_images` stay in that layout from their first layer to their last. Layers compute in
the dtype of their inputs, which encoders make with `as_floats`; parameters are float32.

Axis legend: `N` rows, `F` features, `O` outputs, `H` `W` `C` height, width and channels.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import cpu_kernels
from podracers import errors, parallel, precision

# How many images a CPU takes through convolutions at a time: 16 (as many numbers as a register
# holds) of 84 x 84, and up to 64 of smaller ones. Grids of 10 x 10 with 32 channels are learnt from
# twice as fast 64 at a time as 1024 at a time: intermediate results then fit into the cache.
_PIXELS = 16 * 84 * 84
_MIN_IMAGES = 16
_MAX_IMAGES = 64
_MOST_KERNEL = 64  # the places of a kernel are listed in Python, one after the other

# Whether a trunk is being traced whose images are [C, H, W, N]; see `on_images`.
_channels_first = contextvars.ContextVar("channels_first", default=False)


def use_cpu_kernels() -> bool:
    """Returns whether layers take the form for CPU; asked when a network is traced."""
    return parallel.platform() == "cpu"


class Dense(nn.Module):
    """A linear layer with orthogonal weights.

    Attributes:
      features: number of outputs, `O`.
      scale: scale of the orthogonal initializer.
      constant: what all weights and biases begin at instead; None for that initializer, and zero.
    """

    features: int
    scale: float = math.sqrt(2.0)
    constant: float | None = None

    def __post_init__(self):
        """Refuses impossible sizes."""
        errors.require_count(self, "features")
        super().__post_init__()

    @nn.compact
    def weights(self, num_inputs: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns the kernel `[F, O]` and the bias `[O]` for `F` inputs of a dtype, in that."""
        initializers = nn.initializers.orthogonal(self.scale), nn.initializers.zeros
        if self.constant is not None:
            initializers = (nn.initializers.constant(self.constant),) * 2
        kernel = self.param("kernel", initializers[0], (num_inputs, self.features))
        bias = self.param("bias", initializers[1], (self.features,))
        return kernel.astype(dtype), bias.astype(dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns `inputs @ kernel + bias`, `[..., O]`, of inputs `[..., F]`."""
        kernel, bias = self.weights(inputs.shape[-1], inputs.dtype)
        if not use_cpu_kernels():
            return inputs @ kernel + bias
        # After `mlp` XLA drops this transposition and that at the end of `mlp`.
        columns = inputs.reshape(-1, inputs.shape[-1]).T
        columns = cpu_kernels.dense(kernel, columns) + bias[:, None]
        return columns.T.reshape(*inputs.shape[:-1], self.features)


class NoisyDense(nn.Module):
    """A linear layer with noise on its weights, whose size is learnt, for exploration.

    Fortunato et al., "Noisy Networks for Exploration", 2018, https://arxiv.org/abs/1706.10295, with
    factorised Gaussian noise, of each row its own. A product of a factor for each input and one for
    each output needs no weights of each row: it is on the inputs and outputs of a second layer.

    Attributes:
      features: number of outputs, `O`.
      scale: scale of the orthogonal initializer of the mean.
      deviation: initial standard deviation of each weight, times the root of `F`.
    """

    features: int
    scale: float = math.sqrt(2.0)
    deviation: float = 0.5

    @nn.compact
    def __call__(self, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns `[..., B, O]` for inputs `[..., B, F]`.

        Args:
          inputs: `[..., B, F]`.
          key: `[B]` typed keys; None for the mean, without noise.
        """
        num_inputs = inputs.shape[-1]
        mean = Dense(self.features, self.scale, name="mean")(inputs)
        constant = self.deviation / math.sqrt(num_inputs)
        deviation = Dense(self.features, constant=constant, name="deviation")
        if key is None:
            if self.is_initializing():
                deviation(inputs)
            return mean
        noise = jax.vmap(lambda k: jax.random.normal(k, (num_inputs + self.features,)))(key)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        noise_in, noise_out = jnp.split(noise.astype(inputs.dtype), [num_inputs], axis=-1)
        return mean + noise_out * deviation(noise_in * inputs)


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
      layer_norm: whether each layer's outputs are normalised before the activation.

    Returns:
      `[..., sizes[-1]]`.
    """
    layers = [Dense(size, name=name and f"{name}_{i}") for i, size in enumerate(sizes)]
    if not use_cpu_kernels() or not layers:
        for layer in layers:
            inputs = activate(layer(inputs), activation, layer_norm)
        return inputs
    rows = inputs.reshape(-1, inputs.shape[-1])
    kernel, bias = layers[0].weights(rows.shape[-1], rows.dtype)
    if rows.shape[-1] > sizes[0]:
        columns = cpu_kernels.dense_of_rows(kernel, rows)
    else:
        columns = cpu_kernels.dense(kernel, rows.T)
    columns = activate(columns + bias[:, None], activation, layer_norm, axis=0)
    for layer in layers[1:]:
        kernel, bias = layer.weights(columns.shape[0], columns.dtype)
        columns = cpu_kernels.dense(kernel, columns) + bias[:, None]
        columns = activate(columns, activation, layer_norm, axis=0)
    return columns.T.reshape(*inputs.shape[:-1], sizes[-1])


def activate(
    values: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    layer_norm: bool,
    axis: int | None = None,
) -> jax.Array:
    """Applies an activation, after layer normalisation if asked for; call it in a compact method.

    Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450: the
    features of a row, or of a place in an image, have mean 0 and variance 1, and then a scale and
    a bias that are learnt.

    Args:
      values: of a layer, features on one axis.
      activation: elementwise function.
      layer_norm: whether values are normalised.
      axis: that of the features; by default where a trunk of `on_images` has the channels, or
        the last.
    """
    if layer_norm:
        if axis is None:
            axis = 0 if _channels_first.get() else -1
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
      scale: scale of the orthogonal initializer.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    scale: float = math.sqrt(2.0)

    def __post_init__(self):
        """Refuses impossible sizes."""
        for name in ("features", "kernel", "stride"):
            errors.require_count(self, name)
        if self.kernel > _MOST_KERNEL:
            raise errors.UserError(
                f"Conv.kernel: expected at most {_MOST_KERNEL}, got {self.kernel}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the convolution plus bias, `[N, H', W', O]`.

        Args:
          images: `[N, H, W, C]`; floats, or bytes as 255ths.
        """
        channels = images.shape[0 if _channels_first.get() else -1]
        shape = (self.kernel, self.kernel, channels, self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, bias = (weights.astype(precision.compute_dtype()) for weights in (kernel, bias))
        strides = (self.stride, self.stride)
        if not use_cpu_kernels():
            layout = ("NHWC", "HWIO", "NHWC")
            product = jax.lax.conv_general_dilated(
                as_floats(images), kernel, strides, self.padding, dimension_numbers=layout
            )
            return product + bias

        def convolve(images: jax.Array) -> jax.Array:
            if images.dtype != jnp.uint8:
                images = images.astype(kernel.dtype)
            pads = jax.lax.padtype_to_pads(images.shape[1:3], shape[:2], strides, self.padding)
            output = cpu_kernels.convolve(images, kernel, self.stride, tuple(pads))
            return output + bias[:, None, None, None]

        return _with_channels_first(convolve, images)


def max_pool(images: jax.Array) -> jax.Array:
    """Returns the largest values of windows of 3 x 3, two apart, with "SAME" padding.

    Args:
      images: `[N, H, W, C]`.
    """
    if not use_cpu_kernels():
        return nn.max_pool(images, (3, 3), (2, 2), "SAME")
    return _with_channels_first(cpu_kernels.max_pool, images)


def as_floats(values: jax.Array) -> jax.Array:
    """Returns what encoders compute with, float32 or bfloat16; bytes are divided by 255."""
    floats = values.astype(jnp.float32)
    if values.dtype == jnp.uint8:
        floats = floats / 255.0
    return floats.astype(precision.compute_dtype())


def on_images(trunk: nn.Module, images: jax.Array, recompute: bool = False) -> jax.Array:
    """Applies a trunk of convolutions to images, as fast as the backend can.

    On CPU, images are transposed before the trunk and after it rather than around every layer, and
    taken through the trunk a few at a time, so that what one layer hands to the next stays in the
    cache. The derivative is that of all images at once.

    Args:
      trunk: a module, `trunk(images)`, of `Conv`, `max_pool`, `activate` and elementwise functions
        alone; the axes of images inside it depend on the backend.
      images: `[N, H, W, C]`; floats, or bytes as 255ths.
      recompute: whether, on CPU, the derivative computes the activations inside the trunk again
        rather than keep them for all images: deep trunks would keep megabytes for each image.

    Returns:
      `[N, H', W', O]`.
    """
    if not use_cpu_kernels():
        return trunk(as_floats(images))
    fitting = _PIXELS // (images.shape[1] * images.shape[2])
    limit = max(_MIN_IMAGES, min(_MAX_IMAGES, fitting))
    num_chunks = -(-images.shape[0] // limit)
    if num_chunks <= 1:
        return _on_chunk(trunk, (), images)[1]
    size = -(-images.shape[0] // num_chunks)
    padding = num_chunks * size - images.shape[0]
    chunks = jnp.pad(images, ((0, padding), (0, 0), (0, 0), (0, 0)))
    chunks = chunks.reshape(num_chunks, size, *images.shape[1:])
    # The scan keeps XLA from merging both computations, so remat needs no barrier of its own.
    body = nn.remat(_on_chunk, prevent_cse=False) if recompute else _on_chunk
    scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
    _, outputs = scan(trunk, (), chunks)
    return outputs.reshape(-1, *outputs.shape[2:])[: images.shape[0]]


def _on_chunk(trunk: nn.Module, carry: tuple[()], images: jax.Array):
    with _traced_with_channels_first():
        outputs = trunk(jax.lax.optimization_barrier(_swap(images)))
    return carry, _swap(outputs)


@contextlib.contextmanager
def _traced_with_channels_first():
    token = _channels_first.set(True)
    try:
        yield
    finally:
        _channels_first.reset(token)


def _with_channels_first(function: Callable, images: jax.Array) -> jax.Array:
    """Applies a function of images `[C, H, W, N]`, transposed around it outside of `on_images`."""
    return function(images) if _channels_first.get() else _swap(function(_swap(images)))


def _swap(images: jax.Array) -> jax.Array:
    """Turns `[N, H, W, C]` into `[C, H, W, N]`, and back."""
    return jnp.transpose(images, (3, 1, 2, 0))
