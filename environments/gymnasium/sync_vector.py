"""Gymnasium environments of one process, stepped one after the other.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without it.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dm_env
import gymnasium
import numpy as np
from gymnasium.vector import utils

from environments import episode_metrics
from environments.gymnasium import spaces
from podracers import errors

# Names of the outputs of Gymnasium's methods.
_OUTPUTS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
_FIRST, _MID, _LAST = (np.int8(step_type) for step_type in dm_env.StepType)
_NUMBER = gymnasium.spaces.Box(-np.inf, np.inf, ())  # a reward
# pyrefly: ignore[bad-argument-type]  # Gymnasium annotates numbers, and accepts bool
_FLAG = gymnasium.spaces.Box(0, 1, (), np.bool_)
# The fields of a `podracers.types.TimeStep`, `[B, ...]`; that module imports JAX.
VectorStep = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class EnvFactory:
    """Constructor of one environment, in this or another process.

    Attributes:
      spec: Gymnasium's `EnvSpec`, so that other processes need not register it.
      options, wrappers, metrics: see `gymnasium.Gymnasium`; wrappers are callables.
    """

    spec: Any
    options: Mapping[str, Any]
    wrappers: Sequence[Callable[[Any], Any]]
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def make(self) -> Any:
        """Returns one environment."""
        # Gymnasium's checks of every step cost more than a step of CartPole.
        env = gymnasium.make(self.spec, **{"disable_env_checker": True, **self.options})
        return functools.reduce(lambda wrapped, wrapper: wrapper(wrapped), self.wrappers, env)


class SyncVector:
    """`B` environments of this process, with next-step autoreset.

    `gymnasium.vector.SyncVectorEnv` (1.3) is not used: its errors name neither the environment nor
    the wrong part of a result, and with wrappers that do it takes 0.7 of the steps per second.

    There is a seed for each: later episodes continue the random stream of the first one. Error
    messages have the `numbers` of the streams.
    """

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], numbers: Sequence[int]):
        self._name, self._seeds, self._numbers = factory.spec.id, seeds, numbers
        self.envs = [factory.make() for _ in seeds]
        ((observation, self._action_space), *others) = (
            (env.observation_space, env.action_space) for env in self.envs
        )
        if any(other != (observation, self._action_space) for other in others):
            raise errors.UserError(f"{self._name}: two environments have different spaces")
        self._spaces = (observation, _NUMBER, _FLAG, _FLAG)
        self._batch_space = utils.batch_space(self._action_space, len(seeds))
        self._reductions = factory.metrics
        self._metrics = episode_metrics.EpisodeMetrics(factory.metrics, len(seeds))
        self._ended = np.ones(len(seeds), np.bool_)
        self._action = np.empty(0)

    def reset(self) -> VectorStep:
        """Starts the first episode of each.

        Raises:
          errors.UserError: an environment returned something else than Gymnasium's interface and
            its spaces declare; also of `recv`.
        """
        return self._result([self._start(env, seed=s) for env, s in zip(self.envs, self._seeds)])

    def send(self, action: np.ndarray) -> None:
        """Stores the actions `[B, ...]` for `recv`."""
        self._action = action

    def recv(self) -> VectorStep:
        """Steps every environment, or resets it where its episode had ended."""
        actions = utils.iterate(self._batch_space, spaces.decode(self._action_space, self._action))
        self._metrics.restart(self._ended)
        return self._result(
            [
                self._start(env) if self._ended[row] else self._step(row, env, action)
                for row, (env, action) in enumerate(zip(self.envs, actions))
            ]
        )

    def _start(self, env: Any, **options: Any) -> tuple[Any, float, bool, bool]:
        observation, _ = self._checked("reset", env.reset(**options))
        return observation, 0.0, False, False

    def _step(self, row: int, env: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        *values, info = self._checked("step", env.step(action))
        for name in self._reductions:
            if name in info:
                value = info[name]
                if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
                    raise errors.UserError(
                        f"{self._name}: info['{name}'], which Gymnasium.metrics names: expected a "
                        f"number, got {type(value).__name__}"
                    )
                self._metrics.add(name, value, row)
        return tuple(values)

    def _checked(self, method: str, output: Any) -> tuple:
        """Returns the output of an environment's method; raises an error for a wrong number."""
        expected = _OUTPUTS[method]
        if isinstance(output, tuple) and len(output) == len(expected):
            return output
        got = f"{len(output)} values" if isinstance(output, tuple) else type(output).__name__
        as_gym = "" if isinstance(output, tuple) and len(output) != 4 else ", as Gym's did"
        raise errors.UserError(
            f"{self._name}: {method} returned {got}{as_gym}; expected {len(expected)} "
            f"({', '.join(expected)})"
        )

    def _result(self, results: Sequence[Sequence[Any]]) -> VectorStep:
        observation, reward, *flags = zip(*results)
        columns = (observation, reward, *(np.array(x, np.bool_) for x in flags))  # None is false
        observation, reward, terminated, truncated = (
            spaces.read(space, values, f"{self._name}: {part}")
            for space, values, part in zip(self._spaces, columns, _OUTPUTS["step"])
        )
        first, self._ended = self._ended, terminated | truncated
        step_type = np.where(first, _FIRST, np.where(self._ended, _LAST, _MID))
        discount = (~terminated).astype(np.float32)
        return observation, reward, discount, step_type, self._metrics.read()

    def render(self) -> list[Any]:
        """Returns a picture of each environment."""
        return [env.render() for env in self.envs]

    def close(self) -> None:
        """Closes every environment once, even if another one fails to close.

        Raises:
          errors.RunFailure: closing failed; the first failure.
        """
        envs, self.envs = self.envs, []
        failure = None
        for number, env in zip(self._numbers, envs):
            try:
                env.close()
            except Exception as error:
                failure = failure or errors.RunFailure(
                    f"{self._name}: closing stream {number}: {errors.one_line(error)}"
                )
        if failure is not None:
            raise failure
