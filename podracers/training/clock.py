"""Times of a run."""

import dataclasses
import math
import time


@dataclasses.dataclass
class Clock:
    """Times of a run over all its starts; checkpoints store the fields.

    The first dispatch after a start compiles, so neither its time nor its steps count in a rate.
    """

    wall: float = 0.0  # seconds of earlier starts
    training: float = 0.0  # seconds of dispatches, without the first dispatch of each start
    steps: int = 0  # agent steps in `training`
    first_dispatch: float = 0.0  # seconds of all starts' first dispatches and waits to compile
    evaluation_steps: int = 0  # agent steps of evaluations, of one member of the population

    def __post_init__(self):
        self._start = time.perf_counter() - self.wall
        self._is_compiled = False
        self._lap = self.training, self.steps  # values at the latest `lap_rate`

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the run, earlier starts included."""
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Agent steps per second of training, without compilation; NaN before it is known."""
        return self.steps / self.training if self.training else math.nan

    def add_dispatch(self, seconds: float, steps: int) -> None:
        """Adds one dispatch, from its launch to its metrics."""
        if not self._is_compiled:
            self._is_compiled = True
            self.first_dispatch += seconds
            return
        self.training += seconds
        self.steps += steps

    def lap_rate(self) -> float:
        """Returns agent steps per second since the last call; NaN without a compiled dispatch."""
        seconds, steps = self.training - self._lap[0], self.steps - self._lap[1]
        self._lap = self.training, self.steps
        return steps / seconds if seconds else math.nan

    def record(self) -> dict[str, float]:
        """Returns the fields, from which a later start continues."""
        return dataclasses.asdict(self) | {"wall": self.elapsed}
