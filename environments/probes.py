"""Probe environments: tiny tasks whose optimal values are known, one for each thing to get wrong.

An agent that fails on one of these has a bug that the probe's name points at. They are ordered by
difficulty, and each takes seconds to learn.

Every probe has, besides the environment protocol:

- `optimal_return`: the expected undiscounted return of one episode under the best policy;
- `observations()`: NumPy observations, `[N, ...]` leaves, whose values are known;
- `value(gamma)`: `[N]` float32, the value of each of them under the best policy.

Where an action earns something, a policy that explores is worth a little less than that.

Axis legend: `N` observations with a known value, `A` actions, `D` parts of a multi-discrete action.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, types


class State(NamedTuple):
    """The state of a probe; most use only one of the two."""

    cue: jax.Array  # int32, which of a few situations this episode is
    time: jax.Array  # int32, steps since the reset


class OneStep:
    """Episodes of one step: one of `N` situations is drawn, shown, and answered.

    A subclass says what is seen (`observations`), what it is worth (`value`) and what an action
    pays (`_reward`).
    """

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of this environment."""
        return environment.EnvironmentSpec(
            name=type(self).__name__,
            observation=jax.tree.map(
                lambda leaf: specs.Array(leaf.shape[1:], leaf.dtype), self.observations()
            ),
            action=self._action_spec(),
            max_episode_steps=1,
        )

    @property
    def optimal_return(self) -> float:
        """The mean value of the situations, which are equally likely."""
        return float(np.mean(self.value(gamma=1.0)))

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Draws a situation."""
        num_situations = len(self.value(gamma=1.0))
        cue = jax.random.randint(key, (), 0, num_situations, jnp.int32)
        return State(cue, jnp.zeros((), jnp.int32)), types.restart(self._observe(cue))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Pays for the action, and ends the episode."""
        state = state._replace(time=state.time + 1)
        reward = self._reward(state.cue, jnp.asarray(action))
        return state, types.transition(self._observe(state.cue), reward, terminated=True)

    def observations(self) -> types.PyTree:
        """What is seen in each situation; the default is one that never changes, `[1, 1]`."""
        return np.ones((1, 1), np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """What the best action pays in each situation, `[N]`; 1 by default."""
        del gamma
        return np.ones((len(jax.tree.leaves(self.observations())[0]),), np.float32)

    def _action_spec(self) -> specs.Array:
        """Returns the action's spec; two actions by default."""
        return specs.DiscreteArray(2)

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array | float:
        """Returns what `action` pays in situation `cue`."""
        raise NotImplementedError

    def _observe(self, cue: jax.Array) -> types.PyTree:
        """Returns one of `observations()`."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[cue], self.observations())


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantReward(OneStep):
    """Always the same observation, always a reward of 1: does the value learn at all?"""

    def _reward(self, cue: jax.Array, action: jax.Array) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class ObservationReward(OneStep):
    """The observation is -1 or 1, and so is the reward: does the value look?"""

    def observations(self) -> np.ndarray:
        """Both signs, `[2, 1]`."""
        return np.array([[-1.0], [1.0]], np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """The reward that the observation shows, `[2]`."""
        del gamma
        return np.array([-1.0, 1.0], np.float32)

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return 2.0 * cue - 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class ActionReward(OneStep):
    """Action 1 pays 1 and action 0 pays -1: does the policy learn?"""

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.where(action == 1, 1.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class ObservationActionReward(OneStep):
    """Action 0 is right where the observation is -1, and 1 where it is 1: does the policy look?

    A right answer pays 1, a wrong one -1.
    """

    def observations(self) -> np.ndarray:
        """Both signs, `[2, 1]`."""
        return np.array([[-1.0], [1.0]], np.float32)

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.where(action == cue, 1.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedAction(OneStep):
    """One action of three is illegal, and would pay ten times more: is the mask kept?

    Actions 0, 1 and 2 pay 0, 0.5 and 1 where they are legal; the illegal one, which changes from
    episode to episode and shows in the observation, pays 10. A return above 1 is thus proof that a
    mask was ignored, in acting or in evaluation.
    """

    illegal_reward = 10.0

    def observations(self) -> types.PyTree:
        """The three situations, `[3, 3]` leaves; row `i` forbids action `i`."""
        illegal = np.eye(3, dtype=np.float32)
        return {"features": illegal, environment.ACTION_MASK: illegal == 0.0}

    def value(self, gamma: float) -> np.ndarray:
        """What the best legal action pays, `[3]`."""
        del gamma
        return np.array([1.0, 1.0, 0.5], np.float32)

    def _action_spec(self) -> specs.Array:
        return specs.DiscreteArray(3)

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.where(action == cue, self.illegal_reward, 0.5 * action)


@dataclasses.dataclass(frozen=True, eq=False)
class MultiDiscreteReward(OneStep):
    """An action of two parts, each with a right value that the observation shows.

    The first part has two values and the second three; each right part pays 0.5.

    Attributes:
      masked: whether the observation is a dict with a mask `[2, 3]`, whose only false entry is the
        value that the first part does not have.
    """

    masked: bool = False

    def observations(self) -> types.PyTree:
        """The six pairs of right values, one-hot, `[6, 5]`; and the mask, `[6, 2, 3]`."""
        situation = np.arange(6)
        first, second = np.eye(2, dtype=np.float32), np.eye(3, dtype=np.float32)
        features = np.concatenate([first[situation // 3], second[situation % 3]], axis=1)
        if not self.masked:
            return features
        mask = np.array([[True, True, False], [True, True, True]])
        return {"features": features, environment.ACTION_MASK: np.tile(mask, (6, 1, 1))}

    def _action_spec(self) -> specs.Array:
        return specs.BoundedArray((2,), np.int32, 0, np.array([1, 2], np.int32))

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(action == jnp.stack([cue // 3, cue % 3]))


@dataclasses.dataclass(frozen=True, eq=False)
class ContinuousReward(OneStep):
    """A continuous action of two parts has to be at a point that the observation tells.

    The parts have different bounds, neither symmetric about zero, so an agent that scales its
    actions wrongly cannot reach the points. The reward is 1 minus the squared distance.
    """

    def targets(self) -> np.ndarray:
        """The best action in each situation, `[2, 2]`."""
        return np.array([[-0.5, 2.5], [0.25, 1.5]], np.float32)

    def observations(self) -> np.ndarray:
        """Both signs, `[2, 1]`."""
        return np.array([[-1.0], [1.0]], np.float32)

    def _action_spec(self) -> specs.Array:
        low = np.array([-1.0, 1.0], np.float32)
        high = np.array([0.5, 3.0], np.float32)
        return specs.BoundedArray((2,), np.float32, low, high)

    def _reward(self, cue: jax.Array, action: jax.Array) -> jax.Array:
        return 1.0 - jnp.sum((action - jnp.asarray(self.targets())[cue]) ** 2)


@dataclasses.dataclass(frozen=True, eq=False)
class FixedLength:
    """Episodes of a fixed number of steps, with two actions.

    A subclass says what an action pays (`_reward`), what is seen (`observations`, `_observe`) and
    what it is worth (`optimal_return`, `value`).

    Attributes:
      length: number of steps of an episode.
    """

    length: int = 4

    _least_length: ClassVar = 1
    _truncates: ClassVar = False  # whether episodes are truncated at their end

    def __post_init__(self):
        if self.length < self._least_length:
            raise errors.UserError(
                f"length must be {self._least_length} or more, got {self.length}"
            )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of this environment."""
        return environment.EnvironmentSpec(
            name=type(self).__name__,
            observation=specs.BoundedArray(self.observations().shape[1:], np.float32, -1.0, 1.0),
            action=specs.DiscreteArray(2),
            max_episode_steps=self.length,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Starts the clock, and draws a cue where there is one."""
        state = State(jnp.asarray(self._draw(key), jnp.int32), jnp.zeros((), jnp.int32))
        return state, types.restart(self._observe(state))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Lets time pass, and pays."""
        state = state._replace(time=state.time + 1)
        reward = self._reward(state, action)
        done = state.time >= self.length
        end = {"truncated": done} if self._truncates else {"terminated": done}
        return state, types.transition(self._observe(state), reward, **end)

    def observations(self) -> np.ndarray:
        """Observations with a known value; by default the only one there is, `[1, 1]`."""
        return np.ones((1, 1), np.float32)

    def _draw(self, key: jax.Array) -> jax.Array | int:
        """Returns the cue of an episode."""
        del key
        return 0

    def _observe(self, state: State) -> jax.Array:
        """Returns what is seen in a state; by default the same everywhere."""
        return jnp.ones((1,), jnp.float32)

    def _reward(self, state: State, action: jax.Array) -> jax.Array | float:
        """Returns what the action pays that led to `state`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedReward(FixedLength):
    """A reward of 1 after a few steps, whatever the actions: is the discount right?

    The observation is the time, one-hot. The policy does not matter, so the values are exact for
    every agent.
    """

    length: int = 3

    optimal_return = 1.0

    def observations(self) -> np.ndarray:
        """The observation at each time but the last, `[length, length + 1]`."""
        return np.eye(self.length, self.length + 1, dtype=np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """`gamma` to the power of the steps before the last one, `[length]`."""
        return np.asarray(gamma, np.float32) ** np.arange(self.length - 1, -1, -1)

    def _observe(self, state: State) -> jax.Array:
        """Returns the time, one-hot, float32 `[length + 1]`."""
        return (jnp.arange(self.length + 1) == state.time).astype(jnp.float32)

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return state.time >= self.length


@dataclasses.dataclass(frozen=True, eq=False)
class Memory(FixedLength):
    """A cue at the start is needed at the end: is recurrent state kept, replayed and reset?

    The observation is `[2]`: the cue (-1 or 1 at the start, 0 afterwards), and 1 when the answer is
    due. The last action is the answer: 0 for -1 and 1 for 1. A right one pays 1, a wrong one -1.
    Without memory no policy has an expected return other than 0. Episodes of two steps are the
    shortest that need memory.
    """

    optimal_return = 1.0
    memoryless_return = 0.0

    _least_length: ClassVar = 2

    def observations(self) -> np.ndarray:
        """The two cues, `[2, 2]`: later observations do not tell the state."""
        return np.array([[-1.0, 0.0], [1.0, 0.0]], np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """The value at the start, `[2]`: the reward is `length` steps away."""
        return np.full((2,), gamma ** (self.length - 1), np.float32)

    def _draw(self, key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key)

    def _observe(self, state: State) -> jax.Array:
        """Returns the cue and the question, float32 `[2]`."""
        cue = jnp.where(state.time == 0, 2.0 * state.cue - 1.0, 0.0)
        return jnp.stack([cue, (state.time == self.length - 1).astype(jnp.float32)])

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        answer = jnp.where(action == state.cue, 1.0, -1.0)
        return jnp.where(state.time >= self.length, answer, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Bandit(FixedLength):
    """Two arms, one of which pays: does the network see what it did, and what that earned?

    Which arm pays is drawn anew each episode and never shown: the observation is always the same.
    The paying arm pays 1 and the other one -1. The first action is a guess; what it earned tells
    all the others. Without the previous action and reward among its inputs no policy has an
    expected return other than 0, whatever it remembers of observations. Episodes of two steps are
    the shortest that can be adapted to.
    """

    return_without_inputs = 0.0

    _least_length: ClassVar = 2

    @property
    def optimal_return(self) -> float:
        """One for each step but the first, which earns 0 on average."""
        return self.length - 1.0

    def value(self, gamma: float) -> np.ndarray:
        """The value at the start, `[1]`: all but the first reward, discounted."""
        return np.array([sum(gamma**time for time in range(1, self.length))], np.float32)

    def _draw(self, key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key)

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return jnp.where(action == state.cue, 1.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Truncation(FixedLength):
    """A reward of 1 for ever, cut by a time limit: does the value bootstrap where it must?

    Nothing tells the time, and the task never terminates, so the value is the infinite sum
    `1 / (1 - gamma)`. An agent that takes the cut for an ending learns much less than that.
    """

    length: int = 5

    _truncates: ClassVar = True

    @property
    def optimal_return(self) -> float:
        """One for each step up to the limit."""
        return float(self.length)

    def value(self, gamma: float) -> np.ndarray:
        """The sum of all powers of `gamma`, `[1]`."""
        return np.full((1,), 1.0 / (1.0 - gamma), np.float32)

    def _reward(self, state: State, action: jax.Array) -> float:
        return 1.0


# Every probe, in the order in which to debug an agent with them.
ALL = (
    ConstantReward,
    ObservationReward,
    ActionReward,
    ObservationActionReward,
    DelayedReward,
    Truncation,
    MaskedAction,
    MultiDiscreteReward,
    ContinuousReward,
    Memory,
    Bandit,
)
