"""Convolutions and pooling in the form that a CPU runs fastest: channels first, images last.

Only `layouts` uses these functions; parameters and results are those of the usual forms.

XLA's convolution is 15 to 25 times slower on CPU inside a scan or a while loop, where acting and
learning happen. Here images are `[C, H, W, N]`, and a convolution is one matrix product between two
movements of long contiguous runs: the bands of rows that the kernel covers are concatenated before
it, and the products of one window are added up, column by column, after it. Patches, which need no
sum, move three times as many numbers for a kernel of 3 x 3.

Axis legend: `N` images, `C` channels, `O` outputs, `H` `W` height and width, `K` a kernel's side.
"""

import functools

import jax
import jax.numpy as jnp

Pads = tuple[tuple[int, int], tuple[int, int]]


def max_pool(images: jax.Array) -> jax.Array:
    """Returns the largest values of windows of 3 x 3 of `[C, H, W, N]`, two apart, "SAME" padding.

    Slices, first over rows and then over columns, take a twenty-fifth of the time of XLA's windows
    inside a scan, gradient included. Where two inputs are equal and largest, the slices share the
    gradient and XLA's form gives it to one.
    """
    pads = jax.lax.padtype_to_pads(images.shape[1:3], (3, 3), (2, 2), "SAME")
    pooled = jnp.pad(images, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        last = (pooled.shape[axis] - 3) // 2 * 2 + 1
        windows = [jax.lax.slice_in_dim(pooled, start, start + last, 2, axis) for start in range(3)]
        pooled = functools.reduce(jnp.maximum, windows)
    return pooled


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(images: jax.Array, kernel: jax.Array, stride: int, pads: Pads) -> jax.Array:
    """Returns the convolution, `[O, H', W', N]`.

    The derivative is the usual one. Its residuals are the arguments alone, bytes as bytes.

    Args:
      images: `[C, H, W, N]`; bytes count as 255ths, and have no derivative.
      kernel: `[K, K, C, O]`.
      stride: in both directions.
      pads: zeros before and after, of `H` and of `W`.
    """
    side, stride, fold = _folded(kernel.shape[0], stride)
    bands = _bands(_fold(images, fold, pads, kernel.dtype), side, stride)  # [K * C, H', W, N]
    products = _weights(kernel, fold) @ _flat(bands)
    products = products.reshape(side, -1, *bands.shape[1:])  # [K, O, H', W, N]
    columns = range(0, products.shape[3] - side + 1, stride)
    # pyrefly: ignore[bad-return]  # a kernel has a column at least
    return sum(products[k, :, :, k : k + columns[-1] + 1 : stride] for k in range(side))


def _forward(images, kernel, stride, pads):
    return convolve(images, kernel, stride, pads), (images, kernel)


def _backward(stride, pads, residuals, gradient):
    images, kernel = residuals
    side, stride, fold = _folded(kernel.shape[0], stride)
    bands, to_images = jax.vjp(
        lambda x: _bands(_fold(x, fold, pads, kernel.dtype), side, stride), images
    )
    weights, to_kernel = jax.vjp(lambda x: _weights(x, fold), kernel)
    # The derivative of the sum over columns: each product gets the gradient where it took part.
    after = bands.shape[2] - (gradient.shape[2] - 1) * stride - 1
    zero, none = jnp.zeros((), gradient.dtype), (0, 0, 0)
    spread = [
        jax.lax.pad(gradient, zero, (none, none, (k, after - k, stride - 1), none))
        for k in range(side)
    ]
    spread = _flat(jnp.concatenate(spread))  # [K * O, H' * W * N]
    of_weights = spread @ _flat(bands).T
    of_bands = (jax.lax.optimization_barrier(weights.T) @ spread).reshape(bands.shape)
    of_bands = jax.lax.optimization_barrier(of_bands)
    return *to_images(of_bands), *to_kernel(of_weights)


convolve.defvjp(_forward, _backward)


def _flat(images: jax.Array) -> jax.Array:
    """Returns `[C, H * W * N]`.

    Without the barrier XLA would mix the movements before a product with the product's own.
    """
    return jax.lax.optimization_barrier(images).reshape(images.shape[0], -1)


def _folded(side: int, stride: int) -> tuple[int, int, int]:
    """Returns the kernel's side and the stride after folding, and the fold.

    `fold x fold` pixels become channels where that makes the stride 1: a kernel of 8 x 8 and stride
    4 is one of 2 x 2 in images of a quarter of the height and width.
    """
    return (side, stride, 1) if side % stride else (side // stride, 1, stride)


def _fold(images: jax.Array, fold: int, pads: Pads, dtype: jnp.dtype) -> jax.Array:
    """Returns the padded images as floats, `[fold * fold * C, H / fold, W / fold, N]`."""
    if images.dtype == jnp.uint8:
        images = (images.astype(jnp.float32) / 255.0).astype(dtype)
    images = jnp.pad(images, ((0, 0), *pads, (0, 0)))
    if fold == 1:
        return images
    channels, height, width, count = images.shape
    height, width = height // fold, width // fold
    images = images[:, : height * fold, : width * fold]
    images = images.reshape(channels, height, fold, width, fold, count)
    return jnp.transpose(images, (2, 4, 0, 1, 3, 5)).reshape(-1, height, width, count)


def _weights(kernel: jax.Array, fold: int) -> jax.Array:
    """Returns the (folded) kernel as `[K * O, K * C]`: by columns of windows, and by rows."""
    side, _, channels, outputs = kernel.shape
    side = side // fold
    kernel = kernel.reshape(side, fold, side, fold, channels, outputs)
    return jnp.transpose(kernel, (2, 5, 0, 1, 3, 4)).reshape(side * outputs, -1)


def _bands(images: jax.Array, side: int, stride: int) -> jax.Array:
    """Returns the rows under each row of a kernel, concatenated: `[K * C, H', W, N]`."""
    rows = range(0, images.shape[1] - side + 1, stride)
    return jnp.concatenate([images[:, k : k + rows[-1] + 1 : stride] for k in range(side)])
