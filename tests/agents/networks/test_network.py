"""Networks: unrolling is stepping, rows are independent, every form of a layer is the same."""

import copy
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import networks
from agents.meta import rules
from agents.meta.rules import interface
from agents.networks import cores, encoders, heads, muzero, sac, tables
from podracers import environment, parallel, types
from tests import streams
from tests.agents import experience

LENGTH, BATCH = 7, 3
VECTOR = specs.Array((5,), np.float32)
MIXED = {
    "action_mask": specs.Array((4,), bool),
    "board": specs.Array((6, 5), np.float32),
    "inventory": {"count": specs.Array((), np.int32), "flags": specs.Array((3,), bool)},
}
DISCRETE = specs.DiscreteArray(4)
BOX = specs.BoundedArray((2,), np.float32, -1.0, 1.0)
HEAD = heads.from_spec(DISCRETE)
OUTPUTS = interface.OutputSpec({"policy": 4}, {"q": 1})
SMALL_CNN = encoders.CNN(channels=(4,), hidden_sizes=(8,))

# Observation, action, and the arguments of `actor_critic`.
CASES = {
    "mlp": (VECTOR, DISCRETE, {}),
    "shared_gaussian": (VECTOR, BOX, {"separate_critic": False}),
    "cnn": (MIXED, DISCRETE, {"encoder": SMALL_CNN}),
    "cells": (
        specs.Array((2, 2, 3), np.float32),
        DISCRETE,
        {"encoder": encoders.CNN((4,), hidden_sizes=()), "num_cells": 4},
    ),
    "asymmetric": (
        MIXED,
        DISCRETE,
        {
            "encoder": SMALL_CNN,
            "policy_keys": ("board",),
            "critic_keys": ("inventory",),
            "critic_encoder": encoders.MLP((8,)),
        },
    ),
    "lstm": (VECTOR, DISCRETE, {"core": cores.LSTM(8), "separate_critic": False}),
    "stack": (VECTOR, DISCRETE, {"core": cores.Stack(cores.MinGRU(8))}),
    "attention": (VECTOR, DISCRETE, {"core": cores.Stack(cores.Attention(8, 2, 3), 2, 4)}),
    "frames": (VECTOR, DISCRETE, {"frame_stack": 4}),
    "frames_lstm": (
        MIXED,
        DISCRETE,
        {"encoder": SMALL_CNN, "core": cores.LSTM(8), "frame_stack": 3, "separate_critic": False},
    ),
}
FAST = ("mlp", "cnn", "lstm", "attention", "frames")  # each kind of memory
EVERY = [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in CASES]
RECURRENT = {"lstm", "stack", "attention", "frames_lstm"}
WITHOUT_MEMORY = {"mlp", "shared_gaussian", "cnn", "cells", "asymmetric"}
_assert_close = functools.partial(streams.assert_close, atol=2e-5)


def _timestep(spec, seed=0):
    rng = np.random.default_rng(seed)

    def draw(leaf):
        noise = rng.normal(scale=100.0, size=(LENGTH, BATCH, *leaf.shape))
        return np.abs(noise).astype(leaf.dtype) if leaf.dtype != bool else noise > 0.0

    step_type = rng.choice([types.FIRST, types.MID, types.LAST], (LENGTH, BATCH), p=[0.3, 0.5, 0.2])
    step_type[0] = types.MID  # a rollout may begin within an episode
    zeros = np.zeros((LENGTH, BATCH), np.float32)
    observation = jax.tree.map(draw, spec)
    return types.TimeStep(observation, zeros, zeros + 1.0, step_type.astype(np.int8))


def _row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@functools.cache
def _case(name):
    """Returns the network, parameters and a core that are not initial, and the unroll."""
    observation, action, arguments = CASES[name]
    spec = environment.EnvironmentSpec("test", observation, action)
    network = networks.actor_critic(spec, heads.from_spec(action), **arguments)
    timestep = _timestep(observation, seed=1)
    params = jax.jit(network.init)(jax.random.key(0), _row(timestep, 0))
    params = experience.moved(params, 0.1, seed=1)
    unroll = jax.jit(network.unroll)
    _, core = unroll(params, network.initial_core(BATCH), timestep)
    return network, params, core, unroll


@pytest.mark.parametrize("name", EVERY)
def test_unroll_equals_a_scan_of_step_with_resets(name):
    network, params, core, unroll = _case(name)
    timestep = _timestep(CASES[name][0])
    output, last = unroll(params, core, timestep)

    @jax.jit
    def scan(params, core, timestep):
        def body(core, timestep):
            output, core = network.step(params, core, timestep)
            return core, output

        return jax.lax.scan(body, core, timestep)

    expected_last, expected = scan(params, core, timestep)
    _assert_close((output, last), (expected, expected_last))
    assert output.value.shape == (LENGTH, BATCH)
    num_outputs = heads.from_spec(CASES[name][1]).num_outputs
    assert output.policy.shape == (LENGTH, BATCH, num_outputs)
    assert isinstance(network, networks.Network)
    assert network.is_recurrent == (network.memory_length is None) == (name in RECURRENT)
    assert (core == ()) == (network.memory_length == 0) == (name in WITHOUT_MEMORY)


def test_actions_begin_with_the_standard_deviation_of_the_option():
    spec, head = environment.EnvironmentSpec("test", VECTOR, BOX), heads.from_spec(BOX)
    network = networks.actor_critic(spec, head, initial_std=0.3)
    first = networks.zero_timestep(spec)
    params = jax.jit(network.init)(jax.random.key(0), first)
    output, _ = jax.device_get(jax.jit(network.step)(params, (), first))
    np.testing.assert_allclose(output.policy[..., 2:], np.log(0.3), rtol=1e-6)


KINDS = {
    "action_mask": specs.Array((4,), bool),
    "board": environment.MultiDiscreteArray((2, 3, 2), np.uint8, 0, [2, 1]),
    "room": specs.DiscreteArray(5, np.uint8),
    "speed": specs.Array((2,), np.float32),
    "tools": environment.MultiDiscreteArray((2,), np.int32, 0, [2, 0]),
}
MAKERS = {
    "actor_critic": lambda spec, **options: networks.actor_critic(spec, HEAD, **options),
    "model": lambda spec, **options: muzero.model(spec, 4, 3, **options).representation,
    "policy_value": lambda spec, **_: muzero.policy_value(spec, 4, 3),
    "q_network": lambda spec, **options: networks.q_network(spec, 4, **options),
    "rule_network": lambda spec, **options: rules.rule_network(spec, OUTPUTS, **options),
    "sac_network": lambda spec, **options: (
        sac.sac_network(spec, sac.head_from_spec(spec), **options).memory
    ),
}


def _spec(observation):
    observation = copy.deepcopy(observation)  # copies, as in other processes, keep their kind
    return environment.EnvironmentSpec("test", observation, DISCRETE)


@pytest.mark.parametrize(
    ("name", "frame_stack"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * (name != "q_network"))
        for name, size in (*((name, 3) for name in MAKERS), ("model", 1))
    ],
)
def test_networks_read_one_hot_codes_of_categorical_observations(name, frame_stack):
    """An equal network reads codes that were made before; frames of cores stay integers."""
    rng = np.random.default_rng(0)
    timestep = _timestep(KINDS)
    draw = {"room": rng.integers(0, 5, (LENGTH, BATCH), np.uint8)}
    draw["board"] = rng.integers(0, [3, 2], (LENGTH, BATCH, 2, 3, 2), np.uint8)
    draw["tools"] = rng.integers(0, [3, 1], (LENGTH, BATCH, 2), np.int32)
    step_type = timestep.step_type.copy()
    step_type[0] = types.FIRST  # otherwise frames of zeros, which are no codes, come before it
    timestep = timestep._replace(observation=timestep.observation | draw, step_type=step_type)
    tools = np.concatenate([np.eye(3)[draw["tools"][..., 0]], np.ones((LENGTH, BATCH, 1))], -1)
    codes = {"room": np.eye(5, dtype="f")[draw["room"]], "tools": tools.astype("f")}
    tile, colour = draw["board"][..., 0], draw["board"][..., 1]
    codes["board"] = np.concatenate([np.eye(3)[tile], np.eye(2)[colour]], -1).astype("f")
    coded = timestep._replace(observation=timestep.observation | codes)
    sizes = {name: specs.Array(code.shape[2:], np.float32) for name, code in codes.items()}
    network, reference = (
        MAKERS[name](_spec(spec), frame_stack=frame_stack) for spec in (KINDS, KINDS | sizes)
    )
    params = {}
    if name != "sac_network":  # its frames have no parameters
        params = jax.jit(network.init)(jax.random.key(0), _row(timestep, 0))
        params = experience.moved(params, 0.1, seed=1)
    core = network.initial_core(BATCH)
    if core != ():
        assert core.frames["room"].dtype == np.uint8
    actual, _ = jax.jit(network.unroll)(params, core, timestep)
    expected, _ = jax.jit(reference.unroll)(params, reference.initial_core(BATCH), coded)
    streams.assert_same(actual, expected)
    prepared = jax.jit(lambda *x: network.unroll(params, *network.prepare(*x))[0])(core, timestep)
    _assert_close(prepared, expected)


@pytest.mark.parametrize(
    ("encoder", "num_inputs"),
    [(encoders.OneHot(encoders.MLP((3,)), 2), 3 * 2), (tables.Table(9, 3), 9)],
)
def test_encoders_that_read_integers_get_them(encoder, num_inputs):
    spec = _spec({name: KINDS[name] for name in ("room", "tools")})
    network = networks.q_network(spec, 4, encoder=encoder)
    params = jax.eval_shape(network.init, jax.random.key(0), networks.zero_timestep(spec))
    assert jax.tree.leaves(params["torso"])[-1].shape == (num_inputs, 3)


@pytest.mark.parametrize("size", [1, 4])  # most time steps of a part: 1, and 3 of the 6
@pytest.mark.parametrize("name", ["lstm", pytest.param("frames_lstm", marks=pytest.mark.slow)])
def test_a_rollout_in_parts_has_the_same_values(name, size, monkeypatch):
    network, params, core, unroll = _case(name)
    timestep = jax.tree.map(lambda x: x[:6], _timestep(CASES[name][0]))
    module = importlib.import_module("agents.networks.network")  # not the case's `network`
    step_bytes = parallel.num_bytes(timestep.observation) // 6
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", size * step_bytes)

    def values(params, core, timestep):
        return networks.unroll_in_parts(network, params, core, timestep, lambda x: x.value)

    # On a TPU, gathers of frames take several times the cycles of the network.
    assert "gather" not in str(jax.make_jaxpr(values)(params, core, timestep))
    value = jax.jit(values)(params, core, timestep)
    # XLA chooses the order of sums by shape.
    _assert_close(value, unroll(params, core, timestep)[0].value, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_rows_are_independent_and_first_resets_the_core(name):
    _, params, core, unroll = _case(name)
    timestep, replacement = (_timestep(CASES[name][0], seed) for seed in (0, 7))
    output, _ = unroll(params, core, timestep)
    other = jax.tree.map(
        lambda x, y: np.concatenate([y[:, :1], x[:, 1:]], axis=1),
        timestep.observation,
        replacement.observation,
    )
    changed, _ = unroll(params, core, timestep._replace(observation=other))
    _assert_close(*(_row(x, (slice(None), slice(1, None))) for x in (changed, output)))
    assert not np.allclose(changed.value[:, 0], output.value[:, 0])
    # From another core the outputs differ until an episode begins, and agree from there.
    restarted, _ = jax.device_get(unroll(params, jax.tree.map(np.zeros_like, core), timestep))
    begun = np.maximum.accumulate(timestep.first(), axis=0)
    assert 0 < begun.sum() < begun.size
    _assert_close(restarted.value[begun], output.value[begun])
    same_before = np.allclose(restarted.value[~begun], output.value[~begun])
    assert same_before == (name in WITHOUT_MEMORY)


@pytest.mark.parametrize("name", ["mlp", "frames"])
def test_time_steps_drawn_in_any_order_have_the_outputs_of_the_unroll(name):
    network, params, core, unroll = _case(name)
    timestep = _timestep(CASES[name][0])
    output, _ = unroll(params, core, timestep)
    items = np.random.default_rng(0).permutation(LENGTH * BATCH)
    prepared, stacks = jax.device_get(jax.jit(network.prepare)(core, timestep))
    drawn = _row(stacks, (items // BATCH, items % BATCH))
    actual, _ = jax.jit(network.step)(params, prepared, drawn)
    _assert_close(actual, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[items], output))


@pytest.mark.parametrize(
    ("core", "frames"),
    [
        pytest.param(None, specs.Array((36, 40, 1), np.uint8), marks=pytest.mark.slow),
        pytest.param(cores.LSTM(8), specs.Array((36, 40, 1), np.uint8), marks=pytest.mark.slow),
        (None, environment.MultiDiscreteArray((36, 40, 1), np.uint8, 0, 3)),
    ],
)
def test_frames_that_a_tpu_packs_have_the_same_outputs(core, frames):
    observation = {"action_mask": specs.Array((4,), bool), "frame": frames}
    spec = environment.EnvironmentSpec("test", observation, DISCRETE)
    network = networks.actor_critic(
        spec,
        heads.from_spec(DISCRETE),
        encoder=encoders.NatureCNN(8),
        core=core,
        frame_stack=4,
        separate_critic=False,
    )
    timestep = _timestep(observation)
    params = jax.jit(network.init)(jax.random.key(0), _row(timestep, 0))

    def outputs(params, timestep):
        start = network.initial_core(BATCH)
        output, last = network.unroll(params, start, timestep)
        prepared = network.unroll(params, *network.prepare(start, timestep))[0]
        step, _ = network.step(params, last, _row(timestep, 0))
        return output, prepared, step, last.states

    expected = jax.jit(outputs)(params, timestep)
    _assert_close(expected[0], expected[1])
    with parallel.compiling_for("tpu"):
        text = str(jax.make_jaxpr(network.initial_core, static_argnums=0)(BATCH))
        actual = jax.jit(outputs)(params, timestep)
    assert (f"u32[{BATCH},3,9,10,4]" in text) == (environment.num_values(frames) is None)
    _assert_close(actual, expected)


def test_a_separate_critic_shares_nothing():
    _, params, core, unroll = _case("mlp")
    timestep = _timestep(VECTOR)
    gradient = jax.jit(jax.grad(lambda p: unroll(p, core, timestep)[0].value.sum()))
    gradient = jax.device_get(gradient(params))
    touched = {name for name, tree in gradient.items() if any(map(np.any, jax.tree.leaves(tree)))}
    assert touched == {"torsos_1", "value"}


@pytest.mark.parametrize("kind", ["actor_critic", "q_network", "policy_value"])
def test_an_action_of_a_cell_moves_with_the_cell(kind):
    """A 1 x 1 convolution and shared weights: a permutation of the cells is one of the outputs."""
    spec = environment.EnvironmentSpec("test", specs.Array((2, 2, 3), np.float32), DISCRETE)
    options = {"encoder": encoders.CNN((8,), kernel=1, hidden_sizes=()), "num_cells": 4}
    if kind == "actor_critic":
        network = networks.actor_critic(spec, heads.from_spec(DISCRETE), **options)
    elif kind == "q_network":
        network = networks.q_network(spec, 4, **options)
    else:
        network = muzero.policy_value(spec, 4, 3, **options)
    timestep = _row(_timestep(spec.observation), 0)
    params = jax.jit(network.init)(jax.random.key(0), timestep)
    order = np.array([2, 0, 3, 1])
    cells = timestep.observation.reshape(BATCH, 4, 3)[:, order].reshape(BATCH, 2, 2, 3)

    @jax.jit
    def outputs(observation):
        output, _ = network.step(params, (), timestep._replace(observation=observation))
        return output if kind == "q_network" else output.policy

    before, after = jax.device_get((outputs(timestep.observation), outputs(cells)))
    np.testing.assert_allclose(after, before[:, order], rtol=1e-5)
    assert np.all(np.std(before, axis=1) > 0.0)


def test_the_state_value_of_a_dueling_head_sees_all_cells():
    _, params, unroll = _q_network(dueling=True, num_cells=2)
    assert params["action"]["kernel"].shape == (3, 2)
    assert params["state"]["kernel"].shape == (6, 1)
    assert unroll(params, _timestep(VECTOR)).shape == (LENGTH, BATCH, 4)


def _q_network(**options):
    """Returns a network of five features and four actions, its parameters, and its unroll."""
    spec = environment.EnvironmentSpec("test", VECTOR, DISCRETE)
    network = networks.q_network(spec, 4, encoder=encoders.MLP((6,), "relu"), **options)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0), _row(_timestep(VECTOR), 0)))
    return network, params, jax.jit(lambda p, timestep: network.unroll(p, (), timestep)[0])


def test_dueling_heads_have_separate_hidden_layers_and_center_each_atom():
    network, params, unroll = _q_network(dueling=True, head_hidden_sizes=(8, 7), num_atoms=3)
    timestep = _timestep(VECTOR)
    features = network.module.torso.apply(
        {"params": params["torso"]}, (), timestep.observation, timestep.first()
    )[0]

    def head(name):
        hidden = features
        for layer in (f"{name}_hidden_0", f"{name}_hidden_1"):
            hidden = np.maximum(hidden @ params[layer]["kernel"] + params[layer]["bias"], 0.0)
        logits = hidden @ params[name]["kernel"] + params[name]["bias"]
        return logits.reshape(LENGTH, BATCH, -1, 3)

    advantage = head("action")
    expected = head("state") + advantage - np.mean(advantage, axis=2, keepdims=True)
    np.testing.assert_allclose(unroll(params, timestep), expected, rtol=1e-4, atol=1e-5)
    assert unroll(params, timestep).shape == (LENGTH, BATCH, 4, 3)
    loss = lambda p: jnp.sum(jnp.square(unroll(p, timestep) - 1.0))  # noqa: E731
    gradient = jax.device_get(jax.jit(jax.grad(loss))(params))
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(gradient))


def test_heads_are_noisy_with_a_key_alone():
    network, params, unroll = _q_network(dueling=True, head_hidden_sizes=(8,), noisy=True)
    timestep = _timestep(VECTOR)
    quiet = unroll(params, timestep)
    key = jax.random.split(jax.random.key(3), BATCH)
    with_key = jax.jit(lambda p: network.unroll(p, (), timestep, key)[0])
    noisy = with_key(params)
    assert noisy.shape == quiet.shape == (LENGTH, BATCH, 4)
    assert np.all(np.any(noisy != quiet, axis=(0, 2)))
    still = jax.tree_util.tree_map_with_path(
        lambda path, x: np.zeros_like(x) if "deviation" in str(path) else x, params
    )
    np.testing.assert_allclose(with_key(still), quiet, rtol=1e-4, atol=1e-4)
    layers_of_noise = {name for name, layer in params.items() if "deviation" in layer}
    assert layers_of_noise == {"action_hidden_0", "action", "state_hidden_0", "state"}


def test_an_image_of_words_is_no_packed_frame_on_a_tpu():
    spec = environment.EnvironmentSpec("test", specs.Array((8, 8, 4), np.uint32), DISCRETE)
    network = networks.q_network(spec, 4, encoder=encoders.CNN((4,)))
    timestep = _row(_timestep(spec.observation), 0)
    params = jax.jit(network.init)(jax.random.key(0), timestep)
    step = jax.jit(network.step)
    with parallel.compiling_for("tpu"):
        actual, _ = step(params, (), timestep)
    expected, _ = step(params, (), timestep)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
