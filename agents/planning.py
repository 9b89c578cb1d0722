"""What agents that act by tree search have in common: MuZero and AlphaZero.

How they act, what replay keeps, their targets, their loss and their priorities stand here once.
An algorithm adds the model that it searches with, and what it predicts of a sequence.

Targets follow the two rules of `agents.returns`, and a third one where a model is unrolled through
the end of an episode:

- up to LAST, and at it for the reward that came with it, everything is learnt from;
- past a termination, and at it for the value, values and rewards are zero, whatever the action;
- past a truncation, and at it for the value, nothing is known, and nothing is learnt.

A sequence that begins at LAST teaches nothing: what was done there was ignored, and the observation
of an ending may look like one that is worth something.

Axis legend: `T` time, `L` transitions of a sequence, `K` imagined steps, `B` streams, `N` drawn
sequences, `A` actions, `Z` atoms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import optax
from dm_env import specs

from agents import categorical, off_policy, options, replay, returns, tree_search
from agents.networks import encoders
from podracers import errors, types


class ActorParams(NamedTuple):
    """What acting needs."""

    params: types.PyTree
    normalizer: Any
    temperature: jax.Array  # float32, how random actions are


class Extras(NamedTuple):
    """What acting remembers of each step."""

    policy: jax.Array  # [T, B, A] what the search would rather do than the network
    value: jax.Array  # [T, B] of that policy


class Unrolled(NamedTuple):
    """What is predicted from the first observation of a sequence and its actions."""

    policy: jax.Array  # [K + 1, N, A] logits
    value: jax.Array  # [K + 1, N, Z] logits
    reward: jax.Array  # [K, N, Z] logits


class Targets(NamedTuple):
    """What should have been predicted, and how much each of it counts (0 or 1)."""

    policy: jax.Array  # [K + 1, N, A]
    value: jax.Array  # [K + 1, N]
    reward: jax.Array  # [K, N]
    policy_weight: jax.Array  # [K + 1, N]
    value_weight: jax.Array  # [K + 1, N]
    reward_weight: jax.Array  # [K, N]


def targets(
    timestep: types.TimeStep, extras: Extras, gamma: float, unroll_steps: int, n_steps: int
) -> Targets:
    """Returns the targets of sequences; the module's docstring says what holds at their ends.

    Args:
      timestep: `[K + n + 1, N]`.
      extras: `[K + n + 1, N]` of the same time steps.
      gamma: the discount of the agent.
      unroll_steps: `K`.
      n_steps: of the returns, which bootstrap from the values in `extras`.
    """
    last = timestep.last()[: unroll_steps + 1]
    value = returns.n_step(timestep, extras.value, gamma, n_steps)[: unroll_steps + 1]
    ended = jnp.cumsum(last, axis=0) > 0  # there or before
    # Whichever LAST comes first decides; no later one does.
    terminated = timestep.terminated()[: unroll_steps + 1]
    first_last = last & (jnp.cumsum(last, axis=0) == 1)
    absorbed = (jnp.cumsum(first_last & terminated, axis=0) > 0) & ~last[0]
    reached = ~ended[:-1] & ~last[0]  # [K] the step into k + 1 belongs to the episode
    reward = timestep.reward[1 : unroll_steps + 1]
    return Targets(
        policy=extras.policy[: unroll_steps + 1],
        value=jnp.where(absorbed, 0.0, value),
        reward=jnp.where(absorbed[:-1], 0.0, reward),
        policy_weight=(~ended).astype(jnp.float32),
        value_weight=(~ended | absorbed).astype(jnp.float32),
        reward_weight=(reached | absorbed[:-1]).astype(jnp.float32),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Planner(off_policy.OffPolicy):
    """All of an agent that searches but its model; see `OffPolicy` for the options that it shares.

    A sequence of replay is `K + n + 1` transitions long, and one state of it is learnt from: the
    first, which the model is unrolled from. So `replay_ratio` is what Schrittwieser et al., 2020,
    https://arxiv.org/abs/1911.08265, call samples per state (appendix H).

    Attributes:
      network: what an algorithm says.
      search: `search()` returns how to search.
      support: the largest atom of values and rewards, squashed; see `categorical.Support`.
      support_atoms: how many there are.
      n_steps: of the returns that values are learnt from.
      value_cost: weight of the value loss.
      fresh_values: whether returns bootstrap from what the target network thinks of an observation
        now, rather than from what the search found when it was acted on: then old replay holds no
        old values (the values of Ye et al., "Mastering Atari Games with Limited Data", 2021,
        https://arxiv.org/abs/2111.00210, without searching anew).
      temperature: how random actions are in the beginning: 1 samples from the policy that the
        search found, and 0 takes its best action, as evaluation does.
      final_temperature: in the end.
      temperature_steps: agent steps, over all streams, in which it falls linearly; None for never.
    """

    network: Callable[..., Any] = None
    search: Callable[..., tree_search.Search] = tree_search.Search
    support: float = 30.0
    support_atoms: int = 61
    n_steps: int = 5
    value_cost: float = 0.25
    fresh_values: bool = False
    temperature: float = 1.0
    final_temperature: float = 0.25
    temperature_steps: float | None = None

    _COUNTS: ClassVar = ("n_steps", *off_policy.OffPolicy._COUNTS)
    _POSITIVE: ClassVar = (
        "value_cost",
        "temperature",
        "temperature_steps",
        *off_policy.OffPolicy._POSITIVE,
    )

    def __post_init__(self):
        """Refuses impossible options."""
        super().__post_init__()
        name = type(self).__name__
        options.expect(self, "final_temperature", self.final_temperature >= 0.0, "0 or more")
        if not isinstance(self.spec.action, specs.DiscreteArray):
            raise errors.UserError(
                f"{name} needs discrete actions, and those of {self.spec.name} are "
                f"{self.spec.action!r}: use SAC or PPO"
            )
        if self._burn_in is None:
            raise errors.UserError(
                f"{name} searches without memory: give its network no recurrent core "
                f"(use R2D2 where memory is needed)"
            )
        # Made now: gin's bindings may be others by the time that they are first used.
        _ = self._search, self._support
        self._check_support()

    def _check_support(self) -> None:
        """Refuses a support that is too small for what rewards are known to add up to."""
        if self.reward_clip is None:
            return
        steps = self.spec.max_episode_steps
        if self.gamma < 1.0:
            horizon = (1.0 - self.gamma ** (steps or float("inf"))) / (1.0 - self.gamma)
        else:
            horizon = steps or 1
        most = self.reward_clip * horizon
        if most > self._support.largest:
            raise errors.UserError(
                f"{type(self).__name__}.support = {self.support} holds returns up to "
                f"{self._support.largest:.4g}, and rewards up to {self.reward_clip} add up to "
                f"{most:.4g}: expected a support of at least "
                f"{float(categorical.signed_hyperbolic(most)):.3g}"
            )

    @functools.cached_property
    def _support(self) -> categorical.Support:
        return categorical.Support(self.support, self.support_atoms)

    @functools.cached_property
    def _search(self) -> tree_search.Search:
        return self.search()

    @functools.cached_property
    def _network(self) -> Any:
        return self.network(self.spec, self.spec.action.num_values, self.support_atoms)

    @property
    def _imagined(self) -> int:
        """`K`."""
        return 0

    @property
    def _unroll(self) -> int:
        return self._imagined + self.n_steps + 1

    @property
    def _learnt_states(self) -> int:
        return 1

    def _root(self, params: ActorParams, core: Any, timestep: types.TimeStep):
        """Returns what the search begins with, `[B, ...]`, and the core after it."""
        raise NotImplementedError

    def _model(self, params: ActorParams) -> tree_search.Model:
        """Returns what the search goes on with."""
        raise NotImplementedError

    def _unrolled(self, params: types.PyTree, rollout: types.Rollout) -> Unrolled:
        """Returns what is predicted of sequences, `[burn-in + K + n + 1, N, ...]`."""
        raise NotImplementedError

    def _values(self, params: types.PyTree, timestep: types.TimeStep) -> jax.Array:
        """Returns the logits `[L, N, Z]` of the values of time steps after the burn-in."""
        raise NotImplementedError

    def _init_target(self, params):
        return params if self.fresh_values else ()

    def _kept(self, rollout):
        return rollout._replace(actor_state=())

    def actor_params(self, learner):
        """Returns the parameters, the statistics of the observations, and the temperature."""
        temperature = jnp.float32(self.temperature)
        if self.temperature_steps is not None:
            schedule = optax.linear_schedule(
                self.temperature, self.final_temperature, float(self.temperature_steps)
            )
            temperature = jnp.float32(schedule(learner.agent_steps))
        return ActorParams(learner.params, learner.normalizer, temperature)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Searches for each stream; in evaluation without any noise."""
        mask = encoders.action_mask(timestep.observation)
        root, actor_state = self._root(params, actor_state, timestep)
        temperature = 0.0 if evaluation else params.temperature
        plan = self._search.run(self._model(params), root, mask, temperature, key)
        return plan.action, actor_state, Extras(plan.policy, plan.value)

    def _root_output(self, prediction: Any, embedding: types.PyTree) -> mctx.RootFnOutput:
        value = self._support.decode(prediction.value)
        return mctx.RootFnOutput(prior_logits=prediction.policy, value=value, embedding=embedding)

    def _first_priority(self, recent, num_items):
        """Returns how far the search's values are from the returns."""
        timestep = jax.tree.map(lambda x: x[:-1], recent.timestep)
        value = recent.extras.value
        target = returns.n_step(timestep, value, self.gamma, self.n_steps)
        begin = slice(self._burn_in, self._burn_in + num_items)
        return (jnp.abs(value[:-1] - target) * returns.weights(timestep))[begin]

    def _loss(self, params, target, sample: replay.Sample):
        """Returns the loss of sequences, of which each counts with its importance."""
        rollout = sample.rollout
        predicted = self._unrolled(params, rollout)
        begin = self._burn_in
        timestep = jax.tree.map(lambda x: x[begin:-1], rollout.timestep)
        extras = jax.tree.map(lambda x: x[begin:], rollout.extras)
        if self.fresh_values:
            seen = jax.tree.map(lambda x: x[:-1], rollout.timestep)
            extras = extras._replace(value=self._support.decode(self._values(target, seen)))
        goal = targets(timestep, extras, self.gamma, self._imagined, self.n_steps)
        goal = jax.lax.stop_gradient(goal)
        # The root counts as much as all imagined steps together.
        scale = jnp.where(jnp.arange(self._imagined + 1) == 0, 1.0, 1.0 / max(self._imagined, 1))
        log_policy = jax.nn.log_softmax(predicted.policy, axis=-1)
        policy = -jnp.sum(goal.policy * log_policy, axis=-1) * goal.policy_weight
        value = self._support.cross_entropy(predicted.value, goal.value) * goal.value_weight
        reward = self._support.cross_entropy(predicted.reward, goal.reward) * goal.reward_weight

        def summed(loss):  # [K + 1, N] or [K, N]
            return jnp.sum(loss * scale[len(scale) - len(loss) :, None], axis=0)

        policy, value, reward = summed(policy), summed(value), summed(reward)
        begins = goal.policy_weight[0]  # 0 where a sequence begins at LAST
        root_value = self._support.decode(predicted.value[0])
        beyond = self._support.beyond
        metrics = {
            "loss/total": types.Mean.of(
                sample.weight * (policy + self.value_cost * value + reward), begins
            ),
            "loss/policy": types.Mean.of(policy, begins),
            "loss/value": types.Mean.of(value, begins),
            "loss/reward": types.Mean.of(reward, begins),
            "value/mean": types.Mean.of(root_value, begins),
            "value/target": types.Mean.of(goal.value[0], begins),
            "value/clipped": types.Mean.of(beyond(goal.value), goal.value_weight),
            "reward/clipped": types.Mean.of(beyond(goal.reward), goal.reward_weight),
            "policy/target_entropy": types.Mean.of(
                jnp.sum(jax.scipy.special.entr(goal.policy[0]), axis=-1), begins
            ),
        }
        return off_policy.Learnt(metrics, jnp.abs(root_value - goal.value[0]) * begins)
