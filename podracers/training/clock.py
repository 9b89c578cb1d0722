"""Keeps apart the times that rates are made of: compiling and training, across restarts."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping


class Dispatch:
    """What was dispatched.

    Attributes:
      steps: agent steps; known at its end, for a runner may be stopped early.
    """

    def __init__(self):
        self.steps = 0


class Clock:
    """The times of a run, in seconds; it starts when it is made.

    The first dispatch after a start compiles, so neither its time nor its steps count in a rate.
    """

    def __init__(self):
        self._start = time.perf_counter()
        self._training = 0.0
        self._steps = 0  # agent steps taken in that time
        self._warm = False
        self.first_dispatch = 0.0  # of every start, compilation included
        self.latest_rate = math.nan  # agent steps a second in the latest dispatch

    def resume(self, record: Mapping[str, float]) -> None:
        """Adds the times of earlier starts, as `record` returned them."""
        self._start -= record["wall"]
        self._training += record["training"]
        self._steps += record["steps"]
        self.first_dispatch += record["first_dispatch"]

    @property
    def wall(self) -> float:
        """Wall time of the run, earlier starts included."""
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Agent steps a second while training, without compilation; NaN before it is known."""
        return self._steps / self._training if self._training else math.nan

    @contextlib.contextmanager
    def dispatch(self) -> Iterator["Dispatch"]:
        """Times one dispatch, from its launch to its metrics; the caller says how long it was."""
        dispatch = Dispatch()
        start = time.perf_counter()
        yield dispatch
        seconds = time.perf_counter() - start
        if self._warm:
            self._training += seconds
            self._steps += dispatch.steps
            self.latest_rate = dispatch.steps / seconds
        else:
            self.first_dispatch += seconds
            self._warm = True

    def record(self) -> dict[str, float]:
        """Returns what a later start resumes from."""
        return {
            "wall": self.wall,
            "training": self._training,
            "steps": self._steps,
            "first_dispatch": self.first_dispatch,
        }
