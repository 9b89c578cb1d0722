"""An environment whose observations show its state, for agents that search with it.

An agent gets time steps, and no more; so what a search begins with has to be in them. The state is
in the observation under `environment.STATE`, which no network sees, and the specification names the
environment that goes on from there. Runners know nothing of it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from dm_env import specs

from environments import wrappers
from podracers import environment, errors, types


@dataclasses.dataclass(frozen=True, eq=False)
class Searchable(wrappers.Wrapper):
    """Shows the state of the inner environment; the outermost wrapper, or others' states are lost.

    An observation that is one array becomes the part `observation` of a dict. The state is shown as
    a dict of its leaves, typed keys as their data. It crosses to the learner with the observation,
    so it should be small.
    """

    def __post_init__(self):
        """Refuses what cannot be stepped from a state."""
        if environment.is_host(self.environment):
            raise errors.UserError(
                "Searchable needs a JAX environment, whose states can be stepped from; "
                f"{getattr(self.environment, '__name__', type(self.environment).__name__)} is "
                "stepped on the host"
            )
        super().__post_init__()

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec, with the state in the observation and this environment as `model`."""
        spec = self.environment.spec
        shown = jax.eval_shape(lambda: self._show(self.environment.reset(jax.random.key(0))[0]))
        state = jax.tree.map(lambda leaf: specs.Array(leaf.shape, leaf.dtype), shown)
        return dataclasses.replace(spec, observation=_with(spec.observation, state), model=self)

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode."""
        state, timestep = self.environment.reset(key)
        return state, self._joined(timestep, state)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Steps the inner environment."""
        state, timestep = self.environment.step(state, action)
        return state, self._joined(timestep, state)

    def step_from(
        self, shown: types.PyTree, action: jax.Array
    ) -> tuple[types.TimeStep, types.PyTree]:
        """Returns where an action leads from a state; see `environment.EnvironmentModel`."""
        state, timestep = self.environment.step(self._hidden(shown), action)
        observation = environment.without_state(_with(timestep.observation, ()))
        return timestep._replace(observation=observation), self._show(state)

    def _joined(self, timestep: types.TimeStep, state: Any) -> types.TimeStep:
        return timestep._replace(observation=_with(timestep.observation, self._show(state)))

    @functools.cached_property
    def _layout(self) -> tuple[Any, list[jax.ShapeDtypeStruct], list[Any]]:
        """The state's tree, its leaves' shapes and dtypes, and which generators its keys are of."""
        generators = []

        def look():
            state = self.environment.reset(jax.random.key(0))[0]
            leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
            generators.extend(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)
            return state

        leaves, tree = jax.tree.flatten(jax.eval_shape(look))
        return tree, leaves, generators

    def _show(self, state: Any) -> dict[str, jax.Array]:
        """Returns the leaves of a state by number, typed keys as their data."""

        def plain(leaf: jax.Array) -> jax.Array:
            leaf = jnp.asarray(leaf)
            return jax.random.key_data(leaf) if _is_key(leaf) else leaf

        return {f"{i:03}": plain(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}

    def _hidden(self, shown: dict[str, jax.Array]) -> Any:
        """Returns the state that is shown."""

        def wrapped(leaf: jax.Array, template: jax.ShapeDtypeStruct, generator: Any) -> jax.Array:
            if generator is None:
                return jnp.asarray(leaf, template.dtype)
            return jax.random.wrap_key_data(leaf, impl=generator)

        tree, *layout = self._layout
        return jax.tree.unflatten(tree, [wrapped(*each) for each in zip(shown.values(), *layout)])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with(observation: types.PyTree, state: types.PyTree) -> dict[str, Any]:
    """Returns an observation, or its spec, as a dict with a state."""
    parts = observation if isinstance(observation, dict) else {"observation": observation}
    return {**parts, environment.STATE: state}
