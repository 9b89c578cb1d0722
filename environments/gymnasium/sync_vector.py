"""A few Gymnasium environments, stepped one after the other. Worker processes run this.

`gymnasium.vector.SyncVectorEnv` is as fast, but it does not say which environment's observation
does not fit its space, wraps integers that do not fit, and leaves the others open where one cannot
be closed.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from environments.gymnasium import spaces
from podracers import errors


class VectorStep(NamedTuple):
    """What `B` environments return after a reset or a step."""

    observation: Any  # [B, ...]
    reward: np.ndarray  # [B] float32
    first: np.ndarray  # [B] bool, an episode begins here
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool


@dataclasses.dataclass(frozen=True)
class EnvFactory:
    """How one environment is made, in this process or in another one.

    Attributes:
      spec: Gymnasium's `EnvSpec`: another process need not have registered it.
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
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


class SyncVector:
    """`B` environments of this process, with next-step reset.

    Args:
      factory: maker of each environment.
      seeds: one for each; later episodes continue the random stream of the first one.
      numbers: numbers of the streams, for error messages.
    """

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], numbers: Sequence[int]):
        self._name, self._numbers = factory.spec.id, numbers
        self._seeds = [int(seed) for seed in seeds]
        self._envs = []
        try:
            for _ in self._seeds:
                self._envs.append(factory.make())
        except BaseException:
            with contextlib.suppress(errors.RunFailure):  # the first cause is the one to report
                self.close()
            raise
        self._ended = np.zeros(len(self._envs), np.bool_)
        self._action = None

    def reset(self) -> VectorStep:
        """Starts the first episode of each."""
        observations = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, self._seeds)]
        none = np.zeros(len(self._envs), np.bool_)
        self._ended = none
        observation = self._stack(observations, ~none)
        return VectorStep(observation, none.astype(np.float32), ~none, none, none)

    def send(self, action: np.ndarray) -> None:
        """Keeps the actions `[B, ...]` for `recv`."""
        self._action = action

    def recv(self) -> VectorStep:
        """Steps every environment, or resets it where its episode had ended."""
        count = len(self._envs)
        first, observations = self._ended, []
        reward = np.zeros(count, np.float32)
        terminated, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for row, env in enumerate(self._envs):
            if first[row]:
                observation, _ = env.reset()
            else:
                action = spaces.decode(env.action_space, self._action[row])
                observation, reward[row], terminated[row], truncated[row], _ = env.step(action)
            observations.append(observation)
        self._ended = terminated | truncated
        return VectorStep(self._stack(observations, first), reward, first, terminated, truncated)

    def render(self) -> list[Any]:
        """Returns the picture that each environment draws of its state."""
        return [env.render() for env in self._envs]

    def close(self) -> None:
        """Closes the environments, once.

        Raises:
          errors.RunFailure: that failed, at the first of these.
        """
        envs, self._envs = self._envs, []
        close_all(self._name, [f"stream {number}" for number in self._numbers], envs)

    def _stack(self, observations: list[Any], first: np.ndarray) -> Any:
        try:
            return spaces.stack(self._envs[0].observation_space, observations)
        except spaces.SpaceMismatch as error:
            when = "a reset" if first[error.row] else "a step"
            number = self._numbers[error.row]
            raise errors.UserError(
                f"{self._name}, stream {number}: after {when}, {error}"
            ) from error


def close_all(name: str, labels: Sequence[str], envs: Sequence[Any]) -> None:
    """Closes all environments, though some of them raise.

    Args:
      name: the environment's name, for error messages.
      labels: what messages call each of them.
      envs: those to close.

    Raises:
      errors.RunFailure: closing failed, at the first of these.
    """
    failures = []
    for label, env in zip(labels, envs):
        try:
            env.close()
        except Exception as error:  # the others have to be closed as well
            failures.append((label, error))
    for label, error in failures[:1]:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise errors.RunFailure(f"{name}: closing {label}: {cause}") from error
