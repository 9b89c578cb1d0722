"""Delayed chains: the first of many actions decides the reward at the end.

After Oh et al., "Discovering Reinforcement Learning Algorithms", 2020,
https://arxiv.org/abs/2007.08794, appendix A; close to the umbrella problem of Osband et al.,
"Behaviour Suite for Reinforcement Learning", 2020, https://arxiv.org/abs/1908.03568.

Axis legend: `F` rows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, tasks, types

VARIANTS = ("short", "short_noisy", "long", "long_noisy", "distractor")
_NUM_BITS = 22  # correct action, whether it was chosen, and 20 random bits


class Params(NamedTuple):
    """One chain."""

    task: jax.Array  # int32, the index of its variant
    length: jax.Array  # int32, steps of an episode
    right: jax.Array  # int32, correct first action; unused in distractor chains
    noisy: jax.Array  # bool, intermediate rewards of 1 or -1
    distractor: jax.Array  # bool


class State(NamedTuple):
    """State of an episode."""

    right: jax.Array  # int32
    choice: jax.Array  # int32, the first action
    time: jax.Array  # int32, steps since the reset
    key: jax.Array  # typed, of the episode


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedChains:
    """A family of chains (a `tasks.TaskFamily`).

    There are two actions. The first action of an episode determines whether its last reward is 1 or
    -1; later actions have no effect. The task determines the length of episodes. In noisy chains,
    each intermediate reward is 1 or -1 at random.

    The task determines the correct action, and the state is the first action and the step. In the
    distractor chain the correct action is random in each episode, and the state is 22 bits: whether
    action 0 is correct, whether the correct action was chosen, and 20 that are random at each step.
    Each bit selects one of two rows of a table.

    Attributes:
      variants: names in `VARIANTS`, equally likely.
      short: the range of lengths, in steps, of the short and the distractor chains.
      long: the range of lengths, in steps, of the long chains.
    """

    variants: tuple[str, ...] = VARIANTS
    short: tuple[int, int] = (5, 30)
    long: tuple[int, int] = (5, 50)

    def __post_init__(self):
        for name in self.variants or ("",):
            errors.require_known("DelayedChains.variants: no variant", name, VARIANTS)
        for name in ("short", "long"):
            low, high = getattr(self, name)
            if not 2 <= low <= high:
                raise errors.UserError(
                    f"DelayedChains.{name}: expected a range of at least 2 steps, got {low, high}"
                )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return environment.EnvironmentSpec(
            name="DelayedChains",
            observation={
                tasks.ROWS: environment.MultiDiscreteArray(
                    (self._num_rows,), np.int32, 0, self._num_states
                ),
                environment.ACTION_MASK: specs.Array((2,), np.bool_),
            },
            action=specs.DiscreteArray(2),
            max_episode_steps=self._longest,
        )

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(f"{name}_chain" for name in self.variants)

    def sample(self, key: jax.Array) -> Params:
        """Samples a variant, the length and the correct action."""
        variant_key, length_key, right_key = jax.random.split(key, 3)
        task = jax.random.randint(variant_key, (), 0, len(self.variants))
        ranges = [self._lengths(name) for name in self.variants]
        low, high = jnp.asarray(ranges, jnp.int32)[task]
        return Params(
            task=task,
            length=jax.random.randint(length_key, (), low, high + 1),
            right=jax.random.randint(right_key, (), 0, 2),
            noisy=jnp.array([name.endswith("_noisy") for name in self.variants])[task],
            distractor=jnp.array([name == "distractor" for name in self.variants])[task],
        )

    def task(self, params: Params) -> jax.Array:
        return params.task

    def reset(self, params: Params, key: jax.Array) -> tuple[State, types.TimeStep]:
        right_key, key = jax.random.split(key)
        drawn = jax.random.randint(right_key, (), 0, 2)
        zero = jnp.zeros((), jnp.int32)
        state = State(jnp.where(params.distractor, drawn, params.right), zero, zero, key)
        return state, types.restart(self._observe(params, state))

    def step(self, params: Params, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        action = jnp.asarray(action, jnp.int32)
        choice = jnp.where(state.time == 0, action, state.choice)
        state = state._replace(choice=choice, time=state.time + 1)
        final = jnp.where(choice == state.right, 1.0, -1.0)
        noise = jax.random.rademacher(self._step_keys(state)[0], (), jnp.float32)
        terminated = state.time >= params.length
        reward = jnp.where(terminated, final, jnp.where(params.noisy, noise, 0.0))
        return state, types.transition(self._observe(params, state), reward, terminated)

    def optimal_return(self, params: Params) -> float:
        """Returns 1: the mean of the noise is 0."""
        return 1.0

    def _lengths(self, variant: str) -> tuple[int, int]:
        return self.long if variant.startswith("long") else self.short

    @property
    def _longest(self) -> int:
        return max(self._lengths(name)[1] for name in self.variants)

    @property
    def _num_rows(self) -> int:
        return _NUM_BITS if "distractor" in self.variants else 1

    @property
    def _num_states(self) -> int:
        bits = 2 * _NUM_BITS if "distractor" in self.variants else 0
        return max(bits, 2 * self._longest + 1)

    def _step_keys(self, state: State) -> jax.Array:
        return jax.random.split(jax.random.fold_in(state.key, state.time))

    def _observe(self, params: Params, state: State) -> dict[str, jax.Array]:
        started = state.time > 0
        row = jnp.where(started, 2 * state.time - 1 + state.choice, 0)
        rows = jnp.full((self._num_rows,), self._num_states, jnp.int32).at[0].set(row)
        if "distractor" in self.variants:
            drawn = jax.random.bernoulli(self._step_keys(state)[1], 0.5, (_NUM_BITS - 2,))
            is_right = started & (state.choice == state.right)
            bits = jnp.concatenate([jnp.stack([state.right == 0, is_right]), drawn])
            both = 2 * jnp.arange(_NUM_BITS, dtype=jnp.int32) + bits.astype(jnp.int32)
            rows = jnp.where(params.distractor, both, rows)
        return {tasks.ROWS: rows, environment.ACTION_MASK: jnp.ones((2,), bool)}
