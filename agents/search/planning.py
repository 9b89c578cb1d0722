"""Acting, targets and loss of agents with tree search: MuZero and AlphaZero.

Targets follow the two rules of `agents.parts.returns`, and a third one where a model is unrolled
through the end of an episode:

- up to LAST, and at it for the reward that came with it, everything is learnt;
- past a termination, and at it for the value, values and rewards are zero, whatever the action;
- past a truncation, and at it for the value, all weights are 0.

A sequence that begins at LAST has weight 0, because the action there was ignored and the final
observation may look like one that has a value.

The loss of a sequence, with the importance weight `w` of its draw, and at step `k` of the unrolled
model the search policy `π_k`, n-step return `G_k` (`returns.n_step`) and reward `r_k`, which the
predictions `p_k`, `v_k` and `u_k` approach in cross-entropy `CE` (the root has no reward, and
AlphaZero the root alone):

    w Σ_k c_k (CE(π_k, p_k) + value_cost CE(G_k, v_k) + CE(r_k, u_k)),  c_0 = 1, c_k = 1 / K

Where the search drew its actions (`proposals`), the cross-entropy with the policy is a sum over
these, `-Σ_a π_k(a) log p_k(a)`, with densities of continuous ones.

Axis legend: `T` time, `L` transitions of a sequence, `K` unrolled steps, `B` streams, `N` drawn
sequences, `A` searched actions of a node, `Z` atoms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import optax

from agents.parts import categorical, optimization, options, returns
from agents.replay import replay
from agents.search import proposals, tree_search
from podracers import types


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SearchAgent(replay.ReplayAgent):
    """Options of agents with tree search; `replay.ReplayAgent` describes others.

    Attributes:
      search: `search()` returns a `tree_search.Search`.
      proposal: `proposal(action_spec)` returns a `proposals.Proposal`, which draws the actions of
        each node, for continuous and for many discrete ones; None to search all actions.
      support: largest atom of values and rewards, in squashed units; see `categorical.Support`.
      support_atoms: number of atoms.
      n_steps: steps of the returns that are the targets of values.
      value_cost: weight of the value loss, a cross-entropy.
      temperature: initial temperature of actions: 1 samples from the search's policy, and 0 takes
        its best action, as evaluation does.
      final_temperature: final temperature of actions.
      temperature_steps: agent steps, over all streams, in which it falls linearly; None for a
        constant one.
      temperature_moves: steps of an episode with that temperature, before all later actions are the
        search's best (30 in AlphaZero, which keeps the Dirichlet noise); None for no limit.
    """

    search: Callable[..., tree_search.Search] = tree_search.Search
    proposal: Callable[..., proposals.Proposal] | None = None
    support: float = options.positive(30.0)
    support_atoms: int = options.count(61, least=3)
    n_steps: int = options.count(5)
    value_cost: float = options.positive(0.25, most=1e6)
    temperature: float = options.positive(1.0)
    final_temperature: float = options.non_negative(0.25)
    temperature_steps: float | None = options.positive(None)
    temperature_moves: int | None = options.count(None)

    def __post_init__(self):
        super().__post_init__()
        if self._proposal is None:
            name = type(self).__name__
            options.require_discrete(self, f"bind {name}.proposal = @proposals.Proposal")
        _ = self._search, self._support  # refuse their options

    @functools.cached_property
    def net(self) -> Any:
        proposal = self._proposal
        outputs = self.spec.num_actions if proposal is None else proposal.action_head.num_outputs
        return options.make(self, "network", self.spec, outputs, self.support_atoms)

    @functools.cached_property
    def _support(self) -> categorical.Support:
        return categorical.Support(self.support, self.support_atoms)

    @functools.cached_property
    def _search(self) -> tree_search.Search:
        return options.make(self, "search")

    @functools.cached_property
    def _proposal(self) -> proposals.Proposal | None:
        return options.make(self, "proposal", self.spec.action) if self.proposal else None

    def searched(
        self,
        model: tree_search.Model,
        root: mctx.RootFnOutput,
        mask: jax.Array | None,
        temperature: jax.Array | float,
        key: jax.Array,
    ) -> tuple["Extras", jax.Array]:
        """Returns the results of searches from roots `[B, ...]`, and actions of the environment.

        The arguments are those of `proposals.Proposal.run`.
        """
        if self._proposal is None:
            plan = self._search.run(model, root, mask, temperature, key)
            return Extras(plan.policy, plan.value), plan.action
        plan, raw, action = self._proposal.run(self._search, model, root, mask, temperature, key)
        return Extras(plan.policy, plan.value, raw), action

    def log_policy(self, outputs: jax.Array, raw: Any) -> jax.Array:
        """Returns the log-probabilities `[..., A]` of the actions of searches; see `Extras`."""
        if self._proposal is None:
            return jax.nn.log_softmax(outputs, axis=-1)
        return self._proposal.log_prob(outputs, raw)

    def actor_params(self, learner: optimization.Learner) -> optimization.ActorParams:
        """Returns the parameters, the statistics of the observations, and the temperature."""
        temperature = optimization.annealed(
            self.temperature, self.final_temperature, self.temperature_steps, learner.agent_steps
        )
        return optimization.ActorParams(learner.params, learner.normalizer, temperature)

    def temperature_at(self, params, moves, evaluation: bool) -> jax.Array | float:
        """Returns the temperature of actions, of `[B]` streams after `moves` of their episodes."""
        if evaluation:
            return 0.0
        if self.temperature_moves is None:
            return params.exploration
        # Above 0, so that the noise at the root stays.
        greedy = jnp.finfo(jnp.float32).tiny
        return jnp.where(moves < self.temperature_moves, params.exploration, greedy)

    def stored(self, rollout):
        return rollout._replace(actor_state=())

    def initial_priorities(self, normalizer, recent):
        """Returns the errors of the searches' values against n-step returns; -1 from LAST on."""
        timestep, value = self.preprocess.apply(normalizer, recent.timestep), recent.extras.value
        count = timestep.reward.shape[0] - self.buffer.sequence_length  # K, new sequences
        timestep = jax.tree.map(lambda x: x[:-1], timestep)
        target = returns.n_step(timestep, value, self.gamma, self.n_steps)
        error = jnp.where(returns.weights(timestep) > 0.0, jnp.abs(value[:-1] - target), -1.0)
        return error[self.buffer.burn_in : self.buffer.burn_in + count]


class Extras(NamedTuple):
    """The results of the search at each step, stored for learning."""

    policy: jax.Array  # [T, B, A] probabilities from the search
    value: jax.Array  # [T, B] of that policy
    raw: Any = ()  # [T, B, A, ...] the drawn actions, of the action head; () if all are searched


class Unrolled(NamedTuple):
    """Predictions from the first observation of a sequence and its actions."""

    log_policy: jax.Array  # [K + 1, N, A] log-probabilities of the searched actions
    value: jax.Array  # [K + 1, N, Z] logits
    reward: jax.Array  # [K, N, Z] logits
    passes: jax.Array | None = None  # [K, N] logits that the turn passes, if the model learns turns
    consistency: jax.Array | None = None  # [K, N] losses of latents, weighted


class Targets(NamedTuple):
    """Targets of `Unrolled`, with weights that are 0 or 1."""

    policy: jax.Array  # [K + 1, N, A]
    value: jax.Array  # [K + 1, N]
    reward: jax.Array  # [K, N]
    discount: jax.Array  # [K, N] of the environment
    policy_weight: jax.Array  # [K + 1, N]
    value_weight: jax.Array  # [K + 1, N]
    reward_weight: jax.Array  # [K, N]


def targets(
    timestep: types.TimeStep, extras: Extras, gamma: float, unroll_steps: int, n_steps: int
) -> Targets:
    """Returns the targets of sequences; see the module's docstring for ends of episodes.

    There are `K = unroll_steps` unrolled steps, and returns of `n = n_steps` steps that bootstrap
    from the values in `extras`, which are `[K + n + 1, N]` as the time steps.
    """
    out = returns.weights(timestep)[: unroll_steps + 1] == 0.0  # LAST, or the agent is out
    value = returns.n_step(timestep, extras.value, gamma, n_steps)[: unroll_steps + 1]
    ended = jnp.cumsum(out, axis=0) > 0  # there or before
    # Only the first of them matters.
    terminated = timestep.discount[: unroll_steps + 1] == 0.0
    first_out = out & (jnp.cumsum(out, axis=0) == 1)
    absorbed = (jnp.cumsum(first_out & terminated, axis=0) > 0) & ~out[0]
    reward = timestep.reward[1 : unroll_steps + 1]
    value_weight = (~ended | absorbed).astype(jnp.float32)
    return Targets(
        policy=extras.policy[: unroll_steps + 1],
        value=jnp.where(absorbed, 0.0, value),
        reward=jnp.where(absorbed[:-1], 0.0, reward),
        discount=timestep.discount[1 : unroll_steps + 1],
        policy_weight=(~ended).astype(jnp.float32),
        value_weight=value_weight,
        reward_weight=value_weight[:-1],
    )


def root(
    prediction: Any, embedding: types.PyTree, support: categorical.Support
) -> mctx.RootFnOutput:
    """Returns the root `[B, ...]` of a search from the network's prediction."""
    value = support.decode(prediction.value)
    return mctx.RootFnOutput(prior_logits=prediction.policy, value=value, embedding=embedding)


def loss(
    predicted: Unrolled,
    target: Targets,
    weight: jax.Array,
    support: categorical.Support,
    value_cost: float,
) -> optimization.LossOutput:
    """Returns the loss of sequences with importance weights `[N]`; targets must be constants."""
    unroll_steps = len(predicted.reward)
    # The root has the weight of all unrolled steps together.
    scale = jnp.where(jnp.arange(unroll_steps + 1) == 0, 1.0, 1.0 / max(unroll_steps, 1))
    policy = -jnp.sum(target.policy * predicted.log_policy, axis=-1) * target.policy_weight
    value = support.cross_entropy(predicted.value, target.value) * target.value_weight
    reward = support.cross_entropy(predicted.reward, target.reward) * target.reward_weight

    def summed(loss):  # [K + 1, N] or [K, N]
        return jnp.sum(loss * scale[len(scale) - len(loss) :, None], axis=0)

    policy, value, reward = summed(policy), summed(value), summed(reward)
    total = policy + value_cost * value + reward
    begins = target.policy_weight[0]  # 0 where a sequence begins at LAST
    root_value = support.decode(predicted.value[0])
    others = {}  # losses that the model may have
    if predicted.passes is not None:
        is_known = target.policy_weight[:-1] * jnp.abs(target.discount)
        turn = optax.sigmoid_binary_cross_entropy(predicted.passes, target.discount < 0.0)
        others["loss/turn"] = summed(turn * is_known)
    if predicted.consistency is not None:
        others["loss/consistency"] = summed(predicted.consistency * target.policy_weight[1:])
    total += sum(others.values())
    metrics = {
        **{name: types.Mean.of(losses, begins) for name, losses in others.items()},
        "loss/policy": types.Mean.of(policy, begins),
        "loss/value": types.Mean.of(value, begins),
        "loss/reward": types.Mean.of(reward, begins),
        "value/mean": types.Mean.of(root_value, begins),
        "value/target": types.Mean.of(target.value[0], begins),
        "value/clipped": types.Mean.of(support.beyond(target.value), target.value_weight),
        "reward/clipped": types.Mean.of(support.beyond(target.reward), target.reward_weight),
        "policy/target_entropy": types.Mean.of(
            jnp.sum(jax.scipy.special.entr(target.policy[0]), axis=-1), begins
        ),
    }
    priority = jnp.where(begins > 0.0, jnp.abs(root_value - target.value[0]), -1.0)
    loss = types.Mean.of(weight * total, begins)
    return optimization.LossOutput(loss, metrics, priority, predicted)
