"""Stacks of frames and recurrent cores, against loops that keep lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import cores
from podracers import parallel


def test_stacks_repeat_the_first_frame_and_never_cross_episodes():
    frames = jnp.arange(1.0, 8.0).reshape(7, 1, 1)
    first = jnp.array([0, 0, 1, 0, 0, 0, 1], bool)[:, None]
    state = jnp.array([[[-2.0], [-1.0]]])  # [B, K - 1, F]
    stacks, state = jax.jit(cores.stack_frames, static_argnums=3)(state, frames, first, 3)
    expected = [[-2, -1, 1], [-1, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5], [4, 5, 6], [7, 7, 7]]
    np.testing.assert_array_equal(stacks[:, 0], expected)
    np.testing.assert_array_equal(state, [[[7.0], [7.0]]])


@pytest.mark.parametrize("shape", [(), (4,), (5, 6), (5, 6, 2)])
def test_stacks_grow_the_last_axis_and_keep_the_dtype(shape):
    rng = np.random.default_rng(0)
    observation = {"leaf": rng.integers(0, 255, (6, 2, *shape)).astype(np.uint8)}
    first = jnp.zeros((6, 2), bool).at[0].set(True)
    state = cores.initial_frames({"leaf": observation["leaf"][0]}, 4)
    stacks, state = cores.stack_frames(state, observation, first, 4)
    newest = observation["leaf"][2:6]  # what the last stack holds
    if shape in ((), (5, 6)):
        newest = newest[..., None]
    assert stacks["leaf"].dtype == np.uint8
    expected = np.concatenate(list(newest), axis=-1)
    np.testing.assert_array_equal(stacks["leaf"][-1], expected)
    np.testing.assert_array_equal(state["leaf"], np.moveaxis(observation["leaf"][3:], 0, 1))


@pytest.mark.parametrize("channels", [1, 2])
def test_a_tpu_stacks_one_time_step_in_another_order_and_gets_the_same(channels):
    rng = np.random.default_rng(0)
    state, image = (
        rng.integers(0, 255, (*axes, 5, 6, channels)).astype(np.uint8)
        for axes in ((1024, 3), (1, 1024))
    )
    first = rng.random((1, 1024)) < 0.3
    expected = cores.stack_frames(state, image, first, 4)
    traced = [jax.make_jaxpr(cores.stack_frames, static_argnums=3)(state, image, first, 4)]
    with parallel.compiling_for("tpu"):
        found = cores.stack_frames(state, image, first, 4)
        traced.append(jax.make_jaxpr(cores.stack_frames, static_argnums=3)(state, image, first, 4))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert str(traced[0]) != str(traced[1])


@pytest.mark.parametrize("num_frames", [2, 4])
def test_the_state_before_a_drawn_step_is_that_of_acting(num_frames):
    """Frames from before the first step, of an episode, and copies of an episode's first."""
    length, batch = 9, 5
    rng = np.random.default_rng(0)
    observation = {"leaf": rng.integers(0, 255, (length, batch, 3)).astype(np.uint8)}
    first = jnp.asarray(rng.random((length, batch)) < 0.3)
    state = {"leaf": rng.integers(0, 255, (batch, num_frames - 1, 3)).astype(np.uint8)}
    items = rng.permutation(length * batch)[:30]
    time, stream = items // batch, items % batch
    drawn = jax.jit(cores.frames_before)(state, observation, first, time, stream)["leaf"]
    assert drawn.shape == (30, num_frames - 1, 3) and drawn.dtype == np.uint8
    for row, (t, b) in enumerate(zip(time, stream)):
        acted = state
        if t:
            acted = cores.stack_frames(state, _until(observation, t), first[:t], num_frames)[1]
        expected = acted["leaf"][b]
        if first[t, b]:
            expected = np.broadcast_to(observation["leaf"][t, b], expected.shape)
        np.testing.assert_array_equal(drawn[row], expected)


def _until(observation, time):
    return {"leaf": observation["leaf"][:time]}


@pytest.mark.parametrize(
    "core",
    [kind(4, layer_norm) for kind in (cores.LSTM, cores.GRU) for layer_norm in (False, True)],
)
def test_recurrent_cores_equal_their_equations(core):
    features = jax.random.normal(jax.random.key(0), (5, 2, 3))
    first = jnp.array([[0, 1], [0, 0], [1, 0], [0, 0], [0, 1]], bool)
    state = jax.tree.map(lambda x: x + 0.5, core.initial_state(2))
    variables = core.init(jax.random.key(1), state, features, first)
    params = _moved(variables["params"])
    outputs, last = core.apply({"params": params}, state, features, first)
    sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))  # noqa: E731

    def norm(x, name):
        """Returns rows with mean 0 and variance 1, scaled and moved, if there is such a norm."""
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
            cell = sigmoid(f + 1.0) * cell + sigmoid(i) * np.tanh(g)
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


def _moved(params):
    """Returns parameters in NumPy, away from the ones and zeros that they begin with."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x) + 0.3 * rng.normal(size=x.shape), params)
