"""Games that this module registers with Gymnasium when it is imported."""

import os
import time
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A walk along a line, with every kind of space in its observations, and both kinds of ends.

    It terminates at `-goal` and `goal`, and truncates itself after nine steps, on the same step as
    well. One random direction is illegal at each step; the reward is the direction. `info` has the
    place, under several names, and `goal` where an end is reached.
    """

    LIMIT = 9

    def __init__(self, goal: int = 3):
        self._goal = goal
        self.action_space = spaces.Discrete(3, start=-1)
        self.observation_space = spaces.Dict(
            {
                "place": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "action_mask": spaces.Box(0, 1, (3,), np.int8),
                "steps": spaces.Box(0, 2**40, (), np.int64),
                "room": spaces.Discrete(2 * goal + 1, start=-goal),
                "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([10, 3])]),
            }
        )
        # A buffer that is reused, as in some simulators: observations have to be copied.
        self._place = np.zeros(2, np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._steps = 0, 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert self._mask[action + 1], "an illegal action"
        self._x, self._steps = self._x + int(action), self._steps + 1
        terminated = abs(self._x) == self._goal
        truncated = self._steps == self.LIMIT or None  # as some environments have it
        info = {**dict.fromkeys(("highest", "total", "average"), self._x)}
        if terminated:
            info["goal"] = np.float64(self._x)
        return self._observe(), float(action), terminated, truncated, info

    def _observe(self):
        self._mask = np.ones(3, np.int8)
        self._mask[self.np_random.integers(3)] = 0
        self._place[:] = self._x, self.np_random.normal()
        return {
            "place": self._place,
            "action_mask": self._mask,
            "steps": np.int64(self._steps),
            "room": np.int64(self._x),
            "pair": (np.array([1, 0], np.int8), np.array([self._steps, 2])),
        }


class Faulty(gymnasium.Env):
    """Fails in its third step."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str):
        self._fault, self._steps = fault, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 3:
            if self._fault == "raise":
                raise ArithmeticError("the third step is a fault")
            if self._fault == "quit":
                raise SystemExit("no license")
            if self._fault == "shape":
                return np.zeros(2, np.float32), 0.0, False, False, {}
            if self._fault == "exit":
                os._exit(7)
            time.sleep(1000.0)
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Picture(gymnasium.Env):
    """A square moves to the right for nine steps; action 1 earns 1."""

    observation_space = spaces.Box(0, 255, (12, 20, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._y = 0, self.np_random.integers(10)
        return self._draw(), {}

    def step(self, action):
        self._x += 2
        return self._draw(), float(action), self._x == 18, False, {}

    def _draw(self):
        image = np.zeros((12, 20, 3), np.uint8)
        image[self._y : self._y + 2, self._x : self._x + 2] = (255, 160, 0)
        return image


class ChannelsFirst(gymnasium.ObservationWrapper):
    """Observes a picture as `[C, H, W]`, as PyTorch's convolutions read it."""

    observation_space = spaces.Box(0, 255, (3, 12, 20), np.uint8)

    def observation(self, observation):
        return np.moveaxis(observation, -1, 0)


class Drawn(gymnasium.Env):
    """Random positions, observed as a number and drawn as a bright column."""

    metadata: ClassVar = {"render_modes": ["human", "rgb_array"], "render_fps": 30}
    observation_space = spaces.Box(0.0, 20.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, fault: str | None = None):
        self.render_mode, self._fault = render_mode, fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._steps = int(self.np_random.integers(20)), 0
        return np.array([self._x], np.float32), {}

    def step(self, action):
        self._x, self._steps = int(self.np_random.integers(20)), self._steps + 1
        ended = bool(self.np_random.integers(7) == 0)
        return np.array([self._x], np.float32), float(action), ended, self._steps == 30, {}

    def render(self):
        if self._fault == "missing":
            raise gymnasium.error.DependencyNotInstalled("no_such_package is not installed")
        if self._fault == "none":
            return None
        image = np.zeros((12, 20, 3), np.uint8)
        image[:, self._x] = 255
        return image


class Spaces(gymnasium.Env):
    """Has the given spaces, and cannot be played."""

    def __init__(self, observation=None, action=None):
        self.observation_space = observation or spaces.Box(-1.0, 1.0, (1,))
        self.action_space = action or spaces.Discrete(2)


class Wrong(gymnasium.Env):
    """Is what its options are: spaces, observations and outputs of its methods."""

    def __init__(self, space=None, action=None, observation=None, reset=None, step=None):
        self.observation_space = space or spaces.Box(-1.0, 1.0, (3,))
        self.action_space = action or spaces.Discrete(2)
        self._first = np.zeros(3, np.float32) if observation is None else observation
        self._reset, self._step = reset, step
        if step == "no seed":
            self.reset = lambda: (self._first, {})

    def reset(self, *, seed=None, options=None):
        return (self._first, {}) if self._reset is None else self._reset

    def step(self, action):
        return self._step or (self._first, 0.0, False, False, {})


class Half(gymnasium.RewardWrapper):
    """Halves the reward."""

    def reward(self, reward):
        return reward / 2


class Unclosable(gymnasium.Wrapper):
    """Raises when it is closed, once it was reset."""

    _is_reset = False

    def reset(self, **options):
        self._is_reset = True
        return super().reset(**options)

    def close(self):
        if self._is_reset:
            raise ArithmeticError("not today")


for _game in (Walk, Faulty, Picture, Drawn, Spaces, Wrong):
    gymnasium.register(f"Own/{_game.__name__}-v0", entry_point=f"{__name__}:{_game.__name__}")
gymnasium.register(
    "Own/Normalized-v0",
    entry_point=f"{__name__}:Drawn",
    additional_wrappers=(gymnasium.wrappers.NormalizeReward.wrapper_spec(),),
)
