"""Action heads: distributions over actions, parametrised by the flat output of a policy network.

`CategoricalReturn` is a distribution of returns, parametrised by the output of a value network.

`sample` and `mode` of a head return `raw`, the value that agents store and of which they recompute
log-probabilities; `to_action` turns it into the environment's action. For a squashed Gaussian `raw`
is the sample before the squash. distrax, the reference of the tests, would have to invert the
squash: its log-probability of tanh(12) is NaN.

Axis legend: `...` any leading axes, `B` streams, `D` parts or components of an action, `A` the
largest number of values of a part.
"""

import dataclasses
import functools
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from agents.networks import layers
from podracers import environment, errors

_MIN_STD = 1e-3
_MAX_STD = 1e2
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_QUADRATURE_NODES = 32


def legal_values(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns values `[..., A]` with -1e9 in place of those of illegal actions.

    Every action is legal where the mask `[..., A]` is None or allows none, as in final states of
    some environments.
    """
    if mask is None:
        return values
    return jnp.where(mask | ~jnp.any(mask, axis=-1, keepdims=True), values, layers.MASKED)


def legal_outputs(outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns outputs `[..., O]` of a policy whose mask is `[..., A]` or `[..., D, A]`, masked."""
    if mask is None:
        return outputs
    return legal_values(outputs.reshape(mask.shape), mask).reshape(outputs.shape)


def legal_argmax(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the action with the largest of `legal_values`, int32 `[...]`; the first of equals."""
    return jnp.argmax(legal_values(values, mask), axis=-1).astype(jnp.int32)


@runtime_checkable
class ActionHead(Protocol):
    """A distribution over actions, given the flat output `[..., num_outputs]` of a network."""

    @property
    def num_outputs(self) -> int:
        """Size of the flat output."""

    @property
    def num_free(self) -> int:
        """Number of last outputs that are free parameters, without an observation."""

    def sample(self, outputs: jax.Array, mask: jax.Array | None, key: jax.Array) -> jax.Array:
        """Samples `raw`; `outputs` `[B, num_outputs]`, `key` `[B]` typed keys."""

    def mode(self, outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Returns the greedy `raw`."""

    def log_prob(self, outputs: jax.Array, mask: jax.Array | None, raw: jax.Array) -> jax.Array:
        """Returns the log-probability (or log-density of the action) `[...]`, over all parts."""

    def entropy(self, outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Returns the entropy `[...]` in nats, over all parts."""

    def kl(
        self, target: jax.Array, outputs: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Returns divergences `[...]` from `target` to `outputs`, in nats, over all parts.

        Continuous actions have two, of means and of standard deviations, each with the target's
        other one (Abdolmaleki et al., 2018, https://arxiv.org/abs/1812.02256); others have one.
        """

    def to_action(self, raw: jax.Array) -> jax.Array:
        """Returns the action in the form of the environment's action specification."""


@dataclasses.dataclass(frozen=True, eq=False)
class Categorical:
    """One integer, `raw` `[...]`; masks are `[..., A]` bool.

    Attributes:
      num_values: number of values, `A`.
    """

    num_values: int
    num_free = 0

    @property
    def num_outputs(self) -> int:
        """`A` logits."""
        return self.num_values

    def _log_probs(self, outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        if mask is not None:
            outputs = jnp.where(mask, outputs, layers.MASKED)
        return jax.nn.log_softmax(outputs, axis=-1)

    def sample(self, outputs, mask, key):
        logits = self._log_probs(outputs, mask)
        return jax.vmap(jax.random.categorical)(key, logits).astype(jnp.int32)

    def mode(self, outputs, mask):
        """Returns the most probable legal value, of each part; the lowest one among equals."""
        return jnp.argmax(self._log_probs(outputs, mask), axis=-1).astype(jnp.int32)

    def log_prob(self, outputs, mask, raw):
        return layers.take(self._log_probs(outputs, mask), raw)

    def probabilities(self, outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Returns `[..., A]`; that of an illegal value is exactly 0."""
        return jnp.exp(self._log_probs(outputs, mask))

    def entropy(self, outputs, mask):
        log_p = self._log_probs(outputs, mask)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def kl(self, target, outputs, mask):
        log_p = self._log_probs(target, mask)
        terms = jnp.exp(log_p) * (log_p - self._log_probs(outputs, mask))
        return (jnp.sum(terms, axis=tuple(range(outputs.ndim - 1, terms.ndim))),)

    def to_action(self, raw):
        return raw


@dataclasses.dataclass(frozen=True, eq=False)
class MultiDiscrete(Categorical):
    """`D` independent integers, `raw` `[..., D]`; masks are `[..., D, A]` bool.

    Attributes:
      num_values: number of values of each of the `D` parts; `A` is the largest.
    """

    # pyrefly: ignore[bad-override]  # one number a part; what both share does not read it
    num_values: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        """`D * A` logits; those past the end of a shorter part are never legal."""
        return len(self.num_values) * max(self.num_values)

    def _log_probs(self, outputs, mask):
        parts, most = len(self.num_values), max(self.num_values)
        exists = np.arange(most) < np.array(self.num_values)[:, None]  # [D, A]
        outputs = outputs.reshape(*outputs.shape[:-1], parts, most)
        if mask is not None:
            outputs = jnp.where(mask, outputs, layers.MASKED)
        # Values past the end of a part are lower than illegal ones: where a part's mask is empty,
        # the policy is uniform over the values that exist.
        return jax.nn.log_softmax(jnp.where(exists, outputs, 2.0 * layers.MASKED), axis=-1)

    def log_prob(self, outputs, mask, raw):
        return jnp.sum(super().log_prob(outputs, mask, raw), axis=-1)

    def entropy(self, outputs, mask):
        log_p = self._log_probs(outputs, mask)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=(-2, -1))


@dataclasses.dataclass(frozen=True, eq=False)
class Gaussian:
    """Independent normals in units of the bounds, which are -1 and 1; actions are clipped to them.

    The flat output holds `D` means and `D` log standard deviations; `raw` is `[..., D]`. Densities
    are those of the unclipped sample, as is usual in PPO; masks are ignored.

    Attributes:
      minimum: lower bounds, `D` of them.
      maximum: upper bounds, `D` of them.
      shape: shape of the action; `D` is its size.
    """

    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    shape: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        """`D` means and `D` log standard deviations."""
        return 2 * len(self.minimum)

    @property
    def num_free(self) -> int:
        """`D`: the standard deviations."""
        return len(self.minimum)

    @functools.cached_property
    def _unit(self) -> tuple[np.ndarray, np.ndarray]:
        """The middles and half widths of the intervals, float32 `[D]`."""
        low, high = np.array(self.minimum), np.array(self.maximum)
        middle, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
        return middle.astype(np.float32), half.astype(np.float32)

    def to_units(self, action: jax.Array) -> jax.Array:
        """Returns actions `[..., *shape]` of the environment in units of the bounds, `[..., D]`."""
        middle, half = self._unit
        leading = action.shape[: action.ndim - len(self.shape)]
        return (action.reshape(*leading, len(middle)) - middle) / half

    def _mean_and_log_std(self, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return mean, jnp.clip(log_std, math.log(_MIN_STD), math.log(_MAX_STD))

    def sample(self, outputs, mask, key):
        mean, log_std = self._mean_and_log_std(outputs)
        noise = jax.vmap(lambda k: jax.random.normal(k, mean.shape[-1:]))(key)
        return mean + jnp.exp(log_std) * noise

    def mode(self, outputs, mask):
        return self._mean_and_log_std(outputs)[0]

    def log_prob(self, outputs, mask, raw):
        mean, log_std = self._mean_and_log_std(outputs)
        scaled = (raw - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * jnp.square(scaled) - log_std - _HALF_LOG_TAU, axis=-1)

    def entropy(self, outputs, mask):
        _, log_std = self._mean_and_log_std(outputs)
        return jnp.sum(0.5 + _HALF_LOG_TAU + log_std, axis=-1)

    def kl(self, target, outputs, mask):
        target_mean, target_log_std = self._mean_and_log_std(target)
        mean, log_std = self._mean_and_log_std(outputs)
        log_ratio = 2.0 * (target_log_std - log_std)  # log ratio of variances
        of_mean = 0.5 * jnp.square((mean - target_mean) * jnp.exp(-target_log_std))
        of_std = 0.5 * (jnp.expm1(log_ratio) - log_ratio)
        return jnp.sum(of_mean, axis=-1), jnp.sum(of_std, axis=-1)

    def to_action(self, raw):
        middle, half = self._unit
        action = jnp.clip(middle + half * raw, jnp.array(self.minimum), jnp.array(self.maximum))
        return action.reshape(raw.shape[:-1] + self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class TanhGaussian(Gaussian):
    """Independent normals squashed by a hyperbolic tangent and rescaled to the bounds.

    `raw` is the sample before the squash. Densities are those of the action, in units of the
    bounds. The entropy has no closed form: it is integrated by Gauss-Hermite quadrature.
    """

    def _log_slope(self, raw: jax.Array) -> jax.Array:
        """Returns `log |d tanh(raw) / d raw|` of each component; stable for large `raw`."""
        # log(1 - tanh(x)^2) loses everything to cancellation for |x| > 9; this form loses nothing.
        return 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))

    def log_prob(self, outputs, mask, raw):
        density = super().log_prob(outputs, mask, raw)
        return density - jnp.sum(self._log_slope(raw), axis=-1)

    def entropy(self, outputs, mask):
        mean, log_std = self._mean_and_log_std(outputs)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        weights = jnp.asarray(weights / weights.sum(), jnp.float32)  # [K]
        raw = mean + jnp.exp(log_std) * jnp.asarray(nodes, jnp.float32).reshape(
            (-1,) + (1,) * mean.ndim
        )  # [K, ..., D]
        slope = jnp.tensordot(weights, self._log_slope(raw), axes=1)
        return super().entropy(outputs, mask) + jnp.sum(slope, axis=-1)

    def to_action(self, raw):
        return super().to_action(jnp.tanh(raw))


@dataclasses.dataclass(frozen=True)
class CategoricalReturn:
    """The distribution of a return over evenly spaced atoms, for each action: C51.

    Bellemare, Dabney and Munos, "A Distributional Perspective on Reinforcement Learning", 2017,
    https://arxiv.org/abs/1707.06887. `Z` atoms.

    Attributes:
      minimum: lowest atom, in units of the preprocessed rewards.
      maximum: highest atom; targets beyond both are clipped.
      num_atoms: `Z`.
    """

    minimum: float = -10.0
    maximum: float = 10.0
    num_atoms: int = 51

    def __post_init__(self):
        errors.require_count(self, "num_atoms")
        if not (self.num_atoms > 1 and -math.inf < self.minimum < self.maximum < math.inf):
            raise errors.UserError(
                "CategoricalReturn: expected minimum < maximum and 2 atoms or more, got "
                f"minimum = {self.minimum}, maximum = {self.maximum}, num_atoms = {self.num_atoms}"
            )

    def mean(self, logits: jax.Array) -> jax.Array:
        """Returns the mean `[...]` of the distributions with logits `[..., Z]`."""
        return jnp.sum(jax.nn.softmax(logits) * self._atoms(), axis=-1)

    def loss(
        self,
        logits_tm1: jax.Array,
        action: jax.Array,
        reward: jax.Array,
        discount: jax.Array,
        logits_t: jax.Array,
        selector: jax.Array,
    ) -> jax.Array:
        """Returns the divergences `[B]` from the projected targets, which are constants.

        Their gradient is that of the cross-entropy. The divergence is Rainbow's priority (Hessel et
        al. 2017, https://arxiv.org/abs/1710.02298): it is 0 where nothing is left to be learnt.

        Args:
          logits_tm1: `[B, A, Z]`, those that learn.
          action: `[B]` int32, those that were taken.
          reward: `[B]`, the sum of those until the target bootstraps.
          discount: `[B]` of the return from then on.
          logits_t: `[B, A, Z]` of it.
          selector: `[B, A]` values, of which the largest chooses the action then.
        """
        atoms = self._atoms()

        def chosen(logits, action):
            return layers.take(jnp.swapaxes(logits, 1, 2), action[:, None])

        probabilities = jax.nn.softmax(chosen(logits_t, jnp.argmax(selector, axis=-1)))
        moved = reward[:, None] + discount[:, None] * atoms
        from rlax import categorical_l2_project  # noqa: PLC0415 (its import takes 0.7 s)

        project = jax.vmap(categorical_l2_project, (0, 0, None))
        target = jax.lax.stop_gradient(project(moved, probabilities, atoms))
        log_predicted = jax.nn.log_softmax(chosen(logits_tm1, action))
        return optax.losses.kl_divergence(log_predicted, target)

    def _atoms(self) -> jax.Array:
        return jnp.linspace(self.minimum, self.maximum, self.num_atoms)


_CONTINUOUS = {"gaussian": Gaussian, "tanh_gaussian": TanhGaussian}


def from_spec(action_spec: specs.BoundedArray, kind: str | None = None) -> ActionHead:
    """Returns the head for an action specification.

    Args:
      action_spec: action specification, see `podracers.environment`.
      kind: "categorical", "multi_discrete", "gaussian" or "tanh_gaussian"; by default the first of
        them that fits the specification.

    Raises:
      UserError: the kind does not fit the specification, or no kind does.
    """
    if fault := environment.action_fault(action_spec):
        raise errors.UserError(f"the action {fault}")
    fitting = ("multi_discrete",) if action_spec.shape else ("categorical",)
    if np.issubdtype(action_spec.dtype, np.floating):
        fitting = tuple(_CONTINUOUS)
    kind = kind or fitting[0]
    if kind not in fitting:
        raise errors.UserError(
            f"no action head '{kind}' for {action_spec!r}{errors.nearest(kind, fitting)}"
        )
    if kind == "categorical":
        return Categorical(int(action_spec.maximum) + 1)
    minimum = np.broadcast_to(action_spec.minimum, action_spec.shape).reshape(-1)
    maximum = np.broadcast_to(action_spec.maximum, action_spec.shape).reshape(-1)
    if kind == "multi_discrete":
        return MultiDiscrete(tuple(int(most) + 1 for most in maximum))
    return _CONTINUOUS[kind](
        minimum=tuple(minimum.tolist()),
        maximum=tuple(maximum.tolist()),
        shape=tuple(action_spec.shape),
    )


def features(action: jax.Array, action_spec: specs.BoundedArray) -> jax.Array:
    """Returns an action as features `[..., F]`: one-hot parts, or components in `[-1, 1]`."""
    if np.issubdtype(action_spec.dtype, np.floating):
        head = from_spec(action_spec)
        assert isinstance(head, Gaussian)
        return head.to_units(action)
    sizes = np.broadcast_to(action_spec.maximum, action_spec.shape).reshape(-1) + 1  # [D]
    return layers.one_hot(action if action_spec.shape else action[..., None], sizes)
