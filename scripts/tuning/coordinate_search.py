"""How `scripts/tune.py` searches: along one parameter after the other, and then a duel."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from tuning import candidates, trial

# By how much a candidate has to be faster for the search to go on from it: less is noise, or not
# worth another batch size.
_BETTER = 1.03
_HOPELESS = 0.8  # of the best rate: a candidate that is slower is not measured well


class CoordinateSearch:
    """Goes from a start to the fastest candidate that it finds in time.

    Along one parameter it goes on while candidates get faster, upwards and else downwards; then
    comes the next parameter, and the first one again until none is left that makes it faster.

    Args:
      measure: measures a candidate; the second argument is a rate below which a turn is enough.
      choices: the parameters, in the order in which they are searched.
      in_time: false once there is no time for another candidate.

    Attributes:
      measured: every candidate that was measured, in this order.
      best: the fastest; None while none could be measured.
      complete: whether nothing was left out for want of time.
    """

    def __init__(
        self,
        measure: Callable[[candidates.Candidate, float], trial.Outcome],
        choices: Sequence[candidates.Choice],
        in_time: Callable[[], bool],
    ):
        self._measure, self._choices, self._in_time = measure, choices, in_time
        self.measured: dict[candidates.Candidate, trial.Outcome] = {}
        self.best: candidates.Candidate | None = None
        self.complete = True

    def run(self, origin: candidates.Candidate, machine: candidates.Machine) -> None:
        """Searches, until nothing is faster than the best or the time is up.

        Args:
          origin: where to start; it was measured already, with `add`.
          machine: where the search runs.
        """
        before = math.nan
        while self.complete and before != self.best:
            before = self.best
            for choice in self._choices:
                directions = choice.directions(self.best or origin, machine)
                any(self._improves(direction) for direction in directions)

    def add(self, candidate: candidates.Candidate, outcome: trial.Outcome) -> bool:
        """Notes what was measured; returns whether it is the best by far enough."""
        self.measured[candidate] = outcome
        is_best = not outcome.problem and outcome.rate > _BETTER * self._best_rate()
        self.best = candidate if is_best else self.best
        return is_best

    def _best_rate(self) -> float:
        return self.measured[self.best].rate if self.best else 0.0

    def _improves(self, direction: Sequence[candidates.Candidate]) -> bool:
        """Goes in a direction while it gets faster; returns whether it did."""
        improved = False
        for candidate in direction:
            if candidate in self.measured:
                is_best = False
            elif not self._in_time():
                self.complete = False
                return True  # so that no other direction is tried
            else:
                outcome = self._measure(candidate, _HOPELESS * self._best_rate())
                is_best = self.add(candidate, outcome)
            improved = improved or is_best
            # What does not divide says nothing of what comes next.
            if not is_best and not self.measured[candidate].refused:
                break
        return improved


def duel(
    measure: Callable[[candidates.Candidate], float],
    origin: candidates.Candidate,
    best: candidates.Candidate,
    in_time: Callable[[], bool],
) -> Iterator[tuple[float, float]]:
    """Measures the start and the best, turn by turn: three times, or twice if the time is up.

    Yields:
      The rates of both, NaN where one could not be measured.
    """
    for turn in range(3):
        if turn < 2 or in_time():
            yield measure(origin), measure(best)


def beats(rounds: Sequence[tuple[float, float]]) -> bool:
    """Returns whether the best was faster each time: whether all of the spread is above 1."""
    return len(rounds) > 1 and all(theirs > own for own, theirs in rounds)


def ratio(rounds: Sequence[tuple[float, float]]) -> str:
    """Returns the ratio of the best to the start: its median, the least and the most."""
    ratios = [theirs / own for own, theirs in rounds]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
