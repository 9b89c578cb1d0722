"""Soft actor-critic, for continuous actions and for discrete ones.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018,
https://arxiv.org/abs/1812.05905; the discrete form is that of Christodoulou, "Soft Actor-Critic for
Discrete Action Settings", 2019, https://arxiv.org/abs/1910.07207.

The policy, the critics and the temperature are updated together, by the gradient of the sum of
their losses, none of which depends on the parameters of another. This equals three optimizers with
one learning rate; with a `policy_period`, those of the policy and of the temperature pause.

The losses of a transition to `s'`, with critics `q_i`, target critics `q'_i`, temperature `α`,
`a ~ π(·|s)`, `a' ~ π(·|s')` and `H(s) = -log π(a|s)` (the expectations, if actions are discrete):

    y = r + γ d (min_i q'_i(s', a') + α H(s'))
    critics: Σ_i (q_i(s, replayed action) - y)² / 2
    policy: -min_i q_i(s, a) - α H(s)
    temperature: α (H(s) - target entropy)

In a game of two players `d` is -1 where the turn passed, and `y` has minus the soft value of the
opponent. That is the negamax of the zero-sum game whose payoff to a player is, beside the rewards,
`α` times the entropies at its own moves minus those at the opponent's: each player maximises
`r + α H` at its moves, and what the opponent gains there, this player loses. Its equilibrium is a
logit quantal response equilibrium, which tends to the game's own as `α` goes to 0.

With a recurrent network, `s` is the output of a core that policy and critics share, and that the
critics' loss alone trains, as the sharing variant in the code of Yang and Nguyen, "Recurrent
Off-policy Baselines for Memory-based Continuous Control", 2021, https://arxiv.org/abs/2110.12628.
Ni, Eysenbach and Salakhutdinov, "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs",
2022, https://arxiv.org/abs/2110.05038, separate the cores: in their code, one that both losses
trained did badly. Both begin with a zero state; here sequences begin with the stored core and a
burn-in, as in R2D2.

Axis legend: `T` time, `B` streams, `L` transitions of a sequence, `U` of them after the burn-in,
`N` drawn sequences, `R = U N` transitions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.networks import encoders
from agents.networks import sac as sac_networks
from agents.parts import inputs, optimization, options, preprocessing, returns
from agents.replay import replay
from podracers import environment, types

_PRIORITY_MIX = 0.9  # weight of the largest error of a sequence in its priority, as in R2D2


class _PolicyInput(NamedTuple):
    """Network inputs of one of the two time steps of a transition."""

    observation: types.PyTree  # [R, ...], with a core its outputs
    mask: jax.Array | None
    key: jax.Array  # [R] typed keys of the policy's sample


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SAC(inputs.NetworkAgent, replay.ReplayAgent):
    """Soft actor-critic with gradient steps after each rollout as `replay.Replay` counts them.

    `replay.ReplayAgent` describes the options that are not listed here. Target parameters are those
    of the critics.

    Attributes:
      network: `network(spec, head)` returns a `SACNetwork`; `head` is an `SACHead`. A recurrent one
        gets the previous action and reward beside the observation.
      sequence_length: `L` with a recurrent network; `L - burn_in` must be at least the length of a
        rollout, so that every step is trained on. 1 without a core.
      burn_in: first steps of a sequence, which only warm up the core.
      initial_temperature: initial alpha, the weight of the entropy, in units of the scaled reward.
      target_entropy: entropy that alpha is learnt for. Continuous actions: nats for each component,
        scaled to [-1, 1] (at most log 2, by default -1). Discrete ones: portion of the
        entropy of the uniform policy over the legal actions (at most 1, by default 0.98).
      random_steps: agent steps over all streams, at the start, with uniformly random actions.
      random_shift: largest random shift of replayed images in pixels, drawn separately for both
        time steps of a transition, and once for a sequence with a recurrent network; 0 for none.
        See `preprocessing.random_shifts`.
      policy_period: gradient steps between those of the policy and of the temperature; the critics
        take all of them. 2 in DrQ (Kostrikov et al., 2020, https://arxiv.org/abs/2004.13649).
      greedy_evaluation: see `agents.parts.options`; the most probable continuous action is the
        squashed mean. By default True for continuous actions, as published, and False for discrete
        ones.
    """

    network: Callable[..., sac_networks.SACNetwork] = sac_networks.sac_network
    sequence_length: int = options.count(1)
    burn_in: int = options.burn_in(0, learnt=1)
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
        fits = self.net.is_recurrent or self.sequence_length == 1
        expected = "1, because the network has no core (set sac_network.core = @cores.GRU())"
        options.expect(self, "sequence_length", fits, expected)

    @functools.cached_property
    def action_head(self) -> sac_networks.SACHead:
        return sac_networks.head_from_spec(self.spec)

    @property
    def _outputs(self) -> sac_networks.SACHead:
        return self.action_head

    @property
    def _target_entropy(self) -> float:
        if self.target_entropy is None:
            return self.action_head.default_target_entropy
        return self.target_entropy

    @property
    def _is_weight(self) -> sac_networks.Params:
        return sac_networks.Params._make((True, True, False))  # all but the temperature

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        optimizer = optimization.adam_of(self, self.weight_decay)
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
        labels = sac_networks.Params._make(("period", "every", "period"))
        return dataclasses.replace(optimizer, transformation=optax.partition(parts, labels))

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        length = self.sequence_length - self.burn_in
        burn_in = self.burn_in if self.net.is_recurrent else self.net.memory_length or 0
        return replay.Replay.of(self, length, length, burn_in)

    def init_params(self, key):
        return self.net.init(key, math.log(self.initial_temperature))

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the latest frames of `B` streams, or cores and previous actions with a core."""
        actor_state = super().init_actor(env_id, num_envs)
        return actor_state if self.net.is_recurrent else actor_state.core

    def actor_params(self, learner):
        """Returns the policy, its encoder, the statistics, and whether actions are random."""
        # The part of the critics' parameters that `observe` and `encode` read.
        critic = learner.params.critic
        encoder = {name: value for name, value in critic.items() if name == "encoder"}
        params = learner.params._replace(critic=encoder, log_temperature=())
        is_random = learner.agent_steps < self.random_steps
        return optimization.ActorParams(params, learner.normalizer, is_random)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action, or takes the mode (see `greedy_evaluation`)."""
        mask = environment.action_mask(timestep.observation)
        timestep = self.preprocess.apply(params.normalizer, timestep)
        timestep = self._step_inputs(actor_state, timestep)
        recurrent = self.net.is_recurrent
        core = actor_state.core if recurrent else actor_state
        observation, core = self.net.observe(params.params.critic, core, timestep)
        features = self.net.encode(params.params.critic, observation)
        outputs = self.net.outputs(params.params.policy, features)
        if evaluation and self.greedy_evaluation:
            raw = self.action_head.mode(outputs, mask)
        else:
            raw = self.action_head.sample(outputs, mask, key)
        action = self.action_head.to_action(raw)
        if self.random_steps and not evaluation:
            random = self.action_head.random(mask, key)
            action = jnp.where(params.exploration, random, action)
        return action, self._next_state(core, action) if recurrent else core, ()

    def stored(self, rollout):
        """Returns the part of a rollout that replay stores: with a core, the actor state, too."""
        return rollout._replace(extras=()) if self.net.is_recurrent else super().stored(rollout)

    def target_params(self, params):
        return params.critic

    def loss(self, params, sample, context):
        """Returns the losses of the critics, the policy and alpha, of `R` transitions."""
        timestep = _transitions(sample.rollout.timestep, self.buffer.burn_in)
        action = sample.rollout.action[self.buffer.burn_in :]
        action = action.reshape(-1, *action.shape[2:])  # [R, ...]
        input_tm1, input_t = self._policy_inputs(params.critic, timestep, sample)
        frozen, input_t = jax.lax.stop_gradient((params, input_t))
        target_input_t = input_t
        if self.net.is_recurrent:  # target parameters have their own memory
            _, target_input_t = self._policy_inputs(context.target, timestep, sample)
        alpha = jnp.exp(frozen.log_temperature)
        features_t = self.net.encode(frozen.critic, input_t.observation)
        target_features_t = self.net.encode(context.target, target_input_t.observation)
        expected_t = self._expect(
            frozen.policy, context.target, features_t, target_features_t, input_t
        )
        soft_value = expected_t.value + alpha * expected_t.entropy
        td_target = self.targets(timestep, soft_value)
        features = self.net.encode(params.critic, input_tm1.observation)
        seen = self.action_head.to_critics(action)
        taken = self.action_head.taken(self.net.values(params.critic, features, seen), action)
        expected = self._expect(
            params.policy, frozen.critic, *jax.lax.stop_gradient((features, features)), input_tm1
        )
        target_entropy = self.action_head.target_entropy(self._target_entropy, input_tm1.mask)
        entropy_error = jax.lax.stop_gradient(expected.entropy - target_entropy)
        critic_loss = 0.5 * jnp.sum(jnp.square(taken - td_target), axis=0)
        policy_loss = -expected.value - alpha * expected.entropy
        alpha_loss = jnp.exp(params.log_temperature) * entropy_error
        weight = returns.weights(timestep)[0]  # [R]
        importance = jnp.tile(sample.weight, self.buffer.learnt_states)
        mean = functools.partial(types.Mean.of, weights=weight)
        total = mean(importance * (critic_loss + policy_loss + alpha_loss))
        metrics = {
            "loss/critic": mean(critic_loss),
            "loss/policy": mean(policy_loss),
            "policy/entropy": mean(expected.entropy),
            "policy/temperature": types.Mean.of(alpha),
            "value/mean": mean(jnp.mean(taken, axis=0)),
            "value/target": mean(td_target),
        }
        error = jnp.mean(jnp.abs(taken - td_target), axis=0)
        error, weight = (x.reshape(-1, sample.weight.size) for x in (error, weight))  # [U, N]
        mix = _PRIORITY_MIX if self.net.is_recurrent else 1.0
        priority = replay.sequence_priority(error, weight, mix)
        is_learnt = jnp.any(weight > 0.0, axis=0)
        priority = jnp.where(is_learnt, priority, -1.0)
        return optimization.LossOutput(total, metrics, priority, expected)

    def _policy_inputs(self, critic, timestep, sample) -> tuple[_PolicyInput, _PolicyInput]:
        """Returns both time steps of the transitions, with their memory under `critic`."""
        mask = environment.action_mask(timestep.observation)
        shape = 2, self.buffer.learnt_states
        keys = jax.vmap(lambda key: jax.random.split(key, shape), out_axes=2)(sample.key)
        keys = keys.reshape(2, -1)  # [2, R]
        shift_keys = keys  # not used without shifts
        if self.random_shift:
            keys, shift_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(keys), -1, 0)
        observation = _transitions(self._observations(critic, sample, shift_keys))
        both = _PolicyInput(observation, mask, keys)
        return jax.tree.map(lambda x: x[0], both), jax.tree.map(lambda x: x[1], both)

    def _observations(self, critic, sample, shift_keys) -> types.PyTree:
        """Returns the inputs `[U + 1, N, ...]` of the encoder, or the outputs of the core."""
        network, params = self.net.memory, critic.get("encoder", {})
        after = functools.partial(
            networks.unroll_after, network, params, burn_in=self.buffer.burn_in
        )
        shift = jax.vmap(lambda x, key: preprocessing.random_shifts(x, self.random_shift, key))
        timestep = self._rollout_inputs(sample.rollout)
        shape = timestep.reward.shape
        if not self.net.is_recurrent:
            return shift(after(self.net.initial_core(shape[1]), timestep), shift_keys)
        core, timestep = self.net.memory.prepare(sample.rollout.actor_state.core, timestep)
        keys = jnp.broadcast_to(shift_keys[0, : shape[1]], shape)  # one shift of a sequence
        timestep = timestep._replace(observation=shift(timestep.observation, keys))
        return after(core, timestep)

    def targets(self, timestep, soft_value):
        """Returns the targets `[R]` of the values of the chosen actions.

        Args:
          timestep: `[2, R]`, with rewards to learn from.
          soft_value: `[R]` of the second time step: the expected value with the policy's entropy.
        """
        return timestep.reward[1] + self.gamma * timestep.discount[1] * soft_value

    def _expect(
        self, policy, critic, features, critic_features, policy_input: _PolicyInput
    ) -> sac_networks.Expectation:
        """Returns the policy's expected value and entropy; each part has its own features."""
        outputs = self.net.outputs(policy, features)
        critics = functools.partial(self.net.values, critic, critic_features)
        return self.action_head.expect(outputs, policy_input.mask, policy_input.key, critics)


def _transitions(tree: types.PyTree, begin: int = 0) -> types.PyTree:
    """Returns both time steps `[2, R, ...]` of the transitions of `[begin + U + 1, N, ...]`."""

    def pairs(x: jax.Array) -> jax.Array:
        both = jnp.stack([x[begin:-1], x[begin + 1 :]])
        return both.reshape(2, -1, *x.shape[2:])

    return jax.tree.map(pairs, tree)
