"""Adaptor of brax, an optional package: continuous control.

Freeman et al., "Brax - A Differentiable Physics Engine for Large Scale Rigid Body Simulation",
https://arxiv.org/abs/2106.13281. The package is imported lazily, also because its import is slow.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors, episode_metrics
from podracers import environment, errors, types


@dataclasses.dataclass(frozen=True, eq=False)
class Brax(adaptors.Adaptor):
    """A brax environment under the contract.

    Actions lie in [-1, 1]. Brax's `done` terminates an episode; `episode_length` truncates it. A
    simulation that diverges (a non-finite observation or reward) also terminates, with zeros for
    non-finite numbers, so that one stream cannot make a whole batch non-finite.

    Attributes:
      name: registered name, such as `ant`.
      options: keyword arguments of the environment's constructor; `backend` chooses the physics
        (`generalized`, `spring`, `positional` or `mjx`).
      episode_length: time limit, in agent steps.
      metrics: numbers of brax's state to report for each episode (rule S6), with a reduction over
        agent steps: "last", "max", "mean" or "sum", such as `{'x_velocity': 'mean'}`.
    """

    episode_length: int = 1000
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)

    _MODEL = "sys"  # the simulator's attribute with its model

    def __post_init__(self):
        super().__post_init__()
        errors.require_count(self, "episode_length")
        episode_metrics.check(f"{type(self).__name__}.metrics", self.metrics)

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner = self._built
        with jax.ensure_compile_time_eval():
            key = jax.random.key(0)
        shapes = jax.eval_shape(inner.reset, key)
        for name in self.metrics:
            errors.require_known(f"{self.name} has no metric", name, shapes.metrics)
        return environment.EnvironmentSpec(
            name=self.name,
            observation=jax.tree.map(
                lambda leaf: specs.Array(leaf.shape, np.float32), adaptors.plain(shapes.obs)
            ),
            action=specs.BoundedArray((int(inner.action_size),), np.float32, -1.0, 1.0, "action"),
            max_episode_steps=self.episode_length,
            metrics=tuple(self.metrics),
        )

    def reset(self, key: jax.Array) -> tuple[adaptors.CountedState, types.TimeStep]:
        inner = adaptors.strong(self._built.reset(key))
        observation, _ = _finite(adaptors.plain(inner.obs))
        metrics = dict.fromkeys(self.metrics, jnp.zeros(()))
        state = adaptors.CountedState(inner, jnp.zeros((), jnp.int32), metrics)
        return state, types.restart(observation, metrics)

    def step(
        self, state: adaptors.CountedState, action: jax.Array
    ) -> tuple[adaptors.CountedState, types.TimeStep]:
        # Some environments write into the dictionaries of their argument: pass a copy.
        inner = jax.tree.map(lambda leaf: leaf, state.inner)
        inner = adaptors.strong(self._advance(inner, jnp.clip(action, -1.0, 1.0)))
        observation, whole = _finite(adaptors.plain(inner.obs))
        reward, reward_whole = _finite(inner.reward)
        steps = state.steps + 1
        terminated = (inner.done > 0.0) | ~whole | ~reward_whole
        truncated = steps >= self.episode_length
        metrics = {}
        for name, reduction in self.metrics.items():
            so_far, (number, _) = state.metrics[name], _finite(inner.metrics[name])
            metrics[name] = episode_metrics.reduce(reduction, so_far, number, state.steps, jnp)
        return adaptors.CountedState(inner, steps, metrics), types.transition(
            observation, reward, terminated, truncated, metrics
        )

    def _advance(self, inner: Any, action: jax.Array) -> Any:
        return self._built.step(inner, action)

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """Float arrays of the model that this physics may read, by path.

        Brax's own physics have `gravity`, `link.inertia.mass`, `link.inertia.i`, `dof.damping`,
        `actuator.gear`, ...; the backend `mjx` has MuJoCo's names, such as `body_mass`. Constants
        that the simulator derives from its model when it loads it keep their nominal values.
        """
        inner = self._built
        if not hasattr(inner, "sys"):  # an environment without physics
            return {}
        # The model has the fields of MuJoCo's, too, of which brax's own physics read the geometry.
        is_mujoco = inner._backend == "mjx"
        fields = set(type(inner.sys).__annotations__)
        return {
            name: value
            for name, value in adaptors.parameters_of(inner.sys).items()
            if name.startswith("geom_") or (name.partition(".")[0] in fields) != is_mujoco
        }

    def with_parameters(self, values: Mapping[str, jax.Array]) -> "Brax":
        """Returns a copy with other values of some parameters, which may be traced."""
        result = dataclasses.replace(self)
        vars(result)["_built"] = adaptors.with_parameters(self._built, self._MODEL, values)
        return result

    def _make(self) -> Any:
        envs = adaptors.optional_import("brax.envs", f"environment '{self.name}'")
        errors.require_known("brax has no environment", self.name, envs._envs)
        name = f"brax's {self.name}"
        with adaptors.options_of(name, self.options):
            return envs.get_environment(self.name, **self.options)


def _finite(tree: types.PyTree) -> tuple[types.PyTree, jax.Array]:
    """Returns `tree` in float32 with zeros for non-finite numbers, and whether all were finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    tree = jax.tree.map(
        lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0).astype(jnp.float32), tree
    )
    return tree, jnp.all(jnp.stack(leaves))
