"""Dense layers, convolutions and pooling.

Inputs, outputs and parameters are the same on every backend: rows `[..., F]` and images
`[N, H, W, C]`. On CPU, convolutions and pooling are those of `cpu_kernels`, with channels first and
images last; a trunk under `on_images` stays in that layout from its first layer to its last. Layers
compute in the dtype of their inputs, which encoders make with `as_floats`; parameters are float32.

Axis legend: `N` rows, `F` features, `O` outputs, `H` `W` `C` height, width and channels.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from agents.networks import cpu_kernels
from podracers import errors, parallel, precision

# Images of one pass through convolutions on CPU: 16 (the floats of a register) of 84 x 84 pixels,
# and up to 64 of smaller ones, so that intermediate results fit into the cache.
_PIXELS = 16 * 84 * 84
_MIN_IMAGES = 16
_MAX_IMAGES = 64

# Whether a trunk is being traced whose images are [C, H, W, N]; see `on_images`.
_channels_first = contextvars.ContextVar("channels_first", default=False)


def use_cpu_kernels() -> bool:
    """Returns whether the network is traced for a CPU."""
    return parallel.platform() == "cpu"


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

    def __post_init__(self):
        errors.require_count(self, "features", "num_cells")
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns `inputs @ kernel + bias`, `[..., O]`, of inputs `[..., F]`, in their dtype."""
        initializers = nn.initializers.orthogonal(self.scale), nn.initializers.zeros
        if self.constant is not None:
            initializers = (nn.initializers.constant(self.constant),) * 2
        sizes = inputs.shape[-1], self.features
        if any(size % self.num_cells for size in sizes):
            raise errors.UserError(
                f"num_cells: {self.num_cells} cells do not divide {sizes[0]} features and "
                f"{sizes[1]} outputs; use an encoder without dense layers, and no vectors beside it"
            )
        shape = tuple(size // self.num_cells for size in sizes)
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
      deviation: initial standard deviation of each weight, times the root of `F`.
      num_cells: see `Dense`; each cell has noise of its own.
    """

    features: int
    scale: float = math.sqrt(2.0)
    deviation: float = 0.5
    num_cells: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns `[..., B, O]` for inputs `[..., B, F]`.

        Args:
          inputs: `[..., B, F]`.
          key: `[B]` typed keys; None for the mean, without noise.
        """
        num_inputs = inputs.shape[-1]
        make = functools.partial(Dense, self.features, num_cells=self.num_cells)
        mean = make(self.scale, name="mean")(inputs)
        constant = self.deviation / math.sqrt(num_inputs / self.num_cells)
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
    """Returns float32 codes `[..., sum(num_values)]`, those of each part after the other.

    Args:
      numbers: integers `[..., D]`; the code of one that is not in its range is zero.
      num_values: number of values of each part, `[D]`.
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
      layer_norm: whether each layer's outputs are normalised before the activation.

    Returns:
      `[..., sizes[-1]]`.
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
    features of a row, or the channels of a place in an image.

    Args:
      values: outputs of a layer; features on the last axis, or on the first one inside a trunk of
        `on_images` on CPU.
      activation: elementwise function.
      layer_norm: whether values are normalised.
    """
    if layer_norm:
        axis = 0 if _channels_first.get() else -1
        norm = nn.LayerNorm(reduction_axes=axis, feature_axes=axis, dtype=values.dtype)
        values = norm(values)
    return activation(values)


def relu(values: jax.Array) -> jax.Array:
    """Returns the positive part of values, for trunks of `on_images`."""
    return _relu(values) if parallel.platform() == "tpu" else jax.nn.relu(values)


@jax.custom_vjp
def _relu(values: jax.Array) -> jax.Array:
    """Computes as `jax.nn.relu`, with a derivative that reads the rounded output again.

    The TPU compiler would pack the signs of the input into bits, at a fifth of the cycles of the
    Nature network. Products round the output to bfloat16 in any case.
    """
    return jnp.maximum(values, 0)


def _relu_forward(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = jnp.maximum(values, 0)
    return output, output.astype(jnp.bfloat16)


def _relu_backward(output: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps the comparison with the gradient.
    return (jnp.where(jax.lax.optimization_barrier(output) > 0, gradient, 0),)


_relu.defvjp(_relu_forward, _relu_backward)


class Conv(nn.Module):
    """A two-dimensional convolution with orthogonal weights.

    Attributes:
      features: number of outputs, `O`.
      kernel: side of the kernel.
      stride: stride in both directions.
      padding: "SAME" or "VALID".
      scale: scale of the orthogonal initializer.
      pool: whether a maximum over windows of 3 x 3, two apart, follows, before the bias: the same
        outputs, and the bias adds up the gradients of a quarter of the pixels.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    scale: float = math.sqrt(2.0)
    pool: bool = False

    def __post_init__(self):
        errors.require_count(self, "features", "kernel", "stride")
        super().__post_init__()

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the convolution plus bias, `[N, H', W', O]`.

        Args:
          images: `[N, H, W, C]`; floats, or bytes as 255ths; of `pack` for a stride of 4 without
            padding, not on CPU.
        """
        channels = images.shape[0 if _channels_first.get() else -1]
        channels = channels // 4 if is_packed(images) else channels
        shape = (self.kernel, self.kernel, channels, self.features)
        height, width = (size * (4 if is_packed(images) else 1) for size in images.shape[1:3])
        if self.padding == "VALID" and min(height, width) < self.kernel:
            raise errors.UserError(
                f"an image of {height} x {width}, without padding, is smaller than a kernel of "
                f"{self.kernel} x {self.kernel}; use encoders.CNN with padding = 'SAME'"
            )
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, bias = (weights.astype(precision.compute_dtype()) for weights in (kernel, bias))
        strides = (self.stride, self.stride)
        if not use_cpu_kernels():
            if is_packed(images):
                return _convolve_packed(images, kernel) + bias
            layout = ("NHWC", "HWIO", "NHWC")
            product = jax.lax.conv_general_dilated(
                as_floats(images), kernel, strides, self.padding, dimension_numbers=layout
            )
            if self.pool:
                product = nn.max_pool(product, (3, 3), (2, 2), "SAME")
            return product + bias

        def convolve(images: jax.Array) -> jax.Array:
            if images.dtype != jnp.uint8:
                images = images.astype(kernel.dtype)
            pads = jax.lax.padtype_to_pads(images.shape[1:3], shape[:2], strides, self.padding)
            output = cpu_kernels.convolve(images, kernel, self.stride, tuple(pads))
            output = cpu_kernels.max_pool(output) if self.pool else output
            return output + bias[:, None, None, None]

        return _with_channels_first(convolve, images)


def pack(images: jax.Array) -> jax.Array:
    """Returns squares of 4 x 4 pixels as uint32, `[..., H / 4, W / 4, 4 * C]`; a column each.

    A TPU pads channels to tiles, and computes in words of 32 bits: packed, frames of bytes take a
    quarter of the memory, and are stacked and selected in a quarter of the cycles.

    Args:
      images: bytes, `[..., H, W, C]`.
    """
    *rows, height, width, channels = images.shape
    images = images.reshape(*rows, height // 4, 4, width // 4, 4, channels).astype(jnp.uint32)
    words = sum(images[..., row, :, :, :] << 8 * row for row in range(4))
    return jnp.moveaxis(words, -1, -2).reshape(*rows, height // 4, width // 4, channels * 4)


def is_packed(images: jax.Array) -> bool:
    """Returns whether images are of `pack`, which is for TPUs alone."""
    return images.dtype == jnp.uint32 and parallel.platform() == "tpu"


def _convolve_packed(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the convolution with stride 4 of packed images `[N, H', W', 4 * C]`, no padding.

    The four rows in a word are an axis of the convolution, which the compiler unpacks as it reads.

    Args:
      images: uint32, of `pack`.
      kernel: `[K, K, C, O]`, `K` a multiple of 4.
    """
    side, _, channels, outputs = kernel.shape
    kernel = kernel.reshape(side // 4, 4, side // 4, 4, channels, outputs)
    kernel = jnp.transpose(kernel, (0, 2, 1, 4, 3, 5)).reshape(side // 4, side // 4, 4, -1, outputs)
    shift = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]
    pixels = ((images[..., None, :] >> shift) & 255).astype(jnp.int32)
    pixels = as_floats(pixels / 255.0)
    layout = ("NHWDC", "HWDIO", "NHWDC")
    product = jax.lax.conv_general_dilated(
        pixels, kernel, (1, 1, 1), "VALID", dimension_numbers=layout
    )
    return product[:, :, :, 0]


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `values[..., index]`, such as those of the actions that were taken.

    The gradient of an indexing is a scatter, which is slow on a CPU, and which a TPU executes
    number by number; that of this selection is a selection.

    Args:
      values: `[..., A]`.
      index: int32, which broadcasts to `values.shape[:-1]`.
    """
    chosen = index[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(chosen, values, 0.0), axis=-1)


def as_floats(values: jax.Array) -> jax.Array:
    """Returns values in the compute dtype, float32 or bfloat16; bytes are divided by 255."""
    floats = values.astype(jnp.float32)
    if values.dtype == jnp.uint8:
        floats = floats / 255.0
    return floats.astype(precision.compute_dtype())


def on_images(trunk: nn.Module, images: jax.Array, recompute: bool = False) -> jax.Array:
    """Applies a trunk of convolutions to images.

    On CPU, images are transposed before and after the trunk rather than around every layer, and
    pass through it a few at a time, so that intermediate results stay in the cache. The derivative
    is that of all images at once.

    Args:
      trunk: a module, `trunk(images)`, of `Conv`, `activate` and elementwise functions only; the
        axes of images inside it depend on the backend.
      images: `[N, H, W, C]`; floats, or bytes as 255ths.
      recompute: whether, on CPU, the derivative recomputes the activations inside the trunk: deep
        trunks would keep megabytes for each image.

    Returns:
      `[N, H', W', O]`.
    """
    if not use_cpu_kernels():
        return trunk(images if is_packed(images) else as_floats(images))
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
    token = _channels_first.set(True)
    try:
        outputs = trunk(jax.lax.optimization_barrier(_swap(images)))
    finally:
        _channels_first.reset(token)
    return carry, _swap(outputs)


def _with_channels_first(function: Callable, images: jax.Array) -> jax.Array:
    """Applies a function of images `[C, H, W, N]`, transposed around it outside of `on_images`."""
    return function(images) if _channels_first.get() else _swap(function(_swap(images)))


def _swap(images: jax.Array) -> jax.Array:
    """Turns `[N, H, W, C]` into `[C, H, W, N]`, and back."""
    return jnp.transpose(images, (3, 1, 2, 0))
