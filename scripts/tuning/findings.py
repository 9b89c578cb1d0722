"""What `scripts/tune.py` found: in words, as a table, and as a .gin file."""

import dataclasses
import datetime
import math
import textwrap
from collections.abc import Mapping, Sequence

import rich.markup
import rich.table
from tuning import candidates, coordinate_search, trial

from podracers import footprint

_WIDTH = 98  # of comments
_STEADY = 0.1  # a machine whose speed changes by more in the meantime is no place to search


@dataclasses.dataclass(frozen=True)
class Found:
    """A search, at its end or so far.

    Attributes:
      start: the experiment's own values.
      measured: what each candidate reached.
      best: the fastest candidate.
      rounds: of the duel: rates of the start and of the best.
      last: the rate of the start at the end; NaN if it was not measured again.
      interrupted: whether the user did not wait for the end.
      complete: whether nothing was left out for want of time.
      facts: of the machine.
    """

    start: candidates.Candidate
    measured: Mapping[candidates.Candidate, trial.Outcome]
    best: candidates.Candidate | None = None
    rounds: Sequence[tuple[float, float]] = ()
    last: float = math.nan
    interrupted: bool = False
    complete: bool = True
    facts: trial.Facts | None = None

    @property
    def chosen(self) -> candidates.Candidate:
        """What to write: the best, unless the start was measured beside it and held its own."""
        unmeasured = bool(self.measured[self.start].problem)
        if self.interrupted or unmeasured or coordinate_search.beats(self.rounds):
            return self.best
        return self.start

    def verdict(self) -> list[str]:
        """Returns lines that say what was found, and how sure that is."""
        lines = [] if self.complete else ["the time was up before all was tried: raise --minutes"]
        change = self.last / self.measured[self.start].rate
        if not math.isnan(change):
            line = f"the start at the end: {self.last:,.0f} agent steps/s, {change:.2f} of what it "
            line += "was at the beginning"
            if abs(change - 1) > _STEADY:
                line += "; the machine had other work, so search again when it has none"
            lines.append(line)
        if whole := [pair for pair in self.rounds if not math.isnan(sum(pair))]:
            lines.append(
                f"{self.best.describe(self.start)}: {coordinate_search.ratio(whole)} times the "
                f"speed of the start, median (least to most) of {len(whole)} rounds, turn by turn"
            )
        return [*lines, self._conclusion()]

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

    def table(self) -> rich.table.Table:
        """Returns what was measured as a table, the best of it in bold."""
        table = rich.table.Table(title="What was measured", title_justify="left")
        for column in ("changed", "agent steps/s", "memory"):
            table.add_column(column, overflow="fold")
        for each, outcome in self.measured.items():
            row = [outcome.problem] if outcome.problem else [rates(outcome), memory(outcome)]
            cells = map(rich.markup.escape, [each.describe(self.start), *row])
            table.add_row(*cells, style="bold" if each == self.best else "")
        return table

    def gin(self, runner: str, command: str) -> str:
        """Returns the file to add after the experiment's own.

        Args:
          runner: the name of the runner's class, with its module.
          command: what made it.
        """
        module, _, name = runner.rpartition(".")
        package, _, short = module.rpartition(".")
        made, cores = self.facts.provenance, self.facts.machine.num_cores
        changing = [name for name in candidates.LEARNT if self.start.get(name) is not None]
        lines = [
            f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {made['device']}, {cores} host cores, "
            f"jax {made['versions'].get('jax')}, commit {made['commit']}",
            "For this experiment on this machine; add it after the experiment's own file.",
        ]
        if changing:
            lines.append(
                f"{' and '.join(changing)}: with another value the agent learns otherwise from as "
                "many agent steps, and periods that count updates last otherwise."
            )
        lines += ["", "what was changed: agent steps/s, warm, median (least to most); memory"]
        for each, outcome in self.measured.items():
            lines.append(f"  {each.describe(self.start)}: {outcome.problem or measured(outcome)}")
        lines += ["", *self.verdict()]
        comments = [f"Made by: {command}", *(part for line in lines for part in _wrapped(line))]
        return "\n".join(
            [
                *(f"# {line}".rstrip() for line in comments),
                "\nfrom __gin__ import dynamic_registration\n",
                f"from {package} import {short}\n" if package else f"import {short}\n",
                *self.chosen.bindings(f"{short}.{name}"),
                "",
            ]
        )


def _wrapped(line: str) -> list[str]:
    indent = "    " if line.startswith(" ") else ""
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent) or [""]


def measured(outcome: trial.Outcome) -> str:
    """Returns rates and memory in words."""
    return f"{rates(outcome)} agent steps/s, {memory(outcome)}"


def rates(outcome: trial.Outcome) -> str:
    """Returns the rates as people read them."""
    if len(outcome.rates) == 1:
        return f"{outcome.rate:,.0f}"
    return f"{outcome.rate:,.0f} ({min(outcome.rates):,.0f} to {max(outcome.rates):,.0f})"


def memory(outcome: trial.Outcome) -> str:
    """Returns the memory as people read it."""
    where = "" if outcome.device_memory is None else " on the device"
    return footprint.readable(outcome.memory) + where
