"""Layers, each in the form that the backend runs fastest.

XLA's CPU backend is far slower at some forms of the same arithmetic than at others, so a layer
chooses its form by backend when it is traced. Parameters and results are the same in every form.
What was measured, on two CPU cores inside a scan (gradient of a policy and a value of two tanh
layers of 64 on 2048 rows): row-major 1.27 ms, feature-major as below 0.89 ms.

Axis legend: `N` rows, `F` features, `O` outputs, `H` `W` `C` height, width and channels.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import cpu_kernels
from podracers import errors

# How many images a CPU takes through convolutions at a time: 16 (as many numbers as a register
# holds) of 84 x 84, and up to 64 of smaller ones. Grids of 10 x 10 with 32 channels are learnt from
# twice as fast 64 at a time as 1024 at a time: what they are worked into still fits into the cache.
_PIXELS = 16 * 84 * 84
_MIN_IMAGES = 16
_MAX_IMAGES = 64
_MOST_KERNEL = 64  # the places of a kernel are listed in Python, one after the other


def max_pool(images: jax.Array, columns: bool = False) -> jax.Array:
    """Returns the largest values of windows of 3 x 3, two apart, "SAME" padding.

    On CPU it is written with slices, first over rows and then over columns: with its gradient that
    takes a twenty-fifth of the time of XLA's own windows inside a scan. Where two inputs are equal
    and largest, the slices share the gradient and XLA's own form gives it to one.

    Args:
      images: `[N, H, W, C]`, or `[C, H, W, N]` if `columns`.
      columns: whether images are columns, on both sides (static).
    """
    if not columns and not feature_major():
        return nn.max_pool(images, (3, 3), (2, 2), "SAME")
    pads = jax.lax.padtype_to_pads(images.shape[1:3], (3, 3), (2, 2), "SAME")
    pooled = jnp.pad(images, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        last = (pooled.shape[axis] - 3) // 2 * 2 + 1
        windows = [jax.lax.slice_in_dim(pooled, start, start + last, 2, axis) for start in range(3)]
        pooled = functools.reduce(jnp.maximum, windows)
    return pooled


def feature_major() -> bool:
    """Returns whether rows are columns on this backend: `[F, N]` and `[C, H, W, N]`."""
    return jax.default_backend() == "cpu"


@jax.custom_vjp
def column_product(kernel: jax.Array, inputs: jax.Array) -> jax.Array:
    """Returns `kernel.T @ inputs`, with every product in the form that a CPU runs fastest.

    The derivative is the usual one. The barriers keep XLA from folding a transposition into a
    product: copying the operand first takes less time than the product then saves.

    Args:
      kernel: `[F, O]`.
      inputs: `[F, N]`.

    Returns:
      `[O, N]`.
    """
    return jax.lax.optimization_barrier(kernel.T) @ inputs


def _column_product_forward(kernel, inputs):
    return column_product(kernel, inputs), (kernel, inputs)


def _column_product_backward(residuals, gradient):
    kernel, inputs = residuals
    return inputs @ jax.lax.optimization_barrier(gradient.T), kernel @ gradient


column_product.defvjp(_column_product_forward, _column_product_backward)


@jax.custom_vjp
def row_product(kernel: jax.Array, inputs: jax.Array) -> jax.Array:
    """Returns `(inputs @ kernel).T`: from rows to columns, for inputs wider than outputs.

    Such inputs are dearer to transpose than the outputs, and as rows they are what the kernel's
    derivative wants: MinAtar's 400 inputs to 64 outputs.

    Args:
      kernel: `[F, O]`.
      inputs: `[N, F]`.

    Returns:
      `[O, N]`.
    """
    return jax.lax.optimization_barrier(inputs @ kernel).T


def _row_product_forward(kernel, inputs):
    return row_product(kernel, inputs), (kernel, inputs)


def _row_product_backward(residuals, gradient):
    kernel, inputs = residuals
    return jax.lax.optimization_barrier(gradient @ inputs).T, (kernel @ gradient).T


row_product.defvjp(_row_product_forward, _row_product_backward)


class Dense(nn.Module):
    """A linear layer with orthogonal weights.

    Attributes:
      features: `O`.
      scale: of the orthogonal initializer.
    """

    features: int
    scale: float = math.sqrt(2.0)

    def __post_init__(self):
        """Refuses sizes that cannot be."""
        errors.require_count(self, "features")
        super().__post_init__()

    @nn.compact
    def __call__(
        self, inputs: jax.Array, columns: bool = False, from_rows: bool = False
    ) -> jax.Array:
        """Returns `inputs @ kernel + bias`.

        Args:
          inputs: `[..., F]`, or `[F, N]` if `columns`.
          columns: whether rows are columns, on both sides (static).
          from_rows: with `columns`: the inputs still are `[N, F]` (static).

        Returns:
          `[..., O]`, or `[O, N]` if `columns`.
        """
        shape = (inputs.shape[0 if columns and not from_rows else -1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if columns:
            product = row_product if from_rows else column_product
            return product(kernel, inputs) + bias[:, None]
        return inputs @ kernel + bias


class Conv(nn.Module):
    """A two-dimensional convolution with orthogonal weights.

    Attributes:
      features: `O`.
      kernel: its side.
      stride: in both directions.
      padding: "SAME" or "VALID".
      scale: of the orthogonal initializer.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    scale: float = math.sqrt(2.0)

    def __post_init__(self):
        """Refuses sizes that cannot be."""
        for name in ("features", "kernel", "stride"):
            errors.require_count(self, name)
        if self.kernel > _MOST_KERNEL:
            raise errors.UserError(
                f"Conv.kernel: expected at most {_MOST_KERNEL}, got {self.kernel}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, images: jax.Array, columns: bool = False) -> jax.Array:
        """Returns the convolution plus bias.

        Args:
          images: `[N, H, W, C]`, or `[C, H, W, N]` if `columns`; floats, or bytes as 255ths.
          columns: whether images are columns, on both sides (static).

        Returns:
          `[N, H', W', O]`, or `[O, H', W', N]` if `columns`.
        """
        shape = (self.kernel, self.kernel, images.shape[0 if columns else -1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        strides = (self.stride, self.stride)
        if columns or feature_major():
            pads = jax.lax.padtype_to_pads(
                images.shape[1:3], kernel.shape[:2], strides, self.padding
            )
            images = images if columns else _swap(images)
            output = cpu_kernels.convolve(images, kernel, self.stride, tuple(pads))
            output = output + bias[:, None, None, None]
            return output if columns else _swap(output)
        layout = ("NHWC", "HWIO", "NHWC")
        product = jax.lax.conv_general_dilated(
            as_floats(images), kernel, strides, self.padding, dimension_numbers=layout
        )
        return product + bias


def as_floats(values: jax.Array) -> jax.Array:
    """Returns float32; bytes are divided by 255."""
    if values.dtype == jnp.uint8:
        return values.astype(jnp.float32) / 255.0
    return values.astype(jnp.float32)


def _swap(images: jax.Array) -> jax.Array:
    """Turns rows into columns, `[N, H, W, C]` into `[C, H, W, N]`, and back."""
    return jnp.transpose(images, (3, 1, 2, 0))


def on_images(trunk: nn.Module, images: jax.Array, recompute: bool = False) -> jax.Array:
    """Applies convolutional layers in the form that the backend runs fastest.

    On CPU images are columns, and a few at a time are taken through all layers: what one layer
    hands to the next then stays in the cache. The derivative is that of all images at once.

    Args:
      trunk: a module, `trunk(images, columns)`, images on both sides as in `Conv`.
      images: `[N, H, W, C]`; floats, or bytes as 255ths.
      recompute: whether the derivative computes what is inside the trunk once more, rather than
        keep it of all images: for deep trunks, of which it would keep megabytes an image. On CPU.

    Returns:
      `[N, H', W', O]`.
    """
    if not feature_major():
        return trunk(as_floats(images), False)
    fitting = _PIXELS // (images.shape[1] * images.shape[2])
    limit = max(_MIN_IMAGES, min(_MAX_IMAGES, fitting))
    num_chunks = -(-images.shape[0] // limit)
    if num_chunks <= 1:
        return _columns(trunk, (), images)[1]
    size = -(-images.shape[0] // num_chunks)
    padding = num_chunks * size - images.shape[0]
    chunks = jnp.pad(images, ((0, padding), (0, 0), (0, 0), (0, 0)))
    chunks = chunks.reshape(num_chunks, size, *images.shape[1:])
    # The scan keeps XLA from merging both computations, so remat needs no barrier of its own.
    body = nn.remat(_columns, prevent_cse=False) if recompute else _columns
    scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
    _, outputs = scan(trunk, (), chunks)
    return outputs.reshape(-1, *outputs.shape[2:])[: images.shape[0]]


def _columns(trunk: nn.Module, carry: tuple[()], images: jax.Array):
    columns = jax.lax.optimization_barrier(_swap(images))
    return carry, _swap(trunk(columns, True))
