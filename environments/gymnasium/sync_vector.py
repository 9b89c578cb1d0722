"""Gymnasium environments of one process, in `gymnasium.vector.SyncVectorEnv`.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import gymnasium
import numpy as np

from environments.gymnasium import spaces
from podracers import errors


class VectorStep(NamedTuple):
    """The fields of `podracers.types.TimeStep` (whose module imports JAX) of `B` environments."""

    observation: Any  # [B, ...]
    reward: np.ndarray  # [B] float32
    discount: np.ndarray  # [B] float32
    step_type: np.ndarray  # [B] int8


@dataclasses.dataclass(frozen=True)
class EnvFactory:
    """Constructor of one environment, in this or another process.

    Attributes:
      spec: Gymnasium's `EnvSpec`, so that other processes need not register it.
      options: arguments of `gymnasium.make`.
      wrappers: callables, from the inside out, that take an environment.
    """

    spec: Any
    options: Mapping[str, Any]
    wrappers: Sequence[Callable[[Any], Any]]

    def make(self) -> Any:
        """Returns one environment."""
        # Gymnasium's checks of every step cost more than a step of CartPole.
        env = gymnasium.make(self.spec, **{"disable_env_checker": True, **self.options})
        return functools.reduce(lambda wrapped, wrapper: wrapper(wrapped), self.wrappers, env)


class SyncVector:
    """`B` environments of this process, with next-step autoreset.

    Args:
      factory: maker of each environment.
      seeds: one for each; later episodes continue the random stream of the first one.
      numbers: numbers of the streams, for error messages.
    """

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], numbers: Sequence[int]):
        self._name, self._numbers = factory.spec.id, numbers
        self._seeds = [int(seed) for seed in seeds]
        self._vector = gymnasium.vector.SyncVectorEnv([factory.make] * len(self._seeds))
        self._action = None

    def reset(self) -> VectorStep:
        """Starts the first episode of each."""
        observation, _ = self._vector.reset(seed=self._seeds)
        none = np.zeros(len(self._seeds), np.bool_)
        return self._result(~none, observation, none, none, none)

    def send(self, action: np.ndarray) -> None:
        """Stores the actions `[B, ...]` for `recv`."""
        self._action = action

    def recv(self) -> VectorStep:
        """Steps every environment, or resets it where its episode had ended."""
        action = spaces.decode(self._vector.single_action_space, self._action)
        *results, _ = self._vector.step(action)
        return self._result(self._ended, *results)

    def _result(self, first, observation, reward, terminated, truncated) -> VectorStep:
        self._ended = terminated | truncated
        step_type = np.where(self._ended, dm_env.StepType.LAST, dm_env.StepType.MID)
        return VectorStep(
            spaces.read(self._vector.single_observation_space, observation, self._name),
            reward.astype(np.float32),
            1.0 - terminated.astype(np.float32),
            np.where(first, dm_env.StepType.FIRST, step_type).astype(np.int8),
        )

    def render(self) -> list[Any]:
        """Returns a picture of each environment."""
        return list(self._vector.render())

    def close(self) -> None:
        """Closes every environment once, even if another one fails to close.

        Raises:
          errors.RunFailure: closing failed; the first failure.
        """
        envs, self._vector.envs = self._vector.envs, []
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
