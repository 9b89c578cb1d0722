"""Tests of the times of a run."""

import math

import pytest

from podracers.training import clock


@pytest.fixture
def now(monkeypatch):
    """A time that a test sets."""
    moment = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: moment[0])
    return moment


def _dispatch(timer, now, seconds, steps):
    with timer.dispatch() as dispatch:
        dispatch.steps = steps
        now[0] += seconds


def test_the_first_dispatch_counts_in_no_rate(now):
    timer = clock.Clock()
    _dispatch(timer, now, 30.0, 64)
    assert math.isnan(timer.rate)
    assert math.isnan(timer.latest_rate)
    _dispatch(timer, now, 2.0, 64)
    now[0] += 5.0  # an evaluation
    _dispatch(timer, now, 1.0, 128)
    assert timer.rate == 64.0
    assert timer.latest_rate == 128.0
    assert timer.first_dispatch == 30.0
    assert timer.wall == 38.0


def test_times_add_up_over_starts(now):
    before = clock.Clock()
    _dispatch(before, now, 30.0, 64)
    _dispatch(before, now, 2.0, 64)
    record = before.record()
    now[0] += 1000.0  # nothing runs
    after = clock.Clock()
    now[0] += 3.0  # restoring the checkpoint
    after.resume(record)
    _dispatch(after, now, 10.0, 64)
    assert after.rate == 32.0
    _dispatch(after, now, 1.0, 64)
    assert after.rate == 128.0 / 3.0
    assert after.wall == 32.0 + 14.0
    assert after.first_dispatch == 40.0
