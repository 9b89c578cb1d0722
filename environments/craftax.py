"""Adaptor of Craftax, an optional package: open worlds on a grid, with achievements.

Matthews et al., "Craftax: A Lightning-Fast Benchmark for Open-Ended Reinforcement Learning", 2024,
https://arxiv.org/abs/2402.16801. The package is imported lazily; its import creates arrays.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import math
import os
import pathlib
import tempfile
import types as python_types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors, gymnax
from podracers import environment, errors, types

NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Craftax(gymnax.Gymnax):
    """A Craftax environment under the contract; it has gymnax's interface.

    Craftax's `done` joins death, the last boss and the time limit; here only `max_timesteps`
    truncates, and a death in the last step terminates. The vector of a symbolic observation is
    split without loss: `map`, the zeros and ones of the cells in view as bool `[H, W, C]`, and
    `vector`, the other floats. Pixels are an image of bytes `[H, W, 3]`.

    Metrics are `achievement/NAME`, whether the episode has unlocked an achievement, and their
    number, `achievements`.

    Attributes:
      name: one of `NAMES`.
      options: parameters of the environment (`max_timesteps`, `day_length`, ...), by name.
    """

    _TIME = "timestep"

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner, params = self._built
        # Tracing `reset` would take seconds.
        shape = inner.observation_space(params).shape
        observation = specs.BoundedArray(shape, np.uint8, 0, 255)
        if self._map_shape:
            observation = {
                "map": specs.Array(self._map_shape, bool),
                "vector": specs.Array((shape[0] - math.prod(self._map_shape),), np.float32),
            }
        action = specs.DiscreteArray(inner.num_actions, name="action")
        metrics = ("achievements", *self._achievements)
        return environment.EnvironmentSpec(
            self.name, observation, action, params.max_timesteps, metrics=metrics
        )

    def _ends(self, state: Any, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        inner, params = self._built
        unlimited = params.replace(max_timesteps=errors.INT32_MAX)
        return inner.is_terminal(state, unlimited), done

    def render(self, state: adaptors.KeyedState) -> np.ndarray:
        """Returns a picture of one state, uint8 `[height, width, 3]`."""
        return np.asarray(self._draw(state.inner))

    def _make(self) -> tuple[Any, Any]:
        craftax_env = adaptors.optional_import("craftax.craftax_env", f"environment '{self.name}'")
        errors.require_known("Craftax has no environment", self.name, NAMES)
        with _textures():
            inner = craftax_env.make_craftax_env_from_name(self.name, auto_reset=False)
        known = [field.name for field in dataclasses.fields(inner.default_params)]
        with adaptors.options_of(self.name, self.options, known):
            params = dataclasses.replace(inner.default_params, **self.options)
            errors.require_types(params)
            errors.require_count(params, "max_timesteps")
        return inner, params

    @functools.cached_property
    def _draw(self) -> Callable[[Any], jax.Array]:
        with jax.ensure_compile_time_eval(), _textures():
            size = self._module("constants").BLOCK_PIXEL_SIZE_IMG
            draw = self._module("renderer").make_craftax_pixel_renderer(size)
        return jax.jit(lambda state: _as_bytes(draw(state)))

    def _module(self, name: str) -> python_types.ModuleType:
        """Returns a module of the game of this environment."""
        game = "craftax_classic" if "Classic" in self.name else "craftax"
        return importlib.import_module(f"craftax.{game}.{name}")

    @functools.cached_property
    def _achievements(self) -> dict[str, int]:
        """Index of each achievement in Craftax's state, by the name of its metric."""
        achievements = self._module("constants").Achievement
        return {f"achievement/{entry.name.lower()}": entry.value for entry in achievements}

    def _metrics(self, state: Any) -> dict[str, jax.Array]:
        """Returns 1 for each unlocked achievement, and their number."""
        unlocked = state.achievements
        single = {name: unlocked[index] for name, index in self._achievements.items()}
        return {"achievements": jnp.sum(unlocked), **single}

    @functools.cached_property
    def _map_shape(self) -> tuple[int, ...] | None:
        """Height, width and channels of the map in symbolic observations; None for pixels."""
        if "Pixels" in self.name:
            return None
        return self._module("envs.craftax_symbolic_env").get_map_obs_shape()

    def _observe(self, observation: jax.Array) -> types.PyTree:
        """Returns an observation of the contract for Craftax's floats."""
        if not self._map_shape:
            return _as_bytes(255.0 * observation)
        cells, vector = jnp.split(observation, [math.prod(self._map_shape)])
        return {
            "map": cells.reshape(self._map_shape).astype(bool),
            "vector": vector.astype(jnp.float32),
        }


@contextlib.contextmanager
def _textures() -> Iterator[None]:
    """Guards the import that writes Craftax's cache of textures into its package, not atomically.

    One process at a time imports it, because another one would read half a file. A process that is
    killed meanwhile leaves a damaged one.
    """
    lock = pathlib.Path(tempfile.gettempdir(), f"craftax-textures-{os.getuid()}.lock")
    try:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except (EOFError, OSError) as error:
        raise errors.UserError(
            "Craftax's cache of textures, a file in its package, cannot be used: set the variable "
            f"CRAFTAX_RELOAD_TEXTURES=true once ({errors.one_line(error)})"
        ) from error


def _as_bytes(pixels: jax.Array) -> jax.Array:
    """Returns an image of uint8 for one of floats from 0 to 255."""
    return jnp.round(pixels).astype(jnp.uint8)
