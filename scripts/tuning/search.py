"""Coordinate search over settings: along one parameter after the other."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping

from podracers import errors
from podracers.scripts.tuning import candidates, trial

_MIN_GAIN = 1.03  # a smaller gain is noise, or not worth another batch size
_ROUNDS = 2  # final rounds of the start and the best


@dataclasses.dataclass
class Search:
    """A search and its results so far."""

    measure: Callable[[candidates.Settings], trial.Outcome]
    budget: float  # seconds
    measured: list[tuple[candidates.Settings, trial.Outcome]]  # the experiment's are the first
    best: int | None = None  # index of the fastest settings; None if none could be measured
    # Rates of the start and of the best, measured again, alternately.
    rounds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    complete: bool = True  # the time sufficed for all settings
    interrupted: bool = False  # Ctrl-C ended the search, before the best was measured again

    def __post_init__(self):
        self.start, outcome = self.measured[0]
        self.best = None if outcome.problem else self.best or 0

    def needed(self) -> float:
        """Returns the seconds in all, with another candidate and the rounds at the end."""
        seconds = [outcome.seconds for _, outcome in self.measured]
        return sum(seconds) + seconds[-1] + _ROUNDS * (seconds[0] + seconds[self.best or 0])

    def run(self, choices: Mapping[str, list | None], num_devices: int, num_cores: int) -> None:
        """Searches until no parameter gains; then measures the start and the best again.

        Along a parameter the search continues while candidates gain, upwards or else downwards;
        then comes the next parameter, and after the last the first. `candidates.parse` returns
        `choices`.
        """
        gained = True
        while gained and self.complete:
            gained = False
            for name, chosen in choices.items():
                now = self.measured[self.best or 0][0]
                ways = candidates.values(name, now, num_devices, num_cores)
                ways = [[value] for value in chosen] if chosen else ways
                gained |= any(self._follow([now | {name: x} for x in way]) for way in ways)
        if self.best and not self.measured[0][1].problem:
            fastest = self.measured[self.best][0]
            for _ in range(_ROUNDS):
                self.rounds.append((self.measure(self.start).rate, self.measure(fastest).rate))

    def _follow(self, way: list[candidates.Settings]) -> bool:
        """Measures settings while they gain; returns whether any did."""
        gained = False
        for settings in way:
            known = next((outcome for tried, outcome in self.measured if tried == settings), None)
            self.complete &= known is not None or self.needed() < self.budget
            if not self.complete:
                break
            outcome = known or self.measure(settings)
            rate = 0.0 if self.best is None else self.measured[self.best][1].rate
            if not known:
                self.measured.append((settings, outcome))
            if not known and outcome.rate > _MIN_GAIN * rate:
                self.best, gained = len(self.measured) - 1, True
            elif not outcome.refused:  # settings that do not divide are skipped
                break
        return gained

    @property
    def chosen(self) -> candidates.Settings:
        """Settings to write: the best if it won every round.

        It needs no round after Ctrl-C, or if the start could not be measured.
        """
        won = len(self.rounds) == _ROUNDS and all(best > start for start, best in self.rounds)
        unmeasured = bool(self.measured[0][1].problem)
        return (
            self.measured[self.best or 0][0]
            if self.interrupted or unmeasured or won
            else self.start
        )

    def verdict(self) -> list[str]:
        """Returns lines on the result and its reliability."""
        lines = [] if self.complete else ["no time to try everything: raise --minutes"]
        if self.rounds:
            ratios = ", ".join(f"{best / start:.2f}" for start, best in self.rounds)
            lines.append(f"the fastest, measured again: {ratios} times the speed of the start")
        end = "stopped early; the fastest so far" if self.interrupted else "the fastest"
        end = "nothing was reliably faster" if self.chosen == self.start else end
        return [*lines, f"{end}: {describe(self.chosen, self.start)}"]


def describe(settings: candidates.Settings, start: candidates.Settings) -> str:
    """Returns the differences from the start."""
    changed = [f"{name} {value}" for name, value in settings.items() if value != start[name]]
    return ", ".join(changed) or "the experiment's own values"


def run(
    options: argparse.Namespace, runner: str, choices: Mapping[str, list | None], cache: str
) -> tuple[Search, trial.Facts]:
    """Measures the experiment's own settings, and searches with the options of `scripts/tune.py`.

    Raises:
      errors.UserError: the experiment is invalid, or the time too short.
      errors.RunFailure: no settings could be measured.
    """
    budget = 60.0 * options.minutes
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = budget / 3, 1e9 * options.memory if options.memory else 0.8 * host

    def measure(settings: candidates.Settings) -> trial.Outcome:
        start = facts.settings if settings else {}
        changed = candidates.fields(settings, start, facts.num_devices) if settings else {}
        bindings = [f"{runner}.{name} = {value!r}" for name, value in changed.items()]
        training = options.gin_file, [*options.gin_bindings, *bindings]
        outcome = trial.run(*training, *limits, cache)
        print(f"{describe(settings, start)}: {outcome.text}", flush=True)
        return outcome

    first = measure({})
    if first.facts is None:
        raise (errors.UserError if first.refused else errors.RunFailure)(first.problem)
    facts: trial.Facts = first.facts
    result = Search(measure, budget, [(facts.settings, first)])
    if result.needed() > budget:
        raise errors.UserError(f"--minutes: expected at least {result.needed() / 60:.1f}")
    try:
        measurable = {name: chosen for name, chosen in choices.items() if name in facts.settings}
        result.run(measurable, facts.num_devices, facts.num_cores)
    except KeyboardInterrupt:
        result.interrupted = True
    if result.best is None:
        raise errors.RunFailure(f"no settings could be measured; the start: {first.problem}")
    return result, facts
