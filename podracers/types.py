"""The stream contract (`docs/architecture.md`): the arrays that runners pass to agents.

Axis legend: `T` time, `B` streams (one environment each, or one agent of it, for the whole run).

- S1  A LAST time step carries the true final observation. The action chosen there is ignored, and
  the next time step of the stream is FIRST.
- S2  A discount is 0 iff the episode terminated. Otherwise it is 1, or -1 where the turn passed: in
  a zero-sum game of two players a time step is that of the player to move, its reward is that of
  the player who moved, and the discount is -1 where these players differ. Of several agents in one
  environment, one that goes out before the episode ends arrives there with discount 0 (`ACTIVE`).
- S3  Row `b` is one stream for the whole run, and rollout `k + 1` begins where `k` ended.
- S4  `Agent.act` resets its own recurrent state at FIRST.
- S5  One rollout is acted by one version of the parameters.
- S6  The `metrics` of a LAST time step are the numbers of the episode that ends there. At MID
  they are its numbers so far, used only where an evaluation cuts an episode. An episode whose
  number is NaN has none. Runners remove them before an agent receives a time step.
"""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeVar

from podracers import errors

PyTree = Any
# Arrays of a device; host environments have `TimeStep[np.ndarray]`.
_Array = TypeVar("_Array", jax.Array, np.ndarray, default=jax.Array)

# Step types are plain Python ints: nothing at import time may touch a device.
FIRST = 0
MID = 1
LAST = 2

# Key of observations: bool, false from the step on in which the stream's agent went out.
ACTIVE = "active"

# Rules of the numbers of a time step, each in the words of the fault; see `broken_rules`.
RULES = (
    "reset returned a step_type other than FIRST",
    "reset returned a reward other than 0",
    "step returned a step_type other than MID or LAST",
    "a LAST time step has a discount other than 0 (terminated) or 1 (truncated)",
    "a time step other than LAST has a discount other than 1",
    "a discount is -1, which needs EnvironmentSpec.players = 2, or at a time step of reset",
    "reward is NaN, infinite or missing",
)


class TimeStep(NamedTuple, Generic[_Array]):
    """One time step of an environment; leaves are `[...]`, `[B, ...]` or `[T, B, ...]`."""

    observation: PyTree
    reward: _Array  # float32, received on arrival, never clipped; 0 at FIRST
    discount: _Array  # float32, 0 iff the episode terminated here, -1 where the turn passed (S2)
    step_type: _Array  # int8, FIRST | MID | LAST
    # float32, the environment's own numbers by name (S6)
    metrics: dict[str, _Array] = {}  # noqa: RUF012  (nothing writes into it)

    def first(self) -> _Array:
        """Returns a bool array: an episode begins here."""
        return self.step_type == FIRST

    def last(self) -> _Array:
        """Returns a bool array: an episode ends here, terminated or truncated."""
        return self.step_type == LAST

    def terminated(self) -> _Array:
        """Returns a bool array: the episode ended here by the rules of the environment."""
        return self.last() & (self.discount == 0.0)

    def truncated(self) -> _Array:
        """Returns a bool array: the episode was cut here, by a time limit for example."""
        return self.last() & (self.discount != 0.0)

    def active(self) -> _Array | None:
        """Returns a bool array: the stream's agent is not out; None where agents never are."""
        return self.observation.get(ACTIVE) if isinstance(self.observation, dict) else None


def restart(
    observation: PyTree, metrics: Mapping[str, jax.typing.ArrayLike] | None = None
) -> TimeStep:
    """Returns the FIRST time step of an episode (one stream, no batch axis).

    `metrics` are as in `transition`; their values are ignored at FIRST.
    """
    return TimeStep(
        observation=observation,
        reward=jnp.zeros((), jnp.float32),
        discount=jnp.ones((), jnp.float32),
        step_type=jnp.full((), FIRST, jnp.int8),
        metrics=_as_floats(metrics),
    )


def transition(
    observation: PyTree,
    reward: jax.Array | float,
    terminated: jax.Array | bool = False,
    truncated: jax.Array | bool = False,
    metrics: Mapping[str, jax.typing.ArrayLike] | None = None,
    passes: jax.Array | bool = False,
) -> TimeStep:
    """Returns the time step that an action led to (one stream, no batch axis).

    Args:
      observation: the observation on arrival; the true final observation when the episode ends.
      reward: scalar, received on arrival.
      terminated: scalar bool, the episode ended by the rules of the environment.
      truncated: scalar bool, the episode was cut; termination wins when both hold.
      metrics: scalars by the names of `environment.EnvironmentSpec.metrics`: the numbers of the
        episode so far, because a wrapper or an evaluation may cut it at any step.
      passes: scalar bool, in a game of two players: the other one is to move now.

    Raises:
      errors.UserError: there is no reward, which some versions of JAX convert to NaN.
    """
    if reward is None:
        raise errors.UserError("types.transition: expected a number as reward, got None")
    terminated = jnp.asarray(terminated, bool)
    last = terminated | jnp.asarray(truncated, bool)
    return TimeStep(
        observation=observation,
        reward=jnp.asarray(reward, jnp.float32),
        discount=jnp.where(terminated, 0.0, jnp.where(passes, -1.0, 1.0)).astype(jnp.float32),
        step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
        metrics=_as_floats(metrics),
    )


def _as_floats(metrics: Mapping[str, jax.typing.ArrayLike] | None) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in (metrics or {}).items()}


def broken_rules(timestep: TimeStep, fresh: jax.Array, players: int) -> dict[str, jax.Array]:
    """Returns where time steps `[...]` break each of `RULES`, bool `[...]`.

    `fresh`, bool `[...]`, is true where a reset made the time step, and `players` is that of
    `environment.EnvironmentSpec`. Of observations, only `ACTIVE` is used.
    """
    _, reward, discount, step_type, _ = timestep
    size, passes = jnp.abs(discount), discount == -1.0
    last, is_binary = timestep.last(), (size == 0.0) | (size == 1.0)
    unequal = size != 1.0
    if (active := timestep.active()) is not None:
        unequal &= active | (size != 0.0)
    broken = (
        fresh & (step_type != FIRST),
        fresh & (jnp.abs(reward) > 0.0),  # NaN is the last rule
        ~fresh & (step_type != MID) & ~last,
        last & ~is_binary,
        ~last & unequal,
        passes & (fresh | (players != 2)),
        ~jnp.isfinite(reward),
    )
    return dict(zip(RULES, broken, strict=True))


class Rollout(NamedTuple):
    """`T` consecutive transitions of `B` fixed streams."""

    timestep: TimeStep  # [T + 1, B, ...]; the last one bootstraps and begins the next rollout
    action: PyTree  # [T, B, ...] as the environment received it
    extras: PyTree  # [T, B, ...] further outputs of `act`: logits, values, search policies
    actor_state: PyTree  # [B, ...] before the action at t = 0
    age: PyTree = ()  # int32 [B], updates that the acting parameters were behind; () if always 0


class AgentState(NamedTuple):
    """State of an agent's learning."""

    learner: PyTree  # identical on every learner device: parameters, optimizer, counters
    memory: PyTree  # separate on each learner device: replay, recent rollouts; or ()


class Mean(NamedTuple):
    """A mean as a total and a count, which can be merged before the division."""

    total: jax.Array  # float32
    count: jax.Array  # float32

    @classmethod
    def of(
        cls, values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None
    ) -> "Mean":
        """Returns the weighted mean of `values` (any shape), unreduced over devices."""
        values = jnp.asarray(values, jnp.float32)
        if weights is None:
            return cls(jnp.sum(values), jnp.asarray(values.size, jnp.float32))
        weights = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), values.shape)
        # A value with weight zero may be NaN, and 0 * NaN is NaN.
        kept = jnp.where(weights > 0.0, values, 0.0)
        return cls(jnp.sum(weights * kept), jnp.sum(weights))

    def merge(self, other: "Mean") -> "Mean":
        """Returns the mean of both sets of samples."""
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> jax.Array:
        """Returns `total / count`; NaN where nothing was counted."""
        return self.total / self.count
