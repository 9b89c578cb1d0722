"""How `scripts/tune.py` searches: along one parameter after the other."""

from collections.abc import Callable, Sequence

from tuning import candidates, findings, trial

_HOPELESS = 0.8  # of the best rate: a candidate that is slower is not measured well


def search(
    found: findings.Findings,
    choices: Sequence[candidates.Choice],
    machine: candidates.Machine,
    measure: Callable[[candidates.Candidate, float], trial.Outcome],
    in_time: Callable[[], bool],
) -> None:
    """Goes from the start to the fastest candidate that it finds in time.

    Along one parameter it goes on while candidates get faster, upwards or else downwards; then
    comes the next parameter, and the first one again until none of them makes it faster.

    Args:
      found: with the start, measured; it takes what else is measured.
      choices: the parameters, in the order in which they are searched.
      machine: the machine that the search runs on.
      measure: measures a candidate; the second argument is a rate below which a turn is enough.
      in_time: false once there is no time for another candidate.
    """

    def improves(direction: Sequence[candidates.Candidate]) -> bool:
        improved = False
        for candidate in direction:
            is_best = False
            if candidate not in found.measured:
                found.complete = found.complete and in_time()
                if not found.complete:
                    return improved
                is_best = found.add(candidate, measure(candidate, _HOPELESS * found.best_rate))
            improved = improved or is_best
            # What does not divide says nothing of what comes next.
            if not is_best and not found.measured[candidate].refused:
                return improved
        return improved

    improved = True
    while improved and found.complete:
        improved = False
        for choice in choices:
            directions = choice.directions(found.best or found.start, machine)
            improved |= any(improves(direction) for direction in directions)
