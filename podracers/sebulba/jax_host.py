"""Steps a JAX environment in batches on the host: what Sebulba does with a task made for Anakin.

Axis legend: `B` streams.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from podracers import environment as environment_lib
from podracers import keys, types, unroll


@dataclasses.dataclass(frozen=True, eq=False)
class JaxHostEnvironment:
    """A factory of host environments (`environment.HostEnvironmentFactory`).

    The streams are those of Anakin: equal keys and equal actions give equal time steps.

    Attributes:
      environment: a one-stream JAX environment.
      reset_batch: number of streams that are reset together; see `unroll.BatchedEnvironment`.
    """

    environment: environment_lib.Environment
    reset_batch: int | None = 16

    @property
    def spec(self) -> environment_lib.EnvironmentSpec:
        """The shapes of the JAX environment."""
        return self.environment.spec

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> "JaxHostBatch":
        """Makes `B` streams; JAX's own pool of threads serves all of them."""
        return JaxHostBatch(self, key, env_id)

    # Compiled once for all batches of one size.
    @functools.cached_property
    def _init(self):
        batched = unroll.BatchedEnvironment(self.environment, self.reset_batch)
        return jax.jit(lambda key, env_id: batched.init(keys.per_stream(key, env_id)))

    @functools.cached_property
    def _step(self):
        batched = unroll.BatchedEnvironment(self.environment, self.reset_batch)
        return jax.jit(batched.step, donate_argnums=0)


class JaxHostBatch:
    """`B` streams; a step runs while its caller does something else.

    Args:
      factory: the factory that made it.
      key: one typed key, equal for all streams.
      env_id: `[B]` int32.
    """

    def __init__(self, factory: JaxHostEnvironment, key: jax.Array, env_id: np.ndarray):
        self._factory = factory
        self._device = _host_device()
        self._key, self._env_id = jax.device_put((key, env_id), self._device)
        self._state: Any = None
        self._timestep: types.TimeStep | None = None

    @property
    def num_envs(self) -> int:
        """The batch size `B`."""
        return self._env_id.shape[0]

    def reset(self) -> types.TimeStep:
        """Starts every stream."""
        self._state, timestep = self._factory._init(self._key, self._env_id)
        return _to_numpy(timestep)

    def send(self, action: types.PyTree) -> None:
        """Begins a step."""
        # The state is on the device already, and the call takes the action there: `device_put`
        # would cost more than the step.
        self._state, self._timestep = self._factory._step(self._state, action)

    def recv(self) -> types.TimeStep:
        """Waits for the step."""
        return _to_numpy(self._timestep)

    def close(self) -> None:
        """Forgets the state."""
        self._state = self._timestep = None


def _host_device() -> jax.Device:
    """Returns a device of the host, or where JAX was told to have none, the default one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _to_numpy(timestep: types.TimeStep) -> types.TimeStep:
    return jax.tree.map(np.asarray, timestep)
