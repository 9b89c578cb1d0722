"""The memory of networks: recurrent cores and frame stacks.

A core is a Flax module between the encoder and the heads. `initial_state(batch_size)` returns its
state `[B, ...]` at the start of an episode. A call `core(state, features, first)` maps a state and
features `[T, B, F]` to outputs `[T, B, H]` and the state after them; where `first` `[T, B]` is
true, the state is reset before the step. One step is a sequence of length one, so unrolling and
stepping are the same code. Products have the dtype of the features; recurrent states are float32,
and counts int32.

Axis legend: `T` time, `B` streams, `F` features, `H` units, `K` frames,
`W` earlier steps of a window, `S = W + T`, `N` heads of `D` units.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import layers
from podracers import errors, types

_MAX_RADIUS, _MAX_PHASE = 0.999, math.pi / 10.0  # bounds of an LRU's initial eigenvalues


def _reset(state: types.PyTree, first: jax.Array) -> types.PyTree:
    return jax.tree.map(lambda s: jnp.where(first[:, None], 0.0, s), state)


def _latest(first: jax.Array, time: jax.Array, before: jax.typing.ArrayLike) -> jax.Array:
    """Returns the time of the latest first step, int32 `[T, B]`; `before` where there is none.

    It is `cummax` as CPUs and GPUs compute it; that of integers has no form in ONNX.
    """
    return jax.lax.associative_scan(jnp.maximum, jnp.where(first, time, before))


class _Units(nn.Module):
    """Options of cores with a memory."""

    size: int = 256

    def __post_init__(self):
        errors.require_count(self, "size")
        super().__post_init__()

    def initial_state(self, batch_size: int) -> Any:
        return jnp.zeros((batch_size, self.size), jnp.float32)


class _Gated(_Units):
    """Options of cores with gates.

    Initial biases are those of Tallec and Ollivier, "Can recurrent neural networks warp time?",
    2018, https://arxiv.org/abs/1804.11188: `log U(1, chrono_steps - 1)`, one draw for each unit.
    The sign of a block of `H` biases is 1 if its gate keeps the state, -1 if it admits the input,
    and 0 if its biases are 0.
    """

    chrono_steps: int | None = None

    def __post_init__(self):
        errors.require_count(self, "chrono_steps", least=3)
        super().__post_init__()

    def _inputs(self, features: jax.Array, *signs: int) -> jax.Array:
        """Returns the products with the inputs, `[..., F]`, a block of `[..., H]` for each sign."""
        size, dtype, bias = len(signs) * self.size, features.dtype, nn.initializers.zeros
        if not getattr(self, "layer_norm", False):  # layer normalisation would scale them
            bias = self._gate_bias(*signs)
        return nn.Dense(size, name="input", dtype=dtype, bias_init=bias)(features)

    def _gate_bias(self, *signs: int) -> nn.initializers.Initializer:
        """Returns the initializer of the blocks; zeros without `chrono_steps`."""
        if self.chrono_steps is None:
            return nn.initializers.zeros

        def initializer(key, shape, dtype=jnp.float32):
            steps = jax.random.uniform(key, (self.size,), dtype, 1.0, self.chrono_steps - 1.0)
            return jnp.outer(jnp.array(signs, dtype), jnp.log(steps)).reshape(shape)

        return initializer


class _Recurrent(_Gated):
    """Options of cores whose steps follow one another."""

    layer_norm: bool = False

    def _norm(self, name: str, *signs: int) -> Callable[[jax.Array], jax.Array]:
        """Returns layer normalisation of blocks `[..., H]`, or the identity without `layer_norm`.

        The parameters are created here, outside of the scan that applies them.
        """
        if not self.layer_norm:
            return lambda x: x
        size = (len(signs) * self.size,)
        scale = self.param(f"{name}_scale", nn.initializers.ones, size)
        bias = self.param(f"{name}_bias", self._gate_bias(*signs), size)
        return lambda x: jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6) * scale + bias


class LSTM(_Recurrent):
    """A long short-term memory; its state is the pair of cell and hidden `[B, H]`.

    Hochreiter and Schmidhuber, "Long Short-Term Memory". The products with the inputs are computed
    for all steps at once, outside the scan.

    Attributes:
      size: number of units, `H`.
      chrono_steps: longest memory that the initial gates allow for, in agent steps: their biases
        are drawn by chrono initialisation; None for forget gates that are biased by one.
      layer_norm: whether the products with the inputs and with the hidden state, and the cell that
        the output gate multiplies, are normalised; equations 20 to 22 of Ba, Kiros and Hinton,
        "Layer Normalization", https://arxiv.org/abs/1607.06450.
    """

    def initial_state(self, batch_size: int) -> tuple[jax.Array, jax.Array]:
        return (super().initial_state(batch_size),) * 2

    @nn.compact
    def __call__(self, state, features, first):
        dtype = features.dtype
        forget_bias = 1.0 if self.chrono_steps is None else 0.0
        inputs = self._inputs(features, -1, 1, 0, 0)  # [T, B, 4H]
        kernel = self.param("recurrent", _orthogonal_blocks(4), (self.size, 4 * self.size))
        kernel = kernel.astype(dtype)
        inputs = self._norm("input_norm", -1, 1, 0, 0)(inputs)
        norm_gates = self._norm("recurrent_norm", 0, 0, 0, 0)
        norm_cell = self._norm("cell_norm", 0)

        def step(state, x):
            inputs, first = x
            cell, hidden = _reset(state, first)
            gates = inputs + norm_gates(hidden.astype(dtype) @ kernel)
            i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
            cell = jax.nn.sigmoid(f + forget_bias) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
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
      chrono_steps: as that of `LSTM`, for the update gate; None for no bias.
      layer_norm: whether the products with the inputs and with the state are normalised, those of
        the gates apart from those of the candidate, as in the supplement of Ba, Kiros and Hinton,
        "Layer Normalization", https://arxiv.org/abs/1607.06450.
    """

    @nn.compact
    def __call__(self, state, features, first):
        dtype = features.dtype
        inputs = self._inputs(features, 0, 1, 0)  # [T, B, 3H]
        kernel = self.param("recurrent", _orthogonal_blocks(3), (self.size, 3 * self.size))
        kernel = kernel.astype(dtype)
        bias = self.param("candidate_bias", nn.initializers.zeros, (self.size,))
        split = 2 * self.size  # the gates stand before the candidate
        input_gates = self._norm("input_gates_norm", 0, 1)(inputs[..., :split])
        input_n = self._norm("input_candidate_norm", 0)(inputs[..., split:])
        norm_gates = self._norm("recurrent_gates_norm", 0, 0)
        norm_candidate = self._norm("recurrent_candidate_norm", 0)

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


def _linear_scan(
    state: jax.Array, decay: jax.Array, inputs: jax.Array, first: jax.Array
) -> jax.Array:
    """Returns `h[t] = decay[t] * h[t - 1] + inputs[t]`, `[T, B, H]`, of all steps in parallel.

    A reset is a decay of 0, so episodes need no other operator than `jax.lax.associative_scan`'s;
    Lu et al., "Structured State Space Models for In-Context Reinforcement Learning", 2023,
    https://arxiv.org/abs/2303.03982. `h` before the first step is `state` `[B, H]`, and counts as 0
    where `first` `[T, B]` is true; absolute values of `decay` are 1 or less.
    """

    def combine(earlier: tuple, later: tuple) -> tuple:
        return later[0] * earlier[0], later[0] * earlier[1] + later[1]

    decay = jnp.where(first[..., None], 0.0, decay)
    inputs = inputs.at[0].add(decay[0] * state)
    return jax.lax.associative_scan(combine, (decay, inputs))[1]


class MinGRU(_Gated):
    """A gated unit that is linear in its state, `[B, H]`; all steps are computed in parallel.

    Feng et al., "Were RNNs All We Needed?", 2024, https://arxiv.org/abs/2410.01201, without
    logarithms. Gate and candidate depend on the input alone.

    Attributes:
      size: number of units, `H`.
      chrono_steps: as that of `LSTM`, for the gate; None for no bias, which halves a state in a
        step.
    """

    chrono_steps: int | None = 256

    @nn.compact
    def __call__(self, state, features, first):
        inputs = self._inputs(features, -1, 0)
        gate, candidate = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
        gate = jax.nn.sigmoid(gate)
        hidden = _linear_scan(state, 1.0 - gate, gate * candidate, first)
        return hidden, hidden[-1]


class LRU(_Units):
    """A linear recurrent unit, of which all steps are computed in parallel.

    Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences", 2023,
    https://arxiv.org/abs/2303.06349: a complex diagonal recurrence, then GELU and a gated linear
    unit. The inputs skip the recurrence by a matrix, because sizes may differ.

    Attributes:
      size: number of units, `H`; the state has their real and imaginary parts, `[B, H]` each.
      min_radius: smallest initial absolute value of an eigenvalue; the largest is 0.999.
    """

    min_radius: float = 0.9

    def __post_init__(self):
        if not 0.0 <= self.min_radius < _MAX_RADIUS:
            expected = f"at least 0 and less than {_MAX_RADIUS}"
            raise errors.UserError(f"LRU.min_radius: expected {expected}, got {self.min_radius}")
        super().__post_init__()

    def initial_state(self, batch_size: int) -> tuple[jax.Array, jax.Array]:
        return (super().initial_state(batch_size),) * 2

    @nn.compact
    def __call__(self, state, features, first):
        uniform, sizes = jax.random.uniform, (self.size,)
        squares = self.min_radius**2, _MAX_RADIUS**2

        def nu_log(key, shape):
            return jnp.log(
                -0.5 * jnp.log(uniform(key, shape, minval=squares[0], maxval=squares[1]))
            )

        def theta_log(key, shape):
            return jnp.log(_MAX_PHASE * (1.0 - uniform(key, shape)))

        decay = jnp.exp(-jnp.exp(self.param("nu_log", nu_log, sizes)))
        phase = jnp.exp(self.param("theta_log", theta_log, sizes))
        scale = self.param("gamma_log", lambda _, shape: 0.5 * jnp.log1p(-jnp.square(decay)), sizes)
        layer = functools.partial(nn.Dense, dtype=features.dtype)
        linear = functools.partial(layer, use_bias=False)
        normal = functools.partial(nn.initializers.variance_scaling, mode="fan_in")
        inputs = linear(2 * self.size, kernel_init=normal(0.5, distribution="normal"), name="input")
        real, imaginary = jnp.split(inputs(features).astype(jnp.float32), 2, axis=-1)
        inputs = jnp.exp(scale) * jax.lax.complex(real, imaginary)
        decay = decay * jnp.exp(1j * phase) * jnp.ones_like(inputs)
        hidden = _linear_scan(jax.lax.complex(*state), decay, inputs, first)
        parts = jnp.concatenate([hidden.real, hidden.imag], axis=-1).astype(features.dtype)
        output = linear(self.size, kernel_init=normal(2.0, distribution="normal"), name="output")
        values = jax.nn.gelu(output(parts) + linear(self.size, name="skip")(features))
        values, gate = jnp.split(layer(2 * self.size, name="gate")(values), 2, axis=-1)
        return values * jax.nn.sigmoid(gate), (hidden[-1].real, hidden[-1].imag)


class Attention(_Units):
    """Attention to the present step and the `W` steps before it, within the episode.

    The state is the cache of the last `W` inputs, as in Dai et al., "Transformer-XL", 2019,
    https://arxiv.org/abs/1901.02860: keys and values of the cache have gradients, its inputs have
    none. Each head has a learnt bias for each age of an input, as in Raffel et al., "Exploring the
    Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
    https://arxiv.org/abs/1910.10683, but without buckets. Where the size of the features differs, a
    matrix projects them. Layers of a transformer are a `Stack` of it with `Stack.hidden_size`.

    Attributes:
      size: number of units, `H`.
      num_heads: number of heads, `N`, which divides `H`.
      window: number of earlier steps, `W`; the state has `[B, W, H]` inputs, and `[B]` int32, how
        many of them are of the episode.
    """

    num_heads: int = 4
    window: int = 64

    def __post_init__(self):
        errors.require_count(self, "num_heads", "window")
        super().__post_init__()
        if self.size % self.num_heads:
            raise errors.UserError(
                f"Attention.num_heads: expected a divisor of size = {self.size}, "
                f"got {self.num_heads}"
            )

    def initial_state(self, batch_size: int) -> tuple[jax.Array, jax.Array]:
        inputs = jnp.zeros((batch_size, self.window, self.size), jnp.float32)
        return inputs, jnp.zeros(batch_size, jnp.int32)

    @nn.compact
    def __call__(self, state, features, first):
        (cache, count), (length, _), dtype = state, first.shape, features.dtype
        if features.shape[-1] != self.size:
            features = nn.Dense(self.size, dtype=dtype, name="projection")(features)
        # [B, S, H], as the cache, so that acting transposes only the newest inputs.
        inputs = jnp.concatenate([cache.astype(dtype), jnp.moveaxis(features, 0, 1)], axis=1)

        heads = self.num_heads, self.size // self.num_heads
        query = nn.DenseGeneral(heads, dtype=dtype, name="query")(features)  # [T, B, N, D]
        normal = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        key = self.param("key", normal, (self.size, *heads)).astype(dtype)
        value = self.param("value", normal, (self.size, *heads)).astype(dtype)
        # `einsum` chooses by `T` whether it projects the inputs, or the queries and the results.
        logits = jnp.einsum("tbnd,hnd,bsh->bnts", query, key, inputs).astype(jnp.float32)
        logits = logits / math.sqrt(heads[1]) + self._age_bias(length)
        # Where the episode of each step begins, counted in `inputs`.
        time = self.window + jnp.arange(length)[:, None]
        begin = _latest(first, time, self.window - count)
        exists = jnp.arange(self.window + length) >= begin.T[:, None, :, None]  # [B, 1, T, S]
        weights = jax.nn.softmax(jnp.where(exists, logits, layers.MASKED)).astype(dtype)
        attended = jnp.einsum("bnts,bsh,hnd->tbnd", weights, inputs, value)
        outputs = nn.DenseGeneral(self.size, (-2, -1), dtype=dtype, name="output")(attended)

        count = jnp.minimum(self.window + length - begin[-1], self.window)
        # Inputs of earlier episodes become 0: a weight of 0 does not hide a NaN.
        kept = jnp.arange(self.window) >= self.window - count[:, None]
        cache = jnp.where(kept[..., None], inputs[:, length:].astype(jnp.float32), 0.0)
        return outputs, (cache, count)

    def _age_bias(self, length: int) -> jax.Array:
        """Returns the biases `[N, T, S]`, which exclude later steps and those before the window.

        Row `t` has the same `W + 1` numbers, oldest first, from place `t` on: rows of one place
        more, one after another, are cut into rows of `S` places.
        """
        shape, size = (self.num_heads, self.window + 1), self.window + length
        bias = self.param("age_bias", nn.initializers.zeros, shape)
        row = jnp.pad(bias, ((0, 0), (0, length)), constant_values=layers.MASKED)  # [N, S + 1]
        return jnp.tile(row, length)[:, : length * size].reshape(-1, length, size)


class Stack(nn.Module):
    """Layers of one kind of core, with residual connections and normalisation before each layer.

        x[k + 1] = x[k] + core_k(LayerNorm(x[k])),    outputs = LayerNorm(x[num_layers])

    Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
    https://arxiv.org/abs/2002.04745. Where the sizes of features and core differ, a matrix projects
    the features for the first sum.

    Attributes:
      core: core of each layer, with parameters of its own; the state is a tuple of theirs.
      num_layers: number of layers.
      hidden_size: units of a GELU layer, and a linear one, that follow each core as a layer of
        their own, as in a transformer; None for none.
    """

    core: nn.Module = MinGRU()
    num_layers: int = 2
    hidden_size: int | None = None

    def __post_init__(self):
        errors.require_count(self, "num_layers", "hidden_size")
        if not hasattr(self.core, "initial_state"):
            got = errors.path_of(self.core)
            raise errors.UserError(f"Stack.core: expected a core such as MinGRU, got {got}")
        super().__post_init__()

    def initial_state(self, batch_size: int) -> tuple:
        return (self.core.initial_state(batch_size),) * self.num_layers

    @nn.compact
    def __call__(self, state, features, first):
        norm, states = functools.partial(nn.LayerNorm, dtype=features.dtype), []
        for index in range(self.num_layers):
            core = self.core.clone(parent=self, name=f"layer_{index}")
            inputs = norm(name=f"norm_{index}")(features)
            outputs, layer_state = core(state[index], inputs, first)
            if features.shape != outputs.shape:
                project = nn.Dense(outputs.shape[-1], dtype=features.dtype, name="projection")
                features = project(features)
            features += outputs.astype(features.dtype)
            states.append(layer_state)
            if self.hidden_size is not None:
                inputs = norm(name=f"hidden_norm_{index}")(features)
                dense = functools.partial(nn.Dense, dtype=features.dtype)
                hidden = jax.nn.gelu(dense(self.hidden_size, name=f"hidden_{index}")(inputs))
                features += dense(features.shape[-1], name=f"hidden_output_{index}")(hidden)
        return norm(name="norm")(features), tuple(states)


def _orthogonal_blocks(num_blocks: int) -> nn.initializers.Initializer:
    """Returns an initializer of `num_blocks` square orthogonal matrices side by side."""

    def initializer(key, shape, dtype=jnp.float32):
        rows, columns = shape
        block = nn.initializers.orthogonal()
        keys = jax.random.split(key, num_blocks)
        blocks = [block(k, (rows, columns // num_blocks), dtype) for k in keys]
        return jnp.concatenate(blocks, axis=1)

    return initializer


def stack_frames(
    state: types.PyTree, observation: types.PyTree, first: jax.Array, num_frames: int
) -> tuple[types.PyTree, types.PyTree]:
    """Returns the stacks of the last `K` frames, and the state after them.

    They are built without a scan and without a gather. At the start of an episode the stack is
    filled with copies of the first frame. Frames are stacked on the last axis, oldest first:
    `[H, W, C]` becomes `[H, W, K * C]`, `[H, W]` becomes `[H, W, K]`, and `[F]` becomes `[K * F]`.

    `state` has the previous frames, `[B, K - 1, ...]`, oldest first; `observation` is
    `[T, B, ...]`, and `first` `[T, B]`.
    """
    # Steps since the episode began, if that was after time 0; else more than any lag.
    time = jnp.arange(first.shape[0])[:, None]
    age = time - _latest(first, time, -num_frames)

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
