"""What an environment is: a pure one-stream protocol for JAX, a batched one for the host.

Observations are an array or a (nested) dict of arrays. The top-level key `action_mask` is reserved:
a bool array, true where an action is legal, `[A]` for a discrete action and `[D, A]` for a
multi-discrete one of `D` parts with at most `A` values each. The top-level key `environment_state`
is reserved too: what it holds is for agents that search with the environment, and no network sees
it (`environments.wrappers.Searchable`).

Action specifications (`dm_env.specs`) tell agents which kind of policy they need:

- `specs.DiscreteArray(num_values)`: one integer in `[0, num_values)`.
- an integer `specs.BoundedArray` of shape `(D,)`: multi-discrete; part `d` lies in
  `[0, maximum[d]]`.
- a floating `specs.BoundedArray`: continuous; every component has finite bounds.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from dm_env import specs

from podracers import types

ACTION_MASK = "action_mask"
STATE = "environment_state"
RESERVED = (ACTION_MASK, STATE)


@dataclasses.dataclass(frozen=True, eq=False)
class EnvironmentSpec:
    """The shapes, dtypes and limits of one stream; no batch axis anywhere.

    Attributes:
      name: the environment's name in logs and error messages.
      observation: a pytree whose leaves are `dm_env.specs.Array`.
      action: a `dm_env.specs` array, as the module's docstring says.
      max_episode_steps: the time limit in agent steps, or None where there is none.
      model: the environment that steps from the states that observations show; None where they
        show none.
    """

    name: str
    observation: types.PyTree
    action: specs.Array
    max_episode_steps: int | None = None
    model: "EnvironmentModel | None" = None

    def zero_observation(self) -> types.PyTree:
        """Returns zeros (NumPy) of the shapes and dtypes of one observation."""
        return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.observation)


class EnvironmentModel(Protocol):
    """An environment whose observations show its state, under the key `STATE`."""

    def step_from(
        self, state: types.PyTree, action: jax.Array
    ) -> tuple[types.TimeStep, types.PyTree]:
        """Returns where an action leads from a state (one stream, no batch axis).

        Args:
          state: the part of an observation under `STATE`.
          action: one action of this environment.

        Returns:
          The time step, whose observation shows no state, and the state as it would show it.
        """


def without_state(observation: types.PyTree) -> types.PyTree:
    """Returns an observation, or the spec of one, without the state of the environment."""
    if not isinstance(observation, dict) or STATE not in observation:
        return observation
    return {key: part for key, part in observation.items() if key != STATE}


@runtime_checkable
class Environment(Protocol):
    """A pure environment of one stream, without auto-reset; the runner batches and resets it.

    An implementation may also have `render(state) -> np.ndarray`, uint8 `[height, width, 3]`, which
    runs on the host and serves videos only.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """The shapes of this environment."""

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode. The state carries whatever randomness later steps need."""

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Advances one step; what it returns for a state whose episode ended is thrown away."""


@runtime_checkable
class HostEnvironment(Protocol):
    """`B` environments that are stepped together on the host, with next-step auto-reset (S1).

    `send` and `recv` alternate. All leaves are NumPy and `[B, ...]`, in the dtypes of the spec, and
    fresh at each call: nobody writes into an array that was handed out. One thread at a time calls.
    """

    @property
    def num_envs(self) -> int:
        """The batch size `B`."""

    def reset(self) -> types.TimeStep:
        """Starts an episode of every environment; called once, before all else."""

    def send(self, action: np.ndarray) -> None:
        """Begins a step of every environment; waits as little as the simulator allows.

        Args:
          action: `[B, ...]`; ignored where the latest time step was LAST, and the episode restarts.
        """

    def recv(self) -> types.TimeStep:
        """Waits for the step that `send` began, and returns where it led."""

    def close(self) -> None:
        """Frees what the simulators hold: threads, processes, files. A second call does nothing.

        Where another thread hangs in `recv` for good, this is called beside it, and must not wait.
        """


@runtime_checkable
class HostEnvironmentFactory(Protocol):
    """A factory of host environments: a frozen dataclass of static configuration.

    An experiment names one where it would name a JAX environment. An implementation may also have
    `render(timestep) -> np.ndarray`, uint8 `[height, width, 3]`, of one environment's time step
    (no batch axis), which serves videos. One whose simulators alone can draw may have `filmed()`
    instead: the same factory, whose host environments have `render() -> list[np.ndarray]`, a
    picture of each where it stands. It raises `errors.UserError` where nothing can be drawn.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """The shapes of one environment; cheap, and without a simulator that stays alive."""

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> HostEnvironment:
        """Makes `B` environments.

        Args:
          key: one typed key, equal for all streams of a run, and another one for its evaluations.
          env_id: `[B]` int32, the global indices of the streams: each has a seed of its own, which
            depends on `key` and its index alone (`stream_seeds`).
          num_threads: number of the host's threads that the simulators may use.
        """


def is_host(environment: Any) -> bool:
    """Returns whether this is a factory of host environments, rather than a JAX environment."""
    return hasattr(environment, "make")


def stream_seeds(key: jax.Array, env_id: np.ndarray) -> np.ndarray:
    """Returns a seed for each stream, `[B]` int64 in `[0, 2**31)`.

    Streams of one key never share a seed, whichever thread or host they are on: the map from index
    to seed is one to one. Neighbours are far apart, for simulators that count on from their seed.

    Args:
      key: one typed key.
      env_id: `[B]`, global indices below `2**31`.
    """
    base = int(jax.random.bits(key, dtype=np.uint32))
    # The golden ratio's odd multiple of 2**31 (Knuth, vol. 3, 6.4): odd numbers have an inverse.
    return (base + np.asarray(env_id, np.int64) * 1_327_217_885) % 2**31
