"""DiscoRL's rule: inputs and targets of its published weights.

Oh et al., "Discovering state-of-the-art reinforcement learning algorithms", 2025,
https://www.nature.com/articles/s41586-025-09761-x; the weights are `disco_103.npz` of
https://github.com/google-deepmind/disco_rl, whose arithmetic this module follows. It
differs in three points:

- After a truncation an agent bootstraps from the true last state, as at the end of a rollout.
- Transitions out of LAST are excluded from all means.
- The moving average of TD errors is omitted: only a log entry depends on it.

Axis legend: `T` transitions, `B` streams of one device, `A` actions, `Y` = 600 categories of
predictions, `Z` = 601 atoms of values.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import rlax

from agents.meta.rules import disco_network, interface
from agents.networks import layers
from agents.parts import categorical, returns
from podracers import parallel, types

_SUPPORT = categorical.Support(bound=300.0, num_atoms=601)
_GAMMA = 0.997
_LAMBDA = 0.95
_TARGET_DECAY = 0.9  # decay per update; the agent's parameters are averaged
_ADVANTAGE_DECAY = 0.99


class Moments(NamedTuple):
    """Moving averages of advantages; initially zero."""

    first: jax.Array  # float32
    second: jax.Array  # float32
    decay: jax.Array  # float32, remaining weight of the initial zero


class State(NamedTuple):
    """State of the rule in a lifetime; equal on all devices."""

    network: disco_network.State
    advantage: Moments
    target_params: types.PyTree  # moving average of the agent's parameters


class Targets(NamedTuple):
    """Targets of the agent's outputs."""

    predictions: disco_network.Targets
    q: jax.Array  # [T, B] of the taken actions


class _Values(NamedTuple):
    """Values of the agent, in units of reward."""

    online: jax.Array  # [T + 1, B] of states, under the learner's policy
    target: jax.Array  # [T + 1, B] of the moving average's values, under that policy
    q: jax.Array  # [T + 1, B, A] action values of the moving average
    q_target: jax.Array  # [T, B] returns of the taken actions


@dataclasses.dataclass(frozen=True)
class Disco:
    """The rule; its parameters are those of `disco_network`.

    An agent predicts two distributions whose meaning the rule defines, `y` of each state and `z` of
    each action, and also its values `q` and the policy at the next state. The rule has two LSTMs:
    one runs backwards over a rollout, the other over a lifetime.
    """

    @property
    def costs(self) -> dict[str, float]:
        """The published weights of the parts of the loss."""
        return {"policy": 1.0, "y": 1.0, "z": 1.0, "next_policy": 1.0, "q": 0.2}

    def output_spec(self, num_actions: int) -> interface.OutputSpec:
        """Returns sizes of logits: policy, `y` of states; `z`, values, next policy of actions."""
        size = disco_network.PREDICTION_SIZE
        return interface.OutputSpec(
            of_state={interface.POLICY: num_actions, "y": size},
            of_action={"z": size, "next_policy": num_actions, "q": _SUPPORT.num_atoms},
        )

    def init(self, key: jax.Array) -> disco_network.Params:
        return disco_network.init(key)

    def init_state(self, agent_params: types.PyTree) -> State:
        """Returns the state at the start of a lifetime."""
        return State(
            network=disco_network.State(*jnp.zeros((2, disco_network.LIFETIME_HIDDEN))),
            advantage=Moments(*jnp.array([0.0, 0.0, 1.0])),
            # Copies: the learner's state is donated, and a buffer can be donated only once.
            target_params=jax.tree.map(jnp.copy, agent_params),
        )

    def teach(self, params, state, experience, agent_params, unroll):
        """Returns the `Targets` of a rollout, and the `State` after it."""
        weight = returns.weights(experience.timestep)
        target = unroll(state.target_params)
        values = _values(experience, target)
        advantage = values.q_target - values.target[:-1]
        q_advantage = (values.q - values.target[..., None])[:-1]
        moments = _updated(state.advantage, advantage, weight)
        predictions, network = disco_network.apply(
            params,
            state.network,
            disco_network.Inputs(
                experience=experience,
                target=target,
                value=values.online,
                advantage=advantage,
                normalized_advantage=_normalized(moments, advantage),
                q=values.q[:-1],
                q_advantage=q_advantage,
                normalized_q_advantage=_normalized(moments, q_advantage),
            ),
            functools.partial(_mean, weight=weight),
        )
        average = jax.tree.map(
            lambda old, new: _TARGET_DECAY * old + (1.0 - _TARGET_DECAY) * new,
            state.target_params,
            agent_params,
        )
        return Targets(predictions, values.q_target), State(network, moments, average)

    def losses(self, targets, outputs, action, timestep):
        """Returns divergences from the targets, and the cross-entropy of values, `[T, B]`.

        The rule has no input for legality, so targets of illegal actions are masked. The target of
        the next policy is the policy of the same parameters, a constant, without weight after a
        termination. Values learn from their returns, independently of the rule.
        """
        now = {name: x[:-1] for name, x in outputs.items()}
        taken = {name: disco_network.taken(now[name], action) for name in ("z", "next_policy", "q")}
        chex.assert_equal_shape([targets.predictions.policy, now[interface.POLICY]])
        chex.assert_equal_shape([targets.predictions.z, taken["z"]])
        legal = now[interface.POLICY] > 0.5 * layers.MASKED
        policy = jnp.where(legal, targets.predictions.policy, layers.MASKED)
        next_policy = jax.lax.stop_gradient(outputs[interface.POLICY][1:])
        return {
            "policy": _divergence(policy, now[interface.POLICY]),
            "y": _divergence(targets.predictions.y, now["y"]),
            "z": _divergence(targets.predictions.z, taken["z"]),
            "next_policy": _divergence(next_policy, taken["next_policy"]) * timestep.discount[1:],
            "q": _SUPPORT.cross_entropy(taken["q"], jax.lax.stop_gradient(targets.q)),
        }


def load(path: str | None = None) -> tuple[Disco, interface.Arrays | None]:
    """Returns the rule and its parameters, in NumPy; without a path, None for random ones.

    Raises:
      errors.UserError: the file is missing, cannot be read, or holds another rule.
    """
    if path is None:
        return Disco(), None
    return interface.read_file(path, lambda _: (Disco(), disco_network.shapes()))


def _divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the Kullback-Leibler divergence `[...]` of logits from those of the target."""
    log_target = jax.nn.log_softmax(target)
    return jnp.sum(jnp.exp(log_target) * (log_target - jax.nn.log_softmax(logits)), axis=-1)


def _values(experience: interface.Experience, target: interface.Outputs) -> _Values:
    """Returns values and the returns of Retrace.

    Munos et al., "Safe and Efficient Off-Policy Reinforcement Learning", 2016,
    https://arxiv.org/abs/1606.02647. Traces and importance weights stop at LAST.
    """
    timestep, action = experience.timestep, experience.action
    logits = jax.lax.stop_gradient(experience.outputs[interface.POLICY])
    policy = jax.nn.softmax(logits)
    online = jnp.sum(policy * _SUPPORT.decode(experience.outputs["q"]), axis=-1)
    q = _SUPPORT.decode(target["q"])  # [T + 1, B, A]
    values = jnp.sum(policy * q, axis=-1)
    log_ratio = jax.nn.log_softmax(logits[:-1]) - jax.nn.log_softmax(experience.behaviour)
    ratio = jnp.exp(disco_network.taken(log_ratio, action))  # [T, B]
    trace = returns.traces(timestep, _LAMBDA)[:-1] * jnp.minimum(ratio, 1.0)[1:]
    retrace = functools.partial(
        rlax.general_off_policy_returns_from_q_and_v, stop_target_gradients=True
    )
    q_target = jax.vmap(retrace, in_axes=1, out_axes=1)(
        disco_network.taken(q[:-1], action)[1:],
        values[1:],
        timestep.reward[1:],
        _GAMMA * timestep.discount[1:],
        trace,
    )
    return _Values(online, values, q, q_target)


def _mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the weighted mean of values `[T, B, ...]` over time and streams of all devices."""
    weight = weight.reshape(*weight.shape, *(1,) * (values.ndim - 2))
    values = jnp.where(weight > 0.0, values, 0.0)
    total, count = parallel.global_sum((jnp.sum(weight * values, axis=(0, 1)), jnp.sum(weight)))
    return total / jnp.maximum(count, 1.0)


def _updated(moments: Moments, values: jax.Array, weight: jax.Array) -> Moments:
    """Returns the moving averages after values `[T, B]`."""
    first, second = _mean(jnp.stack([values, jnp.square(values)], axis=-1), weight)
    decay = _ADVANTAGE_DECAY
    return Moments(
        first=decay * moments.first + (1.0 - decay) * first,
        second=decay * moments.second + (1.0 - decay) * second,
        decay=decay * moments.decay,
    )


def _normalized(moments: Moments, values: jax.Array) -> jax.Array:
    """Returns values minus their mean, divided by their standard deviation."""
    mean, square = (x / (1.0 - moments.decay) for x in (moments.first, moments.second))
    variance = jnp.maximum(square - jnp.square(mean), 0.0)
    return (values - mean) / (jnp.sqrt(variance + 1e-12) + 1e-6)
