"""Adaptor of brax, an optional package: continuous control.

Freeman et al., "Brax - A Differentiable Physics Engine for Large Scale Rigid Body Simulation",
https://arxiv.org/abs/2106.13281. The package is imported lazily, also because its import is slow.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types


class State(NamedTuple):
    """State of one stream."""

    inner: Any  # brax's state
    steps: jax.Array  # [] int32, steps taken in this episode


@dataclasses.dataclass(frozen=True, eq=False)
class Brax:
    """A brax environment under the contract.

    Actions lie in [-1, 1]. Brax's `done` terminates an episode; `episode_length` truncates it. A
    simulation that diverges (a non-finite observation or reward) also terminates, with zeros for
    non-finite numbers, so that one stream cannot make a whole batch non-finite.

    Attributes:
      name: registered name, such as `ant`.
      options: keyword arguments of the environment's constructor; `backend` chooses the physics
        (`generalized`, `spring`, `positional` or `mjx`).
      episode_length: time limit, in agent steps.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    episode_length: int = 1000

    _MODEL = "sys"  # the simulator's attribute with its model

    def __post_init__(self):
        errors.require_types(self)
        errors.require_count(self, "episode_length")

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner = self._inner
        with jax.ensure_compile_time_eval():
            key = jax.random.key(0)
        shapes = jax.eval_shape(inner.reset, key).obs
        return environment.EnvironmentSpec(
            name=self.name,
            observation=jax.tree.map(
                lambda leaf: specs.Array(leaf.shape, np.float32), _plain(shapes)
            ),
            action=specs.BoundedArray((int(inner.action_size),), np.float32, -1.0, 1.0, "action"),
            max_episode_steps=self.episode_length,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        inner = adaptors.strong(self._inner.reset(key))
        observation, _ = _finite(_plain(inner.obs))
        return State(inner, jnp.zeros((), jnp.int32)), types.restart(observation)

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        # Some environments write into the dictionaries of their argument: pass a copy.
        inner = jax.tree.map(lambda leaf: leaf, state.inner)
        inner = adaptors.strong(self._advance(inner, jnp.clip(action, -1.0, 1.0)))
        observation, whole = _finite(_plain(inner.obs))
        reward, reward_whole = _finite(inner.reward)
        steps = state.steps + 1
        terminated = (inner.done > 0.0) | ~whole | ~reward_whole
        truncated = steps >= self.episode_length
        return State(inner, steps), types.transition(observation, reward, terminated, truncated)

    def _advance(self, inner: Any, action: jax.Array) -> Any:
        return self._inner.step(inner, action)

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """Float arrays of the model that this physics may read, by path.

        Brax's own physics have `gravity`, `link.inertia.mass`, `link.inertia.i`, `dof.damping`,
        `actuator.gear`, ...; the backend `mjx` has MuJoCo's names, such as `body_mass`. Constants
        that the simulator derives from its model when it loads it keep their nominal values.
        """
        inner = self._inner
        if not hasattr(inner, "sys"):  # without physics
            return {}
        # The model has the fields of MuJoCo's, too, of which brax's own physics read the geometry.
        is_mujoco = inner._backend == "mjx"
        own = set(type(inner.sys).__annotations__)
        return {
            name: value
            for name, value in adaptors.parameters_of(inner.sys).items()
            if name.startswith("geom_") or (name.partition(".")[0] in own) != is_mujoco
        }

    def with_parameters(self, values: Mapping[str, jax.Array]) -> "Brax":
        """Returns a copy with other values of some parameters, which may be traced."""
        result = dataclasses.replace(self)
        vars(result)["_inner"] = adaptors.with_parameters(self._inner, self._MODEL, values)
        return result

    @functools.cached_property
    def _inner(self) -> Any:
        envs = adaptors.optional_import("brax.envs", f"environment '{self.name}'")
        errors.require_known("brax has no environment", self.name, envs._envs)
        name = f"brax's {self.name}"
        # The first access may be under a trace, and the constructors create arrays.
        with jax.ensure_compile_time_eval(), adaptors.options_of(name, self.options):
            return envs.get_environment(self.name, **self.options)


def _plain(observation: Any) -> types.PyTree:
    """Returns an array, or plain dicts for any other mapping."""
    if isinstance(observation, Mapping):
        return {key: _plain(child) for key, child in observation.items()}
    return observation


def _finite(tree: types.PyTree) -> tuple[types.PyTree, jax.Array]:
    """Returns `tree` in float32 with zeros for non-finite numbers, and whether all were finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    tree = jax.tree.map(
        lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0).astype(jnp.float32), tree
    )
    return tree, jnp.all(jnp.stack(leaves))
