"""The update rule of LPG: targets for an agent's outputs, computed from its transitions.

Oh et al., "Discovering Reinforcement Learning Algorithms", 2020, https://arxiv.org/abs/2007.08794.
Observations and actions are no inputs, so one rule applies to all environments.

Axis legend: `T` transitions, `N` streams, `m` the size of predictions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.meta.rules import interface
from agents.networks import cores
from podracers import errors, types


class Window(NamedTuple):
    """Inputs of the rule, `[T, N]` each, of transitions from `s_tm1` to `s_t`."""

    reward: jax.Array  # on arrival
    discount: jax.Array  # 0 where the episode terminated on arrival
    last: jax.Array  # bool, the episode terminated or was truncated on arrival
    action_prob: jax.Array  # of the action, under the learner's policy
    prediction: jax.Array  # [T, N, m] of s_tm1, a distribution
    next_prediction: jax.Array  # [T, N, m] of s_t; after a truncation, of the true last state


class Targets(NamedTuple):
    """Outputs of the rule for each transition."""

    policy: jax.Array  # [T, N] positive values make the action more probable
    log_prediction: jax.Array  # [T, N, m] log-probabilities of the target distribution


class _Network(nn.Module):
    """The networks of the rule; see `Rule`."""

    hidden_size: int
    embedding_size: int
    prediction_size: int
    gamma: float
    sees_predictions: bool

    @nn.compact
    def __call__(self, window: Window) -> Targets:
        embed = nn.Sequential(
            [nn.Dense(self.embedding_size), nn.relu, nn.Dense(1)], name="embedding"
        )
        now, later = (embed(y)[..., 0] for y in (window.prediction, window.next_prediction))
        later = later * window.discount  # nothing follows a termination
        if not self.sees_predictions:
            now, later = jnp.zeros_like(now), jnp.zeros_like(later)
        gamma = jnp.full_like(now, self.gamma)
        last = window.last.astype(jnp.float32)
        inputs = [window.reward, last, gamma, window.action_prob, now, later]
        features = jnp.stack(inputs, axis=-1)[::-1]  # [T, N, 6] backwards in time
        lstm = cores.LSTM(self.hidden_size, name="lstm")
        state = lstm.initial_state(features.shape[1])
        # The state is reset before a transition that ends an episode: later steps are of another.
        hidden, _ = lstm(state, features, window.last[::-1])
        hidden = nn.relu(hidden[::-1])
        logits = nn.Dense(self.prediction_size, name="prediction")(hidden)
        return Targets(nn.Dense(1, name="policy")(hidden)[..., 0], jax.nn.log_softmax(logits))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A function from windows to targets, with learned parameters.

    An LSTM runs backwards over a window. Its inputs are the reward, whether the episode ended, the
    discount, the probability of the action, and scalar embeddings of the predictions before and
    after the transition.

    Attributes:
      hidden_size: units of the LSTM.
      prediction_size: `m`, the categories of an agent's predictions.
      embedding_size: units of the network that embeds predictions.
      gamma: discount, an input of the rule.
      sees_predictions: whether predictions are inputs; without them the rule cannot bootstrap.
    """

    hidden_size: int = 256
    prediction_size: int = 30
    embedding_size: int = 16
    gamma: float = 0.995
    sees_predictions: bool = True

    def __post_init__(self):
        """Checks the sizes."""
        for name in ("hidden_size", "prediction_size", "embedding_size"):
            errors.require_count(self, name)

    @functools.cached_property
    def _network(self) -> _Network:
        return _Network(
            self.hidden_size,
            self.embedding_size,
            self.prediction_size,
            self.gamma,
            self.sees_predictions,
        )

    def init(self, key: jax.Array) -> types.PyTree:
        """Returns initial parameters."""
        zeros = jnp.zeros((1, 1))
        predictions = jnp.zeros((1, 1, self.prediction_size))
        window = Window(zeros, zeros, zeros > 0, zeros, predictions, predictions)
        return self._network.init(key, window)["params"]

    def targets(self, params: types.PyTree, window: Window) -> Targets:
        """Returns the targets of a window; gradients pass through to `params` and `window`."""
        chex.assert_rank([window.reward, window.prediction], [2, 3])
        chex.assert_equal_shape(window[:4])
        chex.assert_equal_shape_prefix(window, 2)
        return self._network.apply({"params": params}, window)

    # Methods of `interface.Rule`, for agents that a frozen rule trains.

    @property
    def costs(self) -> dict[str, float]:
        """The published weights of the parts of the loss."""
        return {"policy": 1.0, "prediction": 0.5}

    def output_spec(self, num_actions: int) -> interface.OutputSpec:
        """Returns logits: a policy and a prediction."""
        sizes = {interface.POLICY: num_actions, "prediction": self.prediction_size}
        return interface.OutputSpec(of_state=sizes, of_action={})

    def init_state(self, agent_params: types.PyTree) -> tuple[()]:
        """Returns `()`: this rule has no state."""
        del agent_params
        return ()

    def teach(
        self,
        params: types.PyTree,
        state: tuple[()],
        experience: interface.Experience,
        agent_params: types.PyTree,
        unroll: Callable[[types.PyTree], interface.Outputs],
    ) -> tuple[Targets, tuple[()]]:
        """Returns the targets of a rollout, which is one window."""
        del agent_params, unroll
        timestep, outputs = experience.timestep, experience.outputs
        prediction = jax.nn.softmax(outputs["prediction"])
        log_policy = jax.nn.log_softmax(outputs[interface.POLICY][:-1])
        window = Window(
            reward=timestep.reward[1:],
            discount=timestep.discount[1:],
            last=timestep.last()[1:],
            action_prob=jnp.exp(log_prob(log_policy, experience.action)),
            prediction=prediction[:-1],
            next_prediction=prediction[1:],
        )
        return self.targets(params, window), state

    def losses(
        self,
        targets: Targets,
        outputs: interface.Outputs,
        action: jax.Array,
        timestep: types.TimeStep,
    ) -> dict[str, jax.Array]:
        """Returns the parts of `agent_loss`, `[T, N]` each."""
        del timestep
        log_policy, log_prediction = (
            jax.nn.log_softmax(outputs[name][:-1]) for name in (interface.POLICY, "prediction")
        )
        return {
            "policy": policy_loss(log_prob(log_policy, action), targets),
            "prediction": prediction_loss(log_prediction, targets),
        }


def agent_loss(
    log_prob: jax.Array,
    log_prediction: jax.Array,
    targets: Targets,
    prediction_cost: jax.Array | float,
) -> jax.Array:
    """Returns the loss of an agent that a rule trains, `[T, N]`.

    Its negative gradient is the update of equation 2 of Jackson et al., 2023,
    https://arxiv.org/abs/2310.02782, with the paper's sign of the policy target.

    Args:
      log_prob: `[T, N]` of the actions.
      log_prediction: `[T, N, m]` of the states in which they were taken.
      targets: constants.
      prediction_cost: weight of the divergence of the prediction from its target.
    """
    return policy_loss(log_prob, targets) + prediction_cost * prediction_loss(
        log_prediction, targets
    )


def policy_loss(log_prob: jax.Array, targets: Targets) -> jax.Array:
    """Returns `[T, N]`: minus log-probabilities of actions `[T, N]` times policy targets."""
    chex.assert_equal_shape([log_prob, targets.policy])
    return -log_prob * targets.policy


def prediction_loss(log_prediction: jax.Array, targets: Targets) -> jax.Array:
    """Returns the divergence `[T, N]` of predictions `[T, N, m]` from their targets."""
    chex.assert_equal_shape([log_prediction, targets.log_prediction])
    return jnp.sum(jnp.exp(log_prediction) * (log_prediction - targets.log_prediction), axis=-1)


def log_prob(log_policy: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the log-probabilities of actions, in the shape of `action`."""
    return jnp.take_along_axis(log_policy, action[..., None], axis=-1)[..., 0]
