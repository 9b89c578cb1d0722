"""What an environment is: a pure one-stream protocol for JAX, a batched one for the host.

Observations are an array or a (nested) dict of arrays. The top-level key `action_mask` is reserved:
a bool array, true where an action is legal, `[A]` for a discrete action and `[D, A]` for a
multi-discrete one of `D` parts with at most `A` values each.

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


@dataclasses.dataclass(frozen=True, eq=False)
class EnvironmentSpec:
    """The shapes, dtypes and limits of one stream; no batch axis anywhere.

    Attributes:
      name: what logs and error messages call the environment.
      observation: a pytree whose leaves are `dm_env.specs.Array`.
      action: a `dm_env.specs` array, as the module's docstring says.
      max_episode_steps: the time limit in agent steps, or None where there is none.
    """

    name: str
    observation: types.PyTree
    action: specs.Array
    max_episode_steps: int | None = None

    def zero_observation(self) -> types.PyTree:
        """Returns zeros (NumPy) of the shapes and dtypes of one observation."""
        return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.observation)


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
    """A batch of environments that is stepped on the host, in NumPy, with next-step auto-reset."""

    @property
    def spec(self) -> EnvironmentSpec:
        """The shapes of one of the environments."""

    @property
    def num_envs(self) -> int:
        """The batch size `B`."""

    def reset(self) -> types.TimeStep:
        """Starts every environment; leaves are `[B, ...]`."""

    def step(self, action: np.ndarray) -> types.TimeStep:
        """Steps every environment; `action` is `[B, ...]`; an ended episode restarts (S1)."""

    def close(self) -> None:
        """Frees what the simulators hold."""
