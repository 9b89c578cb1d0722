"""The meta-network of DiscoRL's rule, with the arithmetic of its published weights.

Oh et al., "Discovering state-of-the-art reinforcement learning algorithms", 2025,
https://www.nature.com/articles/s41586-025-09761-x; https://github.com/google-deepmind/disco_rl.
Parameters are flat, under the names of the published file: `module/w` and `module/b`.

Axis legend: `T` transitions, `B` streams of one device, `A` actions, `Y` = 600 categories of
predictions, `H` units.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import rlax

from agents.meta.rules import interface

PREDICTION_SIZE = 600  # `Y`
_HIDDEN = 256  # units of the LSTM over a rollout
LIFETIME_HIDDEN = 128  # units of the LSTM over a lifetime
_NET = "lstm"
_LIFETIME_NET = "lstm/~/meta_lstm/~unroll"

Params = dict[str, jax.Array]


class Inputs(NamedTuple):
    """Inputs of the meta-network for a rollout."""

    experience: interface.Experience  # its outputs are those of the learner's parameters
    target: interface.Outputs  # outputs of the parameters' moving average
    value: jax.Array  # [T + 1, B] of the learner's parameters
    advantage: jax.Array  # [T, B]
    normalized_advantage: jax.Array  # [T, B]
    q: jax.Array  # [T, B, A] of the moving average
    q_advantage: jax.Array  # [T, B, A] of each action
    normalized_q_advantage: jax.Array  # [T, B, A]


class Targets(NamedTuple):
    """Outputs of the meta-network: logits."""

    policy: jax.Array  # [T, B, A]
    y: jax.Array  # [T, B, Y]
    z: jax.Array  # [T, B, Y] of the taken action


class State(NamedTuple):
    """The state of the LSTM over a lifetime; initially zero."""

    cell: jax.Array  # [H]
    hidden: jax.Array  # [H]


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter, 754,778 in all, under the names of the file."""
    embedding = {
        "mlp/~/linear_0": (PREDICTION_SIZE, 16),  # embeds y
        "mlp/~/linear_1": (16, 1),
        "mlp_1/~/linear_0": (PREDICTION_SIZE, 16),  # embeds z
        "mlp_1/~/linear_1": (16, 1),
        "sequential/conv1_d": (1, 2 * 9, 16),  # embeds actions
        "sequential/conv1_d_1": (1, 2 * 16, 2),
    }
    net = embedding | {
        "lstm/linear": (27 + _HIDDEN, 4 * _HIDDEN),
        "linear": (LIFETIME_HIDDEN, _HIDDEN),
        "linear_1": (_HIDDEN, 1),  # input of the LSTM over a lifetime
        "linear_2": (_HIDDEN, PREDICTION_SIZE),  # y
        "linear_3": (_HIDDEN, PREDICTION_SIZE),  # z
        "sequential_1/conv1_d": (1, 2 * (_HIDDEN + 2), 16),
        "linear_4": (16, 1),  # policy
    }
    lifetime = embedding | {
        "mlp_2/~/linear_0": (27 + 1 + 1, 16),
        "lstm/linear": (16 + LIFETIME_HIDDEN, 4 * LIFETIME_HIDDEN),
    }
    result: dict[str, tuple[int, ...]] = {}
    for prefix, layers in ((_NET, net), (_LIFETIME_NET, lifetime)):
        for name, shape in layers.items():
            result[f"{prefix}/{name}/w"] = shape
            result[f"{prefix}/{name}/b"] = shape[-1:]
    return result


def init(key: jax.Array) -> Params:
    """Returns random parameters: weights of variance 1 / inputs, biases of zero."""
    result = {name: jnp.zeros(shape) for name, shape in shapes().items()}
    for number, (name, zeros) in enumerate(result.items()):
        if name.endswith("/w"):
            weights = jax.random.normal(jax.random.fold_in(key, number), zeros.shape)
            result[name] = weights * zeros.shape[-2] ** -0.5
    return result


def apply(
    params: Params, state: State, inputs: Inputs, mean: Callable[[jax.Array], jax.Array]
) -> tuple[Targets, State]:
    """Returns the targets of a rollout, and the state after it.

    Args:
      params: of the meta-network.
      state: of the LSTM over a lifetime.
      inputs: this device's part of the rollout.
      mean: returns the mean of values `[T, B, ...]` over time and streams of all devices.
    """
    features, of_actions = _features(params, _NET, inputs)
    hidden = _backwards(params, features, inputs.experience.timestep.last()[1:])
    hidden = hidden * _linear(params, f"{_NET}/linear", state.hidden)
    policy = jnp.broadcast_to(hidden[..., None, :], (*of_actions.shape[:-1], _HIDDEN))
    policy = jnp.concatenate([policy, of_actions], axis=-1)  # [T, B, A, H + 2]
    policy = _across_actions(params, f"{_NET}/sequential_1/conv1_d", policy)
    targets = Targets(
        policy=_linear(params, f"{_NET}/linear_4", policy)[..., 0],
        y=_linear(params, f"{_NET}/linear_2", hidden),
        z=_linear(params, f"{_NET}/linear_3", hidden),
    )
    features, _ = _features(params, _LIFETIME_NET, inputs)
    seen = [
        features,
        _linear(params, f"{_NET}/linear_1", hidden),
        _mlp(params, f"{_LIFETIME_NET}/mlp", jax.nn.softmax(targets.y)),
    ]
    seen = _linear(params, f"{_LIFETIME_NET}/mlp_2/~/linear_0", jnp.concatenate(seen, axis=-1))
    state = _lstm(params, f"{_LIFETIME_NET}/lstm/linear", mean(seen), state)
    return targets, state


def _features(params: Params, prefix: str, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns 27 features of each transition, `[T, B, 27]`, and two of each action in it.

    Probabilities and values are constants; gradients pass through predictions.
    """
    timestep, action, behaviour, outputs = inputs.experience
    constant, both = jax.lax.stop_gradient, (outputs, inputs.target)
    policy, target_policy = (constant(jax.nn.softmax(x[interface.POLICY])) for x in both)
    target_policy = target_policy[:-1]
    behaviour = constant(jax.nn.softmax(behaviour))
    y, target_y = (_mlp(params, f"{prefix}/mlp", jax.nn.softmax(x["y"])) for x in both)
    z, target_z = (
        _mlp(params, f"{prefix}/mlp_1", jax.nn.softmax(x["z"]))[..., 0] for x in both
    )  # [T + 1, B, A]
    base = [
        taken(policy[:-1], action),
        taken(behaviour, action),
        rlax.signed_logp1(timestep.reward[1:]),
        timestep.discount[1:],
        *_before_and_after(constant(rlax.signed_logp1(inputs.value))),
        constant(rlax.signed_logp1(inputs.advantage)),
        constant(inputs.normalized_advantage),
        taken(target_policy, action),
        *_before_and_after(y[..., 0]),
        *_before_and_after(target_y[..., 0]),
    ]
    for values in (z, target_z):
        base.append(taken(values[:-1], action))
        base.extend(_before_and_after(jnp.sum(values * policy, axis=-1)))
        base.extend(_before_and_after(jnp.max(values, axis=-1)))
    of_actions = [
        policy[:-1],
        behaviour,
        target_policy,
        z[:-1],
        target_z[:-1],
        constant(rlax.signed_logp1(inputs.q)),
        constant(rlax.signed_logp1(inputs.q_advantage)),
        constant(inputs.normalized_q_advantage),
        jax.nn.one_hot(action, policy.shape[-1]),
    ]
    embedded = jnp.stack(of_actions, axis=-1)  # [T, B, A, 9]
    for name in ("conv1_d", "conv1_d_1"):
        embedded = _across_actions(params, f"{prefix}/sequential/{name}", embedded)
    both = jnp.mean(embedded, axis=2), taken(embedded, action)  # [T, B, 2]
    return jnp.concatenate([jnp.stack(base, axis=-1), *both], axis=-1), embedded


def taken(values: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the values of the taken actions, `[T, B, ...]`, from `[T, B, A, ...]`."""
    index = action.reshape(*action.shape, *(1,) * (values.ndim - action.ndim))
    return jnp.take_along_axis(values, index, axis=2)[:, :, 0]


def _before_and_after(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values `[T + 1, B]` at the start and at the end of transitions."""
    return values[:-1], values[1:]


def _linear(params: Params, name: str, inputs: jax.Array) -> jax.Array:
    return inputs @ params[f"{name}/w"] + params[f"{name}/b"]


def _mlp(params: Params, name: str, inputs: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(_linear(params, f"{name}/~/linear_0", inputs))
    return _linear(params, f"{name}/~/linear_1", hidden)


def _across_actions(params: Params, name: str, inputs: jax.Array) -> jax.Array:
    """Returns rectified features of each action, from its own features and their mean over actions.

    The published weights are those of a convolution over actions with a kernel of size one.
    """
    mean = jnp.broadcast_to(jnp.mean(inputs, axis=2, keepdims=True), inputs.shape)
    inputs = jnp.concatenate([inputs, mean], axis=-1)
    return jax.nn.relu(inputs @ params[f"{name}/w"][0] + params[f"{name}/b"])


def _backwards(params: Params, features: jax.Array, last: jax.Array) -> jax.Array:
    """Returns the hidden states `[T, B, H]` of an LSTM from the end of a rollout to its start.

    The state is reset before a transition that ends an episode: later steps are of another.
    """

    def step(state: State, x: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        features, last = x
        state = jax.tree.map(lambda s: jnp.where(last[:, None], 0.0, s), state)
        state = _lstm(params, f"{_NET}/lstm/linear", features, state)
        return state, state.hidden

    zeros = jnp.zeros((features.shape[1], _HIDDEN))
    return jax.lax.scan(step, State(zeros, zeros), (features, last), reverse=True)[1]


def _lstm(params: Params, name: str, inputs: jax.Array, state: State) -> State:
    """Returns the state of an LSTM after a step, in haiku's order of gates."""
    gates = _linear(params, name, jnp.concatenate([inputs, state.hidden], axis=-1))
    i, g, f, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f + 1.0) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return State(cell, jax.nn.sigmoid(o) * jnp.tanh(cell))
