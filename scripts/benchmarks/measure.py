"""What all benchmarks share: turns, rates, and the kinds of figures that several of them have."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from benchmarks import records

Turn = Callable[[], float]  # takes one measurement, returns a rate or a time

SPEED = records.Kind("speed", "agent steps/s", records.HIGHER, 0)
RATIO = records.Kind("ratio, turn by turn", "ratio", records.HIGHER, 3)
FIRST_DISPATCH = records.Kind("first dispatch, compiling included", "s", records.LOWER, 2)
PEAK_MEMORY = records.Kind("peak memory", "bytes", records.LOWER, 0)


def take_turns(turns: dict[str, Turn], repeats: int) -> dict[str, list[float]]:
    """Measures each in turn, `repeats` times; the first round warms up and is not counted."""
    measured = {name: [] for name in turns}
    for repeat in range(repeats + 1):
        for name, turn in turns.items():
            value = turn()
            if repeat:
                measured[name].append(value)
    return measured


class Stepper:
    """Steps a runner, or anything with its `init` and `step`, and times it.

    Args:
      runner: with `init(seed)`, `step(state, num_updates)` and `steps_per_update`.
      updates: how many updates a measurement takes, in one dispatch.
      lead_in: how many updates come before each of them and are not counted: actors that went on
        while it was others' turn have something in store.
    """

    def __init__(self, runner: Any, updates: int, lead_in: int = 0):
        self._runner, self._updates, self._lead_in = runner, updates, lead_in
        start = time.perf_counter()
        self.state = runner.init(0)
        self()
        self.first_dispatch = time.perf_counter() - start  # seconds, compilation included

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._lead_in:
            self.state, _ = self._runner.step(self.state, self._lead_in)
            jax.block_until_ready(self.state)
        start = time.perf_counter()
        self.state, report = self._runner.step(self.state, self._updates)
        jax.block_until_ready((self.state, report))
        steps = self._updates * self._runner.steps_per_update
        return steps * getattr(self._runner, "population", 1) / (time.perf_counter() - start)


def ratios(above: list[float], below: list[float]) -> np.ndarray:
    """Returns the ratio of each turn: machines drift, ratios do not."""
    return np.array(above) / np.array(below)


def seconds(function: Callable, *arguments) -> Turn:
    """Returns a turn that times a jitted function, in seconds."""
    jax.block_until_ready(function(*arguments))

    def turn() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return time.perf_counter() - start

    return turn


def rate(function: Callable[[], Any], steps: int) -> float:
    """Returns steps per second of a call that takes so many."""
    start = time.perf_counter()
    function()
    return steps / (time.perf_counter() - start)
