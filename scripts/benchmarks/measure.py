"""What all benchmarks share: turns, rates, and the kinds of figures that several of them have."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from benchmarks import records

from podracers.training import experiment

Turn = Callable[[], float]  # takes one measurement, returns a rate or a time

SPEED = records.Kind("speed", "agent steps/s", records.HIGHER, 0)
RATIO = records.Kind("ratio, turn by turn", "ratio", records.HIGHER, 3)
FIRST_DISPATCH = records.Kind("first dispatch, compiling included", "s", records.LOWER, 2)
PEAK_MEMORY = records.Kind("peak memory", "bytes", records.LOWER, 0)
LEAD_IN = 2  # updates: under Sebulba a rollout or two lie ready


def take_turns(turns: dict[str, Turn], repeats: int) -> dict[str, list[float]]:
    """Measures each in turn, `repeats` times; the first round warms up and is not counted."""
    rounds = [{name: turn() for name, turn in turns.items()} for _ in range(repeats + 1)]
    return {name: [each[name] for each in rounds[1:]] for name in turns}


class Stepper:
    """Steps a runner, or anything with its `init` and `step`, and times it.

    Args:
      runner: with `init(seed)`, `step(state, num_updates)` and `steps_per_update`.
      updates: number of updates of a measurement; None for as many as take about `seconds` once the
        agent learns.
      lead_in: updates before each measurement that are not counted: actors that went on while it
        was others' turn have something in store.
      seconds: length of a measurement, where `updates` is None.
    """

    def __init__(
        self, runner: Any, updates: int | None = None, lead_in: int = 0, seconds: float = 1.0
    ):
        self._runner, self._updates, self._lead_in = runner, updates, lead_in
        start = time.perf_counter()
        self.state = runner.init(0)
        self._step(updates or 1)
        self.first_dispatch = time.perf_counter() - start  # seconds, compilation included
        if updates is None:
            self.compiling = max(self.first_dispatch - self._step(1), 0.0)  # seconds
            while not _is_learning(self._report):
                self._step(1)
            self._updates = max(math.ceil(seconds * LEAD_IN / self._step(LEAD_IN)), 1)

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._lead_in:
            self._step(self._lead_in)
        steps = self._updates * self._runner.steps_per_update
        return steps * getattr(self._runner, "population", 1) / self._step(self._updates)

    def close(self) -> None:
        """Ends what the runner has at work."""
        self._runner.close()

    def _step(self, updates: int) -> float:
        """Returns the seconds of some updates."""
        start = time.perf_counter()
        self.state, self._report = self._runner.step(self.state, updates)
        jax.block_until_ready((self.state, self._report))
        return time.perf_counter() - start


def _is_learning(report: Any) -> bool:
    """Returns whether losses were measured; before that, an agent fills its replay memory."""
    losses = [mean.count for name, mean in report.means.items() if name.startswith("loss/")]
    return not losses or any(np.any(np.asarray(count) > 0) for count in losses)


class Training:
    """An experiment's runner as a contender.

    Args:
      gin_files: those of the experiment.
      bindings: those over the files.
      seconds: length of a turn, about.
    """

    def __init__(self, gin_files: Sequence[str], bindings: Sequence[str], seconds: float = 1.0):
        self._settings = experiment.load(gin_files, bindings)
        self.parts = self._settings.build()
        self._seconds = seconds
        self._stepper: Stepper | None = None

    def check(self) -> None:
        """Refuses parts that do not fit; see `experiment.check`."""
        experiment.check(self.parts, self._settings.seed)

    def __call__(self) -> float:
        """Returns agent steps per second."""
        self._stepper = self._stepper or Stepper(self.parts.runner, None, LEAD_IN, self._seconds)
        return self._stepper()

    def state(self) -> Any:
        """Returns the runner's state after the last turn."""
        return self._stepper.state

    def compiling(self) -> float:
        """Returns the seconds that the first update took longer than the second one."""
        return self._stepper.compiling


def ratios(above: list[float], below: list[float]) -> np.ndarray:
    """Returns the ratio of each turn: machines drift, ratios do not."""
    return np.array(above) / np.array(below)


def seconds(function: Callable, *arguments) -> Turn:
    """Returns a turn that times a jitted function, in seconds."""

    def turn() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return time.perf_counter() - start

    turn()
    return turn


def rate(function: Callable[[], Any], steps: int) -> float:
    """Returns steps per second of a call that takes so many."""
    start = time.perf_counter()
    function()
    return steps / (time.perf_counter() - start)
