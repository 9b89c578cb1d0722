"""Stacks of frames and recurrent cores, against loops that keep lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from agents.networks import cores
from tests import streams
from tests.agents import experience


def test_stacks_repeat_the_first_frame_and_never_cross_episodes():
    frames = np.arange(1.0, 8.0, dtype=np.float32).reshape(7, 1, 1)
    first = np.array([0, 0, 1, 0, 0, 0, 1], bool)[:, None]
    state = np.float32([[[-2.0], [-1.0]]])  # [B, K - 1, F]
    stacks, state = jax.jit(cores.stack_frames, static_argnums=3)(state, frames, first, 3)
    expected = [[-2, -1, 1], [-1, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5], [4, 5, 6], [7, 7, 7]]
    np.testing.assert_array_equal(stacks[:, 0], expected)
    np.testing.assert_array_equal(state, [[[7.0], [7.0]]])


@pytest.mark.parametrize("shape", [(), (5, 6, 2)])
def test_stacks_grow_the_last_axis_and_keep_the_dtype(shape):
    observation = np.random.default_rng(0).integers(0, 255, (6, 2, *shape)).astype(np.uint8)
    first = np.broadcast_to(np.arange(6)[:, None] == 0, (6, 2))
    state = {"leaf": np.zeros((2, 3, *shape), np.uint8)}
    stack = jax.jit(cores.stack_frames, static_argnums=3)
    stacks, state = jax.device_get(stack(state, {"leaf": observation}, first, 4))
    newest = observation[2:]
    if shape in ((), (5, 6)):
        newest = newest[..., None]
    assert stacks["leaf"].dtype == np.uint8
    np.testing.assert_array_equal(stacks["leaf"][-1], np.concatenate(list(newest), axis=-1))
    np.testing.assert_array_equal(state["leaf"], np.moveaxis(observation[3:], 0, 1))


@pytest.mark.parametrize(
    "core",
    [
        pytest.param(kind(4, **options), marks=[pytest.mark.slow] * ("layer_norm" not in options))
        for kind in (cores.LSTM, cores.GRU)
        for options in ({}, {"layer_norm": True}, {"chrono_steps": 9})
    ],
)
def test_recurrent_cores_equal_their_equations(core):
    features = jax.random.normal(jax.random.key(0), (5, 2, 3))
    first = jnp.array([[0, 1], [0, 0], [1, 0], [0, 0], [0, 1]], bool)
    state = jax.tree.map(lambda x: x + 0.5, core.initial_state(2))
    params = jax.jit(core.init)(jax.random.key(1), state, features, first)["params"]
    params = jax.device_get(experience.moved(params, 0.3, seed=2))  # from ones and zeros
    outputs, last = jax.jit(core.apply)({"params": params}, state, features, first)
    sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))  # noqa: E731

    def norm(x, name):
        """Returns rows with mean 0 and variance 1, scaled and shifted, if there is such a norm."""
        if not core.layer_norm:
            return x
        scaled = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return scaled * params[f"{name}_norm_scale"] + params[f"{name}_norm_bias"]

    x = np.asarray(features) @ params["input"]["kernel"] + params["input"]["bias"]
    cell, hidden = np.full((2, 4), 0.5), np.full((2, 4), 0.5)
    for t in range(5):
        keep = 1.0 - np.asarray(first[t], np.float32)[:, None]
        cell, hidden = keep * cell, keep * hidden
        recurrent = hidden @ params["recurrent"]
        if isinstance(core, cores.LSTM):
            gates = norm(x[t], "input") + norm(recurrent, "recurrent")
            i, f, g, o = np.split(gates, 4, axis=-1)
            f += 1.0 if core.chrono_steps is None else 0.0
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(norm(cell, "cell"))
        else:
            gates = norm(x[t, :, :8], "input_gates") + norm(recurrent[:, :8], "recurrent_gates")
            r, z = np.split(sigmoid(gates), 2, axis=-1)
            n = norm(x[t, :, 8:], "input_candidate")
            hn = norm(recurrent[:, 8:], "recurrent_candidate")
            candidate = np.tanh(n + r * (hn + params["candidate_bias"]))
            hidden = (1.0 - z) * candidate + z * hidden
        np.testing.assert_allclose(outputs[t], hidden, atol=1e-5)
    np.testing.assert_allclose(jax.tree.leaves(last)[-1], hidden, atol=1e-5)


@pytest.mark.parametrize("core", [cores.MinGRU(4), cores.LRU(4)])
def test_parallel_cores_equal_their_equations_and_their_steps(core):
    features = jax.random.normal(jax.random.key(0), (23, 2, 3))
    first = jax.random.bernoulli(jax.random.key(1), 0.2, (23, 2))
    state = jax.tree.map(lambda x: x + 0.5, core.initial_state(2))
    params = jax.jit(core.init)(jax.random.key(2), state, features, first)["params"]
    params = jax.device_get(experience.moved(params, 0.1, seed=3))
    apply = jax.jit(lambda *arguments: core.apply({"params": params}, *arguments))
    outputs, last = apply(state, features, first)

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name].get("bias", 0.0)

    sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))  # noqa: E731
    gelu = functools.partial(streams.evaluate, jax.nn.gelu)
    hidden = np.full((2, 4), 0.5 if isinstance(core, cores.MinGRU) else 0.5 + 0.5j)
    for t in range(23):
        stepped, state = apply(state, features[t : t + 1], first[t : t + 1])
        x = np.asarray(features[t])
        hidden = np.where(first[t][:, None], 0.0, hidden)
        if isinstance(core, cores.MinGRU):
            gate, candidate = np.split(dense("input", x), 2, axis=-1)
            output = hidden = (1.0 - sigmoid(gate)) * hidden + sigmoid(gate) * candidate
        else:
            eigenvalue = np.exp(-np.exp(params["nu_log"]) + 1j * np.exp(params["theta_log"]))
            real, imaginary = np.split(dense("input", x), 2, axis=-1)
            hidden = eigenvalue * hidden + np.exp(params["gamma_log"]) * (real + 1j * imaginary)
            parts = np.concatenate([hidden.real, hidden.imag], axis=-1)
            values = gelu(dense("output", parts) + dense("skip", x))
            values, gate = np.split(dense("gate", values), 2, axis=-1)
            output = values * sigmoid(gate)
        np.testing.assert_allclose(stepped[0], output, atol=1e-5)
        np.testing.assert_allclose(outputs[t], output, atol=1e-5)
    for final in (last, state):
        parts = [final] if isinstance(core, cores.MinGRU) else [final[0] + 1j * final[1]]
        np.testing.assert_allclose(parts[0], hidden, atol=1e-5)


@pytest.mark.parametrize(
    "core, name, signs",
    [
        (cores.MinGRU(200, 101), "input/bias", (-1, 0)),
        pytest.param(cores.LSTM(200, 101), "input/bias", (-1, 1, 0, 0), marks=pytest.mark.slow),
        pytest.param(
            cores.LSTM(200, 101, True), "input_norm_bias", (-1, 1, 0, 0), marks=pytest.mark.slow
        ),
        pytest.param(cores.GRU(200, 101), "input/bias", (0, 1, 0), marks=pytest.mark.slow),
        (cores.GRU(200, 101, True), "input_gates_norm_bias", (0, 1)),
    ],
)
def test_chrono_biases_are_logarithms_of_uniform_numbers_of_steps(core, name, signs):
    state, features = core.initial_state(1), jnp.ones((1, 1, 1))
    params = jax.jit(core.init)(jax.random.key(0), state, features, np.ones((1, 1), bool))
    biases = traverse_util.flatten_dict(jax.device_get(params["params"]), sep="/")
    blocks = np.split(np.asarray(biases.pop(name)), len(signs))
    assert not any(np.any(x) for path, x in biases.items() if path.endswith("bias"))
    for sign, block in zip(signs, blocks):
        if sign:
            steps = np.exp(sign * block)
            assert 0.99 < steps.min() < 5.0 and 96.0 < steps.max() < 100.01
            np.testing.assert_allclose(np.mean(steps), 50.5, atol=6.0)
        np.testing.assert_array_equal(block, sign * np.abs(blocks[np.argmax(np.abs(signs))]))


# Without and with a projection of the features.
@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 3])
def test_attention_equals_a_loop_over_the_inputs_of_the_episode(size):
    core, length = cores.Attention(4, num_heads=2, window=5), 23
    features = jax.random.normal(jax.random.key(0), (length, 2, size))
    first = np.zeros((length, 2), bool)
    first[[3, 16, 21], 0] = first[[12, 13], 1] = True  # also episodes longer than the window
    cache = jax.random.normal(jax.random.key(2), (2, 5, 4))
    state = cache, jnp.array([5, 2])  # the others are of an earlier episode
    params = jax.jit(core.init)(jax.random.key(3), state, features, first)["params"]
    params = jax.device_get(experience.moved(params, 0.3, seed=4))
    apply = jax.jit(lambda *arguments: core.apply({"params": params}, *arguments))
    outputs, last = apply(state, features, first)

    def dense(name, x, axes=1):
        return np.tensordot(x, params[name]["kernel"], axes) + params[name]["bias"]

    x = dense("projection", features) if size == 3 else np.asarray(features)
    for stream, count in enumerate((5, 2)):
        inputs, stepped = list(cache[stream][5 - count :]), jax.tree.map(lambda x: x, state)
        for t in range(length):
            inputs = [] if first[t, stream] else inputs[-5:]
            inputs.append(x[t, stream])
            rows, ages = np.stack(inputs), np.arange(len(inputs))[::-1]
            query = dense("query", x[t, stream])  # [N, D]
            keys, values = (np.tensordot(rows, params[name], 1) for name in ("key", "value"))
            logits = np.einsum("nd,snd->ns", query, keys) / np.sqrt(2.0)
            weights = np.exp(logits + params["age_bias"][:, 5 - ages])
            weights /= weights.sum(-1, keepdims=True)
            expected = dense("output", np.einsum("ns,snd->nd", weights, values), 2)
            np.testing.assert_allclose(outputs[t, stream], expected, atol=1e-5)
            output, stepped = apply(stepped, features[t : t + 1], first[t : t + 1])
            np.testing.assert_allclose(output[0, stream], expected, atol=1e-5)
        for cached, counts in (last, stepped):
            rows = inputs[-5:]
            assert counts[stream] == len(rows)
            np.testing.assert_allclose(cached[stream, 5 - len(rows) :], rows, atol=1e-6)
            np.testing.assert_array_equal(cached[stream, : 5 - len(rows)], 0.0)  # earlier episodes


def test_gradients_of_attention_reach_the_window_and_the_cache_but_no_earlier_episode():
    core = cores.Attention(4, num_heads=1, window=5)
    features = jax.random.normal(jax.random.key(0), (8, 2, 4))
    first = np.zeros((8, 2), bool)
    first[4, 1] = True
    cache = jax.random.normal(jax.random.key(1), (2, 5, 4))
    params = jax.jit(core.init)(jax.random.key(2), core.initial_state(2), features, first)

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.grad, argnums=(0, 2))
    def gradients(features, time, params, count):
        outputs, _ = core.apply(params, (cache, jnp.full(2, count)), features, first)
        return jnp.sum(outputs[time])

    reached = np.any(gradients(features, 7, params, 5)[0], axis=-1)
    np.testing.assert_array_equal(reached.T, [[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]])
    of_value = [gradients(features, 0, params, count)[1]["params"]["value"] for count in (0, 5)]
    assert not np.allclose(*of_value, atol=0.1)


def test_a_stack_is_the_sum_of_its_layers_and_keeps_their_states():
    core = cores.MinGRU(4)
    stack = cores.Stack(core, num_layers=3, hidden_size=5)
    features = jax.random.normal(jax.random.key(0), (7, 2, 3))
    first = jax.random.bernoulli(jax.random.key(1), 0.3, (7, 2))
    states = tuple(state + index for index, state in enumerate(stack.initial_state(2)))
    params = jax.jit(stack.init)(jax.random.key(2), states, features, first)["params"]
    kernels = [params[f"layer_{index}"]["input"]["kernel"] for index in (1, 2)]
    assert not np.allclose(*kernels)
    params = jax.device_get(experience.moved(params, 0.3, seed=3))
    outputs, last = jax.jit(stack.apply)({"params": params}, states, features, first)
    features = np.asarray(features)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * params[name]["scale"] + params[name]["bias"]

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    x = dense("projection", features)
    for index in range(3):
        inputs = norm(x if index else features, f"norm_{index}")
        weights = {"params": params[f"layer_{index}"]}
        hidden, state = jax.jit(core.apply)(weights, states[index], inputs, first)
        np.testing.assert_allclose(last[index], state, atol=1e-5)
        x = x + np.asarray(hidden)
        hidden = streams.evaluate(
            jax.nn.gelu, dense(f"hidden_{index}", norm(x, f"hidden_norm_{index}"))
        )
        x = x + dense(f"hidden_output_{index}", hidden)
    np.testing.assert_allclose(outputs, norm(x, "norm"), rtol=1e-5, atol=1e-5)


def test_eigenvalues_of_an_lru_begin_in_their_ring():
    core = cores.LRU(500, min_radius=0.5)
    state, features = core.initial_state(1), jnp.ones((1, 1, 3))
    params = jax.jit(core.init)(jax.random.key(0), state, features, np.ones((1, 1), bool))
    params = jax.device_get(params["params"])
    radius, phase = np.exp(-np.exp(params["nu_log"])), np.exp(params["theta_log"])
    assert 0.5 < radius.min() < 0.51 and 0.99 < radius.max() < 0.999
    assert phase.min() < 0.01 and 0.31 < phase.max() < np.pi / 10
    # The squares are uniform: the eigenvalues are, over the ring.
    np.testing.assert_allclose(np.mean(radius**2), (0.25 + 0.998) / 2, atol=0.02)
    np.testing.assert_allclose(np.exp(params["gamma_log"]) ** 2, 1.0 - radius**2, rtol=1e-4)
