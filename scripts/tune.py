r"""Finds the settings of an experiment's runner that are fastest on this machine.

  python scripts/tune.py --gin_file gin/experiments/cartpole_ppo.gin --out tuned.gin

measures candidates, each in a process of its own, and writes the fastest as a file to add after the
experiment's own:

  python scripts/train.py --gin_file gin/experiments/cartpole_ppo.gin --gin_file tuned.gin

The search climbs from the experiment's own values, along one parameter after the other. At the end
the start and the best are measured again, turn by turn; where the best does not win each time, the
start's values are written. A candidate that does not divide, takes too much memory or too long is
skipped. Ctrl-C keeps the best so far.

num_envs and rollout_length change what is learnt from how many agent steps, not only how fast they
come: see docs/tuning.md. rollout_length is searched only where --parameters names it; name the
parameters without num_envs to leave learning as it is.
"""

import argparse
import dataclasses
import datetime
import functools
import math
import os
import pathlib
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.progress
from tuning import candidates, trial
from tuning import coordinate_search as search
from tuning import outcome as report

from podracers import command_line, errors
from podracers.training import experiment

_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MACHINE_SHARE = 0.8  # of the host's memory, where --memory says nothing


def main() -> int:
    """Parses the command line, searches, and writes what was found."""
    arguments = _parse()
    console = rich.console.Console(highlight=False, soft_wrap=True)
    say = functools.partial(console.print, markup=False)
    runner = experiment.load(arguments.gin_file, arguments.gin_bindings, say).runner
    fields = [field.name for field in dataclasses.fields(runner)]
    wanted = arguments.parameters or [
        n for n in candidates.available(fields) if n != "rollout_length"
    ]
    choices = [candidates.Choice.parse(text, fields, runner.__name__) for text in wanted]
    if not choices:
        raise errors.UserError(f"{runner.__name__} has none of {', '.join(candidates.PARAMETERS)}")
    # SIGTERM keeps the best so far, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tuner = Tuner(arguments, f"{runner.__module__}.{runner.__qualname__}", choices, console)
    if arguments.dry_run:
        tuner.list_candidates()
        return 0
    _refuse_unwritable(arguments.out)
    try:
        with tuner.progress:
            tuner.run()
    except KeyboardInterrupt:
        if tuner.search.best is None:
            raise
        tuner.interrupted = True
    tuner.write(arguments.out)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_experiment(required=True)
    parser.add_argument("--out", default="tuned.gin", metavar="PATH", help="default: tuned.gin")
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long (default: 5)")
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="the most that a candidate may take, such as 8GB: of a device that has memory of its "
        "own, else of the host (default: four fifths of the host's)",
    )
    parser.add_argument(
        "--parameters",
        nargs="+",
        metavar="NAME[=V,V]",
        help=f"what to search, of {', '.join(candidates.PARAMETERS)}, perhaps with the values to "
        "try; default: all that the runner has but rollout_length, which, as num_envs does, "
        "changes what is learnt",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="length of a measurement (default: 1)"
    )
    parser.add_argument("--dry_run", action="store_true", help="list what is tried first")
    arguments = parser.parse_args()
    arguments.gin_file = command_line.gin_files(arguments)
    for name in ("minutes", "seconds"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise errors.UserError(f"--{name}: expected more than 0, got {value:g}")
    return arguments


def _bytes(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GB or 500MB, got '{text}'")
    size = _UNITS[found[2]]
    return float(found[1]) * (1024 ** round(math.log(size, 1000)) if found[3] else size)


def _refuse_unwritable(out: str) -> None:
    """Finds before minutes are spent what the end would trip over."""
    path = pathlib.Path(out)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise errors.UserError(f"--out: cannot write '{out}'")


class Tuner:
    """One search: measures candidates until the time is up, and writes what it found.

    Args:
      arguments: of the command line.
      runner: the name of the runner's class, with its module.
      choices: the parameters to search.
      console: where to say what is measured.

    Attributes:
      search: the candidates that were measured.
      interrupted: the user did not wait for the end.
      progress: a display of the time that is left; a context manager.
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
        self._facts: dict[str, Any] = {}
        self._start = candidates.Candidate(())
        self._last = math.nan  # rate of the start at the end
        self._rounds: list[tuple[float, float]] = []
        self.search = search.Search(self._measure, choices, self._in_time)
        self.interrupted = False
        columns = ("{task.description}", rich.progress.BarColumn(), "{task.fields[left]}")
        self.progress = rich.progress.Progress(
            *columns,
            console=console,
            # Drawn when a child is looked at: no thread that competes with it.
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("", total=self._budget, left="")

    def run(self) -> None:
        """Measures the start, searches, and lets the best and the start take turns.

        Raises:
          errors.UserError: the experiment itself is mistaken, or the time is too short.
          errors.RunFailure: no candidate could be measured.
        """
        outcome = self._run(self._request(None), "the start")
        self._settle(outcome)
        self._note("the start", outcome)
        self.search.add(self._start, outcome)
        if not self._in_time():
            raise errors.UserError(
                f"--minutes {self._arguments.minutes:g} is too short: the start took "
                f"{outcome.seconds:.0f} s, so use at least {self._needed() / 60:.1f}"
            )
        self.search.run(self._start, candidates.Machine.of(self._facts))
        best = self.search.best
        if best is None:
            count = len(self.search.measured)
            raise errors.RunFailure(
                f"none of {count} candidates could be measured; the start: {outcome.problem}"
            )
        if best == self._start:
            self._last = self._again(self._start)
        elif not outcome.problem:
            for pair in search.duel(self._again, self._start, best, self._any_time):
                self._rounds.append(pair)
                self._last = pair[0]

    def list_candidates(self) -> None:
        """Prints where the search starts and what it tries first; compiles and runs nothing."""
        outcome = self._run(self._request(None, turns=0), "the start")
        self._settle(outcome)
        machine = candidates.Machine.of(self._facts)
        values = ", ".join(f"{name} {value}" for name, value in self._start.values)
        self._say(f"start: {values}" + (f" ({outcome.problem})" if outcome.refused else ""))
        for choice in self._choices:
            directions = choice.directions(self._start, machine)
            self._say(f"{choice.name}:" + ("" if any(directions) else " nothing to try here"))
            for each in (each for direction in directions for each in direction):
                self._say(f"  {each.describe(self._start)}")

    def write(self, out: str) -> None:
        """Writes the .gin file, and prints what was found."""
        found = report.Found(
            self._start,
            self.search.best,
            self.search.measured,
            self._rounds,
            self._last,
            self.interrupted,
            self.search.complete,
        )
        command = shlex.join(["python", "scripts/tune.py", *sys.argv[1:]])
        path = pathlib.Path(out)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_text(found.gin(self._runner, command, self._facts))
            os.replace(temporary, path)
        except OSError as error:
            raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error
        self._console.print(found.table())
        for line in found.verdict():
            self._say(line)
        self._say(f"{path}: add it after the experiment, --gin_file {path}")

    def _settle(self, outcome: trial.Outcome) -> None:
        """Learns from the first process what the machine is, and where the search starts."""
        if outcome.facts is None:
            kind = errors.UserError if outcome.refused else errors.RunFailure
            raise kind(outcome.problem)
        self._facts = outcome.facts
        self._start = candidates.start(self._choices, outcome.facts["values"])

    def _measure(self, candidate: candidates.Candidate, floor: float) -> trial.Outcome:
        name = candidate.describe(self._start)
        outcome = self._run(self._request(candidate, floor=floor), name)
        self._note(name, outcome)
        return outcome

    def _again(self, candidate: candidates.Candidate) -> float:
        """Measures a candidate once more, and keeps the most memory that it ever took."""
        name = "the start" if candidate == self._start else "the best"
        outcome = self._run(self._request(candidate), f"{name}, again")
        self._note(f"{name}, again", outcome)
        known = self.search.measured[candidate]
        known.host_memory = max(known.host_memory, outcome.host_memory)
        return outcome.rate

    def _request(self, candidate: candidates.Candidate | None, **options: Any) -> trial.Request:
        bindings = candidate.bindings(self._runner) if candidate else []
        return trial.Request(
            tuple(self._arguments.gin_file),
            (*self._arguments.gin_bindings, *bindings),
            seconds=self._arguments.seconds,
            **options,
        )

    def _run(self, request: trial.Request, name: str) -> trial.Outcome:
        limit = self._budget / 3
        return trial.run(request, limit, self._memory, self._cache.name, self._watch(name))

    def _any_time(self) -> bool:
        return time.monotonic() - self._began < self._budget

    def _in_time(self) -> bool:
        """Returns whether there is time for another candidate."""
        return self._needed() < self._budget

    def _needed(self) -> float:
        """Returns when a search would end, in seconds, that measured one more candidate."""
        measured = self.search.measured
        again = [measured[self._start], measured[self.search.best or self._start]]
        # What was compiled once is read from the cache.
        duel = 2 * sum(outcome.seconds - outcome.compiling for outcome in again)
        return time.monotonic() - self._began + next(reversed(measured.values())).seconds + duel

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _note(self, name: str, outcome: trial.Outcome) -> None:
        rates = (
            outcome.problem or f"{report.rates(outcome)} agent steps/s, {report.memory(outcome)}"
        )
        self._say(f"{name}: {rates}")

    def _watch(self, name: str) -> Callable[[str], None]:
        def watch(stage: str) -> None:
            seconds = time.monotonic() - self._began
            left = datetime.timedelta(seconds=max(round(self._budget - seconds), 0))
            self.progress.update(
                self._task,
                completed=min(seconds, self._budget),
                description=rich.markup.escape(f"{name}: {stage}"),
                left=f"{left} left",
                refresh=True,
            )

        return watch


if __name__ == "__main__":
    command_line.run(main)
