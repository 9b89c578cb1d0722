"""Soft actor-critic, for continuous actions and for discrete ones.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018,
https://arxiv.org/abs/1812.05905; the discrete form is that of Christodoulou, "Soft Actor-Critic for
Discrete Action Settings", 2019, https://arxiv.org/abs/1910.07207.

The policy, the critics and the temperature are updated together, by the gradient of the sum of
their losses, none of which depends on the parameters of another. This equals three optimizers with
one learning rate; with a `policy_period`, those of the policy and of the temperature pause.

Axis legend: `T` time, `B` streams, `N` drawn sequences.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import optimization, options, preprocessing, replay, returns
from agents.networks import encoders
from agents.networks import sac as sac_networks
from podracers import types


class ActorParams(NamedTuple):
    """The part of the learner that acting needs."""

    policy: types.PyTree
    encoder: types.PyTree
    normalizer: Any
    is_random: jax.Array  # bool, whether actions are still uniformly random


class _PolicyInput(NamedTuple):
    """Network inputs of one of the two time steps of a transition."""

    observation: types.PyTree  # [N, ...]
    mask: jax.Array | None
    key: jax.Array  # [N] typed keys of the policy's sample


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SAC(replay.ReplayAgent):
    """Soft actor-critic with gradient steps after each rollout as `replay.Replay` counts them.

    `replay.ReplayAgent` describes the options that are not listed here. Target parameters are those
    of the critics.

    Attributes:
      network: `network(spec, head)` returns a `SACNetwork`; `head` is an `SACHead`.
      initial_temperature: initial alpha, the weight of the entropy, in units of the scaled reward.
      target_entropy: entropy that alpha is learnt for. Continuous actions: nats for each component,
        scaled to [-1, 1] (at most log 2, by default -1). Discrete ones: portion of the
        entropy of the uniform policy over the legal actions (at most 1, by default 0.98).
      random_steps: agent steps over all streams, at the start, with uniformly random actions.
      random_shift: largest random shift of replayed images in pixels, drawn separately for both
        time steps of a transition; 0 for none. See `preprocessing.random_shifts`.
      policy_period: gradient steps between those of the policy and of the temperature; the critics
        take all of them. 2 in DrQ (Kostrikov et al., 2020, https://arxiv.org/abs/2004.13649).
      greedy_evaluation: see `agents.options`; the most probable continuous action is the squashed
        mean. By default True for continuous actions, as published, and False for discrete ones.
    """

    network: Callable[..., sac_networks.SACNetwork] = sac_networks.sac_network
    initial_temperature: float = options.positive(1.0)
    target_entropy: float | None = options.number(None)
    random_steps: int = options.count(0, least=0)
    random_shift: int = options.count(0, least=0)
    policy_period: int = options.count(1)
    greedy_evaluation: bool | None = None
    learning_rate: float = 3e-4
    weight_decay: float = options.non_negative(0.0, most=1e3)
    batch_size: int = 256
    replay_capacity: int = 1_000_000
    replay_ratio: float = 256.0
    target_period: int = options.count(1)
    target_rate: float = options.fraction(0.005)

    def __post_init__(self):
        super().__post_init__()
        if self.greedy_evaluation is None:
            default = self.action_head.default_greedy_evaluation
            object.__setattr__(self, "greedy_evaluation", default)
        largest = self.action_head.most_target_entropy
        expected = f"less than {largest:.3g}, the uniform policy's"
        options.expect(self, "target_entropy", self._target_entropy < largest, expected)
        leaves = jax.tree.leaves(encoders.without_mask(self.spec.observation))
        has_image = any(len(leaf.shape) == 3 for leaf in leaves)  # [H, W, C]
        expected = "0, because there is no image to shift"
        options.expect(self, "random_shift", has_image or not self.random_shift, expected)

    @functools.cached_property
    def action_head(self) -> sac_networks.SACHead:
        return sac_networks.head_from_spec(self.spec)

    @functools.cached_property
    def net(self) -> sac_networks.SACNetwork:
        return options.make(self, "network", self.spec, self.action_head)

    @property
    def _target_entropy(self) -> float:
        if self.target_entropy is None:
            return self.action_head.default_target_entropy
        return self.target_entropy

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        of_parts = sac_networks.Params._make  # policy, critic, temperature
        optimizer = optimization.adam_of(self, self.weight_decay, of_parts((True, True, False)))
        if self.policy_period == 1:
            return optimizer
        every, period = optimizer.transformation, self.policy_period

        def is_due(step: Any, **_: Any) -> Any:
            return step % period == 0

        masked = optax.conditionally_mask(every, is_due)

        def update(*arguments, **extra):  # optax's count would stop at the largest int32
            updates, after = masked.update(*arguments, **extra)
            state: Any = after
            return updates, state._replace(step=state.step % period)

        parts: dict[Any, Any] = {"every": every, "period": masked._replace(update=update)}
        labels = of_parts(("period", "every", "period"))
        return dataclasses.replace(optimizer, transformation=optax.partition(parts, labels))

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        return replay.Replay.of(self, self.net.memory_length + 1)

    def init_learner(self, key):
        params = self.net.init(key, math.log(self.initial_temperature))
        train_state = self._optimizer.init(params)
        normalizer = self.preprocess.init(self.spec.observation)
        return optimization.Learner.create(train_state, params.critic, normalizer)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the latest frames of `B` streams, if the network stacks frames."""
        return self.net.initial_core(env_id.shape[0])

    def actor_params(self, learner):
        """Returns the policy, its encoder, the statistics, and whether actions are random."""
        params = learner.params
        encoder = self.net.encoder_params(params.critic)
        is_random = learner.agent_steps < self.random_steps
        return ActorParams(params.policy, encoder, learner.normalizer, is_random)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action, or takes the mode (see `greedy_evaluation`)."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self.preprocess.apply(params.normalizer, timestep)
        observation, actor_state = self.net.observe(actor_state, timestep)
        features = self.net.encode(params.encoder, observation)
        outputs = self.net.outputs(params.policy, features)
        greedy = bool(evaluation and self.greedy_evaluation)
        action = self.action_head.act(outputs, mask, key, mode=greedy)
        if self.random_steps and not evaluation:
            random = self.action_head.random(mask, key)
            action = jnp.where(params.is_random, random, action)
        return action, actor_state, ()

    def target_params(self, params):
        return params.critic

    def loss(self, params, sample, context):
        """Returns the losses of the critics, the policy and alpha, of `[1, N]` transitions."""
        burn_in = self.net.memory_length
        timestep, action = jax.tree.map(
            lambda x: x[burn_in:], (sample.rollout.timestep, sample.rollout.action)
        )
        input_tm1, input_t = self._policy_inputs(timestep, sample)
        frozen = jax.lax.stop_gradient(params)
        alpha = jnp.exp(frozen.log_temperature)
        soft_value = self._soft_value(frozen, context.target, input_t)
        td_target = self.targets(timestep, soft_value)
        features = self.net.encode(params.critic, input_tm1.observation)
        seen = self.action_head.to_critics(action[0])
        taken = self.action_head.taken(self.net.values(params.critic, features, seen), action[0])
        expected = self._expect(
            params.policy, frozen.critic, *jax.lax.stop_gradient((features, features)), input_tm1
        )
        target_entropy = self.action_head.target_entropy(self._target_entropy, input_tm1.mask)
        entropy_error = jax.lax.stop_gradient(expected.entropy - target_entropy)
        critic_loss = 0.5 * jnp.sum(jnp.square(taken - td_target), axis=0)
        policy_loss = -expected.value - alpha * expected.entropy
        alpha_loss = jnp.exp(params.log_temperature) * entropy_error
        weight = returns.weights(timestep)[0]  # [N]
        mean = functools.partial(types.Mean.of, weights=weight)
        metrics = {
            "loss/total": mean(sample.weight * (critic_loss + policy_loss + alpha_loss)),
            "loss/critic": mean(critic_loss),
            "loss/policy": mean(policy_loss),
            "policy/entropy": mean(expected.entropy),
            "policy/temperature": types.Mean.of(alpha),
            "value/mean": mean(jnp.mean(taken, axis=0)),
            "value/target": mean(td_target),
        }
        priority = jnp.mean(jnp.abs(taken - td_target), axis=0)
        return optimization.LossOutput(metrics, jnp.where(weight > 0.0, priority, -1.0))

    def _policy_inputs(self, timestep, sample) -> tuple[_PolicyInput, _PolicyInput]:
        """Returns both time steps of the transitions, with their stacks of frames."""
        observation = self.net.observe_after(sample.rollout.timestep)
        mask = encoders.action_mask(timestep.observation)
        keys = jax.vmap(jax.random.split, out_axes=1)(sample.key)  # [2, N]
        if self.random_shift:
            keys, shift_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(keys), -1, 0)
            shift = jax.vmap(preprocessing.random_shifts, in_axes=(0, None, 0))
            observation = shift(observation, self.random_shift, shift_keys)
        both = _PolicyInput(observation, mask, keys)
        return jax.tree.map(lambda x: x[0], both), jax.tree.map(lambda x: x[1], both)

    def targets(self, timestep, soft_value):
        """Returns the targets `[N]` of the values of the chosen actions.

        Args:
          timestep: `[2, N]`, with rewards to learn from.
          soft_value: `[N]` of the second time step: the expected value with the policy's entropy.
        """
        return timestep.reward[1] + self.gamma * timestep.discount[1] * soft_value

    def _soft_value(self, params, target, input_t: _PolicyInput) -> jax.Array:
        """Returns the soft values `[N]` of the target critics, without gradients.

        `params` must be constants, because no gradient is stopped here.
        """
        features = self.net.encode(params.critic, input_t.observation)
        target_features = self.net.encode(target, input_t.observation)
        expected = self._expect(params.policy, target, features, target_features, input_t)
        return expected.value + jnp.exp(params.log_temperature) * expected.entropy

    def _expect(
        self, policy, critic, features, critic_features, policy_input: _PolicyInput
    ) -> sac_networks.Expectation:
        """Returns the policy's expected value and entropy; each part has its own features."""
        outputs = self.net.outputs(policy, features)
        critics = functools.partial(self.net.values, critic, critic_features)
        return self.action_head.expect(outputs, policy_input.mask, policy_input.key, critics)
