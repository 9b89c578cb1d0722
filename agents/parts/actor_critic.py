"""A stochastic policy with a value function, of PPO, IMPALA and V-MPO.

Axis legend: `T` time, `B` streams of one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import networks
from agents.networks import heads, popart
from agents.parts import inputs, optimization, options, returns
from podracers import environment, types


class Extras(NamedTuple):
    """The data of each step that acting stores for learning."""

    raw: jax.Array  # action in units of the bounds, before squashing or clipping
    log_prob: jax.Array  # [T, B] of `raw`, under the acting policy
    value: jax.Array  # [T, B], from the acting parameters


class Batch(NamedTuple):
    """The data of a loss: a rollout, or a minibatch of it; all `[T, B, ...]`."""

    timestep: types.TimeStep
    extras: Extras  # log-probabilities are those of the proximal policy
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array
    rho: jax.Array  # importance weights, see `GeneralizedAdvantage`


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ActorCritic(inputs.NetworkAgent, optimization.GradientAgent, options.Learning):
    """Options and acting of agents with a policy and a value.

    A subclass has `_optimizer` and `update`, made of two parts that a variant replaces:

    - `targets`: from time steps and values `[T + 1, B]` to `returns.Targets` `[T, B]`;
    - `loss(params, minibatch, context)`: from a minibatch `[T, B, ...]` with the cores `[B, ...]`
      before it to an `optimization.LossOutput`.

    They use `net` and `action_head`.

    Attributes:
      network: `network(spec, head)` returns a network with output `ActorCriticOutput`.
      head: kind of the action head; None for the default of the action's specification.
      num_minibatches: gradient steps of each pass over a rollout.
      value_cost: weight of the value loss, which is half of the squared error.
      popart_rate: step size of the statistics of targets that normalise the value head's outputs,
        advantages and errors, see `networks.popart`, in place of a `reward_scale` by hand (3e-4 in
        Hessel et al. 2018; 0.03 in runs of some hundred updates); None for no normalisation.
      greedy_evaluation: see `agents.parts.options`.
      previous_action_and_reward: whether the network gets the previous action and reward beside the
        observation, see `agents.parts.inputs`; by default only if it is recurrent.
    """

    network: Callable[..., networks.Network] = networks.actor_critic
    head: str | None = None
    num_minibatches: int = options.count(1)
    value_cost: float = options.non_negative(0.5, most=1e6)
    popart_rate: float | None = options.fraction(None)
    greedy_evaluation: bool = False
    previous_action_and_reward: bool | None = None

    @functools.cached_property
    def action_head(self) -> heads.ActionHead:
        """The action head, which reads the network's policy output."""
        return heads.from_spec(self.spec.action, self.head)

    @property
    def _outputs(self) -> heads.ActionHead:
        return self.action_head

    def init_params(self, key: jax.Array) -> types.PyTree:
        """Returns fresh parameters of the network."""
        params = super().init_params(key)
        if self.popart_rate is None:
            return params
        module = getattr(self.net, "module", None)
        has_head = isinstance(module, networks.ActorCriticModule)
        options.expect(self, "popart_rate", has_head, "None with a network of one's own")
        return popart.init(params)

    @property
    def _is_weight(self) -> Any:
        return True if self.popart_rate is None else popart.is_weight

    def _renormalized(
        self, params: types.PyTree, target: jax.Array, weight: jax.Array
    ) -> types.PyTree:
        """Returns parameters of the network whose statistics count the targets `[T, B]`.

        They count before they are learnt from: the first ones are not in the unit of no targets.
        """
        if self.popart_rate is None:
            return params
        return popart.update(params, target, weight, self.popart_rate)

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns the running returns that normalise rewards; `()` without normalisation."""
        return self.preprocess.init_memory(rollout)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        mask = environment.action_mask(timestep.observation)
        timestep = self.preprocess.apply(params.normalizer, timestep)
        timestep = self._step_inputs(actor_state, timestep)
        output, core = self.net.step(params.params, actor_state.core, timestep)
        if not isinstance(output, networks.ActorCriticOutput):
            raise options.wrong_output(output, "an ActorCriticOutput")
        if evaluation and self.greedy_evaluation:
            raw = self.action_head.mode(output.policy, mask)
        else:
            raw = self.action_head.sample(output.policy, mask, key)
        log_prob = self.action_head.log_prob(output.policy, mask, raw)
        action = self.action_head.to_action(raw)
        return action, self._next_state(core, action), Extras(raw, log_prob, output.value)

    def _learning_inputs(self, normalizer: Any, rollout: types.Rollout) -> types.TimeStep:
        """Returns the time steps `[T + 1, B]` of a rollout as the network learns from them.

        They are preprocessed by the statistics of acting: so the first ratios are 1 with a lag of
        0, and close to 1 with more lag once many observations are counted; but not in the first
        rollout.
        """
        timestep = self.preprocess.apply_to_rollout(normalizer, rollout.timestep)
        return self._rollout_inputs(rollout._replace(timestep=timestep))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GeneralizedAdvantage(ActorCritic):
    """An actor-critic that learns from generalised advantages, `returns.gae`.

    Where a rollout was acted by older parameters, the policy that bounds an update (the proximal
    policy `p`) is not the acting policy `μ`, and importance weights `ρ = min(p / μ, clip_rho)`
    multiply the losses of the policy; Hilton, Cobbe and Schulman, "Batch size-invariance for policy
    optimization", 2021, https://arxiv.org/abs/2110.00641. With the policy `π` before the update and
    the number of updates `n` between `μ` and `π`:

        log p = (log μ + n log π) / (n + 1)

    This halfway policy, which is not normalised, is this project's choice by trials
    (docs/notebook/tried.md). That of Hilton et al. is `π`, or one of averaged parameters: around
    `π` alone, each update would move as far again before any rollout shows the effect of the last.
    Li, Wu and Shen, "A-3PO", 2025, https://arxiv.org/abs/2512.06547, have its coefficient, but in
    place of `π` the policy that learns, which saves the pass over the rollout.

    Attributes:
      gae_lambda: trace parameter of the advantages.
      clip_rho: largest importance weight of a step that an older policy acted.
    """

    gae_lambda: float = options.fraction(0.95)
    clip_rho: float = options.positive(5.0)

    def targets(self, timestep: types.TimeStep, values: jax.Array) -> returns.Targets:
        """Returns the targets and advantages `[T, B]`, before an agent normalises the advantages.

        Args:
          timestep: `[T + 1, B]`, with rewards to learn from.
          values: `[T + 1, B]` of the same time steps.
        """
        advantage = returns.gae(timestep, values, self.gamma, self.gae_lambda)
        return returns.Targets(advantage + values[:-1], advantage)

    def _proximal(
        self,
        params: types.PyTree,
        core: Any,
        timestep: types.TimeStep,
        rollout: types.Rollout,
    ) -> tuple[Extras, jax.Array]:
        """Returns the extras with log-probabilities of the proximal policy, and `rho` `[T, B]`.

        Where the acting policy is that of this update, both policies are the same and `rho` is 1,
        exactly. Parameters are those before the first gradient step; `core` `[B, ...]` and
        `timestep` `[T + 1, B]` are those of `net.prepare`.
        """
        extras, age = rollout.extras, rollout.age
        if isinstance(age, tuple):  # (): always 0
            return extras, jnp.ones_like(extras.log_prob)
        current = jax.tree.map(lambda x: x[:-1], timestep)
        outputs = networks.unroll_in_parts(
            self.net, params, core, current, lambda output: output.policy
        )
        mask = environment.action_mask(current.observation)
        log_ratio = self.action_head.log_prob(outputs, mask, extras.raw) - extras.log_prob
        move = log_ratio * (age / (age + 1))[None]
        rho = jnp.where(age > 0, jnp.minimum(jnp.exp(move), self.clip_rho), 1.0)
        return extras._replace(log_prob=extras.log_prob + move), rho
