"""What `scripts/tune.py` has found: in words, and as a .gin file."""

import dataclasses
import datetime
import math
import statistics
import textwrap

from tuning import candidates, trial

from podracers import parallel

# By how much a candidate has to be faster for the search to go on from it: less is noise, or not
# worth another batch size.
_BETTER = 1.03
_STEADY = 0.1  # a machine whose speed changes by more in the meantime is no place to search
_WIDTH = 98  # of comments


@dataclasses.dataclass
class Findings:
    """A search, at its end or so far."""

    start: candidates.Candidate  # the experiment's own values
    # What each candidate reached, in the order in which they were measured.
    measured: dict[candidates.Candidate, trial.Outcome] = dataclasses.field(default_factory=dict)
    # The fastest candidate; None while none could be measured.
    best: candidates.Candidate | None = None
    # Rates of the start and of the best, measured turn by turn; NaN where that failed.
    rounds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    last: float = math.nan  # the rate of the start at the end; NaN if it was not measured again
    interrupted: bool = False  # whether the user did not wait for the end
    complete: bool = True  # whether nothing was left out for want of time

    @property
    def best_rate(self) -> float:
        """The rate of the best; 0 while there is none."""
        return self.measured[self.best].rate if self.best else 0.0

    def add(self, candidate: candidates.Candidate, outcome: trial.Outcome) -> bool:
        """Notes what was measured; returns whether it is the best by far enough."""
        self.measured[candidate] = outcome
        is_best = not outcome.problem and outcome.rate > _BETTER * self.best_rate
        self.best = candidate if is_best else self.best
        return is_best

    @property
    def chosen(self) -> candidates.Candidate:
        """What to write: the best, if it was faster than the start each time, or was not tried."""
        unmeasured = bool(self.measured[self.start].problem)
        won = len(self.rounds) > 1 and all(best > start for start, best in self.rounds)
        return self.best if self.interrupted or unmeasured or won else self.start

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
        ratios = [best / start for start, best in self.rounds if not math.isnan(start + best)]
        if ratios:
            middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
            lines.append(
                f"{self.best.describe(self.start)}: {middle:.2f} ({least:.2f} to {most:.2f}) times "
                f"the speed of the start, median (least to most) of {len(ratios)} rounds, turn by "
                "turn"
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
        if any(math.isnan(best) for _, best in self.rounds):
            return f"{name} could not be measured again: these are the start's own values"
        if self.chosen == self.start:
            return "nothing beat the start by more than the spread: these are its own values"
        return f"the fastest is {name}"

    def gin(self, runner: str, command: str, facts: trial.Facts) -> str:
        """Returns the file to add after the experiment's own.

        Args:
          runner: the name of the runner's class, with its module.
          command: the command that made it.
          facts: those of the machine.
        """
        module, _, name = runner.rpartition(".")
        package, _, short = module.rpartition(".")
        made = facts.provenance
        changing = [name for name in candidates.LEARNT if self.start.get(name) is not None]
        lines = [
            f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {made['device']}, "
            f"{facts.machine.num_cores} host cores, jax {made['versions'].get('jax')}, commit "
            f"{made['commit']}",
            "For this experiment on this machine; add it after the experiment's own file.",
            *(
                f"{' and '.join(changing)}: with another value the agent learns otherwise from as "
                "many agent steps, and periods that count updates last otherwise."
                for _ in changing[:1]
            ),
            "",
            "what was changed: agent steps/s, warm, median (least to most); memory",
            *(f"  {each.describe(self.start)}: {told(out)}" for each, out in self.measured.items()),
            "",
            *self.verdict(),
        ]
        wrapped = [part for line in lines for part in textwrap.wrap(line, _WIDTH) or [""]]
        return "\n".join(
            [
                *(f"# {line}".rstrip() for line in [f"Made by: {command}", *wrapped]),
                "\nfrom __gin__ import dynamic_registration\n",
                f"from {package} import {short}\n" if package else f"import {short}\n",
                *self.chosen.bindings(f"{short}.{name}"),
                "",
            ]
        )


def told(outcome: trial.Outcome) -> str:
    """Returns rates and memory in words, or what went wrong."""
    if outcome.problem:
        return outcome.problem
    spread = f" ({min(outcome.rates):,.0f} to {max(outcome.rates):,.0f})"
    where = "" if outcome.device_memory is None else " on the device"
    return (
        f"{outcome.rate:,.0f}{spread if len(outcome.rates) > 1 else ''} agent steps/s, "
        f"{parallel.readable_bytes(outcome.memory)}{where}"
    )
