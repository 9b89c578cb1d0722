"""Keeps apart the times that rates are made of: compiling, training, evaluating; across restarts."""

import contextlib
import math
import time
from collections.abc import Iterator


class Clock:
    """The times of a run, in seconds.

    The first dispatch after a start compiles, so neither its time nor its steps count in a rate.

    Args:
      wall: wall time of the run before this start.
      training: training time, and `steps`: the agent steps taken in it, before this start.
      steps: see `training`.
      first_dispatch: time of the first dispatches of earlier starts, compilation included.
    """

    def __init__(
        self,
        wall: float = 0.0,
        training: float = 0.0,
        steps: int = 0,
        first_dispatch: float = 0.0,
    ):
        self._start = time.perf_counter() - wall
        self._training = training
        self._steps = steps
        self.first_dispatch = first_dispatch
        self._warm = False
        self.latest_rate = math.nan  # agent steps a second in the latest dispatch

    @property
    def wall(self) -> float:
        """Wall time of the run, earlier starts included."""
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Agent steps a second while training, without compilation; NaN before it is known."""
        return self._steps / self._training if self._training else math.nan

    @contextlib.contextmanager
    def dispatch(self, steps: int) -> Iterator[None]:
        """Times one dispatch of `steps` agent steps, from its launch to its metrics."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if self._warm:
            self._training += seconds
            self._steps += steps
            self.latest_rate = steps / seconds
        else:
            self.first_dispatch += seconds
            self._warm = True

    def record(self) -> dict[str, float]:
        """Returns what makes a `Clock` that goes on from here."""
        return {
            "wall": self.wall,
            "training": self._training,
            "steps": self._steps,
            "first_dispatch": self.first_dispatch,
        }
