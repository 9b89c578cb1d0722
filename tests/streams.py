"""An environment for tests of the stream contract, and comparisons of streams in NumPy.

Axis legend: `T` time, `B` streams.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, types


class State(NamedTuple):
    key: jax.Array  # typed
    time: jax.Array  # int32
    place: jax.Array  # float32 [2]
    total: jax.Array  # float32, the return so far


@dataclasses.dataclass(frozen=True, eq=False)
class RandomEpisodes:
    """Episodes of random length; half of them terminate and half are truncated.

    The observation is drawn at random and moved by the action; with `masked` it is a dict, and one
    value of each (part of the) action, drawn at random, is illegal. With `reports` its metrics are
    the return and the length so far. With two players, the turn passes after most moves.
    """

    end: float = 0.3  # probability that a step is the last one
    actions: str = "discrete"  # (3 values), "multi_discrete" (2 and 3 values) or "continuous" (2)
    masked: bool = False
    reports: bool = False
    players: int = 1

    @property
    def spec(self) -> environment.EnvironmentSpec:
        action = {
            "discrete": specs.DiscreteArray(3),
            "multi_discrete": specs.BoundedArray((2,), np.int32, 0, np.array([1, 2], np.int32)),
            "continuous": specs.BoundedArray((2,), np.float32, -1.0, 1.0),
        }[self.actions]
        observation = specs.Array((3,), np.float32)
        if self.masked:
            shape = (3,) if self.actions == "discrete" else (2, 3)
            observation = {
                "features": observation,
                environment.ACTION_MASK: specs.Array(shape, np.bool_),
            }
        metrics = ("total", "steps") if self.reports else ()
        return environment.EnvironmentSpec(
            "RandomEpisodes", observation, action, metrics=metrics, players=self.players
        )

    def reset(self, key):
        key, place_key = jax.random.split(key)
        place = jax.random.normal(place_key, (2,))
        state = State(key, jnp.zeros((), jnp.int32), place, jnp.zeros(()))
        return state, types.restart(self._observe(state), self._report(state))

    def step(self, state, action):
        place_key, reward_key, last_key, end_key = jax.random.split(
            jax.random.fold_in(state.key, state.time), 4
        )
        place = 0.5 * state.place + jax.random.normal(place_key, (2,)) + action - 1.0
        reward = jax.random.normal(reward_key) + place[0]
        last = jax.random.bernoulli(last_key, self.end)
        terminated = last & jax.random.bernoulli(end_key)
        state = State(state.key, state.time + 1, place, state.total + reward)
        numbers = reward, terminated, last, self._report(state)
        passes = self.players == 2 and jax.random.bernoulli(jax.random.fold_in(end_key, 1), 0.7)
        return state, types.transition(self._observe(state), *numbers, passes=passes)

    def _report(self, state):
        return {"total": state.total, "steps": state.time} if self.reports else {}

    def _observe(self, state):
        features = jnp.append(state.place, 0.1 * state.time)
        if not self.masked:
            return features
        # The first part of a multi-discrete action has only the values 0 and 1.
        illegal = (jnp.abs(state.place) * 10.0).astype(jnp.int32) % jnp.array([2, 3])
        mask = jnp.arange(3) != illegal[:, None]
        mask = mask.at[0, 2].set(False) if self.actions == "multi_discrete" else mask[1]
        return {"features": features, environment.ACTION_MASK: mask}


@dataclasses.dataclass(frozen=True, eq=False)
class Privileged:
    """Observations `[3]` of `RandomEpisodes` as two parts, the first without the time.

    Attributes:
      environment: the environment.
    """

    environment: RandomEpisodes

    @property
    def spec(self) -> environment.EnvironmentSpec:
        state, everything = specs.Array((2,), np.float32), specs.Array((3,), np.float32)
        observation = {"state": state, "privileged_state": everything}
        return dataclasses.replace(self.environment.spec, observation=observation)

    def reset(self, key):
        return self._split(*self.environment.reset(key))

    def step(self, state, action):
        return self._split(*self.environment.step(state, action))

    def _split(self, state, timestep):
        parts = {"state": timestep.observation[:2], "privileged_state": timestep.observation}
        return state, timestep._replace(observation=parts)


def evaluate(function: Any, *inputs: Any) -> Any:
    """Returns the outputs of one compiled program, in NumPy: eager operations compile apart."""
    return jax.device_get(jax.jit(function)(*inputs))


def to_numpy(tree: Any) -> Any:
    """Returns a pytree of NumPy arrays; typed keys as their data."""

    def fetch(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def assert_same(actual: Any, expected: Any, strict: bool = False) -> None:
    """Asserts that two pytrees are equal bit for bit, and of the same dtypes if `strict`."""
    same = functools.partial(np.testing.assert_array_equal, strict=strict)
    jax.tree.map(same, to_numpy(actual), to_numpy(expected))


def assert_close(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Asserts that two pytrees are equal up to rounding."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, to_numpy(actual), to_numpy(expected))
