"""Turns, rates and figures that several benchmarks share."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podracers.scripts.benchmarks import records
from podracers.training import experiment

Turn = Callable[[], float]  # takes one measurement, returns a rate or a time

LEAD_IN = 2  # updates before each measurement: under Sebulba a rollout or two lie ready
# One small experiment of each agent.
EXPERIMENTS = {
    "ppo": "cartpole_ppo",
    "impala": "cartpole_impala",
    "dqn": "cartpole_dqn",
    "r2d2": "catch_r2d2",
    "sac": "pendulum_sac",
    "muzero": "catch_muzero",
    "alphazero": "catch_alphazero",
}
RUNNERS = {"Anakin": (), "Sebulba": ("gin/runners/sebulba.gin",)}


def files(name: str, runner: str) -> list[str]:
    """Returns the .gin files of an experiment under a runner."""
    return [f"gin/experiments/{name}.gin", *RUNNERS[runner]]


def take_turns(turns: Mapping[str, Turn], repeats: int) -> dict[str, list[float]]:
    """Measures each in turn, `repeats` times; the first round warms up and is discarded."""
    rounds = [{name: turn() for name, turn in turns.items()} for _ in range(repeats + 1)]
    return {name: [rates[name] for rates in rounds[1:]] for name in turns}


class Stepper:
    """Measures the rate of a runner, or an object with its `init`, `step` and `steps_per_update`.

    A measurement takes `updates`; None stands for about a second once the agent learns. Before
    each, the updates `lead_in` are not counted: while other programs were measured, actors may have
    filled the queue.
    """

    def __init__(self, runner: Any, updates: int | None = None, lead_in: int = 0):
        self._runner, self._updates, self._lead_in = runner, updates or 1, lead_in
        start = time.perf_counter()
        self.state = runner.init(0)
        self._step(self._updates)
        self.first_dispatch = time.perf_counter() - start  # seconds, compilation included
        if updates is None:
            self._step(1)
            while not _is_learning(self._report):
                self._step(1)
            self._updates = max(math.ceil(LEAD_IN / self._step(LEAD_IN)), 1)

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._lead_in:
            self._step(self._lead_in)
        steps = self._updates * self._runner.steps_per_update
        return steps * getattr(self._runner, "population", 1) / self._step(self._updates)

    def close(self) -> None:
        """Stops the runner's threads."""
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


def build(gin_files: Sequence[str], bindings: Sequence[str] = ()) -> experiment.Parts:
    """Returns the parts of an experiment."""
    return experiment.load(gin_files, bindings).build()


def speed(rates: Sequence[float], **case: str | int) -> records.Row:
    """Returns rates as a row."""
    return records.row("speed", "agent steps/s", rates, **case)


def ratio(rates: dict[str, list[float]], above: str, below: str, **case: str) -> records.Row:
    """Returns the ratio of two programs, turn by turn: a machine's drift cancels."""
    ratios = np.array(rates[above]) / np.array(rates[below])
    case["program"] = f"{above} / {below}"
    return records.row("ratio, turn by turn", "ratio", ratios, **case)
