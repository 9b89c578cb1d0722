"""Tests of shares of time, and the bottleneck."""

import re

import pytest

from podracers.sebulba import timing
from podracers.supervision import pipeline

LEARNER = dict.fromkeys(("wait_for_rollouts", "learning", "publishing", "elsewhere", "host"), 0.0)
ACTORS = dict.fromkeys(
    ("environment", "inference", "transfer", "sending", "wait_for_parameters", "wait_for_queue"),
    0.0,
) | {"compiling": 0.0, "host": 0.0}


@pytest.mark.parametrize(
    ("learner", "actors", "verdict"),
    [
        (
            {"wait_for_rollouts": 0.6, "learning": 0.4},
            {"environment": 0.9, "inference": 0.1},
            "environments limit: 90% of the actors' time, .* learner idles 60%",
        ),
        (
            {"wait_for_rollouts": 0.6, "learning": 0.4},
            {"environment": 0.3, "inference": 0.5, "transfer": 0.2},
            "inference limits: 70% .*; (more actor devices|a faster device) would",
        ),
        (
            {"learning": 0.9, "publishing": 0.1},
            {"environment": 0.5, "wait_for_parameters": 0.4, "wait_for_queue": 0.1},
            "learning limits: actors wait 50%.*; (more learner devices|a faster device) would",
        ),
        (
            # The actors wait for an evaluation.
            {"learning": 0.4, "elsewhere": 0.5},
            {"environment": 0.4, "wait_for_parameters": 0.6},
            "environments limit: 40% of the actors' time",
        ),
        (
            {"wait_for_rollouts": 0.5, "learning": 0.5},
            {"environment": 0.5, "wait_for_parameters": 0.5},
            "acting and learning take turns: .* a larger Sebulba.lag",
        ),
    ],
)
def test_bottleneck(learner, actors, verdict):
    for count, other in ((1, "more (actor|learner) devices"), (2, "a faster device")):
        line = timing.verdict({**LEARNER, **learner}, {**ACTORS, **actors}, count)
        assert re.match(verdict, line) and not re.search(other, line)


def test_shares_add_up_and_are_reset(monkeypatch):
    now = 0.0
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: now)
    timers = timing.Timers(actors=[pipeline.Timer()], lags=[0, 1, 1, 1])
    with timers.learner(timing.LEARNING):
        now += 0.05
    with timers.actors[0](timing.ENVIRONMENT):
        now += 0.05
    values = timers.take().values
    for thread in ("learner", "actor"):
        shares = [v for name, v in values.items() if name.startswith(f"time/{thread}/")]
        assert sum(shares) == pytest.approx(1.0)
    assert values["time/learner/learning"] == pytest.approx(0.5)
    assert (values["lag/0"], values["lag/1"], values["lag/mean"]) == (0.25, 0.75, 0.75)
    again = timers.take().values
    assert again["time/learner/learning"] == 0.0
    assert "lag/mean" not in again
