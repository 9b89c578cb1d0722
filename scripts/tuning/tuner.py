"""One search of `scripts/tune.py`: measures candidates until the time is up, and keeps the best."""

import argparse
import dataclasses
import datetime
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

import rich.console
import rich.markup
import rich.progress
from tuning import candidates, coordinate_search, findings, trial

from podracers import errors

_MACHINE_SHARE = 0.8  # of the host's memory, where --memory says nothing


class Tuner:
    """Measures candidates, each in a process of its own.

    Args:
      arguments: of the command line.
      runner: the name of the runner's class, with its module.
      choices: the parameters to search.
      console: where to say what is measured.

    Attributes:
      found: what was measured so far.
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
        self._budget = 60.0 * arguments.minutes
        self._began = time.monotonic()
        self._search = coordinate_search.CoordinateSearch(self._measure, choices, self._in_time)
        self.found = findings.Found(candidates.Candidate(()), self._search.measured)
        self._progress = rich.progress.Progress(
            *("{task.description}", rich.progress.BarColumn(), "{task.fields[left]}"),
            console=console,
            # Drawn when a child is looked at: no thread that competes with it.
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=self._budget, left="")

    def run(self) -> None:
        """Measures the start, searches, and lets the best and the start take turns.

        After a KeyboardInterrupt, `found` is what was found before.

        Raises:
          errors.UserError: the experiment itself is mistaken, or the time is too short.
          errors.RunFailure: no candidate could be measured.
        """
        with self._progress:
            try:
                self._run()
            except KeyboardInterrupt:
                if self._search.best is None:
                    raise
                self._note(interrupted=True)

    def _run(self) -> None:
        outcome = self._trial("the start", None)
        machine = self._settle(outcome)
        start = self.found.start
        self._search.add(start, outcome)
        self._note()
        if not self._in_time():
            raise errors.UserError(
                f"--minutes {self._arguments.minutes:g} is too short: the start took "
                f"{outcome.seconds:.0f} s, so use at least {self._needed() / 60:.1f}"
            )
        self._search.run(start, machine)
        best = self._search.best
        self._note()
        if best is None:
            count = len(self._search.measured)
            raise errors.RunFailure(
                f"none of {count} candidates could be measured; the start: {outcome.problem}"
            )
        if best == start:
            self._note(last=self._again(start))
        elif not outcome.problem:
            for pair in coordinate_search.duel(self._again, start, best, self._any_time):
                self._note(last=pair[0], rounds=(*self.found.rounds, pair))

    def list_candidates(self) -> None:
        """Prints where the search starts and what it tries first; compiles and runs nothing."""
        outcome = self._trial("the start", None, turns=0, say=False)
        machine = self._settle(outcome)
        start = self.found.start
        values = ", ".join(f"{name} {value}" for name, value in start.values)
        self._say(f"start: {values}" + (f" ({outcome.problem})" if outcome.refused else ""))
        for choice in self._choices:
            directions = choice.directions(start, machine)
            self._say(f"{choice.name}:" + ("" if any(directions) else " nothing to try here"))
            for each in (each for direction in directions for each in direction):
                self._say(f"  {each.describe(start)}")

    def write(self, out: str, command: str) -> None:
        """Writes the .gin file that `command` makes, and prints what was found."""
        path = pathlib.Path(out)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_text(self.found.gin(self._runner, command))
            os.replace(temporary, path)
        except OSError as error:
            raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error
        self._console.print(self.found.table())
        for line in self.found.verdict():
            self._say(line)
        self._say(f"{path}: add it after the experiment, --gin_file {path}")

    def _note(self, **found) -> None:
        best, complete = self._search.best, self._search.complete
        self.found = dataclasses.replace(self.found, best=best, complete=complete, **found)

    def _settle(self, outcome: trial.Outcome) -> candidates.Machine:
        """Learns from the first process what the machine is, and where the search starts."""
        if outcome.facts is None:
            kind = errors.UserError if outcome.refused else errors.RunFailure
            raise kind(outcome.problem)
        start = candidates.start(self._choices, outcome.facts.values)
        self._note(start=start, facts=outcome.facts)
        return outcome.facts.machine

    def _measure(self, candidate: candidates.Candidate, floor: float) -> trial.Outcome:
        return self._trial(candidate.describe(self.found.start), candidate, floor=floor)

    def _again(self, candidate: candidates.Candidate) -> float:
        """Measures a candidate once more, and keeps the most memory that it ever took."""
        name = "the start" if candidate == self.found.start else "the best"
        outcome = self._trial(f"{name}, again", candidate)
        known = self._search.measured[candidate]
        known.host_memory = max(known.host_memory, outcome.host_memory)
        return outcome.rate

    def _trial(
        self, name: str, candidate: candidates.Candidate | None, say: bool = True, **options
    ) -> trial.Outcome:
        asked = self._arguments
        bindings = candidate.bindings(self._runner) if candidate else []
        outcome = trial.run(
            (asked.gin_file, [*asked.gin_bindings, *bindings], asked.seconds),
            *(self._budget / 3, self._memory, self._cache.name),
            watch=lambda: self._draw(name),
            **options,
        )
        if say:
            self._say(f"{name}: {outcome.problem or findings.measured(outcome)}")
        return outcome

    def _any_time(self) -> bool:
        return time.monotonic() - self._began < self._budget

    def _in_time(self) -> bool:
        """Returns whether there is time for another candidate."""
        return self._needed() < self._budget

    def _needed(self) -> float:
        """Returns when a search would end, in seconds, that measured one more candidate."""
        measured = self._search.measured
        again = [measured[self.found.start], measured[self._search.best or self.found.start]]
        # What was compiled once is read from the cache.
        turns = 2 * sum(outcome.seconds - outcome.compiling for outcome in again)
        return time.monotonic() - self._began + next(reversed(measured.values())).seconds + turns

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _draw(self, name: str) -> None:
        seconds = time.monotonic() - self._began
        left = datetime.timedelta(seconds=max(round(self._budget - seconds), 0))
        self._progress.update(
            self._task,
            completed=min(seconds, self._budget),
            description=rich.markup.escape(name),
            left=f"{left} left",
            refresh=True,
        )
