"""What `scripts/tune.py` found: in words, as a table, and as a .gin file."""

import dataclasses
import datetime
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import rich.markup
import rich.table
from tuning import candidates, trial
from tuning import coordinate_search as search

from podracers import parallel

_WIDTH = 98  # of comments
_STEADY = 0.1  # a machine whose speed changes by more in the meantime is no place to search


@dataclasses.dataclass(frozen=True)
class Found:
    """The end of a search.

    Attributes:
      start: the experiment's own values.
      best: the fastest candidate.
      measured: what each candidate reached.
      rounds: of the duel: rates of the start and of the best.
      last: the rate of the start at the end; NaN if it was not measured again.
      interrupted: the search did not come to its end.
      complete: nothing was left out for want of time.
    """

    start: candidates.Candidate
    best: candidates.Candidate
    measured: Mapping[candidates.Candidate, trial.Outcome]
    rounds: Sequence[tuple[float, float]] = ()
    last: float = math.nan
    interrupted: bool = False
    complete: bool = True

    @property
    def chosen(self) -> candidates.Candidate:
        """What to write: the best, unless the start was measured beside it and held its own."""
        unmeasured = bool(self.measured[self.start].problem)
        if self.interrupted or unmeasured or search.beats(self.rounds):
            return self.best
        return self.start

    def verdict(self) -> list[str]:
        """Returns lines that say what was found, and how sure that is."""
        short = [] if self.complete else ["the time was up before all was tried: raise --minutes"]
        return [*short, *self._drift(), *self._duel(), self._conclusion()]

    def _drift(self) -> list[str]:
        change = self.last / self.measured[self.start].rate
        if math.isnan(change):
            return []
        line = (
            f"the start at the end: {self.last:,.0f} agent steps/s, {change:.2f} of what it was at "
            "the beginning"
        )
        if abs(change - 1) > _STEADY:
            line += "; the machine had other work, so search again when it has none"
        return [line]

    def _duel(self) -> list[str]:
        whole = [pair for pair in self.rounds if not math.isnan(sum(pair))]
        if not whole:
            return []
        name = self.best.describe(self.start)
        return [
            f"{name}: {search.ratio(whole)} times the speed of the start, median (least to most) "
            f"of {len(whole)} rounds, turn by turn"
        ]

    def _conclusion(self) -> str:
        name = self.best.describe(self.start)
        if self.best == self.start:
            found = "so far, nothing" if self.interrupted else "nothing"
            return f"{found} was faster than the start: these are its own values"
        if self.interrupted:
            return f"stopped early: the fastest so far was {name}"
        if self.measured[self.start].problem:
            return f"the start could not be measured; the fastest was {name}"
        if any(math.isnan(theirs) for _, theirs in self.rounds):
            return f"{name} could not be measured again: these are the start's own values"
        if self.chosen == self.start:
            return "nothing beat the start by more than the spread: these are its own values"
        return f"the fastest is {name}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns what was changed, the rate or what went wrong, and the memory."""
        return [
            (each.describe(self.start), outcome.problem, "")
            if outcome.problem
            else (each.describe(self.start), rates(outcome), memory(outcome))
            for each, outcome in self.measured.items()
        ]

    def table(self) -> rich.table.Table:
        """Returns the rows as a table, the best of them in bold."""
        table = rich.table.Table(title="What was measured", title_justify="left")
        for column in ("changed", "agent steps/s", "memory"):
            table.add_column(column, overflow="fold")
        for each, row in zip(self.measured, self.rows()):
            style = "bold" if each == self.best else ""
            table.add_row(*map(rich.markup.escape, row), style=style)
        return table

    def gin(self, runner: str, command: str, facts: Mapping[str, Any]) -> str:
        """Returns the file to add after the experiment's own.

        Args:
          runner: the name of the runner's class, with its module.
          command: what made it.
          facts: of the machine (see `trial.Outcome`).
        """
        module, _, name = runner.rpartition(".")
        package, _, short = module.rpartition(".")
        lines = [
            *(f"# {line}".rstrip() for line in self._account(command, facts)),
            "",
            "from __gin__ import dynamic_registration",
            "",
            f"from {package} import {short}" if package else f"import {short}",
            "",
            *self.chosen.bindings(f"{short}.{name}"),
        ]
        return "\n".join(lines) + "\n"

    def _account(self, command: str, facts: Mapping[str, Any]) -> list[str]:
        made = facts["provenance"]
        changing = [name for name in candidates.LEARNT if self.start.get(name) is not None]
        warning = (
            f"{' and '.join(changing)}: with another value the agent learns otherwise from as many "
            "agent steps, and periods that count updates last otherwise."
        )
        return [
            f"Made by: {command}",
            *_wrapped(
                f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {made['device']}, "
                f"{facts['num_cores']} host cores, jax {made['versions'].get('jax')}, commit "
                f"{made['commit']}"
            ),
            "For this experiment on this machine; add it after the experiment's own file.",
            *(_wrapped(warning) if changing else ()),
            "",
            "what was changed: agent steps/s, warm, median (least to most); the most memory",
            *(part for row in self.rows() for part in _wrapped(_joined(row), 2)),
            "",
            *(part for line in self.verdict() for part in _wrapped(line)),
        ]


def _joined(row: tuple[str, str, str]) -> str:
    return ": ".join(row[:2]) + (f"; {row[2]}" if row[2] else "")


def _wrapped(line: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * 2 * indent
    )


def rates(outcome: trial.Outcome) -> str:
    """Returns the rates as people read them."""
    if len(outcome.rates) == 1:
        return f"{outcome.rate:,.0f}"
    return f"{outcome.rate:,.0f} ({min(outcome.rates):,.0f} to {max(outcome.rates):,.0f})"


def memory(outcome: trial.Outcome) -> str:
    """Returns the memory as people read it."""
    where = "" if outcome.device_memory is None else " on the device"
    return parallel.readable_bytes(outcome.memory) + where
