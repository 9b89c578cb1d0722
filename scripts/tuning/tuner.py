"""One search of `scripts/tune.py`: measures candidates until the time is up."""

import argparse
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

import rich.console
import rich.markup
from tuning import candidates, coordinate_search, findings, trial

from podracers import errors

_MACHINE_SHARE = 0.8  # of the host's memory, where --memory says nothing


class Tuner:
    """Measures candidates, each in a process of its own.

    Args:
      arguments: those of the command line.
      runner: the name of the runner's class, with its module.
      choices: the parameters to search.
      console: prints what is measured.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        runner: str,
        choices: Sequence[candidates.Choice],
        console: rich.console.Console,
    ):
        self._arguments, self._runner, self._choices = arguments, runner, choices
        self._console = console
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._memory = arguments.memory or _MACHINE_SHARE * host
        # Of its own, so that each candidate compiles once: what is cached takes less memory.
        self._cache = tempfile.TemporaryDirectory(prefix="tune-")
        self._budget, self._began = 60.0 * arguments.minutes, time.monotonic()
        self._facts: trial.Facts | None = None
        self.found = findings.Findings(candidates.Candidate(()))

    def run(self) -> None:
        """Measures the start, searches, and lets the best and the start take turns.

        After a KeyboardInterrupt, `found` is what was found before.

        Raises:
          errors.UserError: the experiment itself is mistaken, or the time is too short.
          errors.RunFailure: no candidate could be measured.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            if self.found.best is None:
                raise
            self.found.interrupted = True

    def _run(self) -> None:
        outcome = self._begin()
        found = self.found
        self._say(f"the start: {findings.told(outcome)}")
        found.add(found.start, outcome)
        if not self._in_time():
            raise errors.UserError(
                f"--minutes {self._arguments.minutes:g} is too short: the start took "
                f"{outcome.seconds:.0f} s, so use at least {self._needed() / 60:.1f}"
            )
        machine = self._facts.machine
        coordinate_search.search(found, self._choices, machine, self._measure, self._in_time)
        if found.best is None:
            raise errors.RunFailure(
                f"none of {len(found.measured)} candidates could be measured; the start: "
                f"{outcome.problem}"
            )
        if found.best == found.start:
            found.last = self._again("the start", found.start)
        elif not outcome.problem:
            for turn in range(3):  # or two, if the time is up
                if turn < 2 or time.monotonic() - self._began < self._budget:
                    found.last = self._again("the start", found.start)
                    found.rounds.append((found.last, self._again("the best", found.best)))

    def list_candidates(self) -> None:
        """Prints where the search starts and what it tries first; compiles and runs nothing."""
        outcome, start = self._begin(turns=0), self.found.start
        values = ", ".join(f"{name} {value}" for name, value in start.values)
        self._say(f"start: {values}" + (f" ({outcome.problem})" if outcome.refused else ""))
        for choice in self._choices:
            directions = choice.directions(start, self._facts.machine)
            self._say(f"{choice.name}:" + ("" if any(directions) else " nothing to try here"))
            for each in (each for direction in directions for each in direction):
                self._say(f"  {each.describe(start)}")

    def write(self, out: pathlib.Path, command: str) -> None:
        """Writes the .gin file that `command` makes, and prints what was found."""
        temporary = out.with_name(f".{out.name}.partial")
        try:
            temporary.write_text(self.found.gin(self._runner, command, self._facts))
            os.replace(temporary, out)
        except OSError as error:
            raise errors.RunFailure(f"cannot write '{out}': {error.strerror}") from error
        for line in self.found.verdict():
            self._say(line)
        self._say(f"{out}: add it after the experiment, --gin_file {out}")

    def _begin(self, turns: int = trial.TURNS) -> trial.Outcome:
        """Learns from the first process what the machine is, and where the search starts."""
        outcome = self._trial("the start", [], turns=turns)
        if outcome.facts is None:
            kind = errors.UserError if outcome.refused else errors.RunFailure
            raise kind(outcome.problem)
        self._facts = outcome.facts
        self.found.start = candidates.start(self._choices, outcome.facts.values)
        return outcome

    def _measure(self, candidate: candidates.Candidate, floor: float = 0.0) -> trial.Outcome:
        name = candidate.describe(self.found.start)
        outcome = self._trial(name, candidate.bindings(self._runner), floor=floor)
        self._say(f"{name}: {findings.told(outcome)}")
        return outcome

    def _again(self, name: str, candidate: candidates.Candidate) -> float:
        """Measures a candidate once more, and keeps the most memory that it ever took."""
        outcome = self._trial(f"{name}, again", candidate.bindings(self._runner))
        self._say(f"{name}, again: {findings.told(outcome)}")
        known = self.found.measured[candidate]
        known.host_memory = max(known.host_memory, outcome.host_memory)
        return outcome.rate

    def _trial(self, name: str, bindings: Sequence[str], **options) -> trial.Outcome:
        asked = self._arguments
        training = (asked.gin_file, [*asked.gin_bindings, *bindings], asked.seconds)
        left = max(self._budget - time.monotonic() + self._began, 0.0) / 60
        status = f"{rich.markup.escape(name)}: {math.ceil(left)} minutes left"
        # Seldom redrawn: that takes time from what is measured.
        with self._console.status(status, refresh_per_second=1):
            limits = (self._budget / 3, self._memory)
            return trial.run(training, *limits, self._cache.name, **options)

    def _in_time(self) -> bool:
        """Returns whether there is time for another candidate."""
        return self._needed() < self._budget

    def _needed(self) -> float:
        """Returns when a search would end, in seconds, that measured one more candidate."""
        measured = self.found.measured
        again = [measured[self.found.start], measured[self.found.best or self.found.start]]
        # What was compiled once is read from the cache.
        turns = 2 * sum(outcome.seconds - outcome.compiling for outcome in again)
        return time.monotonic() - self._began + next(reversed(measured.values())).seconds + turns

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)
