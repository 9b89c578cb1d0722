"""Lifetimes: an agent's whole life in one task is one episode of one stream.

What learns from lifetimes is a rule of learning, and an agent is what it remembers: parameters that
differ from stream to stream lie in the actor state, and those of environments in the state of the
environment. Both begin anew where a time step is FIRST, so a lifetime fits into the contract of
streams as it is, and under every runner.

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

from podracers import environment, errors, tasks, types


def _family(make: tasks.TaskFamily | Callable[[], tasks.TaskFamily]) -> tasks.TaskFamily:
    """Returns the family itself, or the one that the class makes."""
    made = make() if isinstance(make, type) or not isinstance(make, tasks.TaskFamily) else make
    if not isinstance(made, tasks.TaskFamily):
        raise errors.UserError(
            "expected a family of tasks, whose parameters are arguments (podracers.tasks), got "
            f"{type(made).__name__}"
        )
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class FixedTask:
    """One task of a family as an environment, for agents that know of no families.

    Attributes:
      tasks: the family, or the class of one.
      seed: of the task that is drawn.
    """

    tasks: tasks.TaskFamily | Callable[[], tasks.TaskFamily]
    seed: int = 0

    def __post_init__(self):
        """Makes the family."""
        object.__setattr__(self, "tasks", _family(self.tasks))
        errors.require_count(self, "seed", 0)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of the family."""
        return self.tasks.spec

    @functools.cached_property
    def params(self) -> Any:
        """The parameters of the task, in NumPy."""
        with jax.ensure_compile_time_eval():
            return jax.device_get(jax.jit(self.tasks.sample)(jax.random.key(self.seed)))

    @property
    def optimal_return(self) -> float:
        """The highest expected undiscounted return of an episode."""
        return self.tasks.optimal_return(self.params)

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode."""
        return self.tasks.reset(jax.tree.map(jnp.asarray, self.params), key)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Advances one step."""
        return self.tasks.step(jax.tree.map(jnp.asarray, self.params), state, action)


class MixtureState(NamedTuple):
    """Parameters or states of all families, of which one counts."""

    family: jax.Array  # int32
    parts: tuple  # one for each family


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The tasks of several families, as one family; each kind of task is equally likely.

    Tables are as long, and observations and actions as wide, as the largest of them. All families
    step, and one of the results is taken: on accelerators that is cheap beside the agents.

    Attributes:
      families: families, or classes of them.
    """

    families: tuple[tasks.TaskFamily | Callable[[], tasks.TaskFamily], ...]

    def __post_init__(self):
        """Makes the families."""
        object.__setattr__(self, "families", tuple(map(_family, self.families)))

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of the largest family."""
        parts = [family.spec for family in self.families]
        rows = [part.observation[tasks.ROWS] for part in parts]
        num_rows, num_states = max(r.shape[0] for r in rows), max(int(r.maximum) for r in rows)
        num_actions = max(part.action.num_values for part in parts)
        return environment.EnvironmentSpec(
            name="Mixture",
            observation={
                tasks.ROWS: specs.BoundedArray((num_rows,), np.int32, 0, num_states),
                environment.ACTION_MASK: specs.Array((num_actions,), np.bool_),
            },
            action=specs.DiscreteArray(num_actions),
            max_episode_steps=max(part.max_episode_steps for part in parts),
        )

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of all tasks."""
        return tuple(name for family in self.families for name in family.task_names)

    def sample(self, key: jax.Array) -> MixtureState:
        """Draws a family, in proportion to its kinds of tasks, and a task of it."""
        family_key, *keys = jax.random.split(key, 1 + len(self.families))
        counts = np.array([len(family.task_names) for family in self.families])
        task = jax.random.randint(family_key, (), 0, counts.sum())
        family = jnp.sum(task >= jnp.asarray(np.cumsum(counts))).astype(jnp.int32)
        return MixtureState(family, tuple(f.sample(k) for f, k in zip(self.families, keys)))

    def task(self, params: MixtureState) -> jax.Array:
        """Returns which of `task_names` it is."""
        counts = [len(family.task_names) for family in self.families]
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        numbers = [
            f.task(part) + int(offset)
            for f, part, offset in zip(self.families, params.parts, offsets)
        ]
        return jnp.stack(numbers).astype(jnp.int32)[params.family]

    def reset(self, params: MixtureState, key: jax.Array) -> tuple[MixtureState, types.TimeStep]:
        """Starts an episode of every family, and shows that of one."""
        results = [f.reset(part, key) for f, part in zip(self.families, params.parts)]
        return self._join(params, results)

    def step(
        self, params: MixtureState, state: MixtureState, action: jax.Array
    ) -> tuple[MixtureState, types.TimeStep]:
        """Steps every family, and shows that of one."""
        results = []
        for family, part, inner in zip(self.families, params.parts, state.parts):
            legal = jnp.minimum(action, family.spec.action.num_values - 1)
            results.append(family.step(part, inner, legal))
        return self._join(params, results)

    def optimal_return(self, params: MixtureState) -> float:
        """Returns that of the family that counts."""
        family = int(params.family)
        return self.families[family].optimal_return(params.parts[family])

    def _join(self, params: MixtureState, results: list) -> tuple[MixtureState, types.TimeStep]:
        spec = self.spec.observation
        mask_width = spec[environment.ACTION_MASK].shape[0]
        num_rows, num_states = spec[tasks.ROWS].shape[0], int(spec[tasks.ROWS].maximum)

        def padded(family: tasks.TaskFamily, timestep: types.TimeStep) -> types.TimeStep:
            rows = timestep.observation[tasks.ROWS]
            none = int(family.spec.observation[tasks.ROWS].maximum)  # its own number for no row
            rows = jnp.where(rows == none, num_states, rows)
            mask = timestep.observation[environment.ACTION_MASK]
            observation = {
                tasks.ROWS: jnp.pad(
                    rows, (0, num_rows - rows.shape[0]), constant_values=num_states
                ),
                environment.ACTION_MASK: jnp.pad(mask, (0, mask_width - mask.shape[0])),
            }
            return timestep._replace(observation=observation)

        states, timesteps = zip(*results)
        timesteps = [padded(family, part) for family, part in zip(self.families, timesteps)]
        shown = jax.tree.map(lambda *parts: jnp.stack(parts)[params.family], *timesteps)
        return MixtureState(params.family, tuple(states)), shown


class State(NamedTuple):
    """A moment of a lifetime."""

    params: Any  # of the task
    environment: Any  # [E, ...]
    last: jax.Array  # [E] bool, the episode ended here
    time: jax.Array  # int32, steps since the lifetime began
    length: jax.Array  # int32, transitions of this lifetime, the one out of LAST included
    key: jax.Array  # typed, of the lifetime


@dataclasses.dataclass(frozen=True, eq=False)
class Lifetimes:
    """The lifetime of an agent in a task that is drawn with it, as one episode.

    The agent acts in `E` environments with the same parameters; their episodes follow one another
    in the lifetime, as streams do in a run: what follows a LAST of theirs is FIRST. They are what
    is observed: rows and masks, rewards, discounts and step types of each, and the kind of task.
    The action is multi-discrete, one part for each. The reward of the lifetime is the mean of
    theirs.

    The length is drawn for each lifetime, so that lifetimes that begin together do not end
    together. It is a multiple of `period`, counted with the transition out of LAST: a lifetime that
    begins with a rollout of that length ends with one.

    Attributes:
      tasks: a family, or the class of one.
      num_envs: `E`.
      period: agent steps of a rollout, which lifetimes are a multiple of.
      min_periods: the shortest lifetime, in periods.
      max_periods: the longest lifetime, in periods.
    """

    tasks: tasks.TaskFamily | Callable[[], tasks.TaskFamily]
    num_envs: int = 64
    period: int = 120
    min_periods: int = 1
    max_periods: int = 400

    def __post_init__(self):
        """Makes the family."""
        object.__setattr__(self, "tasks", _family(self.tasks))
        for name in ("num_envs", "period", "min_periods"):
            errors.require_count(self, name)
        errors.require_count(self, "max_periods", self.min_periods)
        if self.period * self.min_periods < 2:
            raise errors.UserError("Lifetimes.period: a lifetime takes two steps or more")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of a lifetime."""
        inner, count = self.tasks.spec, self.num_envs
        rows = inner.observation[tasks.ROWS]
        num_actions = inner.action.num_values
        return environment.EnvironmentSpec(
            name=f"Lifetimes of {inner.name}",
            observation={
                tasks.ROWS: specs.BoundedArray((count, *rows.shape), np.int32, 0, rows.maximum),
                tasks.REWARD: specs.Array((count,), np.float32),
                tasks.DISCOUNT: specs.BoundedArray((count,), np.float32, 0.0, 1.0),
                tasks.STEP_TYPE: specs.BoundedArray((count,), np.int8, types.FIRST, types.LAST),
                tasks.TASK: specs.BoundedArray((), np.int32, 0, len(self.tasks.task_names) - 1),
                environment.ACTION_MASK: specs.Array((count, num_actions), np.bool_),
            },
            action=specs.BoundedArray((count,), np.int32, 0, num_actions - 1),
            max_episode_steps=self.period * self.max_periods - 1,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Draws a task and a length, and starts an episode of each environment."""
        task_key, length_key, key = jax.random.split(key, 3)
        params = self.tasks.sample(task_key)
        periods = jax.random.randint(length_key, (), self.min_periods, self.max_periods + 1)
        time = jnp.zeros((), jnp.int32)
        inner, shown = self._begin(params, key, time)
        state = State(params, inner, shown.last(), time, periods * self.period, key)
        return state, types.restart(self._observe(params, shown))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Steps each environment; those whose episode had ended begin another one."""
        time = state.time + 1
        stepped = jax.vmap(self.tasks.step, (None, 0, 0))(state.params, state.environment, action)
        fresh = self._begin(state.params, state.key, time)

        def select(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(state.last.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

        inner, shown = jax.tree.map(select, fresh, stepped)
        state = state._replace(environment=inner, last=shown.last(), time=time)
        timestep = types.transition(
            self._observe(state.params, shown),
            reward=jnp.mean(shown.reward),
            truncated=time >= state.length - 1,
        )
        return state, timestep

    def _begin(self, params: Any, key: jax.Array, time: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode of each environment, `[E, ...]`."""
        keys = jax.random.split(jax.random.fold_in(key, time), self.num_envs)
        return jax.vmap(self.tasks.reset, (None, 0))(params, keys)

    def _observe(self, params: Any, shown: types.TimeStep) -> dict[str, jax.Array]:
        return shown.observation | {
            tasks.REWARD: shown.reward,
            tasks.DISCOUNT: shown.discount,
            tasks.STEP_TYPE: shown.step_type,
            tasks.TASK: self.tasks.task(params),
        }
