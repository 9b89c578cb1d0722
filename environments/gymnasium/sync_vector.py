"""A few Gymnasium environments, stepped one after the other. Worker processes run this.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from environments.gymnasium import spaces
from podracers import errors


class VectorStep(NamedTuple):
    """What `B` environments show after a reset or a step."""

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
      options: for `gymnasium.make`.
      wrappers: applied in order, each to what the one before returned.
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
      recipe: of each.
      seeds: one for each; later episodes go on from where the generator of the first one is.
      numbers: of the streams, for error messages.
    """

    def __init__(self, recipe: EnvFactory, seeds: Sequence[int], numbers: Sequence[int]):
        self._name, self._numbers = recipe.spec.id, numbers
        self._seeds = [int(seed) for seed in seeds]
        self._envs = []
        try:
            for _ in self._seeds:
                self._envs.append(recipe.make())
        except BaseException:
            self.close()
            raise
        self._ended = np.zeros(len(self._envs), np.bool_)
        self._action = None

    def reset(self) -> VectorStep:
        """Starts the first episode of each."""
        observations = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, self._seeds)]
        none = np.zeros(len(self._envs), np.bool_)
        self._ended = none
        return VectorStep(
            self._stack(observations, ~none), none.astype(np.float32), ~none, none, none
        )

    def send(self, action: np.ndarray) -> None:
        """Keeps the actions `[B, ...]` for `recv`."""
        self._action = action

    def recv(self) -> VectorStep:
        """Steps every environment, or restarts it where its episode had ended."""
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
        """Returns what each environment draws of where it stands."""
        return [env.render() for env in self._envs]

    def close(self) -> None:
        """Closes the environments, once.

        Raises:
          errors.RunFailure: that failed, at the first of these.
        """
        envs, self._envs = self._envs, []
        failures = []
        for env, number in zip(envs, self._numbers):
            try:
                env.close()
            except Exception as error:  # the others have to be closed as well
                said = " ".join(str(error).split())
                failures.append((f"closing stream {number}: {type(error).__name__}: {said}", error))
        if failures:
            said, error = failures[0]
            raise errors.RunFailure(f"{self._name}: {said}") from error

    def _stack(self, observations: list[Any], first: np.ndarray) -> Any:
        try:
            return spaces.stack(self._envs[0].observation_space, observations)
        except spaces.SpaceMismatch as error:
            when = "a reset" if first[error.row] else "a step"
            number = self._numbers[error.row]
            raise errors.UserError(
                f"{self._name}, stream {number}: after {when}, {error}"
            ) from error
