"""Wrappers of JAX environments.

The argument `environment` of a wrapper is an instance, or a class or other callable that returns
one, as in gin files. Agents normalise observations: the statistics belong in their checkpoints.

Axis legend: `A` joint actions, `D` parts of a multi-discrete action.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, trees, types


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper:
    """An environment around another one; subclasses change its time steps in `_convert`.

    Attributes:
      environment: inner environment; an instance after construction.
    """

    environment: environment.Environment | Callable[[], environment.Environment]
    inner: environment.Environment = dataclasses.field(init=False, repr=False)  # the instance
    # Whether states have a field `inner`, the state of the inner environment, instead of being it.
    has_state: ClassVar[bool] = False
    # Whether this wrapper reads or changes time steps or actions of a single agent.
    one_agent: ClassVar[bool] = False

    def __post_init__(self):
        errors.require_types(self)
        inner: Any = self.environment
        # A class also has the methods of the protocol, so `isinstance` alone is not enough.
        is_made = isinstance(inner, environment.Environment) and not isinstance(inner, type)
        if not is_made and not environment.is_host(inner):
            inner = inner()
        for name in ("environment", "inner"):
            object.__setattr__(self, name, inner)
        if environment.is_host(inner):
            raise errors.UserError(
                f"{type(self).__name__}.environment: expected a JAX environment, got a host "
                f"environment: {errors.path_of(inner)}"
            )
        if self.inner.spec.model is not None:
            raise errors.UserError(
                f"{type(self).__name__}.environment: expected an environment without Searchable, "
                "which must be the outermost wrapper"
            )
        if self.one_agent and (count := self.inner.spec.num_agents) > 1:
            raise errors.UserError(
                f"{type(self).__name__} is for one agent, and {self.inner.spec.name} has {count}"
            )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return self.inner.spec

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        state, timestep = self.inner.reset(key)
        return state, self._convert(state, timestep)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        state, timestep = self.inner.step(state, action)
        return state, self._convert(state, timestep)

    def _convert(self, state: Any, timestep: types.TimeStep) -> types.TimeStep:
        """Returns the time step of this environment from the inner `state` and `timestep`."""
        del state
        return timestep

    @property
    def render(self) -> Callable[[Any], np.ndarray]:
        """Draws a state; the attribute is absent if the inner environment has none."""
        inner: Any = self.inner
        draw = inner.render
        return lambda state: draw(state.inner if self.has_state else state)

    @property
    def evaluation_environment(self) -> environment.Environment:
        """This wrapper around the environment of evaluations; absent if the inner one has none.

        Against an opponent, it is around the game alone.
        """
        inner: Any = self.inner
        if self.spec.players == 2:
            against = inner.evaluation_environment
            game = dataclasses.replace(self, environment=against.game)
            return dataclasses.replace(against, game=game)
        return dataclasses.replace(self, environment=inner.evaluation_environment)


class TimeLimitState(NamedTuple):
    """The state of the inner environment, and the time."""

    inner: Any
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True, eq=False)
class TimeLimit(Wrapper):
    """Truncates episodes: LAST with the discount of the inner environment, which is not 0.

    If the inner environment ends the episode at the limit, its time step is unchanged.

    Attributes:
      max_episode_steps: time limit, in agent steps.
    """

    max_episode_steps: int = 1000
    has_state = True

    def __post_init__(self):
        super().__post_init__()
        errors.require_count(self, "max_episode_steps")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec with the lower of both limits."""
        spec = self.inner.spec
        inner = spec.max_episode_steps
        limit = self.max_episode_steps if inner is None else min(self.max_episode_steps, inner)
        return dataclasses.replace(spec, max_episode_steps=limit)

    def reset(self, key: jax.Array) -> tuple[TimeLimitState, types.TimeStep]:
        inner, timestep = self.inner.reset(key)
        return TimeLimitState(inner, jnp.zeros((), jnp.int32)), timestep

    def step(
        self, state: TimeLimitState, action: jax.Array
    ) -> tuple[TimeLimitState, types.TimeStep]:
        """Advances one step, and ends the episode at the limit."""
        inner, timestep = self.inner.step(state.inner, action)
        time = state.time + 1
        last = timestep.last() | (time >= self.max_episode_steps)
        step_type = jnp.where(last, types.LAST, timestep.step_type).astype(jnp.int8)
        return TimeLimitState(inner, time), timestep._replace(step_type=step_type)

    @property
    def evaluation_environment(self) -> environment.Environment:
        """As of other wrappers; against an opponent a game ends by its own rules."""
        inner: Any = self.inner
        return (
            inner.evaluation_environment
            if self.spec.players == 2
            else super().evaluation_environment
        )


class StickyActionsState(NamedTuple):
    """The state of the inner environment, and the action that the next step may repeat."""

    inner: Any
    action: jax.Array  # the latest executed action
    key: jax.Array  # [] typed key


@dataclasses.dataclass(frozen=True, eq=False)
class StickyActions(Wrapper):
    """Executes the previous action instead of the chosen one, with a fixed probability.

    Machado et al., "Revisiting the Arcade Learning Environment", 2018,
    https://arxiv.org/abs/1709.06009. Before an episode's first step, the previous action is 0, or
    the bound that is nearest to it.

    Attributes:
      repeat_probability: probability of a repetition; 0.1 as in MinAtar (Young and Tian 2019,
        https://arxiv.org/abs/1903.03176).
    """

    repeat_probability: float = 0.1
    has_state = True
    one_agent = True

    def __post_init__(self):
        super().__post_init__()
        spec = self.inner.spec
        if not 0.0 <= self.repeat_probability < 1.0:
            raise errors.UserError(
                "StickyActions.repeat_probability: expected a number of at least 0 and below 1, "
                f"got {self.repeat_probability}"
            )
        if environment.action_mask(spec.observation) is not None:
            raise errors.UserError(
                f"StickyActions: {spec.name} has an action mask, which a repeated action may break"
            )

    @property
    def observation_of(self) -> Callable[[StickyActionsState], types.PyTree]:
        """Returns the observation of a state; absent if the inner environment has none."""
        inner: Any = self.inner
        observe = inner.observation_of
        return lambda state: observe(state.inner)

    def reset(self, key: jax.Array) -> tuple[StickyActionsState, types.TimeStep]:
        reset_key, key = jax.random.split(key)
        inner, timestep = self.inner.reset(reset_key)
        spec = self.spec.action
        action = jnp.clip(jnp.zeros(spec.shape, spec.dtype), spec.minimum, spec.maximum)
        return StickyActionsState(inner, action, key), timestep

    def step(
        self, state: StickyActionsState, action: jax.Array
    ) -> tuple[StickyActionsState, types.TimeStep]:
        """Advances by the given action or by the previous one."""
        key, repeat_key = jax.random.split(state.key)
        repeated = jax.random.bernoulli(repeat_key, self.repeat_probability)
        action = jnp.where(repeated, state.action, action).astype(state.action.dtype)
        inner, timestep = self.inner.step(state.inner, action)
        return StickyActionsState(inner, action, key), timestep


@dataclasses.dataclass(frozen=True, eq=False)
class SelectObservation(Wrapper):
    """Keeps some parts of a dict observation, and the reserved ones if present.

    Attributes:
      environment: inner environment, whose observation is a dict.
      keys: names of the parts to keep.
    """

    keys: Sequence[str] = ()

    def __post_init__(self):
        super().__post_init__()
        known = self.inner.spec.observation
        if not isinstance(known, dict) or not self.keys or set(self.keys) - set(known):
            parts = ", ".join(known) if isinstance(known, dict) else "no parts: it is one array"
            raise errors.UserError(
                f"SelectObservation.keys: expected some of the observation's parts, got "
                f"{tuple(self.keys)}; it has {parts}"
            )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec with fewer parts."""
        spec = self.inner.spec
        return dataclasses.replace(spec, observation=self._select(spec.observation))

    def _convert(self, state: Any, timestep: types.TimeStep) -> types.TimeStep:
        return timestep._replace(observation=self._select(timestep.observation))

    def _select(self, observation: dict[str, Any]) -> dict[str, Any]:
        kept = {*self.keys, environment.ACTION_MASK, environment.ACTIVE}
        return {key: value for key, value in observation.items() if key in kept}


@dataclasses.dataclass(frozen=True, eq=False)
class FlattenAction(Wrapper):
    """Turns a multi-discrete action `[D]` into one of `A` discrete joint actions.

    The last part changes fastest, as in `numpy.unravel_index`. A mask `[D, A_part]` becomes the
    mask `[A]` of the joint actions whose parts are all legal.
    """

    one_agent = True

    def __post_init__(self):
        super().__post_init__()
        spec = self.inner.spec
        if spec.action.dtype.kind != "i" or not spec.action.shape:
            raise errors.UserError(f"{spec.name}: expected a multi-discrete action: {spec.action}")
        errors.require_int32(math.prod(self._sizes), f"{spec.name}: number of joint actions")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec with a discrete action."""
        spec, count = self.inner.spec, math.prod(self._sizes)
        observation = spec.observation
        if environment.action_mask(observation) is not None:
            mask = specs.Array((count,), np.bool_)
            observation = {**observation, environment.ACTION_MASK: mask}
        return dataclasses.replace(spec, observation=observation, action=specs.DiscreteArray(count))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        parts = jnp.stack(jnp.unravel_index(jnp.asarray(action, jnp.int32), self._sizes))
        return super().step(state, parts.astype(self.inner.spec.action.dtype))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The number of values of each part."""
        action = self.inner.spec.action
        return tuple((np.broadcast_to(action.maximum, action.shape) + 1).tolist())

    def _convert(self, state: Any, timestep: types.TimeStep) -> types.TimeStep:
        observation = timestep.observation
        if (mask := environment.action_mask(observation)) is None:
            return timestep
        parts = jnp.meshgrid(*(mask[d, :n] for d, n in enumerate(self._sizes)), indexing="ij")
        joint = jnp.all(jnp.stack(parts), axis=0).ravel()
        return timestep._replace(observation={**observation, environment.ACTION_MASK: joint})


@dataclasses.dataclass(frozen=True, eq=False)
class Searchable(Wrapper):
    """Adds the environment's state to the observation, for agents that search from it.

    Agents receive time steps only, so these must hold the state. The state is the part
    `environment.STATE` of the observation: a dict of the state's leaves, with typed keys as their
    data. Networks ignore it; an observation that is one array becomes the part `observation`. The
    field `model` of the specification is this environment, which steps from such a state.

    This wrapper must be the outermost one: the states of wrappers around it would be lost. States
    should be small, because they are sent to the learner with the observation.
    """

    one_agent = True

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec, with the state in the observation and this environment as `model`."""
        spec = self.inner.spec
        packed = jax.eval_shape(self.pack, self._template)
        state = jax.tree.map(lambda leaf: specs.Array(leaf.shape, leaf.dtype), packed)
        observation = with_part(spec.observation, environment.STATE, state)
        return dataclasses.replace(spec, observation=observation, model=self)

    def step_from(
        self, state: types.PyTree, action: jax.Array
    ) -> tuple[types.TimeStep, types.PyTree]:
        """Returns the time step and the packed state after an action; see `EnvironmentModel`."""
        inner, timestep = self.inner.step(self.unpack(state), action)
        # As in `_convert`: a dict, though without the state.
        observation = with_part(timestep.observation, environment.STATE, ())
        observation = environment.without_state(observation)
        return timestep._replace(observation=observation, metrics={}), self.pack(inner)

    def redrawn(self, state: types.PyTree, key: jax.Array) -> types.PyTree:
        """Returns the packed state with other random events ahead; see `EnvironmentModel`."""
        return self.pack(redrawn(self.unpack(state), key))

    def _convert(self, state: Any, timestep: types.TimeStep) -> types.TimeStep:
        packed = self.pack(state)
        observation = with_part(timestep.observation, environment.STATE, packed)
        return timestep._replace(observation=observation)

    @functools.cached_property
    def _template(self) -> Any:
        """The shapes and dtypes of the state."""

        def reset() -> Any:
            return jax.tree.map(jnp.asarray, self.inner.reset(jax.random.key(0))[0])

        return jax.eval_shape(reset)

    def pack(self, state: Any) -> dict[str, jax.Array]:
        """Returns the leaves of a state by number, typed keys as their data."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
        return {
            f"{i:03}": jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for i, leaf in enumerate(leaves)
        }

    def unpack(self, packed: dict[str, jax.Array]) -> Any:
        """Returns the state from its packed leaves; keys are of JAX's default generator."""
        templates, tree = jax.tree.flatten(self._template)
        leaves = [
            jax.random.wrap_key_data(leaf) if _is_key(like) else jnp.asarray(leaf, like.dtype)
            for leaf, like in zip(packed.values(), templates)
        ]
        return jax.tree.unflatten(tree, leaves)


def redrawn(state: Any, key: jax.Array) -> Any:
    """Returns a state with random events ahead that are drawn anew, for players that search.

    Its typed keys are replaced, and raw ones, of dtype uint32, in fields `key` and `rng`.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)

    def drawn(index: int, path: tuple, leaf: Any) -> Any:
        if not _is_key(leaf):
            named = trees.name(path).rpartition("/")[2] in ("key", "rng")
            if not named or leaf.dtype != np.uint32:
                return leaf
        data = jax.random.bits(jax.random.fold_in(key, index), jax.random.key_data(leaf).shape)
        return jax.random.wrap_key_data(data) if _is_key(leaf) else data

    leaves = [drawn(index, path, leaf) for index, (path, leaf) in enumerate(leaves)]
    return jax.tree.unflatten(tree, leaves)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def with_part(observation: types.PyTree, name: str, part: types.PyTree) -> dict[str, Any]:
    """Returns an observation, or its spec, as a dict with one more part."""
    parts = observation if isinstance(observation, dict) else {"observation": observation}
    return {**parts, name: part}
