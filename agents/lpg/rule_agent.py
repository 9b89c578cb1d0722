"""An agent that learns by a frozen rule: any environment with discrete actions, any network.

Oh et al., "Discovering Reinforcement Learning Algorithms", 2020, https://arxiv.org/abs/2007.08794.

Axis legend: `T` time, `B` streams of one device, `m` the size of predictions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from agents import networks, optimization, options, policy, preprocessing, returns
from agents.lpg import rule as rule_lib
from agents.lpg import rule_file
from agents.networks import cores, encoders, heads, layers
from podracers import environment, errors, types


class Output(NamedTuple):
    """What the network of an agent puts out that a rule teaches."""

    policy: jax.Array  # [..., A] logits
    prediction: jax.Array  # [..., m] logits


class Extras(NamedTuple):
    """What acting remembers of each step."""

    raw: jax.Array  # [T, B] int32, the action


class _Module(nn.Module):
    """A policy and a prediction on one torso."""

    num_actions: int
    prediction_size: int
    torso: networks.Torso

    def initial_states(self, batch_size: int) -> tuple:
        """Returns the state of the torso."""
        return (self.torso.initial_state(batch_size),)

    @nn.compact
    def __call__(self, states, observation, first):
        """Returns `Output` `[T, B, ...]` and the states after it."""
        features, state = self.torso(states[0], observation, first)
        logits = layers.Dense(self.num_actions, scale=0.01, name="policy")(features)
        prediction = layers.Dense(self.prediction_size, scale=0.01, name="prediction")(features)
        return Output(logits, prediction), (state,)


def policy_and_prediction(
    spec: environment.EnvironmentSpec,
    head: heads.ActionHead,
    prediction_size: int,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    frame_stack: int = 1,
) -> networks.Composed:
    """Returns a network that puts out a policy and a prediction.

    Args:
      spec: of the environment.
      head: the action head that reads the policy's outputs.
      prediction_size: `m`.
      encoder: a module of `agents.networks.encoders`; by default two rectified layers of 64.
      core: a module of `agents.networks.cores`; by default none.
      frame_stack: how many frames the encoder sees; 1 for no stack.
    """
    encoder = encoder if encoder is not None else encoders.MLP(activation="relu")
    torso = networks.Torso(encoder, core if core is not None else cores.FeedForward())
    module = _Module(head.num_outputs, prediction_size, torso)
    return networks.Composed(spec, module, frame_stack)


@dataclasses.dataclass(frozen=True, eq=False)
class RuleAgent:
    """An agent taught by a rule. A rollout is one window of it: 20 steps, as it was learnt with.

    Attributes:
      spec: specification of the environment.
      rule: path of a rule's file (`rule_file.save`); None for a random one, to compare with.
      network: `network(spec, head, prediction_size)` returns a network that puts out `Output`.
      learning_rate: Adam learning rate.
      adam_epsilon: Adam epsilon, outside of the root.
      max_grad_norm: norm to which the gradient of the global batch is scaled down; None for no
        clipping.
      prediction_cost: weight of predictions in the loss.
      normalize_observations: whether observations are scaled to mean 0 and variance 1 over all that
        was observed, and clipped at 10.
      reward_scale: factor of the rewards that the rule sees.
      reward_clip: largest absolute value of scaled rewards; None for no bound.
      greedy_evaluation: whether evaluations take the most probable action.
    """

    spec: environment.EnvironmentSpec
    rule: str | None = None
    network: Callable[..., networks.Network] = policy_and_prediction
    learning_rate: float = options.positive(5e-4)
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = options.optional_positive(0.5)
    prediction_cost: float = 0.5
    normalize_observations: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None
    greedy_evaluation: bool = False

    def __post_init__(self):
        """Refuses impossible options, and rules that cannot be read."""
        options.check(self)
        options.require_discrete(self)
        _ = self._policy.network, self._loaded

    @functools.cached_property
    def _loaded(self) -> tuple[rule_lib.Rule, Any]:
        """The rule, and its parameters in NumPy; None for random ones."""
        return (rule_lib.Rule(), None) if self.rule is None else rule_file.load(self.rule)

    @functools.cached_property
    def _policy(self) -> policy.Policy:
        def make(spec: environment.EnvironmentSpec, head: heads.ActionHead) -> networks.Network:
            return self.network(spec, head, prediction_size=self._loaded[0].prediction_size)

        return policy.Policy(self.spec, make, None, False)

    @functools.cached_property
    def _preprocess(self) -> preprocessing.Preprocess:
        return preprocessing.Preprocess(
            self.normalize_observations, self.reward_scale, self.reward_clip
        )

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        adam = optax.scale_by_adam(eps=self.adam_epsilon)
        return optimization.Optimizer(adam, self.learning_rate, None, self.max_grad_norm)

    def init_learner(self, key: jax.Array) -> "Learner":
        """Returns fresh parameters of the agent, and the rule."""
        agent_key, rule_key = jax.random.split(key)
        params = self._policy.init(agent_key)
        self._require_outputs(params)
        rule, rule_params = self._loaded
        return Learner(
            self._optimizer.init(params),
            self._preprocess.init(self.spec.observation),
            rule.init(rule_key) if rule_params is None else jax.tree.map(jnp.asarray, rule_params),
        )

    def init_memory(self, rollout: types.Rollout) -> tuple[()]:
        """Returns `()`: each rollout is forgotten after it."""
        return ()

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the core of the network of `B` streams."""
        return self._policy.initial_state(env_id.shape[0])

    def actor_params(self, learner: "Learner") -> policy.ActorParams:
        """Returns the parameters and the statistics of the observations."""
        return policy.ActorParams(learner.train_state.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        timestep = self._preprocess.apply(params.normalizer, timestep)
        mask = encoders.action_mask(timestep.observation)
        output, core = self._policy.network.step(params.params, actor_state.core, timestep)
        head = self._policy.head
        if evaluation and self.greedy_evaluation:
            raw = head.mode(output.policy, mask)
        else:
            raw = head.sample(output.policy, mask, key)
        return head.to_action(raw), actor_state._replace(core=core), Extras(raw)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes one gradient step on one rollout."""
        learner = state.learner
        timestep = self._preprocess.apply(learner.normalizer, rollout.timestep)
        seen = rollout._replace(timestep=timestep)
        batch = (seen, self._targets(learner, seen))
        train_state, output = self._optimizer.gradient_step(
            self._loss, learner.train_state, batch, jnp.float32(self.learning_rate)
        )
        normalizer = self._preprocess.update_statistics(learner.normalizer, rollout.timestep)
        learner = learner._replace(train_state=train_state, normalizer=normalizer)
        return types.AgentState(learner, state.memory), output.metrics

    def _targets(self, learner: "Learner", rollout: types.Rollout) -> rule_lib.Targets:
        """Returns what the rule asks of every transition."""
        timestep, network = rollout.timestep, self._policy.network
        output, _ = network.unroll(learner.train_state.params, rollout.actor_state.core, timestep)
        mask = encoders.action_mask(jax.tree.map(lambda x: x[:-1], timestep.observation))
        log_prob = self._policy.head.log_prob(output.policy[:-1], mask, rollout.extras.raw)
        prediction = jax.nn.softmax(output.prediction)
        window = rule_lib.Window(
            reward=timestep.reward[1:],
            discount=timestep.discount[1:],
            last=timestep.last()[1:],
            action_prob=jnp.exp(log_prob),
            prediction=prediction[:-1],
            next_prediction=prediction[1:],
        )
        return self._loaded[0].targets(learner.rule, window)

    def _loss(self, params: types.PyTree, batch: Any) -> optimization.LossOutput:
        rollout, targets = batch
        timestep = jax.tree.map(lambda x: x[:-1], rollout.timestep)
        mask = encoders.action_mask(timestep.observation)
        output, _ = self._policy.network.unroll(params, rollout.actor_state.core, timestep)
        log_prob = self._policy.head.log_prob(output.policy, mask, rollout.extras.raw)
        log_prediction = jax.nn.log_softmax(output.prediction)
        loss = rule_lib.agent_loss(log_prob, log_prediction, targets, self.prediction_cost)
        mean = functools.partial(types.Mean.of, weights=returns.weights(rollout.timestep))
        return optimization.LossOutput(
            {
                "loss/total": mean(loss),
                "policy/entropy": mean(self._policy.head.entropy(output.policy, mask)),
                "prediction/entropy": mean(
                    -jnp.sum(jnp.exp(log_prediction) * log_prediction, axis=-1)
                ),
                "rule/policy_target": mean(jnp.square(targets.policy)),
            }
        )

    def _require_outputs(self, params: types.PyTree) -> None:
        """Refuses networks that do not put out what the rule reads."""
        network, size = self._policy.network, self._loaded[0].prediction_size
        timestep = networks.zero_timestep(self.spec)
        output, _ = jax.eval_shape(network.step, params, network.initial_core(1), timestep)
        if getattr(output, "prediction", None) is None or output.prediction.shape[-1] != size:
            raise errors.UserError(
                f"the rule needs a network that puts out a prediction of {size}, such as "
                "rule_agent.policy_and_prediction"
            )


class Learner(NamedTuple):
    """What is learnt, and the rule that it is learnt by; identical on every device."""

    train_state: optimization.TrainState
    normalizer: Any  # statistics of the observations; () where they are not normalised
    rule: types.PyTree
