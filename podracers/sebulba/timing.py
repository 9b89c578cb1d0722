"""Where Sebulba's time goes: shares of the wall time, lags, and one line on the bottleneck."""

import collections
import dataclasses
import math
import threading
import time

import jax

from podracers import metrics
from podracers.supervision import pipeline

# Activities of an actor; the rest of its time is the host's own work, in Python.
ENVIRONMENT, INFERENCE, TRANSFER = "environment step", "inference", "transfer"
SENDING, FOR_PARAMETERS, FOR_SPACE = "sending", "wait_for_parameters", "wait_for_queue"
# Activities of the learner.
FOR_ROLLOUTS, LEARNING, PUBLISHING = "wait_for_rollouts", "learning", "publishing"
ELSEWHERE = "elsewhere"  # time between two calls of the runner: evaluating, saving, logging

# Names in metrics where they are not those of activities.
_NAMES = {"": "host", ENVIRONMENT: "environment", pipeline.STARTING: "environment"}
_ACTOR = ("environment", INFERENCE, TRANSFER, SENDING, FOR_PARAMETERS, FOR_SPACE)
_ACTOR = (*_ACTOR, pipeline.COMPILING, "host")
_LEARNER = (FOR_ROLLOUTS, LEARNING, PUBLISHING, ELSEWHERE, "host")

IDLE_THRESHOLD = 0.15  # share of time; actors that wait longer are limited by the learner
KNOWN_LATENCY_FRACTION = 0.05  # share of a step; its end is known well if the host waited that long


class Pace:
    """The rate of one actor's simulator steps, and the highest rate possible.

    A step lasts from sending its actions to receiving its results. Its latency is unknown if it
    ended before the host waited for it; such a step adds nothing to the possible rate.
    """

    def __init__(self, num_batches: int):
        self.num_batches = num_batches
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._since = time.perf_counter()
        self._steps = self._timed_steps = 0
        self._timed_seconds = 0.0

    def add(self, steps: int, seconds: float, waited: float) -> None:
        """Adds a step of `steps` environments, in whose `seconds` the host `waited` for the end."""
        with self._lock:
            self._steps += steps
            if waited > KNOWN_LATENCY_FRACTION * seconds:
                self._timed_steps += steps
                self._timed_seconds += seconds

    def take(self) -> tuple[float, float]:
        """Returns steps per second since the last call, and the possible rate (NaN if unknown)."""
        with self._lock:
            rate = self._steps / max(time.perf_counter() - self._since, 1e-9)
            possible = math.nan
            if self._timed_seconds:
                possible = self.num_batches * self._timed_steps / self._timed_seconds
            self._reset()
            return rate, possible


@dataclasses.dataclass
class Timers:
    """The clocks of the actors and the learner."""

    learner: pipeline.Timer = dataclasses.field(default_factory=pipeline.Timer)
    actors: list[pipeline.Timer] = dataclasses.field(default_factory=list)
    paces: list[Pace] = dataclasses.field(default_factory=list)  # one for each actor's simulators
    lags: list[int] = dataclasses.field(default_factory=list)  # updates; since the last `take`
    # Of the parameters that acted the latest rollouts, on the actor and on the learner.
    hashes: list[tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=list)
    num_devices: int = 1  # devices of this process

    def take(self) -> metrics.Diagnostics:
        """Returns shares, rates and lags since the last call."""
        learner, actors = _shares([self.learner], _LEARNER), _shares(self.actors, _ACTOR)
        rates = [pace.take() for pace in self.paces]
        possible = sum(fastest for _, fastest in rates)
        share = sum(rate for rate, _ in rates) / possible if possible else math.nan
        values = {
            **{f"time/learner/{name}": x for name, x in learner.items()},
            **{f"time/actor/{name}": x for name, x in actors.items()},
            "environment/possible_steps_per_second": possible,
            "environment/share_of_possible": share,
            "idle/learner": learner[FOR_ROLLOUTS],
            "idle/actor": actors[FOR_PARAMETERS] + actors[FOR_SPACE],
        }
        lags, self.lags = self.lags, []
        for lag, count in sorted(collections.Counter(lags).items()):
            values[f"lag/{lag}"] = count / len(lags)
        if lags:
            values["lag/mean"] = sum(lags) / len(lags)
            values["lag/max"] = max(lags)
        # Parameters that silently stop arriving would look like a lag.
        unequal = [int(of_actor) != int(of_learner) for of_actor, of_learner in self.hashes]
        if unequal:
            values["lag/wrong_parameters"] = sum(unequal) / len(unequal)
        return metrics.Diagnostics(values, verdict(learner, actors, share, self.num_devices))


def _shares(timers: list[pipeline.Timer], names: tuple[str, ...]) -> dict[str, float]:
    """Returns the share of each activity in the time of several threads."""
    totals = dict.fromkeys(names, 0.0)
    for timer in timers:
        for activity, seconds in timer.take().items():
            totals[_NAMES.get(activity, activity)] += seconds
    whole = max(sum(totals.values()), 1e-9)
    return {name: float(seconds / whole) for name, seconds in totals.items()}


def verdict(
    learner: dict[str, float], actors: dict[str, float], pace: float, num_devices: int
) -> str:
    """Returns one line on what limits the speed, and what would help.

    `learner` and `actors` are shares of time. `pace` is the rate of the simulators as a share of
    the possible one; NaN if unknown. Actors and learners can share `num_devices`.
    """
    devices = "more {} devices" if num_devices > 1 else "a faster device"
    waiting = learner[FOR_ROLLOUTS]
    idle = actors[FOR_PARAMETERS] + actors[FOR_SPACE] - learner[ELSEWHERE]
    shares = f"actors wait {idle:.0%} of their time, the learner {waiting:.0%}"
    if idle > IDLE_THRESHOLD and waiting > IDLE_THRESHOLD:
        return f"acting and learning take turns: {shares}; a larger Sebulba.lag would help"
    if idle > IDLE_THRESHOLD:
        return f"learning limits: {shares}; {devices.format('learner')} would help"
    of_possible = "" if math.isnan(pace) else f"{pace:.0%} of the rate they could step at, "
    share, limit, advice = max(
        (actors["environment"], f"environments limit: {of_possible}", "more host cores"),
        (actors[INFERENCE] + actors[TRANSFER], "inference limits: ", devices.format("actor")),
        (actors["host"] + actors[SENDING], "Python limits: ", "larger batches"),
    )
    return (
        f"{limit}{share:.0%} of the actors' time, while the learner idles {waiting:.0%}; {advice} "
        "would help"
    )
