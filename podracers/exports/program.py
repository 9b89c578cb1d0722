"""A policy as functions of arrays, with the arguments that its actions depend on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import agent as agent_lib
from podracers import environment, errors, precision, trees, types
from podracers.training import summary


class Arguments(NamedTuple):
    """The arguments of an exported `act`, leaves `[B, ...]`."""

    state: dict[str, Any]  # state of `initial`, or of the last call
    observation: types.PyTree  # the parts that actions depend on
    first: Any  # bool, whether an episode begins
    reward: Any = None  # float32, since the last action; None if actions do not depend on it


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A policy as functions of arrays and dicts of arrays.

    Axis legend: `B` streams.
    """

    agent: agent_lib.Policy
    params: types.PyTree
    spec: environment.EnvironmentSpec
    precision: precision.Precision

    @property
    def actions(self) -> str:
        """Either `greedy` or `sampled`."""
        agent: Any = self.agent
        is_random = agent_lib.greedy(agent) or getattr(agent, "evaluation_epsilon", 0.0)
        return "sampled" if is_random else "greedy"

    def initial(self, seed: jax.Array) -> dict[str, jax.Array]:
        """Returns the state of the streams of seeds `[B]` uint32, its leaves by name."""
        env_id = jnp.arange(seed.shape[0], dtype=jnp.int32)
        key = jax.random.key_data(jax.vmap(jax.random.key)(seed))
        actor_state = self.agent.init_actor(env_id, seed.shape[0], True)
        return trees.leaves({"actor": actor_state, "key": key})

    def act(self, arguments: Arguments) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the actions `[B, ...]` of the environment, and the state after them."""
        state, observation, first, reward = arguments
        keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(state["key"]))  # [B, 2]
        step_type = jnp.where(first, types.FIRST, types.MID).astype(jnp.int8)
        timestep = types.TimeStep(observation, reward, jnp.ones_like(reward), step_type)
        template = jax.eval_shape(lambda: self.agent.init_actor(jnp.arange(1), 1, True))
        actor_state = jax.tree_util.tree_map_with_path(
            lambda path, _: state[trees.name((jax.tree_util.DictKey("actor"), *path))], template
        )
        # A barrier keeps XLA from folding constants, which rounds otherwise than the agent does.
        params = jax.tree.map(jax.lax.optimization_barrier, self.params)
        with self.precision.tracing():
            action, actor_state, _ = self.agent.act(
                params, actor_state, timestep, keys[:, 1], evaluation=True
            )
        return action, trees.leaves({"actor": actor_state, "key": jax.random.key_data(keys[:, 0])})

    def shapes(self, batch_size: Any) -> Arguments:
        """Returns the shapes and dtypes of all arguments; the size may be symbolic."""
        seed = jax.ShapeDtypeStruct((batch_size,), jnp.uint32)
        timestep = self.spec.timesteps(batch_size)
        first = jax.ShapeDtypeStruct((batch_size,), jnp.bool_)
        state = jax.eval_shape(self.initial, seed)
        return Arguments(state, timestep.observation, first, timestep.reward)

    @functools.cached_property
    def _needed(self) -> set[str]:
        """Names of the leaves of `Arguments` that actions depend on, at once or later."""
        shapes = self.shapes(1)
        names = [*trees.leaves(shapes)]

        def act(*arguments: Any) -> dict[str, Any]:
            return dict(zip(("action", "state"), self.act(Arguments(*arguments))))

        jaxpr, outputs = jax.make_jaxpr(act, return_shape=True)(*shapes)

        def chosen(indices: list[int], *leaves: jax.Array) -> list[jax.Array]:
            values = jax.extend.core.jaxpr_as_fun(jaxpr)(*leaves)
            return [values[index] for index in indices]

        needed, before = {"action"}, set[str]()
        while needed != before:  # a part of the state may depend on further ones
            indices = [index for index, name in enumerate(trees.leaves(outputs)) if name in needed]
            program = jax.jit(functools.partial(chosen, indices))
            exported = jax.export.export(program)(*jax.tree.leaves(shapes))
            before = needed
            needed = needed | {names[index] for index in exported.module_kept_var_idx}
        return needed

    def reduced(self, batch_size: Any) -> tuple[Arguments, Callable[..., Any]]:
        """Returns the shapes of the arguments that actions depend on, and `act` of these alone.

        Its state is that on which later actions depend. `first` is always an argument.

        Raises:
          errors.UserError: the agent acts from the environment's state.
        """
        shapes = self.shapes(batch_size)
        read = jax.tree_util.tree_map_with_path(
            lambda path, x: x if trees.name(path) in self._needed else None, shapes
        )
        kept = Arguments(*map(_without_empty, read))._replace(first=shapes.first)
        if isinstance(kept.observation, dict) and environment.STATE in kept.observation:
            raise errors.UserError(
                f"{errors.path_of(self.agent)} searches in the environment, from whose state "
                "it acts: expected an agent that acts by observations"
            )

        def act(*arguments: Any) -> Any:
            named = trees.leaves(Arguments(*arguments))
            size = named["first"].shape
            filled = jax.tree_util.tree_map_with_path(
                lambda path, x: named.get(trees.name(path), jnp.zeros(size + x.shape[1:], x.dtype)),
                shapes,
            )
            action, state = self.act(filled)
            return action, {name: state[name] for name in kept.state}

        return kept, act

    def describe(self, kept: Arguments) -> dict[str, Any]:
        """Returns shapes, dtypes, finite bounds and provenance of a file with these arguments."""
        parts, provenance = trees.leaves(self.spec.observation), summary.provenance()
        observation = jax.tree_util.tree_map_with_path(
            lambda path, _: _described(parts[trees.name(path)]), kept.observation
        )
        return {
            "observation": observation,
            "action": _described(self.spec.action),
            "reads_reward": kept.reward is not None,
            "reads_seed": "key" in kept.state,
            "versions": provenance["versions"],
            "commit": provenance["commit"],
        }


def _without_empty(tree: types.PyTree) -> types.PyTree:
    """Returns nested dicts without the parts that have no leaves."""
    if not isinstance(tree, dict):
        return tree
    return {key: _without_empty(part) for key, part in tree.items() if jax.tree.leaves(part)}


def _described(spec: specs.Array) -> dict[str, Any]:
    """Returns the shape, the dtype and the finite bounds of an array."""
    about: dict[str, Any] = {"shape": [*spec.shape], "dtype": str(np.dtype(spec.dtype))}
    if isinstance(spec, specs.BoundedArray):
        for name, bound in (("minimum", spec.minimum), ("maximum", spec.maximum)):
            if np.isfinite(bound).all():
                values = np.unique(bound)
                about[name] = values.item() if values.size == 1 else bound.tolist()
    return about
