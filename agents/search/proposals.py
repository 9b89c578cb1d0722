"""Searches over actions that are drawn, for continuous and for many discrete ones.

Sampled MuZero: Hubert et al., "Learning and Planning in Complex Action Spaces", 2021,
https://arxiv.org/abs/2104.06303. At each node `K` actions are drawn from a proposal `β`, and the
tree's actions are their indices. With the policy `π` and the portion `β̂` of the draws that are the
action `a`, the prior of the search is proportional to

    π(a) β̂(a) / β(a)

which is `β̂` where `β` is `π`. An action that was drawn repeatedly has one index, that of its first
draw; the others are illegal. Where there are at most `K` actions, all of them are searched, with
the prior `π`.

Axis legend: `B` streams, `K` drawn actions, `O` outputs of the policy, `D` parts or components of
an action.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from dm_env import specs

from agents.networks import heads, layers
from agents.parts import options
from agents.search import tree_search
from podracers import types

_LEGAL = 0.5 * layers.MASKED  # logits of legal actions are larger


class Draws(NamedTuple):
    """The actions of a node, without batch axis."""

    raw: jax.Array  # [K, ...] of the action head
    logits: jax.Array  # [K] of the corrected prior; `layers.MASKED` for illegal indices
    legal: jax.Array  # bool [K]


class _Node(NamedTuple):
    """A node of the tree, without batch axis."""

    embedding: types.PyTree  # the model's
    raw: jax.Array  # [K, ...]
    key: Any  # data of the key that successors fold their index in; () where all are searched


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """The distribution that searched actions are drawn from: a mixture of policy and uniform.

    Attributes:
      action: action specification.
      num_actions: `K`, actions of each node (20 in the paper's continuous tasks).
      uniform_fraction: share of draws from the uniform distribution over legal actions.
      head: kind of the policy's action head, see `heads.from_spec`; None for the default.
    """

    action: specs.BoundedArray
    num_actions: int = options.count(20, least=2)
    uniform_fraction: float = options.fraction(0.0)
    head: str | None = None

    def __post_init__(self):
        options.check(self)
        _ = self.action_head  # refuses another kind

    @functools.cached_property
    def action_head(self) -> heads.ActionHead:
        """The action head, which reads the policy's outputs."""
        return heads.from_spec(self.action, self.head)

    @functools.cached_property
    def _all(self) -> np.ndarray | None:
        """All actions, int32 `[A, D]`, if there are at most `K`."""
        if np.issubdtype(self.action.dtype, np.floating):
            return None
        sizes = (np.broadcast_to(self.action.maximum, self.action.shape).ravel() + 1).tolist()
        if math.prod(sizes) > self.num_actions:
            return None
        parts = np.unravel_index(np.arange(math.prod(sizes)), sizes)
        return np.stack(parts, axis=-1).astype(np.int32)

    def log_prob(self, outputs: jax.Array, raw: jax.Array) -> jax.Array:
        """Returns the log-probabilities `[..., K]` of actions, given outputs `[..., O]`."""
        return self.action_head.log_prob(outputs[..., None, :], None, raw)

    def draw(self, outputs: jax.Array, key: Any) -> Draws:
        """Returns the actions of a node, given the outputs `[O]` of its policy.

        Outputs of illegal actions are `layers.MASKED`; no key is needed if all are searched.
        """
        head, count = self.action_head, self.num_actions
        if self._all is not None:
            parts = jnp.asarray(self._all)
            values = outputs.reshape(parts.shape[1], -1)
            logits = jnp.sum(layers.take(values, parts), axis=-1)
            return Draws(parts.reshape(-1, *self.action.shape), logits, logits > _LEGAL)
        policy_key, uniform_key, choice_key = jax.random.split(key, 3)
        rows = jnp.broadcast_to(outputs, (count, *outputs.shape))
        raw = head.sample(rows, None, jax.random.split(policy_key, count))
        logits = jnp.zeros(count)
        if self.uniform_fraction:
            is_uniform = jax.random.bernoulli(choice_key, self.uniform_fraction, (count,))
            is_uniform = is_uniform.reshape(-1, *(1,) * (raw.ndim - 1))
            raw = jnp.where(is_uniform, self._uniform(rows, uniform_key), raw)
            log_ratio = self._log_uniform(rows, raw) - head.log_prob(rows, None, raw)
            policy, uniform = jnp.log(1.0 - self.uniform_fraction), jnp.log(self.uniform_fraction)
            logits = -jnp.logaddexp(policy, uniform + log_ratio)
        equal = jnp.all((raw[:, None] == raw).reshape(count, count, -1), axis=-1)
        first = ~jnp.any(jnp.tril(equal, -1), axis=-1)
        logits += jnp.log(jnp.sum(equal, axis=-1))
        return Draws(raw, jnp.where(first, logits, layers.MASKED), first)

    def _uniform(self, rows: jax.Array, key: jax.Array) -> jax.Array:
        """Returns `raw` of legal actions that are drawn uniformly; `rows` is `[K, O]`."""
        head = self.action_head
        if not isinstance(head, heads.Gaussian):
            return head.sample(_flat(rows), None, jax.random.split(key, len(rows)))
        shape = len(rows), len(head.minimum)
        unit = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
        # A hyperbolic tangent of -1 is that of minus infinity.
        is_squashed = isinstance(head, heads.TanhGaussian)
        return jnp.arctanh(jnp.maximum(unit, -1.0 + 1e-6)) if is_squashed else unit

    def _log_uniform(self, rows: jax.Array, raw: jax.Array) -> jax.Array:
        """Returns the log-probabilities (or log-densities) `[K]` of `_uniform`."""
        head = self.action_head
        if not isinstance(head, heads.Gaussian):
            return head.log_prob(_flat(rows), None, raw)
        is_squashed = isinstance(head, heads.TanhGaussian)
        inside = is_squashed | jnp.all(jnp.abs(raw) <= 1.0, axis=-1)
        return jnp.where(inside, -math.log(2.0) * raw.shape[-1], -jnp.inf)

    def run(
        self,
        search: tree_search.Search,
        model: tree_search.Model,
        root: mctx.RootFnOutput,
        mask: jax.Array | None,
        temperature: jax.Array | float,
        key: jax.Array,
    ) -> tuple[tree_search.Plan, jax.Array, jax.Array]:
        """Searches for each stream, as `tree_search.Search.run`.

        The arguments differ in this: the model takes the environment's actions, the prior logits
        `[..., O]` of root and model are outputs for the head, and the mask is the environment's.

        Returns:
          The plan, whose actions are indices; the drawn actions, `raw` `[B, K, ...]`; and the
          chosen ones, `[B, ...]`, in the form of the environment.
        """
        outputs = heads.legal_outputs(root.prior_logits, mask)
        draw_key = node_key = None
        if self._all is None:
            key, draw_key, node_key = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(key)
        draws = jax.vmap(self.draw)(outputs, draw_key)
        data = () if node_key is None else jax.random.key_data(node_key)
        root = dataclasses.replace(
            root, prior_logits=draws.logits, embedding=_Node(root.embedding, draws.raw, data)
        )
        expand = functools.partial(self._expand, model)
        plan = search.run(expand, root, draws.legal, temperature, key)
        chosen = jax.vmap(lambda raw, index: raw[index])(draws.raw, plan.action)
        return plan, draws.raw, self.action_head.to_action(chosen)

    def _expand(
        self, model: tree_search.Model, index: jax.Array, node: _Node
    ) -> tuple[mctx.RecurrentFnOutput, _Node]:
        """Returns the result of the action `index` of a node, and the next node."""
        action = self.action_head.to_action(node.raw[index])
        output, embedding = model(action, node.embedding)
        draw_key, data = None, ()
        if self._all is None:
            key = jax.random.fold_in(jax.random.wrap_key_data(node.key), index)
            draw_key, node_key = jax.random.split(key)
            data = jax.random.key_data(node_key)
        draws = self.draw(output.prior_logits, draw_key)
        output = dataclasses.replace(output, prior_logits=draws.logits)
        return output, _Node(embedding, draws.raw, data)


def _flat(outputs: jax.Array) -> jax.Array:
    """Returns outputs that are equal for all legal values."""
    return jnp.where(outputs > _LEGAL, 0.0, outputs)
