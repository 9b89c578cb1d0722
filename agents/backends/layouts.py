"""Operations whose fastest form depends on the platform; no other module of agents asks for it.

Results and parameters are the same everywhere: images are `[N, H, W, C]`. On CPU, convolutions and
pooling are those of `cpu_kernels`, with channels first and images last; a trunk under `on_images`
stays in that layout from its first layer to its last. A TPU keeps rows in lanes of 128 numbers and
computes in words of 32 bits: frames of bytes are packed, and nothing is gathered or scattered that
a selection can reach.

Axis legend: `N` rows, `H` `W` `C` height, width and channels, `O` outputs, `K` a kernel's side, `M`
items of a group.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import optax

from agents.backends import cpu_kernels
from podracers import parallel, types

# Images of one pass through convolutions on CPU: 16 (the floats of a register) of 84 x 84 pixels,
# and up to 64 of smaller ones, so that intermediate results fit into the cache.
_PIXELS = 16 * 84 * 84
_MIN_IMAGES = 16
_MAX_IMAGES = 64
_MAX_SELECTED = 8  # items of a group, up to which a TPU reads all of them for each

# Whether a trunk is being traced whose images are [C, H, W, N]; see `on_images`.
_channels_first = contextvars.ContextVar("channels_first", default=False)


def _on_cpu() -> bool:
    return _channels_first.get() or parallel.platform() == "cpu"


def _on_tpu() -> bool:
    return not _channels_first.get() and parallel.platform() == "tpu"


def relu(values: jax.Array) -> jax.Array:
    """Returns the positive part of values, for trunks of `on_images`."""
    return _tpu_relu(values) if _on_tpu() else jax.nn.relu(values)


@jax.custom_vjp
def _tpu_relu(values: jax.Array) -> jax.Array:
    """Computes as `jax.nn.relu`, with a derivative that reads the rounded output again.

    The TPU compiler would pack the signs of the input into bits, at a fifth of the cycles of the
    Nature network. Products round the output to bfloat16 in any case.
    """
    return jnp.maximum(values, 0)


def _tpu_relu_forward(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = jnp.maximum(values, 0)
    return output, output.astype(jnp.bfloat16)


def _tpu_relu_backward(output: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps the comparison with the gradient.
    return (jnp.where(jax.lax.optimization_barrier(output) > 0, gradient, 0),)


_tpu_relu.defvjp(_tpu_relu_forward, _tpu_relu_backward)


def pack(frames: jax.Array) -> jax.Array:
    """Returns frames, on a TPU as words, `[..., H / 4, W / 4, 4 * C]` uint32: columns of 4 x 4.

    A TPU pads channels to tiles, and computes in words of 32 bits: packed, frames of bytes take a
    quarter of the memory, and are stacked and selected in a quarter of the cycles. A leaf that is
    not bytes with two leading axes, `[..., H, W, C]`, is returned as it is.
    """
    is_bytes = frames.dtype == jnp.uint8 and frames.ndim == 5
    if not _on_tpu() or not is_bytes or any(size % 4 for size in frames.shape[2:4]):
        return frames
    *rows, height, width, channels = frames.shape
    frames = frames.reshape(*rows, height // 4, 4, width // 4, 4, channels).astype(jnp.uint32)
    words = sum(frames[..., row, :, :, :] << 8 * row for row in range(4))
    return jnp.moveaxis(words, -1, -2).reshape(*rows, height // 4, width // 4, channels * 4)


def _is_packed(images: jax.Array) -> bool:
    return images.dtype == jnp.uint32 and _on_tpu()


def is_bytes(images: jax.Array) -> bool:
    """Returns whether images are bytes, packed or not."""
    return images.dtype == jnp.uint8 or _is_packed(images)


def image_shape(images: jax.Array) -> tuple[int, int, int]:
    """Returns height, width and channels of images, which may be packed or inside of a trunk."""
    channels, height, width = images.shape[:3]
    if not _channels_first.get():
        height, width, channels = images.shape[1:]
    if _is_packed(images):
        return 4 * height, 4 * width, channels // 4
    return height, width, channels


def feature_axis() -> int:
    """Returns the axis of features, inside of a trunk that of channels."""
    return 0 if _channels_first.get() else -1


def convolve(
    images: jax.Array, kernel: jax.Array, bias: jax.Array, stride: int, padding: str, pool: bool
) -> jax.Array:
    """Returns the outputs of a `layers.Conv`, in the dtype of its kernel `[K, K, C, O]`."""
    strides = (stride, stride)
    if _on_cpu():

        def channels_first(images: jax.Array) -> jax.Array:
            if images.dtype != jnp.uint8:
                images = images.astype(kernel.dtype)
            pads = jax.lax.padtype_to_pads(images.shape[1:3], kernel.shape[:2], strides, padding)
            output = cpu_kernels.convolve(images, kernel, stride, tuple(pads))
            output = cpu_kernels.max_pool(output) if pool else output
            return output + bias[:, None, None, None]

        if _channels_first.get():
            return channels_first(images)
        return _swap(channels_first(_swap(images)))
    if _is_packed(images):
        return _convolve_packed(images, kernel) + bias
    if images.dtype == jnp.uint8:
        images = images.astype(jnp.float32) / 255.0
    layout = ("NHWC", "HWIO", "NHWC")
    product = jax.lax.conv_general_dilated(
        images.astype(kernel.dtype), kernel, strides, padding, dimension_numbers=layout
    )
    if pool:
        product = nn.max_pool(product, (3, 3), (2, 2), "SAME")
    return product + bias


def _convolve_packed(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the convolution with stride 4 of packed images `[N, H', W', 4 * C]`, no padding.

    The four rows in a word are an axis of the convolution, which the compiler unpacks as it reads.
    The kernel is `[K, K, C, O]`, `K` a multiple of 4.
    """
    side, _, channels, outputs = kernel.shape
    kernel = kernel.reshape(side // 4, 4, side // 4, 4, channels, outputs)
    kernel = jnp.transpose(kernel, (0, 2, 1, 4, 3, 5)).reshape(side // 4, side // 4, 4, -1, outputs)
    shift = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]
    pixels = ((images[..., None, :] >> shift) & 255).astype(jnp.int32)
    pixels = (pixels / 255.0).astype(kernel.dtype)
    layout = ("NHWDC", "HWDIO", "NHWDC")
    product = jax.lax.conv_general_dilated(
        pixels, kernel, (1, 1, 1), "VALID", dimension_numbers=layout
    )
    return product[:, :, :, 0]


def on_images(trunk: nn.Module, images: jax.Array, recompute: bool = False) -> jax.Array:
    """Applies a trunk of convolutions to images.

    On CPU, images are transposed before and after the trunk rather than around every layer, and
    pass through it a few at a time, so that intermediate results stay in the cache. The derivative
    is that of all images at once.

    Args:
      trunk: a module, `trunk(images)`, that begins with a `layers.Conv`, and consists of these, of
        `layers.activate` and of elementwise functions only; the axes of images inside it depend on
        the platform.
      images: `[N, H, W, C]`; floats, or bytes as 255ths.
      recompute: whether, on CPU, the derivative recomputes the activations inside the trunk: deep
        trunks would keep megabytes for each image.

    Returns:
      `[N, H', W', O]`.
    """
    if not _on_cpu():
        return trunk(images)
    fitting = _PIXELS // (images.shape[1] * images.shape[2])
    limit = max(_MIN_IMAGES, min(_MAX_IMAGES, fitting))
    # An exported policy has an open batch dimension: its images pass through at once.
    is_open = not isinstance(images.shape[0], int)
    num_chunks = 1 if is_open else -(-images.shape[0] // limit)
    if num_chunks <= 1 or trunk.is_initializing():
        return _on_chunk(trunk, (), images)[1]
    size = -(-images.shape[0] // num_chunks)
    padding = num_chunks * size - images.shape[0]
    chunks = jnp.pad(images, ((0, padding), (0, 0), (0, 0), (0, 0)))
    chunks = chunks.reshape(num_chunks, size, *images.shape[1:])
    # The scan keeps XLA from merging both computations, so remat needs no barrier of its own.
    body = nn.remat(_on_chunk, prevent_cse=False) if recompute else _on_chunk
    # Flax's check of the parameters would trace the trunk a second time.
    scan = nn.scan(body, variable_broadcast="params", check_constancy_invariants=False)
    _, outputs = scan(trunk, (), chunks)
    return outputs.reshape(-1, *outputs.shape[2:])[: images.shape[0]]


def _on_chunk(trunk: nn.Module, carry: tuple[()], images: jax.Array):
    token = _channels_first.set(True)
    try:
        outputs = trunk(jax.lax.optimization_barrier(_swap(images)))
    finally:
        _channels_first.reset(token)
    return carry, _swap(outputs)


def _swap(images: jax.Array) -> jax.Array:
    """Turns `[N, H, W, C]` into `[C, H, W, N]`, and back."""
    return jnp.transpose(images, (3, 1, 2, 0))


def permute(tree: types.PyTree, permutation: jax.Array) -> types.PyTree:
    """Returns the tree with the items `[M, ...]` of each group in another order.

    Further axes of the permutation, int32 `[M, ...]`, are those of the leaves, or 1.
    """
    size = len(permutation)
    if size == 1:  # nothing to permute: a gather would copy every observation
        return tree
    selects = _on_tpu() and size <= _MAX_SELECTED

    def permuted(items: jax.Array) -> jax.Array:
        index = permutation.reshape(permutation.shape + (1,) * (items.ndim - permutation.ndim))
        if not selects:
            return jnp.take_along_axis(items, index, axis=0)
        # A TPU keeps rows in the lanes, and a gather would turn all images around, and back.
        taken = items[:1]
        for k in range(1, size):
            taken = jnp.where(index == k, items[k], taken)
        return taken

    return jax.tree.map(permuted, tree)


def recurrence(terms: jax.Array, factors: jax.Array, last: jax.Array | float = 0.0) -> jax.Array:
    """Returns `x_t = terms_t + factors_t x_{t+1}` `[T, ...]`, with `x_T = last`.

    On CPU in `T` steps; elsewhere, where a step is a kernel, by doubling spans in `log T` steps.
    """
    if _on_cpu():

        def step(x, inputs):
            x = inputs[0] + inputs[1] * x
            return x, x

        begin = jnp.broadcast_to(last, terms.shape[1:]).astype(terms.dtype)
        return jax.lax.scan(step, begin, (terms, factors), reverse=True)[1]

    def join(later, earlier):
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    terms = terms.at[-1].add(factors[-1] * last)
    return jax.lax.associative_scan(join, (terms, factors), reverse=True)[0]


def norm(tree: types.PyTree) -> jax.Array:
    """Returns the Euclidean norm of all leaves; on a GPU in one sum, not one for each leaf."""
    if parallel.platform() == "gpu":
        return jnp.sqrt(jnp.sum(jnp.square(jax.flatten_util.ravel_pytree(tree)[0])))
    return optax.tree.norm(tree)


def means(values: dict[str, jax.Array], weights: jax.Array) -> dict[str, types.Mean]:
    """Returns the `types.Mean` of each array, all of the weights' shape; on a GPU in one sum."""
    if parallel.platform() != "gpu":
        return {name: types.Mean.of(value, weights) for name, value in values.items()}
    joined = jnp.stack([value.astype(jnp.float32) for value in values.values()], axis=-1)
    kept = jnp.where(weights[..., None] > 0.0, joined, 0.0)
    totals = jnp.sum(weights[..., None] * kept, axis=range(weights.ndim))
    count = jnp.sum(weights)
    return {name: types.Mean(total, count) for name, total in zip(values, totals)}


def slices(rows: jax.Array, row: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    """Returns `rows[row, begin : begin + size]`, `[..., size]`; `rows` is `[N, F]`."""
    if _on_tpu():  # it would read slices that begin within lanes in a sequential loop
        number = begin[..., None] + jnp.arange(size)
        return rows.at[row[..., None], number].get(mode="promise_in_bounds")
    place = jnp.stack([row, begin], axis=-1)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(begin.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return jax.lax.gather(rows, place, dimensions, (1, size), mode="promise_in_bounds")


def tree_loop(
    model: Callable[[jax.Array, Any], tuple[Any, Any]], embedding: Any, num_simulations: int
) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Returns the root's embedding in the tree of one stream, and arguments of mctx's search.

    `model(action, embedding) -> (output, embedding)` is that of one node, `embedding` the root's.
    """
    if _on_tpu():
        nodes = _Nodes(model, embedding, num_simulations)
        return jnp.int32(0), {"recurrent_fn": nodes.expand, "loop_fn": nodes.loop}

    def recurrent_fn(params, key, action, embedding):
        return jax.vmap(model)(action, embedding)

    return embedding, {"recurrent_fn": recurrent_fn}


class _Nodes:
    """The embeddings of one stream's nodes; mctx's tree holds only their indices.

    mctx writes a new embedding by a scatter, for which a TPU copies the embeddings of all nodes.
    Here every simulation writes at its own index, the same for all streams, which is done in place.
    """

    def __init__(self, model: Callable[..., Any], embedding: types.PyTree, num_simulations: int):
        def with_room(x: jax.Array) -> jax.Array:
            return jnp.concatenate([x[None], jnp.zeros((num_simulations, *x.shape), x.dtype)])

        self._model = model
        # In the loop, both hold tracers of the current simulation.
        self._embeddings = jax.tree.map(with_room, embedding)  # [N + 1, ...]
        self._index = jnp.int32(0)

    def expand(self, params, key, action, index):
        """The `recurrent_fn` of mctx for a batch of one; embeddings are indices."""
        del params, key
        embedding = jax.tree.map(lambda xs: _pick(xs, index[0]), self._embeddings)
        output, embedding = self._model(action[0], embedding)
        self._embeddings = jax.tree.map(
            lambda xs, x: jax.lax.dynamic_update_index_in_dim(xs, x, self._index, 0),
            self._embeddings,
            embedding,
        )
        return jax.tree.map(lambda x: x[None], (output, self._index))

    def loop(self, lower, upper, body, state):
        """The `loop_fn` of mctx, a simulation a pass; it also carries the embeddings."""

        def simulate(index, carry):
            state, self._embeddings = carry
            self._index = index + 1  # the root has index 0
            return body(index, state), self._embeddings

        return jax.lax.fori_loop(lower, upper, simulate, (state, self._embeddings))[0]


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns one of `rows`, by a sum over all of them.

    For a gather with an index per stream, a TPU would change the layout of all rows.
    """
    chosen = (jnp.arange(len(rows)) == index).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(chosen, rows, jnp.zeros_like(rows)), axis=0).astype(rows.dtype)
