"""The memory of networks: recurrent cores and frame stacks.

A core maps sequences `[T, B, ...]`, and is reset where `first` is true. One step is a sequence of
length one, so unrolling and stepping are the same code. Products have the dtype of the features;
recurrent states are float32.

Axis legend: `T` time, `B` streams, `F` features, `H` units, `K` frames.
"""

from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracers import errors, types


class Core(Protocol):
    """A Flax module between the encoder and the heads."""

    def initial_state(self, batch_size: int) -> Any:
        """Returns the state `[B, ...]` at the start of an episode; `()` for no memory."""

    def __call__(self, state: Any, features: jax.Array, first: jax.Array) -> tuple[jax.Array, Any]:
        """Returns outputs `[T, B, H]` and the state after them.

        Args:
          state: `[B, ...]`.
          features: `[T, B, F]`.
          first: `[T, B]` bool; the state is reset before the step where it is true.
        """


class FeedForward(nn.Module):
    """No memory: the output is the input."""

    def initial_state(self, batch_size: int) -> tuple[()]:
        del batch_size
        return ()

    def __call__(self, state, features, first):
        del first
        return features, state


def _reset(state: types.PyTree, first: jax.Array) -> types.PyTree:
    return jax.tree.map(lambda s: jnp.where(first[:, None], 0.0, s), state)


class _Recurrent(nn.Module):
    """Options of recurrent cores."""

    size: int = 256
    layer_norm: bool = False

    def __post_init__(self):
        errors.require_count(self, "size")
        super().__post_init__()

    def _norm(self, name: str, size: int) -> Callable[[jax.Array], jax.Array]:
        """Returns layer normalisation of `[..., size]`, or the identity without `layer_norm`.

        The parameters are created here, outside of the scan that applies them.
        """
        if not self.layer_norm:
            return lambda x: x
        scale = self.param(f"{name}_scale", nn.initializers.ones, (size,))
        bias = self.param(f"{name}_bias", nn.initializers.zeros, (size,))
        return lambda x: jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6) * scale + bias


class LSTM(_Recurrent):
    """A long short-term memory; its state is the pair of cell and hidden `[B, H]`.

    Hochreiter and Schmidhuber, "Long Short-Term Memory"; the forget gate is biased by one. The
    products with the inputs are computed for all steps at once, outside the scan.

    Attributes:
      size: number of units, `H`.
      layer_norm: whether the products with the inputs and with the hidden state, and the cell that
        the output gate multiplies, are normalised; equations 20 to 22 of Ba, Kiros and Hinton,
        "Layer Normalization", https://arxiv.org/abs/1607.06450.
    """

    def initial_state(self, batch_size: int) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((batch_size, self.size), jnp.float32)
        return zeros, zeros

    @nn.compact
    def __call__(self, state, features, first):
        dtype = features.dtype
        inputs = nn.Dense(4 * self.size, name="input", dtype=dtype)(features)  # [T, B, 4H]
        kernel = self.param("recurrent", _orthogonal_blocks(4), (self.size, 4 * self.size))
        kernel = kernel.astype(dtype)
        inputs = self._norm("input_norm", 4 * self.size)(inputs)
        norm_gates = self._norm("recurrent_norm", 4 * self.size)
        norm_cell = self._norm("cell_norm", self.size)

        def step(state, x):
            inputs, first = x
            cell, hidden = _reset(state, first)
            gates = inputs + norm_gates(hidden.astype(dtype) @ kernel)
            i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
            cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(norm_cell(cell))
            return (cell, hidden), hidden

        state, hidden = jax.lax.scan(step, state, (inputs, first))
        return hidden, state


class GRU(_Recurrent):
    """A gated recurrent unit; its state is `[B, H]`.

    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder",
    https://arxiv.org/abs/1406.1078, with the reset gate after the product.

    Attributes:
      size: number of units, `H`.
      layer_norm: whether the products with the inputs and with the state are normalised, those of
        the gates apart from those of the candidate, as in the supplement of Ba, Kiros and Hinton,
        "Layer Normalization", https://arxiv.org/abs/1607.06450.
    """

    def initial_state(self, batch_size: int) -> jax.Array:
        return jnp.zeros((batch_size, self.size), jnp.float32)

    @nn.compact
    def __call__(self, state, features, first):
        dtype = features.dtype
        inputs = nn.Dense(3 * self.size, name="input", dtype=dtype)(features)  # [T, B, 3H]
        kernel = self.param("recurrent", _orthogonal_blocks(3), (self.size, 3 * self.size))
        kernel = kernel.astype(dtype)
        bias = self.param("candidate_bias", nn.initializers.zeros, (self.size,))
        split = 2 * self.size  # the gates stand before the candidate
        input_gates = self._norm("input_gates_norm", split)(inputs[..., :split])
        input_n = self._norm("input_candidate_norm", self.size)(inputs[..., split:])
        norm_gates = self._norm("recurrent_gates_norm", split)
        norm_candidate = self._norm("recurrent_candidate_norm", self.size)

        def step(state, x):
            input_gates, input_n, first = x
            state = _reset(state, first)
            products = (state.astype(dtype) @ kernel).astype(jnp.float32)
            gates = jax.nn.sigmoid(input_gates + norm_gates(products[..., :split]))
            r, z = jnp.split(gates, 2, axis=-1)
            candidate = jnp.tanh(input_n + r * (norm_candidate(products[..., split:]) + bias))
            state = (1.0 - z) * candidate + z * state
            return state, state

        state, hidden = jax.lax.scan(step, state, (input_gates, input_n, first))
        return hidden, state


def _orthogonal_blocks(num_blocks: int) -> nn.initializers.Initializer:
    """Returns an initializer of `num_blocks` square orthogonal matrices side by side."""

    def initializer(key, shape, dtype=jnp.float32):
        rows, columns = shape
        block = nn.initializers.orthogonal()
        keys = jax.random.split(key, num_blocks)
        blocks = [block(k, (rows, columns // num_blocks), dtype) for k in keys]
        return jnp.concatenate(blocks, axis=1)

    return initializer


def initial_frames(observation: types.PyTree, batch_size: int, num_frames: int) -> types.PyTree:
    """Returns the state of a frame stack, zeros `[B, K - 1, ...]`, in the observation's dtypes.

    Args:
      observation: one observation, `[...]`; only shapes and dtypes count.
      batch_size: number of streams, `B`.
      num_frames: number of frames in a stack, `K`.
    """
    shape = (batch_size, num_frames - 1)
    return jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), observation)


def stack_frames(
    state: types.PyTree, observation: types.PyTree, first: jax.Array, num_frames: int
) -> tuple[types.PyTree, types.PyTree]:
    """Rebuilds the stacks of the last `K` frames, without a scan and without a gather.

    At the start of an episode the stack is filled with copies of the first frame. Frames are
    stacked on the last axis, oldest first: `[H, W, C]` becomes `[H, W, K * C]`, `[H, W]` becomes
    `[H, W, K]`, and `[F]` becomes `[K * F]`.

    Args:
      state: previous frames, `[B, K - 1, ...]`, oldest first.
      observation: `[T, B, ...]`.
      first: `[T, B]` bool.
      num_frames: number of frames in a stack, `K`.

    Returns:
      The stacks `[T, B, ...]`, and the state after them.
    """
    # Steps since the episode began, if that was after time 0; else more than any lag.
    time = jnp.arange(first.shape[0])[:, None]
    age = time - jax.lax.cummax(jnp.where(first, time, -num_frames), axis=0)  # [T, B]

    def stack(state: jax.Array, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        past, length = num_frames - 1, leaf.shape[0]
        extended = jnp.concatenate([jnp.moveaxis(state, 1, 0), leaf])  # [K - 1 + T, B, ...]
        ages = age.reshape(age.shape + (1,) * (leaf.ndim - 2))
        frames = [leaf]  # newest first, each [T, B, ...]
        for lag in range(1, num_frames):
            earlier = extended[past - lag : past - lag + length]
            if length == 1:  # acting: no transposed copy of the state
                earlier = state[None, :, past - lag]
            frames.append(jnp.where(ages >= lag, earlier, frames[-1]))
        frames.reverse()
        state = jnp.stack([frame[-1] for frame in frames[1:]], axis=1)  # [B, K - 1, ...]
        if leaf.ndim in (2, 4):  # a scalar or a grey image: add a channel axis
            frames = [frame[..., None] for frame in frames]
        return jnp.concatenate(frames, axis=-1), state

    pairs = jax.tree.map(stack, state, observation)
    return jax.tree.transpose(jax.tree.structure(observation), jax.tree.structure((0, 0)), pairs)
