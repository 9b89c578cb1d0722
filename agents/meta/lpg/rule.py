"""The update rule of LPG: targets for an agent's outputs, computed from its transitions.

Oh et al., "Discovering Reinforcement Learning Algorithms", 2020, https://arxiv.org/abs/2007.08794.
Observations and actions are no inputs, so one rule applies to all environments.

Axis legend: `T` transitions, `N` streams, `m` the size of predictions.
"""

import dataclasses
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.meta.rules import interface
from agents.networks import cores
from agents.networks import network as networks
from agents.parts import options
from podracers import types


class Window(NamedTuple):
    """Inputs of the rule, `[T, N]` each, of transitions from `s_tm1` to `s_t`."""

    reward: jax.Array  # the reward of the arrival
    discount: jax.Array  # 0 where the episode terminated on arrival
    last: jax.Array  # bool, the episode terminated or was truncated on arrival
    action_prob: jax.Array  # probability of the action under the learner's policy
    prediction: jax.Array  # [T, N, m] of s_tm1, a distribution
    next_prediction: jax.Array  # [T, N, m] of s_t; after a truncation, of the true last state

    @classmethod
    def of(
        cls,
        timestep: types.TimeStep,
        action: jax.Array,
        log_policy: jax.Array,
        prediction: jax.Array,
    ) -> "Window":
        """Returns the window of a rollout.

        Args:
          timestep: `[T + 1, N]`.
          action: `[T, N]`.
          log_policy: `[T, N, A]` log-probabilities of actions.
          prediction: `[T + 1, N, m]` probabilities.
        """
        return cls(
            reward=timestep.reward[1:],
            discount=timestep.discount[1:],
            last=timestep.last()[1:],
            action_prob=jnp.exp(log_prob(log_policy, action)),
            prediction=prediction[:-1],
            next_prediction=prediction[1:],
        )


class Targets(NamedTuple):
    """Outputs of the rule for each transition."""

    policy: jax.Array  # [T, N] positive values make the action more probable
    log_prediction: jax.Array  # [T, N, m] log-probabilities of the target distribution


class _Network(nn.Module):
    """The networks of the rule."""

    rule: "Rule"

    @nn.compact
    def __call__(self, window: Window) -> Targets:
        rule = self.rule
        embed = nn.Sequential(
            [nn.Dense(rule.embedding_size), nn.relu, nn.Dense(1)], name="embedding"
        )
        now, later = (embed(y)[..., 0] for y in (window.prediction, window.next_prediction))
        later = later * window.discount  # nothing follows a termination
        if not rule.sees_predictions:
            now, later = jnp.zeros_like(now), jnp.zeros_like(later)
        gamma = jnp.full_like(now, rule.gamma)
        last = window.last.astype(jnp.float32)
        inputs = [window.reward, last, gamma, window.action_prob, now, later]
        features = jnp.stack(inputs, axis=-1)[::-1]  # [T, N, 6] backwards in time
        lstm = cores.LSTM(rule.hidden_size, name="lstm")
        state = lstm.initial_state(features.shape[1])
        # The state is reset before a transition that ends an episode: later steps are of another.
        hidden, _ = lstm(state, features, window.last[::-1])
        hidden = nn.relu(hidden[::-1])
        logits = nn.Dense(rule.prediction_size, name="prediction")(hidden)
        return Targets(nn.Dense(1, name="policy")(hidden)[..., 0], jax.nn.log_softmax(logits))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A function from windows to targets, with learned parameters; an `interface.Rule`.

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

    hidden_size: int = options.count(256)
    prediction_size: int = options.count(30)
    embedding_size: int = options.count(16)
    gamma: float = options.fraction(0.995)
    sees_predictions: bool = True

    def __post_init__(self):
        options.check(self)

    def init(self, key: jax.Array) -> types.PyTree:
        """Returns initial parameters."""
        zeros = jnp.zeros((1, 1))
        predictions = jnp.zeros((1, 1, self.prediction_size))
        window = Window(zeros, zeros, zeros > 0, zeros, predictions, predictions)
        return _Network(self).init(key, window)["params"]

    def targets(self, params: types.PyTree, window: Window) -> Targets:
        """Returns the targets of a window; gradients pass through to `params` and `window`."""
        chex.assert_rank([window.reward, window.prediction], [2, 3])
        chex.assert_equal_shape(window[:4])
        chex.assert_equal_shape_prefix(window, 2)
        return networks.apply(_Network(self), params, window)

    @property
    def costs(self) -> dict[str, float]:
        """The published weights of the parts of the loss."""
        return {"policy": 1.0, "prediction": 0.5}

    def output_spec(self, num_actions: int) -> interface.OutputSpec:
        """Returns logits: a policy and a prediction."""
        sizes = {interface.POLICY: num_actions, "prediction": self.prediction_size}
        return interface.OutputSpec(of_state=sizes, of_action={})

    def init_state(self, agent_params: types.PyTree) -> tuple[()]:
        del agent_params
        return ()

    def teach(self, params, state, experience, agent_params, unroll):
        """Returns the targets of a rollout, which is one window."""
        del agent_params, unroll
        outputs = experience.outputs
        prediction = jax.nn.softmax(outputs["prediction"])
        log_policy = jax.nn.log_softmax(outputs[interface.POLICY][:-1])
        window = Window.of(experience.timestep, experience.action, log_policy, prediction)
        return self.targets(params, window), state

    def losses(self, targets, outputs, action, timestep):
        """Returns the parts of the loss, `[T, N]` each; see `losses` of this module."""
        del timestep
        names = (interface.POLICY, "prediction")
        log_policy, log_prediction = (jax.nn.log_softmax(outputs[name][:-1]) for name in names)
        terms = losses(log_policy, log_prediction, action, targets)
        return dict(zip(("policy", "prediction"), terms))


def losses(
    log_policy: jax.Array, log_prediction: jax.Array, action: jax.Array, targets: Targets
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of the policy and the divergence of the prediction, `[T, N]` each.

    The negative gradient of their weighted sum is the update of equation 2 of Jackson et al., 2023,
    https://arxiv.org/abs/2310.02782, with the paper's sign of the policy target.

    Args:
      log_policy: `[T, N, A]` log-probabilities of actions.
      log_prediction: `[T, N, m]` of the states in which they were taken.
      action: `[T, N]`.
      targets: constants.
    """
    chosen = log_prob(log_policy, action)
    chex.assert_equal_shape([chosen, targets.policy])
    chex.assert_equal_shape([log_prediction, targets.log_prediction])
    error = log_prediction - targets.log_prediction
    return -chosen * targets.policy, jnp.sum(jnp.exp(log_prediction) * error, axis=-1)


def log_prob(log_policy: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the log-probabilities of actions, in the shape of `action`."""
    return jnp.take_along_axis(log_policy, action[..., None], axis=-1)[..., 0]
