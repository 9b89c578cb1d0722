"""Adaptor of JaxMARL, an optional package: environments of several agents.

Rutherford et al., "JaxMARL: Multi-Agent RL Environments and Algorithms in JAX",
https://arxiv.org/abs/2311.10090. The package is imported lazily: its import initialises a backend.

Axis legend: `A` agents, `F` features.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types

AGENT, STATE = "agent", "state"  # parts of observations
_ONE_AGENT = "MPE_simple_v3"
_FAMILIES = ("MPE_", "overcooked", "SMAX", "HeuristicEnemySMAX")


class State(NamedTuple):
    """State of one environment."""

    inner: Any  # JaxMARL's
    key: jax.Array  # [] typed key of the episode
    steps: jax.Array  # [] int32, steps taken in this episode
    score: jax.Array  # [A] float32, sum of the rewards without shaping


@dataclasses.dataclass(frozen=True, eq=False)
class JaxMARL(adaptors.Adaptor):
    """A JaxMARL environment under the contract: the particle environments, Overcooked and SMAX.

    Observations are dicts: `agent` is that of the agent, filled up with zeros to the largest one.
    If the agents' numbers of actions differ, a mask has those that an agent lacks. `max_steps`
    truncates episodes (after one more step in the particle environments and SMAX, as in JaxMARL).
    In SMAX, a dead unit has one legal action and the rewards of its team until the battle ends, as
    in JaxMARL; `win` is whether all enemies died and an ally did not. The metric `task_return` of
    Overcooked is the return without shaping.

    Attributes:
      name: registered id, such as `MPE_simple_spread_v3`.
      options: arguments of the constructor, by name. The `layout` of Overcooked and the `scenario`
        of SMAX are names.
      state: whether observations have the part `state`, too, for critics (`critic_keys`): JaxMARL's
        state of the world, or the observations of all agents side by side.
      agent_id: whether a one-hot code of the agent's number is appended to both parts, along the
        last axis (of images, as planes).
      shaping: factor of the shaped rewards of Overcooked in training; evaluations have none.
    """

    name: str = "MPE_simple_spread_v3"
    state: bool = False
    agent_id: bool = False
    shaping: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.shaping and not self._is_overcooked:
            raise errors.UserError(
                f"JaxMARL.shaping: expected 0, because {self.name} has no shaped rewards, got "
                f"{self.shaping}"
            )

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner = self._built
        _, timestep = jax.eval_shape(self.reset, jax.random.key(0))
        observation: types.PyTree = jax.tree.map(
            lambda leaf: specs.Array(leaf.shape[1:], leaf.dtype), timestep.observation
        )
        return environment.EnvironmentSpec(
            name=self.name,
            observation=observation,
            action=self._action,
            max_episode_steps=inner.max_steps + (not self._is_overcooked),
            metrics=tuple(timestep.metrics),
            num_agents=len(inner.agents),
        )

    @property
    def evaluation_environment(self) -> "JaxMARL":
        """This environment without shaped rewards."""
        return dataclasses.replace(self, shaping=0.0)

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        reset_key, key = jax.random.split(key)
        observation, inner = self._built.reset(reset_key)
        score = jnp.zeros(len(self._built.agents), jnp.float32)
        state = State(adaptors.strong(inner), key, jnp.zeros((), jnp.int32), score)
        return state, jax.vmap(types.restart)(
            self._observe(state, observation), self._metrics(state)
        )

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        env = self._built
        actions = {agent: action[index] for index, agent in enumerate(env.agents)}
        key = jax.random.fold_in(state.key, state.steps)
        observation, inner, rewards, dones, info = env.step_env(key, state.inner, actions)
        reward = self._stacked(rewards)
        score = state.score + reward
        if self.shaping:
            reward += self.shaping * self._stacked(info["shaped_reward"])
        state = State(adaptors.strong(inner), state.key, state.steps + 1, score)
        last = jnp.full(len(env.agents), dones["__all__"])
        return state, jax.vmap(types.transition)(
            self._observe(state, observation),
            reward,
            last & self._is_decided(inner),
            last,
            self._metrics(state),
        )

    def _make(self) -> Any:
        name, options = self.name, dict(self.options)
        # The import prints two lines.
        package = adaptors.optional_import("jaxmarl.registration", f"environment '{name}'")
        known = [x for x in package.registered_envs if x.startswith(_FAMILIES) and x != _ONE_AGENT]
        errors.require_known("JaxMARL has no environment of several agents", name, known)
        layouts = adaptors.optional_import("jaxmarl.environments.overcooked.layouts", name)
        smax = adaptors.optional_import("jaxmarl.environments.smax.smax_env", name)
        for option, names in (
            ("layout", layouts.overcooked_layouts if name == "overcooked" else {}),
            ("scenario", smax.MAP_NAME_TO_SCENARIO),
        ):
            if names and isinstance(chosen := options.get(option), str):
                errors.require_known(f"{name} has no {option}", chosen, names)
                options[option] = names[chosen]
        with adaptors.options_of(f"JaxMARL's {name}", options), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Overcooked's first version warns
            return package.make(name, **options)

    @property
    def _is_overcooked(self) -> bool:
        return self.name.startswith("overcooked")

    def _stacked(self, by_agent: Any) -> jax.Array:
        """Returns the numbers of all agents, float32 `[A]`."""
        return jnp.stack([jnp.float32(by_agent[agent]) for agent in self._built.agents])

    @functools.cached_property
    def _action(self) -> specs.BoundedArray:
        spaces = [self._built.action_space(agent) for agent in self._built.agents]
        if all(hasattr(space, "n") for space in spaces):
            return adaptors.action_spec(max(spaces, key=lambda space: space.n))
        shapes = {space.shape for space in spaces}
        if len(shapes) > 1:
            raise errors.UserError(f"{self.name}: expected actions of one shape, got {shapes}")
        return adaptors.action_spec(spaces[0])

    def _mask(self, inner: Any) -> jax.Array | None:
        """Returns the legal actions `[A, ...]`; None if all are."""
        env = self._built
        if not isinstance(self._action, specs.DiscreteArray):
            return None
        if "SMAX" in self.name:
            masks = env.get_avail_actions(inner)
        else:
            masks = {agent: np.ones(env.action_space(agent).n, bool) for agent in env.agents}
            if len({len(mask) for mask in masks.values()}) == 1:
                return None
        width = self._action.num_values
        rows = [jnp.asarray(masks[agent], bool) for agent in env.agents]
        return jnp.stack([jnp.pad(row, (0, width - len(row))) for row in rows])

    def _units(self, inner: Any) -> Any:
        """Returns whether each unit of SMAX lives, those of the allies first."""
        return getattr(inner, "state", inner).unit_alive

    def _is_decided(self, inner: Any) -> jax.Array | bool:
        """Returns whether an episode that ends does so by its own rules, not by the limit."""
        if "SMAX" not in self.name:
            return False
        units, allies = self._units(inner), self._built.num_allies
        return ~jnp.any(units[:allies]) | ~jnp.any(units[allies:])

    def _metrics(self, state: State) -> dict[str, jax.Array]:
        if self._is_overcooked:
            return {"task_return": state.score}
        if "SMAX" not in self.name:
            return {}
        units, allies = self._units(state.inner), self._built.num_allies
        win = jnp.any(units[:allies]) & ~jnp.any(units[allies:])
        return {"win": jnp.full(len(self._built.agents), win, jnp.float32)}

    def _observe(self, state: State, observation: dict[str, jax.Array]) -> types.PyTree:
        """Returns the observations of all agents, `[A, ...]` leaves."""
        agents = self._built.agents
        rows = [jnp.asarray(observation[agent], jnp.float32) for agent in agents]
        world = observation.get("world_state")
        widths = np.max([row.shape for row in rows], axis=0)
        padded = [jnp.pad(x, [(0, w - n) for w, n in zip(widths, x.shape)]) for x in rows]
        parts = {AGENT: jnp.stack(padded)}
        if self.state:
            world = jnp.concatenate(rows, axis=-1) if world is None else jnp.float32(world)
            parts[STATE] = jnp.broadcast_to(world, (len(agents), *world.shape))
        if self.agent_id:
            parts = {name: self._with_id(part) for name, part in parts.items()}
        if (mask := self._mask(state.inner)) is not None:
            parts[environment.ACTION_MASK] = mask
        return parts

    def _with_id(self, part: jax.Array) -> jax.Array:
        """Returns a part `[A, ..., F]` with the agents' codes, `[A, ..., F + A]`."""
        count = len(part)
        code = jnp.eye(count).reshape(count, *[1] * (part.ndim - 2), count)
        return jnp.concatenate([part, jnp.broadcast_to(code, (*part.shape[:-1], count))], axis=-1)
