"""Monte Carlo tree search, one tree a stream.

The trees are mctx's, https://github.com/google-deepmind/mctx, which splits one key by position in
the batch. So each search here has one stream, with that stream's key, and `vmap` makes the batch:
results depend neither on neighbouring streams nor on the device.

Axis legend: `B` streams, `A` actions, `N` simulations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

from agents.backends import layouts
from agents.parts import options
from podracers import errors, types

# `model(action [], embedding) -> (mctx.RecurrentFnOutput, embedding)`, of one node, no batch axis.
Model = Callable[[jax.Array, types.PyTree], tuple[mctx.RecurrentFnOutput, types.PyTree]]

_KINDS = ("gumbel", "puct")
_BOUNDS = ("node", "tree")
_MAX_CONSIDERED_ACTIONS = 16  # actions that the root of "gumbel" tries


class Plan(NamedTuple):
    """The result of a search."""

    action: jax.Array  # int32 [B]
    policy: jax.Array  # [B, A] improved probabilities; 0 for illegal actions
    value: jax.Array  # [B] of the root, under that policy


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of the search, and the search.

    Attributes:
      kind: "gumbel" (Danihelka et al., "Policy improvement by planning with Gumbel", 2022,
        https://openreview.net/forum?id=bERaNdoegnO), which improves on the prior with as few as two
        simulations, or "puct", the search of MuZero (https://arxiv.org/abs/1911.08265).
      num_simulations: model steps of each decision.
      max_depth: largest depth of a tree; all streams wait for the deepest.
      value_bounds: the values that are scaled to `[0, 1]`: those of a "node", as in mctx, or of
        the whole "tree", for actions of a node that differ little: the latest means, by the formula
        of MuZero's appendix B (its pseudocode keeps the extremes of all earlier means, too).
      min_value_range: smallest range that values are scaled by, so that differences below a learnt
        model's error do not decide the policy.
      dirichlet_alpha: parameter of the Dirichlet noise at the root of "puct".
      dirichlet_fraction: share of that noise in the prior of the root.
    """

    kind: str = "gumbel"
    num_simulations: int = options.count(16)
    max_depth: int = options.count(8)
    value_bounds: str = "node"
    min_value_range: float = options.positive(1e-8)
    dirichlet_alpha: float = options.positive(0.3)
    dirichlet_fraction: float = options.fraction(0.25)

    def __post_init__(self):
        options.check(self)
        for name, known in (("kind", _KINDS), ("value_bounds", _BOUNDS)):
            errors.require_known(f"Search.{name}: got", getattr(self, name), known)

    def run(
        self,
        model: Model,
        root: mctx.RootFnOutput,
        legal: jax.Array | None,
        temperature: jax.Array | float,
        key: jax.Array,
    ) -> Plan:
        """Searches for each stream, from its root `[B, ...]` and by its key `[B]`.

        Legal actions are bool `[B, A]`, or None where every action is legal. The temperature, a
        number or `[B]`, is that of the actions; 0 gives the best action, without any noise.
        """
        legal = jnp.ones(root.prior_logits.shape, bool) if legal is None else legal
        # Some environments allow no action in a final state: then all count as legal.
        legal = legal | ~jnp.any(legal, axis=-1, keepdims=True)

        def one(root, legal, temperature, key):
            embedding, loop = layouts.tree_loop(model, root.embedding, self.num_simulations)
            root = root.replace(embedding=embedding)
            root, invalid = jax.tree.map(lambda x: x[None], (root, 1.0 - legal))
            plan = self._policy(loop, root, invalid, temperature, key)
            return jax.tree.map(lambda x: x[0], plan)

        temperature = jnp.broadcast_to(jnp.float32(temperature), key.shape)
        return jax.vmap(one)(root, legal, temperature, key)

    def _policy(self, loop, root, invalid, temperature, key) -> Plan:
        """Searches for the one stream of a key."""
        shared: dict[str, Any] = {
            "params": (),
            "rng_key": key,
            "root": root,
            **loop,
            "num_simulations": self.num_simulations,
            "invalid_actions": invalid,
            "max_depth": self.max_depth,
        }
        if self.kind == "gumbel":
            output = mctx.gumbel_muzero_policy(
                **shared,
                gumbel_scale=temperature,
                qtransform=self._completed_values,
                # mctx makes a table with this many rows, for any number of actions.
                max_num_considered_actions=min(_MAX_CONSIDERED_ACTIONS, invalid.shape[-1]),
            )
        else:
            output = mctx.muzero_policy(
                **shared,
                temperature=temperature,
                qtransform=self._values,
                dirichlet_alpha=self.dirichlet_alpha,
                dirichlet_fraction=jnp.where(temperature > 0.0, self.dirichlet_fraction, 0.0),
            )
        policy = jnp.where(invalid > 0.0, 0.0, output.action_weights)
        return Plan(output.action, policy, _root_value(output))

    def _completed_values(self, tree: mctx.Tree, node: jax.Array) -> jax.Array:
        """Returns the scaled values `[A]` of a node's actions for "gumbel"."""
        completed = functools.partial(
            mctx.qtransform_completed_by_mix_value, epsilon=self.min_value_range
        )
        if self.value_bounds == "node":
            return completed(tree, node)
        # A constant that is added to all values of a node changes nothing, except for rounding.
        values = completed(tree, node, rescale_values=False)
        return (values - jnp.max(values)) / self._tree_bounds(tree)[1]

    def _values(self, tree: mctx.Tree, node: jax.Array) -> jax.Array:
        """Returns the scaled values `[A]` of a node's actions for "puct"."""
        if self.value_bounds == "node":
            return mctx.qtransform_by_parent_and_siblings(tree, node, epsilon=self.min_value_range)
        low, value_range = self._tree_bounds(tree)
        visited = tree.children_visits[node] > 0
        return jnp.where(visited, tree.qvalues(node) - low, 0.0) / value_range

    def _tree_bounds(self, tree: mctx.Tree) -> tuple[jax.Array, jax.Array]:
        """Returns the lowest value of visited actions and the root, and the range of values."""
        values = tree.children_rewards + tree.children_discounts * tree.children_values
        visited = tree.children_visits > 0
        root = tree.node_values[mctx.Tree.ROOT_INDEX]
        low = jnp.minimum(root, jnp.min(jnp.where(visited, values, jnp.inf)))
        high = jnp.maximum(root, jnp.max(jnp.where(visited, values, -jnp.inf)))
        return low, jnp.maximum(high - low, self.min_value_range)


def _root_value(output: mctx.PolicyOutput) -> jax.Array:
    """Returns the root's value `[B]` under the improved policy.

    The mean of all simulations would be the value of exploration: "gumbel" visits good and bad
    actions alike.
    """
    summary = output.search_tree.summary()
    weight = jnp.where(summary.visit_counts > 0, output.action_weights, 0.0)
    total = jnp.sum(weight, axis=-1)
    mean = jnp.sum(weight * summary.qvalues, axis=-1) / jnp.maximum(total, 1e-6)
    return jnp.where(total > 1e-6, mean, summary.value)
