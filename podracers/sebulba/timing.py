"""Where Sebulba's time goes: shares of the wall time, lags, and one line on the bottleneck."""

import collections
import dataclasses

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


@dataclasses.dataclass
class Timers:
    """The clocks of the actors and the learner."""

    learner: pipeline.Timer = dataclasses.field(default_factory=pipeline.Timer)
    actors: list[pipeline.Timer] = dataclasses.field(default_factory=list)
    lags: list[int] = dataclasses.field(default_factory=list)  # updates; since the last `take`
    num_devices: int = 1  # devices of this process

    def take(self) -> metrics.Diagnostics:
        """Returns shares of time and lags since the last call."""
        learner, actors = _shares([self.learner], _LEARNER), _shares(self.actors, _ACTOR)
        values = {
            **{f"time/learner/{name}": x for name, x in learner.items()},
            **{f"time/actor/{name}": x for name, x in actors.items()},
            "idle/learner": learner[FOR_ROLLOUTS],
            "idle/actor": actors[FOR_PARAMETERS] + actors[FOR_SPACE],
        }
        lags, self.lags = self.lags, []
        for lag, count in sorted(collections.Counter(lags).items()):
            values[f"lag/{lag}"] = count / len(lags)
        if lags:
            values["lag/mean"] = sum(lags) / len(lags)
            values["lag/max"] = max(lags)
        return metrics.Diagnostics(values, verdict(learner, actors, self.num_devices))


def _shares(timers: list[pipeline.Timer], names: tuple[str, ...]) -> dict[str, float]:
    """Returns the share of each activity in the time of several threads."""
    totals = dict.fromkeys(names, 0.0)
    for timer in timers:
        for activity, seconds in timer.take().items():
            totals[_NAMES.get(activity, activity)] += seconds
    whole = max(sum(totals.values()), 1e-9)
    return {name: float(seconds / whole) for name, seconds in totals.items()}


def verdict(learner: dict[str, float], actors: dict[str, float], num_devices: int) -> str:
    """Returns one line on what limits the speed, and what would help.

    `learner` and `actors` are shares of time. Actors and learners can share `num_devices`.
    """
    devices = "more {} devices" if num_devices > 1 else "a faster device"
    waiting = learner[FOR_ROLLOUTS]
    idle = actors[FOR_PARAMETERS] + actors[FOR_SPACE] - learner[ELSEWHERE]
    shares = f"actors wait {idle:.0%} of their time, the learner {waiting:.0%}"
    if idle > IDLE_THRESHOLD and waiting > IDLE_THRESHOLD:
        return f"acting and learning take turns: {shares}; a larger Sebulba.lag would help"
    if idle > IDLE_THRESHOLD:
        return f"learning limits: {shares}; {devices.format('learner')} would help"
    share, limit, advice = max(
        (actors["environment"], "environments limit: ", "more host cores"),
        (actors[INFERENCE] + actors[TRANSFER], "inference limits: ", devices.format("actor")),
        (actors["host"] + actors[SENDING], "Python limits: ", "larger batches"),
    )
    return (
        f"{limit}{share:.0%} of the actors' time, while the learner idles {waiting:.0%}; {advice} "
        "would help"
    )
