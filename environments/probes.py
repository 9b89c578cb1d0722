"""Probe environments: tiny tasks with known optimal values, one for each kind of bug.

An agent learns each in seconds, or has the bug that the probe's name points at. Debug an agent in
the order of this file.

Axis legend: `N` observations with a known value, `A` actions, `D` parts of a multi-discrete action.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, types

_SIGNS = np.array([[-1.0], [1.0]], np.float32)  # [2, 1]


class State(NamedTuple):
    """The state of a probe."""

    cue: jax.Array  # int32, index of the cue, random at the reset
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """Episodes of `length` steps with one of a few cues, drawn uniformly at the reset.

    A subclass overrides methods that differ from the defaults. Where the action matters, a policy
    that explores earns a little less than `value`.

    Attributes:
      length: number of steps of an episode; an option of some probes.
    """

    length: int = dataclasses.field(default=1, init=False)
    num_cues: ClassVar[int] = 1
    min_length: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = ()
    truncates: ClassVar[bool] = False  # truncation ends episodes, not termination
    action: ClassVar[specs.BoundedArray] = specs.DiscreteArray(2)

    def __post_init__(self):
        errors.require_count(self, "length", least=self.min_length)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        observation = jax.tree.map(
            lambda leaf: specs.Array(leaf.shape[1:], leaf.dtype), self.observations()
        )
        return environment.EnvironmentSpec(
            type(self).__name__, observation, self.action, self.length, metrics=self.metrics
        )

    @property
    def optimal_return(self) -> float:
        """The expected undiscounted return of an episode under the best policy."""
        return float(np.mean(self.value(gamma=1.0)))

    def observations(self) -> types.PyTree:
        """Returns the observations whose values are known, NumPy `[N, ...]` leaves.

        By default they are both signs of two cues, `[2, 1]`, else a constant.
        """
        return _SIGNS if self.num_cues == 2 else np.ones((1, 1), np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """Returns the value of each observation under the best policy, float32 `[N]`.

        By default the best policy earns 1, at the end of an episode whose start is observed.
        """
        count = len(jax.tree.leaves(self.observations())[0])
        return np.full(count, gamma ** (self.length - 1), np.float32)

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Samples a cue."""
        cue = jax.random.randint(key, (), 0, self.num_cues, jnp.int32)
        state = State(cue, jnp.zeros((), jnp.int32))
        metrics = dict.fromkeys(self.metrics, 0.0)
        return state, types.restart(self._observe(state), metrics)

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Advances the time, rewards the action, and reports it."""
        state = state._replace(time=state.time + 1)
        done = state.time >= self.length
        terminated, truncated = (False, done) if self.truncates else (done, False)
        action = jnp.asarray(action)
        reward, metrics = self._reward(state, action), self._metrics(state, action)
        observation = self._observe(state)
        return state, types.transition(observation, reward, terminated, truncated, metrics)

    def _observe(self, state: State) -> types.PyTree:
        """Returns the observation in a state; by default the observation of its cue."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[state.cue], self.observations())

    def _reward(self, state: State, action: jax.Array) -> jax.Array | float:
        """Returns the reward of the action that led to `state`; 1 by default."""
        return 1.0

    def _metrics(self, state: State, action: jax.Array) -> dict[str, jax.Array]:
        """Returns the numbers of the action that led to `state`, by the names of `metrics`."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantReward(Probe):
    """A constant observation and a reward of 1: does the value learn at all?"""


@dataclasses.dataclass(frozen=True, eq=False)
class ObservationReward(Probe):
    """The observation is -1 or 1, and so is the reward: does the value use the observation?"""

    num_cues = 2

    def value(self, gamma: float) -> np.ndarray:
        """The reward, equal to the observation, `[2]`."""
        return _SIGNS[:, 0]

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return 2.0 * state.cue - 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class ActionReward(Probe):
    """Action 1 earns 1 and action 0 earns -1: does the policy learn?"""

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return jnp.where(action == 1, 1.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class ObservationActionReward(Probe):
    """Action 0 is correct at -1, and action 1 at 1: does the policy use the observation?

    A correct action earns 1, a wrong one -1.
    """

    num_cues = 2

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return jnp.where(action == state.cue, 1.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedReward(Probe):
    """A reward of 1 after a few steps, for all actions: is the discount correct?

    The observation is the time, one-hot. Values do not depend on the policy.
    """

    length: int = 3

    def observations(self) -> np.ndarray:
        """The observation at each time but the last, `[length, length + 1]`."""
        return np.eye(self.length, self.length + 1, dtype=np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """`gamma` to the power of the steps before the last one, `[length]`."""
        return np.asarray(gamma, np.float32) ** np.arange(self.length - 1, -1, -1)

    def _observe(self, state: State) -> jax.Array:
        return (jnp.arange(self.length + 1) == state.time).astype(jnp.float32)

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return state.time >= self.length


@dataclasses.dataclass(frozen=True, eq=False)
class Truncation(Probe):
    """A reward of 1 at every step, with a time limit: does the value bootstrap there?

    The observation does not show the time, and the task never terminates, so the value is the
    infinite sum `1 / (1 - gamma)`. An agent that learns the cut as a termination learns less.
    """

    length: int = 5
    truncates = True

    @property
    def optimal_return(self) -> float:
        """One for each step up to the limit."""
        return float(self.length)

    def value(self, gamma: float) -> np.ndarray:
        """The sum of all powers of `gamma`, `[1]`."""
        return np.full(1, 1.0 / (1.0 - gamma), np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedAction(Probe):
    """One action of three is illegal, and would earn ten times more: is the mask respected?

    Actions 0, 1 and 2 earn 0, 0.5 and 1 where they are legal; the illegal one, random and visible
    in each episode, earns 10. A return above 1 proves that a mask was ignored.
    """

    num_cues = 3
    action = specs.DiscreteArray(3)
    illegal_reward = 10.0

    def observations(self) -> types.PyTree:
        """The three cues, `[3, 3]` leaves; row `i` forbids action `i`."""
        illegal = np.eye(3, dtype=np.float32)
        return {"features": illegal, environment.ACTION_MASK: illegal == 0.0}

    def value(self, gamma: float) -> np.ndarray:
        """The reward of the best legal action, `[3]`."""
        return np.array([1.0, 1.0, 0.5], np.float32)

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return jnp.where(action == state.cue, self.illegal_reward, 0.5 * action)


@dataclasses.dataclass(frozen=True, eq=False)
class MultiDiscreteReward(Probe):
    """An action of two parts, of 2 and 3 values; the correct value of each earns 0.5.

    The observation shows both correct values.

    Attributes:
      masked: whether the observation is a dict with a mask `[2, 3]`, whose only false entry is the
        value that the first part does not have.
    """

    masked: bool = False
    num_cues = 6
    action = specs.BoundedArray((2,), np.int32, 0, np.array([1, 2], np.int32))

    def observations(self) -> types.PyTree:
        """The six pairs of correct values, one-hot, `[6, 5]`; and the mask, `[6, 2, 3]`."""
        cue = np.arange(6)
        first, second = np.eye(2, dtype=np.float32), np.eye(3, dtype=np.float32)
        features = np.concatenate([first[cue // 3], second[cue % 3]], axis=1)
        if not self.masked:
            return features
        mask = np.array([[True, True, False], [True, True, True]])
        return {"features": features, environment.ACTION_MASK: np.tile(mask, (6, 1, 1))}

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(action == jnp.stack([state.cue // 3, state.cue % 3]))


@dataclasses.dataclass(frozen=True, eq=False)
class ContinuousReward(Probe):
    """A continuous action `[2]` should be at a point that depends on the observation.

    The reward is 1 minus the squared distance. Both parts have different bounds, not symmetric
    about zero: an agent that scales actions wrongly cannot reach the points.
    """

    num_cues = 2
    action = specs.BoundedArray(
        (2,), np.float32, np.array([-1.0, 1.0], np.float32), np.array([0.5, 3.0], np.float32)
    )
    targets = np.array([[-0.5, 2.5], [0.25, 1.5]], np.float32)  # [2, 2] best action for each cue

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return 1.0 - jnp.sum((action - jnp.asarray(self.targets)[state.cue]) ** 2)


@dataclasses.dataclass(frozen=True, eq=False)
class PrivilegedReward(Probe):
    """The reward depends on a part for critics alone: do they read it, and does the policy not?

    Action 0 earns 0. Action 1 earns 1.5 or -0.5, by the sign of `privileged_state`. The policy that
    does not read the sign always takes action 1; one that read it would earn 0.75 on average.
    """

    num_cues = 2

    def observations(self) -> types.PyTree:
        """The constant `state` and both signs, `[2, 1]`."""
        return {"state": np.ones((2, 1), np.float32), "privileged_state": _SIGNS}

    def value(self, gamma: float) -> np.ndarray:
        """The reward of action 1, `[2]`."""
        return 0.5 + _SIGNS[:, 0]

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return jnp.where(action == 1, 2.0 * state.cue - 0.5, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Memory(Probe):
    """A cue at the start is needed at the end: is recurrent state kept, replayed and reset?

    The observation is `[2]`: the cue (-1 or 1 at the start, 0 afterwards), and 1 when the answer is
    due. The last action is the answer, 0 for -1 and 1 for 1: it earns 1 or -1. Without memory the
    expected return of every policy is 0.
    """

    length: int = 4
    num_cues = 2
    min_length = 2

    def observations(self) -> np.ndarray:
        """The two cues, `[2, 2]`: later observations do not determine the state."""
        return np.array([[-1.0, 0.0], [1.0, 0.0]], np.float32)

    def _observe(self, state: State) -> jax.Array:
        cue = jnp.where(state.time == 0, 2.0 * state.cue - 1.0, 0.0)
        return jnp.stack([cue, (state.time == self.length - 1).astype(jnp.float32)])

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        answer = jnp.where(action == state.cue, 1.0, -1.0)
        return jnp.where(state.time >= self.length, answer, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Bandit(ObservationActionReward):
    """Two arms, one of which earns: are the previous action and reward inputs of the network?

    Each episode draws the arm that earns 1, and does not show it; the other arm earns -1. The first
    action is a guess, whose reward determines all the others. Without the previous action and
    reward among the inputs the expected return of every policy is 0.
    """

    length: int = 4
    min_length = 2
    return_without_inputs = 0.0

    def observations(self) -> np.ndarray:
        """A constant for both arms, `[2, 1]`."""
        return np.ones((2, 1), np.float32)

    def value(self, gamma: float) -> np.ndarray:
        """The value at the start, `[2]`: all but the first reward, discounted."""
        return np.full(2, sum(gamma**time for time in range(1, self.length)), np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Reporting(Probe):
    """Two numbers of its own: are they read at the LAST time step, once an episode?

    The observation is the cue, and the last action earns 1 if it equals the cue. The metric
    `success` is 1 where the latest action equals the cue, so that its mean over episodes is their
    mean return; `cue` is the cue, 0 or 1 with equal probability.
    """

    length: int = 3
    num_cues = 2
    metrics = ("success", "cue")

    def _reward(self, state: State, action: jax.Array) -> jax.Array:
        return (action == state.cue) & (state.time >= self.length)

    def _metrics(self, state: State, action: jax.Array) -> dict[str, jax.Array]:
        return {"success": action == state.cue, "cue": state.cue}


class AgentsState(NamedTuple):
    """The state of `TwoAgents`; `[2]` has an entry for each agent."""

    sign: jax.Array  # float32 [2], numbers in [-1, 1] whose signs are cues
    active: jax.Array  # bool [2]
    time: jax.Array  # int32, steps since the reset
    end: jax.Array  # int32, steps of this episode


@dataclasses.dataclass(frozen=True, eq=False)
class TwoAgents:
    """Two agents: is each row of a batch one of them, and is one that is out not learnt from?

    Each observes a number and which agent it is. At a number above 0, action 1 is correct for agent
    0, and action 0 for agent 1; otherwise the other one. A correct action earns 1. Agent 1 goes out
    by action 2. An episode has a random number of steps, up to `length`, and is truncated where the
    number of agent 0 is at most 0. The metric `out` is 1 if agent 1 has gone out.
    """

    length: int = 4

    @property
    def spec(self) -> environment.EnvironmentSpec:
        observation = {
            "features": specs.Array((2,), np.float32),
            environment.ACTION_MASK: specs.Array((3,), np.bool_),
            environment.ACTIVE: specs.Array((), np.bool_),
        }
        action, metrics = specs.DiscreteArray(3), ("out",)
        return environment.EnvironmentSpec(
            "TwoAgents", observation, action, self.length, metrics=metrics, num_agents=2
        )

    @property
    def optimal_return(self) -> float:
        """The expected undiscounted return of each agent: 1 a step."""
        return (1 + self.length) / 2

    def reset(self, key: jax.Array) -> tuple[AgentsState, types.TimeStep]:
        """Draws the numbers and the length."""
        key, end_key = jax.random.split(key)
        sign, end = jax.random.uniform(key, (2,), jnp.float32, -1.0, 1.0), self.length + 1
        end = jax.random.randint(end_key, (), 1, end, jnp.int32)
        state = AgentsState(sign, jnp.ones(2, bool), jnp.zeros((), jnp.int32), end)
        return state, jax.vmap(types.restart)(self._observe(state), {"out": jnp.zeros(2)})

    def step(self, state: AgentsState, action: jax.Array) -> tuple[AgentsState, types.TimeStep]:
        """Takes the actions `[2]`."""
        correct = action == ((state.sign > 0.0) ^ (jnp.arange(2) == 1))
        reward = (state.active & correct).astype(jnp.float32)
        state = state._replace(active=state.active & (action != 2), time=state.time + 1)
        last = jnp.full(2, state.time >= state.end)
        metrics = {"out": jnp.full(2, ~state.active[1], jnp.float32)}
        timestep = jax.vmap(types.transition)(
            self._observe(state), reward, last & (state.sign[0] > 0.0), last, metrics
        )
        return state, timestep._replace(discount=timestep.discount * state.active)

    def _observe(self, state: AgentsState) -> types.PyTree:
        values, may_leave = jnp.arange(3), jnp.array([[False], [True]])
        mask = (values == 0) | (state.active[:, None] & ((values < 2) | may_leave))
        features = jnp.stack([state.sign, jnp.arange(2, dtype=jnp.float32)], axis=-1)
        return {
            "features": features,
            environment.ACTION_MASK: mask,
            environment.ACTIVE: state.active,
        }
