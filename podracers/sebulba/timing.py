"""Where Sebulba's time goes: shares of the wall time, lags, and one line of verdict."""

import collections
import math
import threading
import time

import numpy as np

from podracers import metrics
from podracers.supervision import pipeline

# What an actor's time goes into; the rest of it is the host's own work, in Python.
ENVIRONMENT, INFERENCE, TRANSFER = "environment step", "inference", "transfer"
SENDING, FOR_PARAMETERS, FOR_SPACE = "sending rollouts", "wait for parameters", "wait for the queue"
# And the learner's.
FOR_ROLLOUTS, LEARNING, PUBLISHING = "wait for rollouts", "learning", "publishing"
ELSEWHERE = "elsewhere"  # between two calls of the runner: evaluating, saving, logging

_ACTOR = {
    ENVIRONMENT: "environment",
    INFERENCE: "inference",
    TRANSFER: "transfer",
    SENDING: "sending",
    FOR_PARAMETERS: "wait_for_parameters",
    FOR_SPACE: "wait_for_queue",
    pipeline.COMPILING: "compiling",
    pipeline.STARTING: "environment",
    "": "host",
}
_LEARNER = {
    FOR_ROLLOUTS: "wait_for_rollouts",
    LEARNING: "learning",
    PUBLISHING: "publishing",
    ELSEWHERE: "elsewhere",
    "": "host",
}
_IDLE = 0.15  # actors that wait longer than this share of their time are held up by the learner


class Pace:
    """How fast one actor's simulators step, and how fast they could.

    A step lasts from sending its actions to receiving where they led; but where it had ended before
    anybody asked, nobody knows how long it took, and it tells nothing of what is possible.
    """

    _TOLD = 0.05  # of the step's time was waited for at its end: then that end is known well

    def __init__(self, num_batches: int):
        self.num_batches = num_batches
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._since = time.perf_counter()
        self._steps = self._told_steps = 0
        self._told_seconds = 0.0

    def add(self, steps: int, seconds: float, waited: float) -> None:
        """Adds a step of a batch: of how many environments, how long, and waited for how long."""
        with self._lock:
            self._steps += steps
            if waited > self._TOLD * seconds:
                self._told_steps += steps
                self._told_seconds += seconds

    def take(self) -> tuple[float, float]:
        """Returns the rate since the last call, and the one possible (NaN if nothing told)."""
        with self._lock:
            rate = self._steps / max(time.perf_counter() - self._since, 1e-9)
            possible = math.nan
            if self._told_seconds:
                possible = self.num_batches * self._told_steps / self._told_seconds
            self._reset()
            return rate, possible


class Timers:
    """The clocks of one set of actors and its learner.

    Attributes:
      learner: timer of the learner's thread.
      actors: timers of the actors' threads.
      paces: how fast each actor's simulators step.
      lags: those of the rollouts learnt from since the last `take`, in updates.
    """

    def __init__(self):
        self.learner = pipeline.Timer()
        self.actors: list[pipeline.Timer] = []
        self.paces: list[Pace] = []
        self.lags: list[int] = []

    def take(self) -> metrics.Diagnostics:
        """Returns the shares since the last call, and forgets what they were made of."""
        learner = _shares([self.learner], _LEARNER)
        actors = _shares(self.actors, _ACTOR)
        values = {f"time/learner/{name}": share for name, share in learner.items()}
        values |= {f"time/actor/{name}": share for name, share in actors.items()}
        rates = [pace.take() for pace in self.paces]
        possible = sum(most for _, most in rates)
        share = sum(rate for rate, _ in rates) / possible if possible else math.nan
        values["environment/possible_steps_per_second"] = possible
        values["environment/share_of_possible"] = share
        values["idle/learner"] = learner["wait_for_rollouts"]
        values["idle/actor"] = actors["wait_for_parameters"] + actors["wait_for_queue"]
        counts = collections.Counter(self.lags)
        self.lags.clear()
        for lag, count in sorted(counts.items()):
            values[f"lag/{lag}"] = count / counts.total()
        if counts:
            values["lag/mean"] = sum(lag * count for lag, count in counts.items()) / counts.total()
        return metrics.Diagnostics(values, verdict(learner, actors, share))


def _shares(timers: list[pipeline.Timer], names: dict[str, str]) -> dict[str, float]:
    """Returns the share of each activity in the time of all these threads."""
    totals = dict.fromkeys(names.values(), 0.0)
    for timer in timers:
        for activity, seconds in timer.take().items():
            totals[names[activity]] += seconds
    whole = sum(totals.values())
    return {name: float(np.divide(seconds, max(whole, 1e-9))) for name, seconds in totals.items()}


def verdict(learner: dict[str, float], actors: dict[str, float], pace: float = math.nan) -> str:
    """Returns one line on what limits the speed, and what would help.

    Args:
      learner: the shares of the learner's time.
      actors: those of the actors' time.
      pace: the rate of the simulators as a share of what they could do.
    """
    idle = actors["wait_for_parameters"] + actors["wait_for_queue"] - learner["elsewhere"]
    busy = learner["learning"] + learner["publishing"]
    if idle > _IDLE and learner["wait_for_rollouts"] > _IDLE:
        return (
            f"acting and learning take turns: actors wait {idle:.0%} of their time, the learner "
            f"{learner['wait_for_rollouts']:.0%}; a larger Sebulba.lag would help"
        )
    if idle > _IDLE:
        return (
            f"learning limits: the learner is busy {busy:.0%} of the time, and actors wait "
            f"{idle:.0%} of theirs; more learner devices would help"
        )
    bottlenecks = {
        "environments limit": (actors["environment"], "more host cores would help"),
        "inference limits": (
            actors["inference"] + actors["transfer"],
            "more actor devices would help",
        ),
        "Python limits": (actors["host"] + actors["sending"], "larger batches would help"),
    }
    bottleneck, (share, advice) = max(bottlenecks.items(), key=lambda item: item[1][0])
    of_possible = "" if math.isnan(pace) else f"{pace:.0%} of the rate they could step at, "
    return (
        f"{bottleneck}: {of_possible if bottleneck.startswith('env') else ''}{share:.0%} of the "
        f"actors' time, while the learner idles {learner['wait_for_rollouts']:.0%}; {advice}"
    )
