"""What SAC does with the actions of either kind: what outputs of its policy and critics mean.

Axis legend: `N` rows, `D` components of a continuous action, `A` actions, `C` critics.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from agents import exploration
from agents.networks import heads
from podracers import environment, errors


class Expectation(NamedTuple):
    """What a policy can expect in a state, before its temperature joins both."""

    value: jax.Array  # [N] of the actions, by the lowest of the critics
    entropy: jax.Array  # [N] nats


# The critics' outputs `[C, N, num_values]`, of an action `[N, D]` as `to_critics` returns it.
Critics = Callable[[jax.Array | None], jax.Array]


class SACHead(Protocol):
    """What SAC does with one kind of action; all but the arguments of methods is static."""

    num_outputs: int  # of the policy network
    num_values: int  # of each critic
    default_target_entropy: float
    most_target_entropy: float  # the uniform policy's
    default_greedy_evaluation: bool

    def act(self, outputs: jax.Array, mask: jax.Array | None, key: jax.Array, mode: bool):
        """Returns an action of each row for the environment; the most probable if `mode`."""

    def random(self, mask: jax.Array | None, key: jax.Array) -> jax.Array:
        """Returns a uniformly random (legal) action for each of the keys `[N]`."""

    def to_critics(self, action: jax.Array) -> jax.Array | None:
        """Returns what critics see of the environment's actions; None if nothing."""

    def taken(self, values: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the values `[C, N]` of the environment's actions, from critics' outputs."""

    def expect(
        self, outputs: jax.Array, mask: jax.Array | None, key: jax.Array, critics: Critics
    ) -> Expectation:
        """Returns what the policy can expect; gradients pass to `outputs` and to the critics."""

    def target_entropy(self, setting: float, mask: jax.Array | None) -> jax.Array | float:
        """Returns the entropy to keep, `[N]` or for all rows, in nats."""


def head_from_spec(spec: environment.EnvironmentSpec) -> SACHead:
    """Returns the head for the actions of an environment.

    Raises:
      UserError: they are of neither kind.
    """
    if isinstance(spec.action, specs.DiscreteArray):
        return Discrete(int(spec.action.num_values))
    head = heads.from_spec(spec.action)
    if isinstance(head, heads.MultiDiscrete):
        raise errors.UserError(
            f"SAC needs continuous actions or one discrete action, and those of {spec.name} are "
            f"{spec.action!r}: use PPO or IMPALA"
        )
    return Continuous(head.minimum, head.maximum, head.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Continuous:
    """A normal squashed by a hyperbolic tangent, whose mean and deviation depend on the state.

    Critics see actions as portions of their range, in `[-1, 1]`, and entropies are those of such
    portions: neither depends on the units of the environment.

    Attributes:
      minimum: lower bounds, `D` of them.
      maximum: upper bounds, `D` of them.
      shape: shape of the action; `D` is its size.
    """

    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    shape: tuple[int, ...]
    num_values = 1
    default_target_entropy = -1.0
    most_target_entropy = math.log(2.0)  # of the uniform policy
    default_greedy_evaluation = True  # the mean action, as published

    @functools.cached_property
    def _head(self) -> heads.ActionHead:
        portions = specs.BoundedArray((len(self.minimum),), np.float32, -1.0, 1.0)
        return heads.from_spec(portions, "tanh_gaussian", state_dependent_std=True)

    @property
    def num_outputs(self) -> int:
        """Means and log standard deviations."""
        return self._head.num_outputs

    def act(self, outputs, mask, key, mode):
        """Returns float32 `[N, *shape]` within the bounds; the squashed mean if `mode`."""
        raw = self._head.mode(outputs, mask) if mode else self._head.sample(outputs, mask, key)
        return self._to_environment(jnp.tanh(raw))

    def random(self, mask, key):
        """Returns float32 `[N, *shape]` within the bounds."""
        size = (len(self.minimum),)
        return self._to_environment(jax.vmap(lambda k: jax.random.uniform(k, size, minval=-1))(key))

    def to_critics(self, action):
        """Returns float32 `[N, D]` in `[-1, 1]`."""
        minimum, maximum = jnp.array(self.minimum), jnp.array(self.maximum)
        flat = action.astype(jnp.float32).reshape(-1, len(self.minimum))
        return jnp.clip(2.0 * (flat - minimum) / (maximum - minimum) - 1.0, -1.0, 1.0)

    def taken(self, values, action):
        """Returns the only values there are."""
        del action
        return values[..., 0]

    def expect(self, outputs, mask, key, critics):
        """Returns an estimate of one sample, through which gradients pass to the policy."""
        raw = self._head.sample(outputs, mask, key)
        value = jnp.min(critics(jnp.tanh(raw))[..., 0], axis=0)
        return Expectation(value, -self._head.log_prob(outputs, mask, raw))

    def target_entropy(self, setting, mask):
        """Returns `setting` times the number of components."""
        del mask
        return setting * len(self.minimum)

    def _to_environment(self, portion: jax.Array) -> jax.Array:
        minimum, maximum = jnp.array(self.minimum), jnp.array(self.maximum)
        action = minimum + 0.5 * (maximum - minimum) * (portion + 1.0)
        # The sum may round past a bound.
        return jnp.clip(action, minimum, maximum).reshape(-1, *self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Discrete:
    """One of a few actions: expectations are sums over all of them that are legal.

    Christodoulou, "Soft Actor-Critic for Discrete Action Settings", 2019,
    https://arxiv.org/abs/1910.07207.

    Attributes:
      num_actions: number of actions, `A`.
    """

    num_actions: int
    default_target_entropy = 0.98
    most_target_entropy = 1.0
    default_greedy_evaluation = False

    @property
    def num_outputs(self) -> int:
        """A logit for each action."""
        return self.num_actions

    @property
    def num_values(self) -> int:
        """A value for each action."""
        return self.num_actions

    @functools.cached_property
    def _head(self) -> heads.Categorical:
        return heads.Categorical(self.num_actions)

    def act(self, outputs, mask, key, mode):
        """Returns int32 `[N]`; the most probable action if `mode`."""
        return self._head.mode(outputs, mask) if mode else self._head.sample(outputs, mask, key)

    def random(self, mask, key):
        """Returns int32 `[N]`."""
        noise = jax.vmap(lambda k: jax.random.uniform(k, (self.num_actions,)))(key)
        return exploration.legal_argmax(noise, mask)

    def to_critics(self, action):
        """Returns None: critics put out the values of all actions."""
        del action

    def taken(self, values, action):
        """Returns the values of the actions."""
        index = jnp.broadcast_to(action[..., None], (len(values), *action.shape, 1))
        return jnp.take_along_axis(values, index, axis=-1)[..., 0]

    def expect(self, outputs, mask, key, critics):
        """Returns what is exact: nothing is sampled."""
        del key
        policy = self._head.probabilities(outputs, mask)
        value = jnp.sum(policy * jnp.min(critics(None), axis=0), axis=-1)
        return Expectation(value, self._head.entropy(outputs, mask))

    def target_entropy(self, setting, mask):
        """Returns `setting` times the entropy of the uniform policy over the legal actions."""
        if mask is None:
            return setting * math.log(self.num_actions)
        legal = jnp.sum(mask, axis=-1)
        # Where nothing is legal, the policy is uniform over everything.
        return setting * jnp.log(jnp.where(legal > 0, legal, self.num_actions))
