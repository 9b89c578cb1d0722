"""A JAX environment as a host environment, so that Sebulba can step it.

Axis legend: `E` environments.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from podracers import environment as environment_lib
from podracers import keys, types, unroll

_RESET_BATCH = 16  # the default of Anakin


@dataclasses.dataclass(frozen=True, eq=False)
class JaxHostEnvironment:
    """A factory of host environments (`environment.HostEnvironmentFactory`).

    The streams are those of Anakin: equal keys and equal actions give equal time steps.
    """

    environment: environment_lib.Environment  # written in JAX

    @property
    def spec(self) -> environment_lib.EnvironmentSpec:
        return self.environment.spec

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> "JaxHostBatch":
        """Makes `E` environments; JAX's own thread pool steps all of them."""
        return JaxHostBatch(self, key, env_id)

    # Batches of one size share these programs.
    @functools.cached_property
    def _init(self):
        return jax.jit(lambda key, env_id: self._batched.init(keys.per_stream(key, env_id)))

    @functools.cached_property
    def _step(self):
        return jax.jit(self._batched.step, donate_argnums=0)

    @functools.cached_property
    def _batched(self) -> unroll.BatchedEnvironment:
        return unroll.BatchedEnvironment(self.environment, _RESET_BATCH)


class JaxHostBatch:
    """`E` environments of a factory; a step runs asynchronously."""

    def __init__(self, factory: JaxHostEnvironment, key: jax.Array, env_id: np.ndarray):
        self._factory = factory
        try:
            device = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX was configured without a CPU backend
            device = jax.local_devices()[0]
        self._key, self._env_id = jax.device_put((key, env_id), device)
        self._state: Any = None
        self._timestep: types.TimeStep | None = None

    @property
    def num_envs(self) -> int:
        return self._env_id.shape[0]

    def reset(self) -> types.TimeStep[np.ndarray]:
        self._state, timestep = self._factory._init(self._key, self._env_id)
        return jax.tree.map(np.asarray, timestep)

    def send(self, action: types.PyTree) -> None:
        # The call transfers the action; `device_put` would cost more than the step.
        self._state, self._timestep = self._factory._step(self._state, action)

    def recv(self) -> types.TimeStep[np.ndarray]:
        return jax.tree.map(np.asarray, self._timestep)

    def close(self) -> None:
        """Deletes the state."""
        self._state = self._timestep = None
