"""Environment protocols: pure functions of one stream in JAX, and batched environments on the host.

Observations are an array or a (nested) dict of arrays. The top-level key `action_mask` is reserved:
a bool array, true where an action is legal, `[A]` for a discrete action and `[D, A]` for a
multi-discrete action of `D` parts with at most `A` values each. The reserved key
`environment_state` contains the state for agents that search with the environment; networks do not
receive it (`environments.wrappers.Searchable`). The reserved key `active` is for an environment of
several agents, one of which may be out before the episode ends: a bool, false from then on. An
agent that is out has one legal action and rewards of 0, and is not learnt from.

The action specification (`dm_env.specs`) determines the kind of policy:

- `specs.DiscreteArray(num_values)`: one integer in `[0, num_values)`.
- an integer `specs.BoundedArray` of shape `(D,)`: multi-discrete; part `d` lies in
  `[0, maximum[d]]`.
- a floating `specs.BoundedArray`: continuous; every component has finite, different bounds.
"""

import dataclasses
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs
from typing_extensions import TypeIs

from podracers import errors, trees, types

ACTION_MASK = "action_mask"
STATE = "environment_state"
ACTIVE = types.ACTIVE
RESERVED = (ACTION_MASK, STATE, ACTIVE)
RESERVED_METRICS = ("return", "length")  # runners report them of every episode


@dataclasses.dataclass(frozen=True, eq=False)
class EnvironmentSpec:
    """Shapes, dtypes and limits of one stream, without a batch axis.

    Attributes:
      name: the environment's name in logs and error messages.
      observation: a pytree whose leaves are `dm_env.specs.Array`.
      action: see the docstring of this module.
      max_episode_steps: the time limit in agent steps, or None.
      model: the environment that steps from the states in observations; None if observations
        contain no state.
      metrics: names of the numbers in `metrics` of time steps (S6), such as `success`. Runners log
        their means over episodes as `episode/NAME`, and evaluations as `evaluation/NAME`. Numbers
        of a group, such as `achievement/eat_cow`, are not printed.
      players: 2 for a zero-sum game whose players move in turn, each in time steps of its own (S2).
      alternates: of two players, whether no one ever moves twice in a row.
      hidden: whether one player observes what another one does not: observations of both must not
        share a memory, and no search may begin at the state.
      num_agents: `A`, agents that act at the same time, in one stream each; this describes one. Of
        several, all leaves of the environment's time steps and its actions have a first axis `[A]`,
        and FIRST and LAST are those of all agents together.
    """

    name: str
    observation: types.PyTree
    action: specs.BoundedArray
    max_episode_steps: int | None = None
    model: "EnvironmentModel | None" = None
    metrics: tuple[str, ...] = ()
    players: int = 1
    alternates: bool = False
    hidden: bool = False
    num_agents: int = 1

    @property
    def num_actions(self) -> int:
        """Number of values of a discrete action, or of the largest part of a multi-discrete one."""
        return int(np.max(self.action.maximum)) + 1

    @property
    def agent_axis(self) -> tuple[int, ...]:
        """The first axis of time steps and actions of one environment: `(A,)`, or `()` if 1."""
        return () if self.num_agents == 1 else (self.num_agents,)

    def streams_of(self, env_id: Any) -> Any:
        """Returns the global indices `[E * A]` of the streams of environments `[E]`, in order."""
        if self.num_agents == 1:
            return env_id
        agents = np.arange(self.num_agents, dtype=np.int32)
        return (env_id[:, None] * self.num_agents + agents).reshape(-1)

    def zero_observation(self) -> types.PyTree:
        """Returns zeros (NumPy) of the shapes and dtypes of one observation."""
        return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.observation)

    def timesteps(self, *batch: int) -> types.TimeStep:
        """Returns the shapes and dtypes of time steps `[*batch, ...]` (`jax.ShapeDtypeStruct`)."""
        scalar: types.PyTree = specs.Array((), np.float32)
        step_type: types.PyTree = specs.Array((), np.int8)
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct((*batch, *spec.shape), spec.dtype),
            types.TimeStep(
                self.observation, scalar, scalar, step_type, dict.fromkeys(self.metrics, scalar)
            ),
        )


class MultiDiscreteArray(specs.BoundedArray):
    """Integers from 0 that stand for kinds; a single one is a `specs.DiscreteArray`.

    They are a vector `(D,)`, or a grid `(H, W, D)` whose cells have `D` parts.
    """

    def __reduce__(self):
        return MultiDiscreteArray, super().__reduce__()[1]


def num_values(spec: specs.Array) -> np.ndarray | None:
    """Returns the number of values of each part of a categorical observation, `[D]`, or None.

    Networks read one-hot codes of a `specs.DiscreteArray` and of a `MultiDiscreteArray`, whose last
    axis has the parts: a grid becomes an image of codes. Other integers are numbers, because bounds
    alone do not distinguish kinds from counts.
    """
    is_kinds = isinstance(spec, specs.DiscreteArray | MultiDiscreteArray)
    if not is_kinds or len(spec.shape) not in (0, 1, 3):
        return None
    highest = np.broadcast_to(spec.maximum, spec.shape or (1,))
    highest = highest.max(axis=tuple(range(highest.ndim - 1)), initial=0)  # maximum over the cells
    return highest.astype(np.int64) + 1


def action_fault(action: Any) -> str | None:
    """Returns the fault of an action's spec, if it has one."""
    if not isinstance(action, specs.BoundedArray):
        return (
            f"is a {type(action).__name__}, supported are a DiscreteArray, an integer BoundedArray "
            "of shape (D,) and a floating BoundedArray (all of dm_env.specs)"
        )
    is_float = np.issubdtype(action.dtype, np.floating)
    is_number = is_float or np.issubdtype(action.dtype, np.integer)
    if not is_number or jax.dtypes.canonicalize_dtype(action.dtype) != action.dtype:
        return f"has dtype {action.dtype}, expected int32, float32 or a smaller one"
    if is_float:
        return _bounds_fault(action)
    if not isinstance(action, specs.DiscreteArray):
        if len(action.shape) != 1:
            return f"has shape {action.shape}: use a DiscreteArray, or shape (D,) for several parts"
        if np.any(action.minimum != 0):
            return f"has minimum {action.minimum}: parts count from 0"
    return None


def _bounds_fault(action: specs.BoundedArray) -> str | None:
    """Returns the fault of the first faulty component of a continuous action, or None.

    Bounds are finite, and the dtype has their difference and its reciprocal as normal numbers.
    """
    smallest = float(jnp.finfo(action.dtype).tiny)
    for index in np.ndindex(action.shape):
        bounds = (action.minimum, action.maximum)
        low, high = (float(np.broadcast_to(bound, action.shape)[index]) for bound in bounds)
        if not np.isfinite([low, high]).all():
            fault = "expected finite ones"
        elif low == high:
            fault = "leave it out of the action, because it has a single value"
        elif not smallest <= high - low <= 1.0 / smallest:
            fault = f"their difference exceeds the range of {action.dtype}"
        else:
            continue
        return f"has bounds from {low:g} to {high:g} in component {[*index]}: {fault}"
    return None


class EnvironmentModel(Protocol):
    """An environment whose observations contain its state, under the key `STATE`."""

    def step_from(
        self, state: types.PyTree, action: jax.Array
    ) -> tuple[types.TimeStep, types.PyTree]:
        """Returns the time step and state after an action (one stream, no batch axis).

        States are parts of observations under `STATE`. The time step has neither metrics nor a
        state in its observation.
        """

    def redrawn(self, state: types.PyTree, key: jax.Array) -> types.PyTree:
        """Returns the state with random events ahead that are drawn anew, by `key`.

        A search must begin with it: a player does not know the coming events.
        """


def action_mask(observation: types.PyTree) -> Any:
    """Returns the action mask of an observation, or of the spec of one; None where it has none."""
    return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


def without_state(observation: types.PyTree) -> types.PyTree:
    """Returns an observation, or the spec of one, without the state of the environment."""
    if not isinstance(observation, dict) or STATE not in observation:
        return observation
    return {key: part for key, part in observation.items() if key != STATE}


@runtime_checkable
class Environment(Protocol):
    """Pure environment, without auto-reset; the runner batches and resets it.

    It is one stream, or several agents with a stream each (`EnvironmentSpec.num_agents`).
    For videos it may have `render(state) -> np.ndarray`, uint8 `[height, width, 3]`, on the host.
    Anakin may read `observation_of(state)`, if there is one, in place of the observation of `reset`
    and `step`, which must be equal: a step then computes one observation, not those of two states.
    Its `evaluation_environment`, if any, is the form that evaluations play, such as the environment
    without random parameters; states and observations have the same structure. `parameters` are
    nominal values by name that `environments.randomized` may change beside float options;
    `with_parameters(values)` returns a copy with other values, which may be traced.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """The shapes of this environment."""

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode. The state contains the keys of later steps."""

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Advances one step; the result for a state whose episode ended is discarded."""


@runtime_checkable
class HostEnvironment(Protocol):
    """`E` environments that are stepped together on the host, with next-step auto-reset (S1).

    Their `B` streams are the environments, or with several agents `A`, `B = E * A` in order:
    neighbours are agents of one environment.

    `send` and `recv` alternate. All leaves are NumPy arrays `[B, ...]` in the dtypes of the spec.
    Each call returns new arrays, which are not written to afterwards. Calls come from one thread at
    a time.
    """

    @property
    def num_envs(self) -> int:
        """The number of environments `E`."""

    def reset(self) -> types.TimeStep[np.ndarray]:
        """Starts an episode of every environment; called once, first."""

    def send(self, action: np.ndarray) -> None:
        """Starts a step of every environment, without waiting where the simulator allows it.

        Actions `[B, ...]` are ignored where the latest time step was LAST: the episode restarts.
        """

    def recv(self) -> types.TimeStep[np.ndarray]:
        """Waits for the step that `send` started, and returns its time steps."""

    def close(self) -> None:
        """Frees threads, processes and files of the simulators. A second call does nothing.

        Must not wait for another thread that hangs in `recv`.
        """


@runtime_checkable
class HostEnvironmentFactory(Protocol):
    """Factory of host environments: a frozen dataclass of static configuration.

    For videos it may have `render(timestep) -> np.ndarray`, uint8 `[height, width, 3]`, of a time
    step without a batch axis. If only simulators can draw, it may have `filmed()` instead: the same
    factory, whose host environments have `render() -> list[np.ndarray]`, one image each. It raises
    `errors.UserError` if nothing can be drawn.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """Shapes of one environment; cheap, and keeps no simulator."""

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> HostEnvironment:
        """Makes `E` environments.

        Args:
          key: one typed key, equal for all streams of a run, and a different one for evaluations.
          env_id: `[E]` int32, global indices; the seed of each depends only on `key` and its index
            (`stream_seeds`).
          num_threads: number of host threads that the simulators may use.
        """


AnyEnvironment: TypeAlias = Environment | HostEnvironmentFactory


def is_host(environment: object) -> TypeIs[HostEnvironmentFactory]:
    """Returns whether this is a factory of host environments, not a JAX environment."""
    return hasattr(environment, "make")


def name_of(environment: Any) -> str:
    """Returns the name of an environment, such as its id, and the path of its innermost class."""
    name = getattr(getattr(environment, "spec", None), "name", None)
    while hasattr(inner := getattr(environment, "environment", None), "spec"):
        environment = inner
    path = errors.path_of(environment)
    return f"{name} ({path})" if name else path


def stream_seeds(key: jax.Array, env_id: np.ndarray) -> np.ndarray:
    """Returns a seed for each stream `env_id` `[B]`, int64 in `[0, 2**31)`.

    Streams of one key never share a seed: the map from index to seed is one to one. Seeds of
    neighbours are far apart, for simulators that derive seeds by counting.
    """
    base = int(jax.jit(jax.random.bits, static_argnames="dtype")(key, dtype=np.uint32))
    # The golden ratio's odd multiple of 2**31 (Knuth, vol. 3, 6.4): odd numbers have an inverse.
    return (base + np.asarray(env_id, np.int64) * 1_327_217_885) % 2**31


def random_action(
    action: specs.BoundedArray, observation: types.PyTree, key: jax.Array
) -> jax.Array:
    """Draws a legal action uniformly (one stream, no batch axis).

    `action` is its spec; the `action_mask` of the observation is applied if there is one.
    """
    if np.issubdtype(action.dtype, np.floating):
        bounds = action.minimum, action.maximum
        return jax.random.uniform(key, action.shape, action.dtype, *bounds)
    legal = legal_values(action)
    if (mask := action_mask(observation)) is not None:
        legal = legal & mask
    # Each of several identically distributed numbers is the largest with equal probability.
    score = jax.random.uniform(key, legal.shape)
    return jnp.argmax(jnp.where(legal, score, -1.0), axis=-1).astype(action.dtype)


def legal_values(action: specs.BoundedArray) -> np.ndarray:
    """Returns whether a part has a value: parts may have fewer than the widest, [A] or [D, A]."""
    num_values = np.broadcast_to(np.asarray(action.maximum, np.int64) + 1, action.shape)
    return np.arange(num_values.max()) < num_values[..., None]


def refuse(candidate: Any, faults: list[str]) -> None:
    """Raises `errors.UserError`, in one line, if an environment has faults."""
    if faults:
        path = name_of(candidate)
        raise errors.UserError(f"environment {path}: {'; '.join(faults)}")


def structure_faults(method: str, timestep: Any, expected: types.TimeStep) -> list[str]:
    """Returns the leaves in which host time steps differ from `EnvironmentSpec.timesteps`.

    A run compares every step, so the common case is cheap.
    """
    if not isinstance(timestep, types.TimeStep):
        return [f"{method} returned {type(timestep).__name__}, expected types.TimeStep"]
    if _signature(timestep) == _signature(expected):
        return []
    differences = trees.differences(trees.structure(timestep), trees.structure(expected))
    return [f"{method}: {difference}" for difference in differences]


def _signature(tree: types.PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves)
