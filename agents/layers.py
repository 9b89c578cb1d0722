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


def max_pool(inputs: jax.Array, as_slices: bool | None = None) -> jax.Array:
    """Returns the largest values of windows of 3 x 3, two apart, "SAME" padding.

    On CPU it is written with slices, first over rows and then over columns: with its gradient that
    takes a twenty-fifth of the time of XLA's own windows inside a scan. Where two inputs are equal
    and largest, the slices share the gradient and XLA's own form gives it to one.

    Args:
      inputs: `[N, H, W, C]`.
      as_slices: which form; None chooses by backend.
    """
    as_slices = as_slices if as_slices is not None else jax.default_backend() == "cpu"
    if not as_slices:
        return nn.max_pool(inputs, (3, 3), (2, 2), "SAME")
    pads = jax.lax.padtype_to_pads(inputs.shape[1:3], (3, 3), (2, 2), "SAME")
    pooled = jnp.pad(inputs, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        last = (pooled.shape[axis] - 3) // 2 * 2 + 1
        windows = [jax.lax.slice_in_dim(pooled, start, start + last, 2, axis) for start in range(3)]
        pooled = functools.reduce(jnp.maximum, windows)
    return pooled


def feature_major() -> bool:
    """Returns whether dense layers run as `[F, N]` on this backend, rather than as `[N, F]`."""
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
    """A two-dimensional convolution, `[N, H, W, C]` to `[N, H', W', O]`.

    On CPU it is written as slices and one matrix product: XLA's own convolution is 15 to 25 times
    slower there inside a scan or a while loop, which is where acting and learning happen.

    Attributes:
      features: `O`.
      kernel: its side.
      stride: in both directions.
      padding: "SAME" or "VALID".
      scale: of the orthogonal initializer.
      as_product: which form; None chooses by backend.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    padding: str = "SAME"
    scale: float = math.sqrt(2.0)
    as_product: bool | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the convolution plus bias."""
        shape = (self.kernel, self.kernel, inputs.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        on_cpu = jax.default_backend() == "cpu"
        if self.as_product if self.as_product is not None else on_cpu:
            return self._product(inputs, kernel) + bias
        strides = (self.stride, self.stride)
        layout = ("NHWC", "HWIO", "NHWC")
        product = jax.lax.conv_general_dilated(
            inputs, kernel, strides, self.padding, dimension_numbers=layout
        )
        return product + bias

    def _product(self, inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        """Returns the convolution `[N, H', W', O]` as one product of patches and kernel."""
        size, stride = self.kernel, self.stride
        pads = jax.lax.padtype_to_pads(
            inputs.shape[1:3], (size, size), (stride, stride), self.padding
        )
        inputs = jnp.pad(inputs, ((0, 0), *pads, (0, 0)))
        if size % stride == 0:
            inputs, kernel = _space_to_depth(inputs, kernel, stride)
            size, stride = size // stride, 1
        starts = range(size)
        height, width = ((length - size) // stride + 1 for length in inputs.shape[1:3])
        rows = [slice(start, start + (height - 1) * stride + 1, stride) for start in starts]
        columns = [slice(start, start + (width - 1) * stride + 1, stride) for start in starts]
        patches = [inputs[:, row, column] for row in rows for column in columns]
        return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, self.features)


def _space_to_depth(
    inputs: jax.Array, kernel: jax.Array, stride: int
) -> tuple[jax.Array, jax.Array]:
    """Folds `stride x stride` pixels into channels, so that the stride becomes 1.

    An 8 x 8 kernel of stride 4 then has 4 slices rather than 64, and compiles much faster.
    """
    rows, height, width, channels = inputs.shape
    blocks = kernel.shape[0] // stride
    height, width = height // stride, width // stride
    inputs = inputs[:, : height * stride, : width * stride]
    inputs = inputs.reshape(rows, height, stride, width, stride, channels)
    inputs = jnp.swapaxes(inputs, 2, 3).reshape(rows, height, width, -1)
    kernel = kernel.reshape(blocks, stride, blocks, stride, channels, -1)
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(blocks, blocks, stride**2 * channels, -1)
    return inputs, kernel
