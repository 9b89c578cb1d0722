"""R2D2: recurrent Q-learning from prioritised sequences, with the states that they were acted in.

Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019,
https://openreview.net/forum?id=r1lyTjAqYX.

A network sees the previous action and reward beside the observation. Its values are those of
rescaled returns, `h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x`. Sequences begin where rollouts do,
with the core that acting had there; the first `burn_in` steps only make up for the age of it.

Axis legend: `T` time, `B` streams, `L` transitions of a sequence, `U` of them after the burn-in,
`N` sequences, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from dm_env import specs

from agents import categorical, exploration, inputs, networks, off_policy, options, replay, returns
from agents.networks import cores, encoders
from podracers import environment, errors, types

_RECURRENT = functools.partial(networks.q_network, core=cores.LSTM(), dueling=True)


class ActorParams(NamedTuple):
    """What acting needs."""

    params: types.PyTree
    normalizer: types.PyTree


class ActorState(NamedTuple):
    """What a stream remembers."""

    core: Any  # [B, ...]
    action: jax.Array  # [B] int32, the previous one
    epsilon: jax.Array | tuple  # [B] float32, how often an action is random; () in replay


class Extras(NamedTuple):
    """What acting remembers of each step."""

    value: jax.Array  # [T, B] of the best action, as a return
    taken: jax.Array  # [T, B] of the action that was taken, rescaled


@dataclasses.dataclass(frozen=True, eq=False)
class R2D2(off_policy.OffPolicy):
    """The agent; see `OffPolicy` for the options that it shares.

    Attributes:
      network: `network(spec, num_actions)` returns a recurrent network that puts out `[..., A]`.
      sequence_length: `L`; the part behind the burn-in is no shorter than a rollout, or some steps
        would never be learnt from.
      burn_in: how many first steps of a sequence only warm up the core.
      n_step: rewards that a target adds up before it bootstraps.
      priority_mix: how much of a sequence's priority is its largest error; the rest is the mean.
      epsilon_base: how often an action of the stream that explores most is random.
      epsilon_exponent: how much less others explore; see `exploration.ladder`.
      evaluation_epsilon: how often an action is random in evaluation.
    """

    network: Callable[..., networks.Network] = _RECURRENT
    sequence_length: int = 40
    burn_in: int = 8
    n_step: int = 5
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    priority_mix: float = 0.9
    epsilon_base: float = 0.4
    epsilon_exponent: float = 7.0
    evaluation_epsilon: float = 1e-3

    _COUNTS: ClassVar = ("sequence_length", "n_step", *off_policy.OffPolicy._COUNTS)
    _PORTIONS: ClassVar = (
        "priority_mix",
        "epsilon_base",
        "evaluation_epsilon",
        *off_policy.OffPolicy._PORTIONS,
    )
    _POSITIVE: ClassVar = ("epsilon_exponent", *off_policy.OffPolicy._POSITIVE)

    def __post_init__(self):
        """Refuses impossible options."""
        super().__post_init__()
        if not isinstance(self.spec.action, specs.DiscreteArray):
            raise errors.UserError(
                f"R2D2 needs discrete actions, and those of {self.spec.name} are "
                f"{self.spec.action!r}: use SAC or PPO"
            )
        if self._network.memory_length is not None:
            raise errors.UserError(
                "R2D2 learns recurrent networks, and this one has no core: set "
                "q_network.core = @cores.LSTM(), or use DQN"
            )
        # One step less than the sequence has: first priorities do not know the last one's value.
        most = self.sequence_length - 2
        holds = isinstance(self.burn_in, int) and 0 <= self.burn_in <= most
        expected = f"an int from 0 to sequence_length - 2 = {most}"
        options.expect(self, "burn_in", holds, expected)

    @functools.cached_property
    def _network(self) -> networks.Network:
        return self.network(self._network_spec, self._num_actions)

    @property
    def _num_actions(self) -> int:
        return self.spec.action.num_values

    @functools.cached_property
    def _network_spec(self) -> environment.EnvironmentSpec:
        """The environment's spec, with observations as the network sees them."""
        return inputs.extended_spec(self.spec)

    @property
    def _burn_in(self) -> int:
        return self.burn_in

    @property
    def _unroll(self) -> int:
        return self.sequence_length - self.burn_in

    def _init_params(self, key):
        return self._network.init(key, networks.zero_timestep(self._network_spec))

    def init_memory(self, rollout: types.Rollout) -> replay.Memory:
        """Returns an empty replay of this device's streams."""
        steps = rollout.timestep.reward.shape[0] - 1
        if self._unroll < steps:
            raise errors.UserError(
                f"R2D2.sequence_length: expected at least {self.burn_in + steps} with rollouts of "
                f"{steps} steps and a burn-in of {self.burn_in}, or some would never be learnt "
                f"from; got {self.sequence_length}"
            )
        return super().init_memory(rollout)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the memory of `B` streams, and how much each of them explores."""
        count = env_id.shape[0]
        epsilon = jnp.full((count,), self.evaluation_epsilon)
        if not evaluation:
            ladder = exploration.ladder
            epsilon = ladder(env_id, num_envs, self.epsilon_base, self.epsilon_exponent)
        action = inputs.zero_action(self.spec.action, count)
        return ActorState(self._network.initial_core(count), action, epsilon)

    def actor_params(self, learner):
        """Returns the parameters, and the statistics of the observations."""
        return ActorParams(learner.params, learner.normalizer)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best action, or at times a random one."""
        mask = encoders.action_mask(timestep.observation)
        timestep = self._perceived(params.normalizer, timestep)
        timestep = inputs.extended(timestep, actor_state.action, self.spec.action)
        q_values, core = self._network.step(params.params, actor_state.core, timestep)
        action = exploration.epsilon_greedy(q_values, mask, actor_state.epsilon, key)
        value = categorical.signed_parabolic(exploration.legal_max(q_values, mask))
        extras = Extras(value, _of(q_values, action))
        return action, actor_state._replace(core=core, action=action), extras

    def _kept(self, rollout):
        """Keeps extras, for first priorities, and the memory that belongs to the first step."""
        return rollout._replace(actor_state=rollout.actor_state._replace(epsilon=()))

    def _loss(self, params, target, sample):
        """Returns the error of the rescaled values `[U, N]` of the actions that were taken."""
        q_values, q_target = self._values(params, sample), self._values(target, sample)
        timestep, action = jax.tree.map(
            lambda x: x[self.burn_in :], (sample.rollout.timestep, sample.rollout.action)
        )
        best = exploration.legal_argmax(q_values, encoders.action_mask(timestep.observation))
        values = categorical.signed_parabolic(_of(q_target, best))
        goal = jax.lax.stop_gradient(self._goal(timestep, values))
        taken = _of(q_values[:-1], action)
        weight = returns.weights(timestep)
        metrics = {
            "loss/total": types.Mean.of(sample.weight * 0.5 * (goal - taken) ** 2, weight),
            "value/mean": types.Mean.of(categorical.signed_parabolic(taken), weight),
            "value/target": types.Mean.of(categorical.signed_parabolic(goal), weight),
        }
        return off_policy.Learnt(metrics, self._priority(goal - taken, weight))

    def _values(self, params: types.PyTree, sample: replay.Sample) -> jax.Array:
        """Returns rescaled values `[U + 1, N, A]`."""
        timestep = inputs.extended_rollout(sample.rollout, self.spec.action)
        core = sample.rollout.actor_state.core
        return networks.unroll_after(self._network, params, core, timestep, self.burn_in)

    def _goal(self, timestep: types.TimeStep, values: jax.Array) -> jax.Array:
        """Returns rescaled n-step returns `[T, B]` from values `[T + 1, B]`, as returns."""
        return categorical.signed_hyperbolic(
            returns.n_step(timestep, values, self.gamma, self.n_step)
        )

    def _first_priority(self, recent, num_items):
        """Takes the values that acting had; of the last time step it has none yet."""
        del num_items  # one: sequences begin where rollouts do
        timestep = jax.tree.map(lambda x: x[self.burn_in : -1], recent.timestep)
        value, taken = jax.tree.map(lambda x: x[self.burn_in :], recent.extras)
        error = self._goal(timestep, value) - taken[:-1]
        return self._priority(error, returns.weights(timestep))[None]

    def _priority(self, error: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns the priorities of sequences from their errors `[T, B]`, `[B]`."""
        size = jnp.abs(error) * weight
        mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(weight, axis=0), 1.0)
        return self.priority_mix * jnp.max(size, axis=0) + (1.0 - self.priority_mix) * mean


def _of(q_values: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the values of actions `[...]`, of `q_values` `[..., A]`."""
    return jnp.take_along_axis(q_values, action[..., None], axis=-1)[..., 0]
