"""Where Sebulba's time goes: shares of the wall time, lags, and one line of verdict."""

import collections

import numpy as np

from podracers import actor, metrics, pipeline

FOR_ROLLOUTS, LEARNING, PUBLISHING = "wait for rollouts", "learning", "publishing"

_ACTOR = {
    actor.ENVIRONMENT: "environment",
    actor.INFERENCE: "inference",
    actor.TRANSFER: "transfer",
    actor.SENDING: "sending",
    actor.FOR_PARAMETERS: "wait_for_parameters",
    actor.FOR_SPACE: "wait_for_queue",
    pipeline.COMPILING: "compiling",
    "": "host",
}
_LEARNER = {
    FOR_ROLLOUTS: "wait_for_rollouts",
    LEARNING: "learning",
    PUBLISHING: "publishing",
    "": "host",
}
_IDLE = 0.15  # actors that wait longer than this share of their time are held up by the learner


class Timers:
    """The clocks of one set of actors and its learner.

    Attributes:
      learner: of the learner's thread.
      actors: one of each actor's.
      lags: of the rollouts that were learnt from since the last `take`, in updates.
    """

    def __init__(self):
        self.learner = pipeline.Timer()
        self.actors: list[pipeline.Timer] = []
        self.lags: list[int] = []

    def take(self) -> metrics.Diagnostics:
        """Returns the shares since the last call, and forgets what they were made of."""
        learner = _shares([self.learner], _LEARNER)
        actors = _shares(self.actors, _ACTOR)
        values = {f"time/learner/{name}": share for name, share in learner.items()}
        values |= {f"time/actor/{name}": share for name, share in actors.items()}
        values["idle/learner"] = learner["wait_for_rollouts"]
        values["idle/actor"] = actors["wait_for_parameters"] + actors["wait_for_queue"]
        counts = collections.Counter(self.lags)
        self.lags.clear()
        for lag, count in sorted(counts.items()):
            values[f"lag/{lag}"] = count / counts.total()
        if counts:
            values["lag/mean"] = sum(lag * count for lag, count in counts.items()) / counts.total()
        return metrics.Diagnostics(values, verdict(learner, actors))


def _shares(timers: list[pipeline.Timer], names: dict[str, str]) -> dict[str, float]:
    """Returns the share of each activity in the time of all these threads."""
    totals = dict.fromkeys(names.values(), 0.0)
    for timer in timers:
        for activity, seconds in timer.take().items():
            totals[names[activity]] += seconds
    whole = sum(totals.values())
    return {name: float(np.divide(seconds, max(whole, 1e-9))) for name, seconds in totals.items()}


def verdict(learner: dict[str, float], actors: dict[str, float]) -> str:
    """Returns one line on what limits the speed, and what would help.

    Args:
      learner: the shares of the learner's time.
      actors: those of the actors' time.
    """
    idle = actors["wait_for_parameters"] + actors["wait_for_queue"]
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
    acting = {
        "environments limit": (actors["environment"], "more host cores would help"),
        "inference limits": (
            actors["inference"] + actors["transfer"],
            "more actor devices would help",
        ),
        "Python limits": (actors["host"] + actors["sending"], "larger batches would help"),
    }
    what, (share, cure) = max(acting.items(), key=lambda item: item[1][0])
    return (
        f"{what}: {share:.0%} of the actors' time, while the learner idles "
        f"{learner['wait_for_rollouts']:.0%}; {cure}"
    )
