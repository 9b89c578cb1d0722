"""Reductions of the numbers of steps, of two streams; the second one begins another episode."""

import numpy as np
import pytest

from environments import episode_metrics


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # After each step: the stream 0 has 3, -5 and nothing; the stream 1 has -2, a reset and 4.
        ("last", [[3, -2], [-5, 0], [-5, 4]]),
        ("max", [[3, -2], [3, 0], [3, 4]]),
        ("sum", [[3, -2], [-2, 0], [-2, 4]]),
        ("mean", [[3, -2], [-1, 0], [-1, 4]]),
    ],
)
def test_reductions(reduction, expected):
    metrics = episode_metrics.EpisodeMetrics({"x": reduction}, 2)
    seen = []
    metrics.add("x", np.array([3, -2]), np.array([True, True]))
    seen.append(metrics.read()["x"])
    metrics.restart(np.array([False, True]))
    metrics.add("x", np.float64(-5.0), 0)
    seen.append(metrics.read()["x"])
    metrics.add("x", np.array([4.0]), np.array([False, True]))
    seen.append(metrics.read()["x"])
    np.testing.assert_array_equal(seen, np.array(expected, np.float32), strict=True)
