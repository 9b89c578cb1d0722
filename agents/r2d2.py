"""R2D2: recurrent Q-learning from prioritised sequences that begin with the core of acting.

Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019,
https://openreview.net/forum?id=r1lyTjAqYX.

A network gets the previous action and reward beside the observation. Sequences begin where rollouts
do, with the core of acting there; the first `burn_in` steps only update that old core.

The loss of a step, with the importance weight `w` of its sequence, and the n-step return `G`
(`returns.n_step`) of the values `v(s)` under the parameters `θ` and those of the target, `θ'`:

    h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x
    v(s) = h⁻¹(q(s, argmax_a q(s, a; θ); θ'))
    w (h(G) - q(s, a; θ))² / 2

Axis legend: `T` time, `B` streams, `L` transitions of a sequence, `U` of them after the burn-in,
`N` sequences, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.networks import cores, heads, layers
from agents.parts import categorical, exploration, inputs, optimization, options, returns
from agents.replay import replay
from podracers import environment, errors, types

_RECURRENT = functools.partial(networks.q_network, core=cores.LSTM(), dueling=True)


class ActorState(NamedTuple):
    """The actor state of a stream."""

    core: Any  # [B, ...]
    action: jax.Array  # [B] int32, the previous one
    epsilon: jax.Array | tuple  # [B] float32, probability of a random action; () in replay


class Extras(NamedTuple):
    """The data of each step that acting stores, for initial priorities."""

    value: jax.Array  # [T, B] of the best action, as a return
    taken: jax.Array  # [T, B] of the chosen action, rescaled


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class R2D2(inputs.NetworkAgent, replay.ReplayAgent):
    """Recurrent replay DQN with gradient steps after each rollout as `replay.Replay` counts them.

    `replay.ReplayAgent` describes the options that are not listed here.

    Attributes:
      network: `network(spec, num_actions)` returns a recurrent network with output `[..., A]`.
      sequence_length: `L`; `L - burn_in` must be at least the length of a rollout, so that every
        step is trained on.
      burn_in: first steps of a sequence, which only warm up the core.
      n_step: rewards that a target adds up before it bootstraps.
      priority_mix: weight of a sequence's largest error in its priority; the mean has the rest.
      epsilon_base: probability of a random action in the stream that explores most.
      epsilon_exponent: exponent by which others explore less; see `exploration.ladder`.
    """

    network: Callable[..., networks.Network] = _RECURRENT
    sequence_length: int = options.count(40)
    # Initial priorities need a step after the burn-in whose successor has a value from acting.
    burn_in: int = options.burn_in(8, learnt=2)
    n_step: int = options.count(5)
    priority_mix: float = options.fraction(0.9)
    epsilon_base: float = options.fraction(0.4)
    epsilon_exponent: float = options.positive(7.0)
    evaluation_epsilon: float = options.fraction(1e-3)
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    target_period: int = options.count(2_500)
    target_rate: float = options.fraction(1.0)

    def __post_init__(self):
        super().__post_init__()
        options.require_discrete(self)
        if self.net.memory_length is not None:
            raise errors.UserError(
                "R2D2 learns recurrent networks, and this one has no core: set "
                "q_network.core = @cores.LSTM(), or use DQN"
            )

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        length = self.sequence_length - self.burn_in
        return replay.Replay.of(self, length, length, self.burn_in)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores, previous actions and epsilons of `B` streams."""
        epsilon = jnp.full(env_id.shape, self.evaluation_epsilon)
        if not evaluation:
            ladder = exploration.ladder
            epsilon = ladder(env_id, num_envs, self.epsilon_base, self.epsilon_exponent)
        state = super().init_actor(env_id, num_envs)
        return ActorState(state.core, state.action, epsilon)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best legal action, or with probability epsilon a random one."""
        timestep = self.preprocess.apply(params.normalizer, timestep)
        timestep = self._step_inputs(actor_state, timestep)
        q_values, core = self.net.step(params.params, actor_state.core, timestep)
        epsilon = self.evaluation_epsilon if evaluation else actor_state.epsilon
        action = exploration.epsilon_greedy(q_values, timestep.observation, epsilon, key)
        value = exploration.best_q_value(q_values, timestep.observation)
        value = categorical.signed_parabolic(value)
        extras = Extras(value, layers.take(q_values, action))
        return action, actor_state._replace(core=core, action=action), extras

    def stored(self, rollout):
        """Returns a rollout without the epsilon of its streams, which replay does not store."""
        return rollout._replace(actor_state=rollout.actor_state._replace(epsilon=()))

    def loss(self, params, sample, context):
        """Returns the loss of the rescaled values `[U, N]` of the chosen actions."""
        q_values, q_target = self._values(params, sample), self._values(context.target, sample)
        timestep, action = jax.tree.map(
            lambda x: x[self.burn_in :], (sample.rollout.timestep, sample.rollout.action)
        )
        best = heads.legal_argmax(q_values, environment.action_mask(timestep.observation))
        values = categorical.signed_parabolic(layers.take(q_target, best))
        td_target = jax.lax.stop_gradient(self.targets(timestep, values))
        taken = layers.take(q_values[:-1], action)
        weight = returns.weights(timestep)
        loss = types.Mean.of(sample.weight * optax.losses.l2_loss(taken, td_target), weight)
        metrics = {
            "value/mean": types.Mean.of(categorical.signed_parabolic(taken), weight),
            "value/target": types.Mean.of(categorical.signed_parabolic(td_target), weight),
        }
        priority = replay.sequence_priority(td_target - taken, weight, self.priority_mix)
        return optimization.LossOutput(loss, metrics, priority, q_values)

    def _values(self, params: types.PyTree, sample: replay.Sample) -> jax.Array:
        """Returns rescaled values `[U + 1, N, A]`."""
        timestep = self._rollout_inputs(sample.rollout)
        core = sample.rollout.actor_state.core
        return networks.unroll_after(self.net, params, core, timestep, self.burn_in)

    def targets(self, timestep: types.TimeStep, values: jax.Array) -> jax.Array:
        """Returns the targets `[U, N]` of the chosen actions, rescaled n-step returns.

        Args:
          timestep: `[U + 1, N]`, with rewards to learn from.
          values: `[U + 1, N]` of the best actions there, as returns.
        """
        return categorical.signed_hyperbolic(
            returns.n_step(timestep, values, self.gamma, self.n_step)
        )

    def initial_priorities(self, normalizer, recent: types.Rollout) -> jax.Array:
        """Returns the priorities `[1, B]` of sequences `[L, B]`, from the values of acting.

        The last step has no target yet: acting has not computed the value after it.
        """
        timestep = self.preprocess.apply(normalizer, recent.timestep)
        timestep = jax.tree.map(lambda x: x[self.burn_in : -1], timestep)
        value, taken = jax.tree.map(lambda x: x[self.burn_in :], recent.extras)
        error = self.targets(timestep, value) - taken[:-1]
        return replay.sequence_priority(error, returns.weights(timestep), self.priority_mix)[None]
