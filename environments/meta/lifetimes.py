"""Lifetimes: the training of an agent in one task is one episode of one stream.

Agents' parameters are part of the actor state, and task parameters are part of the environment's
state. Both are reset at FIRST, so lifetimes keep the contract of streams under every runner.

Axis legend: `E` environments of one agent, `F` rows, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, tasks, types, unroll


def _family(make: tasks.TaskFamily | Callable[[], tasks.TaskFamily]) -> tasks.TaskFamily:
    """Returns the family itself, or an instance of the class."""
    family = make() if errors.is_function(make) else make
    if not isinstance(family, tasks.TaskFamily):
        raise errors.UserError(
            f"expected a family of tasks (podracers.tasks.TaskFamily), got {errors.path_of(family)}"
        )
    return family


@dataclasses.dataclass(frozen=True, eq=False)
class FixedTask:
    """One task of a family as an ordinary environment.

    Attributes:
      tasks: the family, or its class.
      seed: random seed of the task.
    """

    tasks: tasks.TaskFamily | Callable[[], tasks.TaskFamily]
    family: tasks.TaskFamily = dataclasses.field(init=False, repr=False)
    seed: int = 0

    def __post_init__(self):
        family = _family(self.tasks)
        for name in ("tasks", "family"):  # a copy by `dataclasses.replace` has the same family
            object.__setattr__(self, name, family)
        errors.require_count(self, "seed", least=0)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return self.family.spec

    @functools.cached_property
    def params(self) -> Any:
        """The parameters of the task, in NumPy."""
        with jax.ensure_compile_time_eval():
            return jax.device_get(jax.jit(self.family.sample)(jax.random.key(self.seed)))

    @property
    def optimal_return(self) -> float:
        """The highest expected undiscounted return of an episode."""
        return self.family.optimal_return(self.params)

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        return self.family.reset(jax.tree.map(jnp.asarray, self.params), key)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        return self.family.step(jax.tree.map(jnp.asarray, self.params), state, action)


class MixtureState(NamedTuple):
    """Parameters or states of all families; one is in use."""

    family: jax.Array  # int32
    parts: tuple  # one for each family


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The tasks of several families, as one family; each kind of task is equally likely.

    Tables, observations and actions have the sizes of the largest family. All families step, and
    one result is selected: on accelerators this costs little compared with the agents.

    Attributes:
      families: families, or their classes.
    """

    families: tuple[tasks.TaskFamily | Callable[[], tasks.TaskFamily], ...]
    members: tuple[tasks.TaskFamily, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        members = tuple(map(_family, self.families))
        for name in ("families", "members"):  # a copy by `dataclasses.replace` has the same ones
            object.__setattr__(self, name, members)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of the largest family."""
        parts = [family.spec for family in self.members]
        rows = [part.observation[tasks.ROWS] for part in parts]
        num_rows, num_states = max(r.shape[0] for r in rows), max(int(r.maximum) for r in rows)
        num_actions = max(part.num_actions for part in parts)
        return environment.EnvironmentSpec(
            name="Mixture",
            observation={
                tasks.ROWS: environment.MultiDiscreteArray((num_rows,), np.int32, 0, num_states),
                environment.ACTION_MASK: specs.Array((num_actions,), np.bool_),
            },
            action=specs.DiscreteArray(num_actions),
            max_episode_steps=max(part.max_episode_steps or 0 for part in parts),
        )

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(name for family in self.members for name in family.task_names)

    def sample(self, key: jax.Array) -> MixtureState:
        """Samples a family, in proportion to its number of kinds of tasks, and a task."""
        family_key, *keys = jax.random.split(key, 1 + len(self.members))
        counts = np.array([len(family.task_names) for family in self.members])
        task = jax.random.randint(family_key, (), 0, counts.sum())
        family = jnp.sum(task >= jnp.asarray(np.cumsum(counts))).astype(jnp.int32)
        return MixtureState(family, tuple(f.sample(k) for f, k in zip(self.members, keys)))

    def task(self, params: MixtureState) -> jax.Array:
        numbers, offset = [], 0
        for family, part in zip(self.members, params.parts):
            numbers.append(family.task(part) + offset)
            offset += len(family.task_names)
        return jnp.stack(numbers).astype(jnp.int32)[params.family]

    def reset(self, params: MixtureState, key: jax.Array) -> tuple[MixtureState, types.TimeStep]:
        """Starts an episode of every family; returns the family in use."""
        results = [f.reset(part, key) for f, part in zip(self.members, params.parts)]
        return self._join(params, results)

    def step(
        self, params: MixtureState, state: MixtureState, action: jax.Array
    ) -> tuple[MixtureState, types.TimeStep]:
        """Steps every family; returns the family in use."""
        results = []
        for family, part, inner in zip(self.members, params.parts, state.parts):
            legal = jnp.minimum(action, family.spec.num_actions - 1)
            results.append(family.step(part, inner, legal))
        return self._join(params, results)

    def optimal_return(self, params: MixtureState) -> float:
        family = int(params.family)
        return self.members[family].optimal_return(params.parts[family])

    def _join(self, params: MixtureState, results: list) -> tuple[MixtureState, types.TimeStep]:
        spec = self.spec.observation
        mask_width = spec[environment.ACTION_MASK].shape[0]
        num_rows, num_states = spec[tasks.ROWS].shape[0], int(spec[tasks.ROWS].maximum)

        def padded(family: tasks.TaskFamily, timestep: types.TimeStep) -> types.TimeStep:
            rows = timestep.observation[tasks.ROWS]
            none = int(family.spec.observation[tasks.ROWS].maximum)  # number for no row
            rows = jnp.where(rows == none, num_states, rows)
            mask = timestep.observation[environment.ACTION_MASK]
            observation = {
                tasks.ROWS: jnp.pad(
                    rows, (0, num_rows - rows.shape[0]), constant_values=num_states
                ),
                environment.ACTION_MASK: jnp.pad(mask, (0, mask_width - mask.shape[0])),
            }
            return timestep._replace(observation=observation, metrics={})

        states, timesteps = zip(*results)
        timesteps = [padded(family, part) for family, part in zip(self.members, timesteps)]
        inner_timestep = jax.tree.map(lambda *parts: jnp.stack(parts)[params.family], *timesteps)
        return MixtureState(params.family, tuple(states)), inner_timestep


class State(NamedTuple):
    """State of a lifetime."""

    params: Any  # task parameters
    environment: Any  # [E, ...]
    last: jax.Array  # [E] bool, the episode ended here
    time: jax.Array  # int32, steps since the lifetime began
    length: jax.Array  # int32, transitions of this lifetime, including the one out of LAST
    key: jax.Array  # typed, of the lifetime


@dataclasses.dataclass(frozen=True, eq=False)
class Lifetimes:
    """The lifetime of an agent in a random task, as one episode.

    The agent acts in `E` environments with the same parameters, with auto-reset within the
    lifetime: FIRST follows LAST. The observation holds the rows, mask, reward, discount and step
    type of each environment, and the kind of task. The action is multi-discrete, with one part per
    environment. The reward of the lifetime is the mean over environments.

    The length is random for each lifetime, so that lifetimes do not end together. It is a multiple
    of `period`, including the transition out of LAST, so lifetimes begin and end with rollouts of
    that length.

    Attributes:
      tasks: a family, or its class.
      num_envs: `E`.
      period: agent steps of a rollout; lengths of lifetimes are multiples of it.
      min_periods: the shortest lifetime, in periods.
      max_periods: the longest lifetime, in periods.
    """

    tasks: tasks.TaskFamily | Callable[[], tasks.TaskFamily]
    family: tasks.TaskFamily = dataclasses.field(init=False, repr=False)
    num_envs: int = 64
    period: int = 120
    min_periods: int = 1
    max_periods: int = 400

    def __post_init__(self):
        family = _family(self.tasks)
        for name in ("tasks", "family"):  # a copy by `dataclasses.replace` has the same family
            object.__setattr__(self, name, family)
        errors.require_count(self, "num_envs", "period", "min_periods")
        errors.require_count(self, "max_periods", least=self.min_periods)
        if self.period * self.min_periods < 2:
            raise errors.UserError("Lifetimes.period: expected lifetimes of 2 steps or more, got 1")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of a lifetime."""
        inner, count = self.family.spec, self.num_envs
        rows = inner.observation[tasks.ROWS]
        num_actions = inner.num_actions
        return environment.EnvironmentSpec(
            name=f"Lifetimes of {inner.name}",
            observation={
                tasks.ROWS: specs.BoundedArray((count, *rows.shape), np.int32, 0, rows.maximum),
                tasks.REWARD: specs.Array((count,), np.float32),
                tasks.DISCOUNT: specs.BoundedArray((count,), np.float32, 0.0, 1.0),
                tasks.STEP_TYPE: specs.BoundedArray((count,), np.int8, types.FIRST, types.LAST),
                tasks.TASK: specs.BoundedArray((), np.int32, 0, len(self.family.task_names) - 1),
                environment.ACTION_MASK: specs.Array((count, num_actions), np.bool_),
            },
            action=specs.BoundedArray((count,), np.int32, 0, num_actions - 1),
            max_episode_steps=self.period * self.max_periods - 1,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Samples a task and a length, and starts an episode of each environment."""
        task_key, length_key, key = jax.random.split(key, 3)
        params = self.family.sample(task_key)
        periods = jax.random.randint(length_key, (), self.min_periods, self.max_periods + 1)
        time = jnp.zeros((), jnp.int32)
        inner, inner_timestep = self._begin(params, key, time)
        state = State(params, inner, inner_timestep.last(), time, periods * self.period, key)
        return state, types.restart(self._observe(params, inner_timestep))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Steps each environment; those whose episode had ended begin another one."""
        time = state.time + 1
        stepped = jax.vmap(self.family.step, (None, 0, 0))(state.params, state.environment, action)
        fresh = self._begin(state.params, state.key, time)
        inner, inner_timestep = unroll.select(state.last, fresh, stepped)
        state = state._replace(environment=inner, last=inner_timestep.last(), time=time)
        timestep = types.transition(
            self._observe(state.params, inner_timestep),
            reward=jnp.mean(inner_timestep.reward),
            truncated=time >= state.length - 1,
        )
        return state, timestep

    def _begin(self, params: Any, key: jax.Array, time: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode of each environment, `[E, ...]`."""
        keys = jax.random.split(jax.random.fold_in(key, time), self.num_envs)
        return jax.vmap(self.family.reset, (None, 0))(params, keys)

    def _observe(self, params: Any, inner_timestep: types.TimeStep) -> dict[str, jax.Array]:
        return inner_timestep.observation | {
            tasks.REWARD: inner_timestep.reward,
            tasks.DISCOUNT: inner_timestep.discount,
            tasks.STEP_TYPE: inner_timestep.step_type,
            tasks.TASK: self.family.task(params),
        }
