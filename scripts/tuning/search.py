"""Coordinate search over settings: along one parameter after the other."""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from tuning import candidates, trial

from podracers import errors

_MIN_GAIN = 1.03  # a smaller gain is noise, or not worth another batch size
_FLOOR = 0.8  # share of the best rate: slower candidates get one turn


@dataclasses.dataclass
class Search:
    """A search and its results so far.

    Attributes:
      start: the experiment's own settings.
      measured: settings and outcomes, in order.
      best: the fastest settings; None if none could be measured.
      rounds: rates of the start and of the best, measured again in turns.
      complete: whether nothing was left out for lack of time.
      interrupted: whether Ctrl-C ended it; then the best was not measured again.
    """

    start: candidates.Settings
    measured: list[tuple[candidates.Settings, trial.Outcome]]
    best: candidates.Settings | None = None
    rounds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    complete: bool = True
    interrupted: bool = False

    def outcome(self, settings: candidates.Settings) -> trial.Outcome | None:
        """Returns the outcome of settings that were measured."""
        return next((outcome for known, outcome in self.measured if known == settings), None)

    def add(self, settings: candidates.Settings, outcome: trial.Outcome) -> bool:
        """Adds an outcome; returns whether it is the best by a sufficient gain."""
        self.measured.append((settings, outcome))
        rate = self.outcome(self.best).rate if self.best is not None else 0.0
        is_best = outcome.rate > _MIN_GAIN * rate
        self.best = settings if is_best else self.best
        return is_best

    def run(
        self,
        choices: Mapping[str, Any],
        machine: candidates.Machine,
        measure: Callable[[candidates.Settings, float], trial.Outcome],
        in_time: Callable[[], bool],
    ) -> None:
        """Searches until no parameter gains.

        Along a parameter it continues while candidates gain, upwards or else downwards; then comes
        the next parameter, and the first one again.

        Args:
          choices: values by parameter, as of `candidates.parse`.
          machine: the machine.
          measure: takes settings, and a rate below which one turn is enough.
          in_time: whether there is time for another candidate.
        """
        gained = True
        while gained and self.complete:
            gained = False
            for name, values in choices.items():
                at = self.start if self.best is None else self.best
                ways = candidates.directions(name, values, at, machine)
                gained |= any(self._follow(way, measure, in_time) for way in ways)

    def _follow(self, way: list[candidates.Settings], measure: Callable, in_time: Callable) -> bool:
        gained = False
        for settings in way:
            outcome, is_best = self.outcome(settings), False
            if outcome is None:
                self.complete = self.complete and in_time()
                if not self.complete:
                    return gained
                rate = self.outcome(self.best).rate if self.best is not None else 0.0
                outcome = measure(settings, _FLOOR * rate)
                is_best = self.add(settings, outcome)
            gained |= is_best
            if not is_best and not outcome.refused:  # skips settings that do not divide
                return gained
        return gained

    @property
    def chosen(self) -> candidates.Settings:
        """Settings to write: the best if it won every round, at least two.

        It needs no round after Ctrl-C, or if the start could not be measured.
        """
        won = len(self.rounds) > 1 and all(best > start for start, best in self.rounds)
        unmeasured = bool(self.measured[0][1].problem)
        return self.best if self.interrupted or unmeasured or won else self.start

    def verdict(self) -> list[str]:
        """Returns lines on the result and its reliability."""
        lines = [] if self.complete else ["no time to try everything: raise --minutes"]
        if self.rounds:
            ratios = [best / start for start, best in self.rounds]
            lines.append(
                f"{describe(self.best, self.start)}: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) times the speed of the start, in turns"
            )
        chosen = self.chosen
        if self.interrupted:
            lines.append(f"stopped early: the fastest so far was {describe(chosen, self.start)}")
        elif chosen == self.start:
            lines.append("nothing was reliably faster: these are the experiment's own values")
        else:
            lines.append(f"the fastest is {describe(chosen, self.start)}")
        return lines


def describe(settings: candidates.Settings, start: candidates.Settings) -> str:
    """Returns the differences from the start."""
    changed = [f"{name} {value}" for name, value in settings.items() if value != start[name]]
    return ", ".join(changed) or "the experiment's own values"


def run(
    options: argparse.Namespace, runner: str, choices: dict, cache: str
) -> tuple[Search, trial.Facts]:
    """Measures the start, searches, and measures the start and the best again.

    Args:
      options: of `scripts/tune.py`.
      runner: the runner's class, with its module.
      choices: values by parameter, as of `candidates.parse`.
      cache: folder for compiled programs.

    Returns:
      The search, and facts of its processes.

    Raises:
      errors.UserError: the experiment is invalid, or the time too short.
      errors.RunFailure: no settings could be measured.
    """
    began, budget = time.monotonic(), 60.0 * options.minutes
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = 1e9 * options.memory if options.memory else 0.8 * host

    def measure(settings: candidates.Settings, floor: float = 0.0) -> trial.Outcome:
        bindings = [f"{runner}.{name} = {value!r}" for name, value in settings.items()]
        training = (options.gin_file, [*options.gin_bindings, *bindings])
        outcome = trial.run(training, budget / 3, memory, cache, floor)
        start = found.start if settings else {}
        print(f"{describe(settings, start)}: {outcome.text}", flush=True)
        return outcome

    def needed() -> float:  # seconds in all, with another candidate and two rounds at the end
        again = [found.outcome(found.start), found.outcome(found.best or found.start)]
        last = found.measured[-1][1].seconds
        return time.monotonic() - began + last + 2 * sum(each.seconds for each in again)

    outcome = measure({})
    if outcome.facts is None:
        kind = errors.UserError if outcome.refused else errors.RunFailure
        raise kind(outcome.problem)
    found = Search(candidates.start([*choices], outcome.facts.values), [])
    found.add(found.start, outcome)
    if needed() > budget:
        raise errors.UserError(f"--minutes: expected at least {needed() / 60:.1f}")
    try:
        found.run(choices, outcome.facts.machine, measure, lambda: needed() < budget)
        if found.best is None:
            raise errors.RunFailure(f"no settings could be measured; the start: {outcome.problem}")
        if found.best != found.start and not outcome.problem:
            while len(found.rounds) < 2 or (
                len(found.rounds) < 3 and time.monotonic() - began < budget
            ):
                found.rounds.append((measure(found.start).rate, measure(found.best).rate))
    except KeyboardInterrupt:
        if found.best is None:
            raise
        found.interrupted = True
    return found, outcome.facts
