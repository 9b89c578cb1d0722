"""Adaptor of gymnax, an optional package, including MinAtar and bsuite.

Lange, "gymnax: A JAX-based Reinforcement Learning Environment Library",
https://github.com/RobertTLange/gymnax. The package is imported lazily.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types


@dataclasses.dataclass(frozen=True, eq=False)
class Gymnax(adaptors.Adaptor):
    """A registered gymnax environment under the contract.

    Gymnax's `step` resets automatically and loses the last observation, so this class calls
    `step_env`. Episodes that `step_env` ends are terminated; `max_steps_in_episode` truncates.
    MinAtar's observations, float32 planes of zeros and ones, become bool to save memory.

    Attributes:
      name: registered id, such as `Breakout-MinAtar`.
      options: environment parameters (`max_steps_in_episode`, ...) and arguments of the
        constructor, by name.
    """

    _TIME = "time"  # the field of states that counts steps

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner, params = self._built
        with adaptors.options_of(f"gymnax's {self.name}", self.options):
            with jax.ensure_compile_time_eval():
                action = adaptors.action_spec(inner.action_space(params))
                space = inner.observation_space(params)
                key = jax.random.key(0)
            shapes, _ = jax.eval_shape(lambda k: inner.reset_env(k, params), key)
        if hasattr(space, "n") and isinstance(shapes, jax.ShapeDtypeStruct):
            observation = specs.DiscreteArray(space.n, shapes.dtype, name="observation")
        else:
            # The environments' observations do not always have the spaces' dtypes and bounds.
            observation = jax.tree.map(
                lambda leaf: specs.Array(leaf.shape, self._dtype(leaf)), shapes
            )
        limit = int(params.max_steps_in_episode)
        return environment.EnvironmentSpec(self.name, observation, action, limit)

    def reset(self, key: jax.Array) -> tuple[adaptors.KeyedState, types.TimeStep]:
        inner, params = self._built
        reset_key, step_key = jax.random.split(key)
        observation, state = inner.reset_env(reset_key, params)
        timestep = types.restart(self._observe(observation), self._metrics(state))
        return adaptors.KeyedState(adaptors.strong(state), step_key), timestep

    def step(
        self, state: adaptors.KeyedState, action: jax.Array
    ) -> tuple[adaptors.KeyedState, types.TimeStep]:
        inner, params = self._built
        # XLA removes the `fold_in` where the dynamics ignore the key; a split would be carried.
        step_key = jax.random.fold_in(state.key, getattr(state.inner, self._TIME))
        observation, stepped, reward, done, _ = inner.step_env(
            step_key, state.inner, action, params
        )
        timestep = types.transition(
            self._observe(observation), reward, *self._ends(stepped, done), self._metrics(stepped)
        )
        return adaptors.KeyedState(adaptors.strong(stepped), state.key), timestep

    def _ends(self, state: Any, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whether an episode terminated, and whether it was truncated."""
        inner, params = self._built
        return done, inner.is_truncated(state, params)

    def _metrics(self, state: Any) -> dict[str, jax.Array]:
        """Returns the numbers of the episode so far."""
        return {}

    def _make(self) -> tuple[Any, Any]:
        name, options = self.name, self.options
        registration = adaptors.optional_import("gymnax.registration", f"environment '{name}'")
        errors.require_known("gymnax has no environment", name, registration.registered_envs)
        parameters = inspect.signature(registration._registry[name]).parameters.values()
        arguments = {x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD}
        keywords = {key: value for key, value in options.items() if key in arguments}
        with adaptors.options_of(f"gymnax's {name}", options):
            inner, params = registration.make(name, **keywords)  # MNIST is downloaded
        known = arguments | {field.name for field in dataclasses.fields(params)}
        rest = {key: value for key, value in options.items() if key not in keywords}
        with adaptors.options_of(f"gymnax's {name}", options, known):
            params = dataclasses.replace(params, **rest)
            errors.require_types(params)
        return inner, params

    @property
    def observation_of(self) -> Callable[[adaptors.KeyedState], types.PyTree]:
        """Returns the observation of a state; absent except for MinAtar's games."""
        inner, params = self._built
        if not self._is_minatar:
            raise AttributeError("observation_of")
        return lambda state: self._observe(inner.get_obs(state.inner, params))

    @property
    def _is_minatar(self) -> bool:
        return ".minatar." in type(self._built[0]).__module__

    def _dtype(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> np.dtype:
        """Returns the dtype of an observation leaf under the contract."""
        if self._is_minatar:
            return np.dtype(bool)
        return np.dtype(leaf.dtype)

    def _observe(self, observation: types.PyTree) -> types.PyTree:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, self._dtype(leaf)), observation)
