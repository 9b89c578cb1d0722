"""What agents reach, row by row: docs/results.json, read, checked and written.

A row is an agent on an environment under a runner: the command that trains it, and what was
measured the last time that somebody recorded it.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from results import aggregates, training_process

from podracers import errors

PATH = training_process.ROOT / "docs" / "results.json"


@dataclasses.dataclass(frozen=True)
class SeedRun:
    """One training run."""

    seed: int  # of everything in it that is random
    final_return: float  # mean of its final evaluation
    wall_time_s: float | None = None  # with start-up, compilation and evaluations
    commit: str | None = None  # of this repository, with `-dirty` where files differed
    # That of greedy actions, where `final_return` is of sampled ones.
    greedy_return: float | None = None
    # Of each evaluation: agent steps, seconds since the start, mean return.
    curve: tuple[tuple[float, float, float], ...] = ()
    settings: str | None = None  # `training_process.settings_digest` of its configuration

    def is_of(self, settings: str | None) -> bool:
        """Returns whether it was trained with these settings, as far as they were kept."""
        return None in (self.settings, settings) or self.settings == settings


@dataclasses.dataclass(frozen=True)
class Failure:
    """A training run that did not come to its end."""

    seed: int
    message: str  # its error, in a line


@dataclasses.dataclass(frozen=True)
class Published:
    """What others reported of a task."""

    value: float  # mean return
    source: str  # who, and where
    steps: str  # with their unit
    error: float | None = None  # what stands behind their plus-minus sign
    protocol: str = ""  # what differs from the row's


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a row, at one time on one machine."""

    date: str  # ISO 8601, of the last run
    hardware: str  # in words
    jax: str  # its version
    agent_steps: int  # of each seed
    episodes: int  # of each seed's final evaluation
    # The return of a policy that is uniform over the legal actions; None where it was not kept.
    random_policy: float | None = None
    runs: tuple[SeedRun, ...] = ()  # one for each seed; empty where only a summary was kept
    mean: float | None = None  # that summary
    standard_error: float | None = None  # that summary
    num_seeds: int | None = None  # that summary
    # Of a seed, from the least to the most, where it is not known by seed.
    wall_times_s: tuple[float, ...] = ()
    note: str = ""  # what a reader has to know besides

    @property
    def returns(self) -> list[float]:
        """The return of each seed; empty where only a summary was kept."""
        return [run.final_return for run in self.runs]

    @property
    def sample(self) -> aggregates.Sample:
        """What is known of the returns over seeds."""
        if self.runs:
            return aggregates.sample(self.returns)
        error = math.nan if self.standard_error is None else self.standard_error
        return aggregates.Sample(self.mean, error, self.num_seeds)

    def bootstrap_interval(self) -> tuple[float, float] | None:
        """Returns the 95% bootstrap interval of the mean; None with one run, or without returns."""
        return aggregates.estimate([self.returns]).interval if self.runs else None

    @property
    def wall_times(self) -> list[float]:
        """Seconds that single seeds took, as far as they are known."""
        known = [run.wall_time_s for run in self.runs if run.wall_time_s is not None]
        return known or list(self.wall_times_s)

    @property
    def seconds(self) -> float | None:
        """Seconds that all seeds took, one after the other; None where that is not known."""
        times = self.wall_times
        return sum(times) / len(times) * self.sample.runs if times else None


@dataclasses.dataclass(frozen=True)
class Row:
    """An agent on an environment under a runner."""

    experiment: str  # a file of gin/experiments, by name, or any .gin file, by path
    runner: str  # the name of its class, in lower case that of a file of gin/runners
    agent: str  # its class; after a comma, what tells rows of one task apart
    environment: str  # what a table calls it
    drawn_with: str | None = None  # the environment that it is another implementation of
    measured: Measured | None = None  # the numbers; None where there are none yet
    gin_bindings: tuple[str, ...] = ()  # of `scripts/train.py`, without the seed
    variant: str = ""  # what tells rows of one experiment with other bindings apart
    most: float | None = None  # the highest return there is, where it is known
    atari_game: str | None = None  # its name in `atari_scores.py`, where it is one
    suite: str | None = None  # the suite that trains it (scripts/reproduce.py --suite)
    published: tuple[Published, ...] = ()  # to stand beside it; the first one is 1 in aggregates
    explanation: str = ""  # why it reaches less than was published
    failures: tuple[Failure, ...] = ()  # of seeds that have not been trained since

    @property
    def short(self) -> str:
        """The experiment's name, and the variant's."""
        name = pathlib.PurePath(self.experiment).stem
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def name(self) -> str:
        """Experiment and runner, as the names of run directories begin."""
        return f"{self.short}-{self.runner.lower()}"

    @property
    def gin_file(self) -> str:
        """The experiment's file."""
        is_path = self.experiment.endswith(".gin")
        return self.experiment if is_path else f"gin/experiments/{self.experiment}.gin"

    def arguments(self, seed: int) -> list[str]:
        """Returns the arguments of `scripts/train.py`, without the run directory."""
        named = ["--gin_file", self.gin_file, "--runner", self.runner.lower()]
        return named + training_process.flags([], [f"SEED = {seed}", *self.gin_bindings])

    def command(self, seed: int) -> str:
        """Returns the command that trains one seed."""
        return shlex.join(["python", "scripts/train.py", *self.arguments(seed)])


def read(path: pathlib.Path = PATH) -> dict[str, Row]:
    """Returns the rows of a file by their names, in its order.

    Raises:
      errors.UserError: it cannot be read, a row does not say what it has to, or two have one name,
        or one agent, runner and environment (or Atari game): tables could not tell them apart.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise errors.UserError(f"cannot read '{path}': {error}") from error
    if not isinstance(entries, list):
        raise errors.UserError(f"'{path}': expected a list of rows")
    rows, taken = {}, {}
    for number, entry in enumerate(entries):
        try:
            row = _row(entry)
            if row.name in rows:
                raise ValueError(f"'{row.name}' is there twice")
            for task in {row.environment, row.atari_game} - {None}:
                other = taken.setdefault((row.agent, row.runner, task), row.name)
                if other != row.name:
                    raise ValueError(f"'{row.name}' has agent, runner and task of '{other}'")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise errors.UserError(f"'{path}', row {number}: {error}") from error
        rows[row.name] = row
    return rows


def _row(entry: Mapping[str, Any]) -> Row:
    made = {
        "gin_bindings": tuple(entry.get("gin_bindings", ())),
        "measured": _measured(entry["measured"]) if "measured" in entry else None,
        "published": tuple(Published(**each) for each in entry.get("published", ())),
        "failures": tuple(Failure(**each) for each in entry.get("failures", ())),
    }
    return Row(**{**entry, **made})


def _measured(entry: Mapping[str, Any]) -> Measured:
    measured = dict(entry)
    runs = tuple(
        SeedRun(**{**run, "curve": tuple(map(tuple, run.get("curve", ())))})
        for run in measured.pop("runs", ())
    )
    times = tuple(measured.pop("wall_times_s", ()))
    found = Measured(**measured, runs=runs, wall_times_s=times)
    if not runs and None in (found.mean, found.num_seeds):
        raise ValueError("expected 'runs', or 'mean' and 'num_seeds'")
    return found


def number(value: float | None) -> str:
    """Returns a return as tables show it: with as many digits as are worth reading."""
    if value is None:
        return "not kept"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def mean(known: Measured) -> str:
    """Returns the mean over seeds as tables show it, with its standard error."""
    sample = known.sample
    if sample.runs < 2:
        return number(sample.mean)
    error = sample.standard_error
    if math.isnan(error):
        return number(sample.mean)
    return f"{number(sample.mean)} ± {error:.{'2g' if error < 99.5 else '0f'}}"


def interval(bounds: tuple[float, float] | None) -> str:
    """Returns an interval as tables show it."""
    return "none" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def find(rows: Mapping[str, Row], experiment: str, runner: str | None = None) -> Row:
    """Returns the row of an experiment: the first, where no runner is named.

    Raises:
      errors.UserError: there is none; names the nearest.
    """
    found = {row.runner.lower(): row for row in rows.values() if row.short == experiment}
    if not found:
        known = {row.short for row in rows.values()}
        hint = errors.nearest(experiment, known) or "; --list names all"
        raise errors.UserError(f"there is no result of '{experiment}'{hint}")
    wanted = next(iter(found)) if runner is None else runner.lower()
    if wanted not in found:
        hint = errors.nearest(wanted, found)
        raise errors.UserError(f"there is no result of '{experiment}' under '{runner}'{hint}")
    return found[wanted]


def update(name: str, change: Callable[[Row], Row], path: pathlib.Path = PATH) -> None:
    """Replaces a row by what `change` makes of it, while no other process does so.

    Raises:
      errors.UserError: the file has no such row.
      errors.RunFailure: its folder cannot be locked, or the file not be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)  # leaves no file behind
        except OSError as error:
            raise errors.RunFailure(f"cannot lock '{path.parent}': {error.strerror}") from error
        rows = read(path)
        if name not in rows:
            raise errors.UserError(f"'{path}' has no row '{name}'{errors.nearest(name, rows)}")
        write(rows | {name: change(rows[name])}, path)


def write(rows: Mapping[str, Row], path: pathlib.Path = PATH) -> None:
    """Writes all rows, whole or not at all."""
    entries = [_kept(dataclasses.asdict(row)) for row in rows.values()]
    temporary = path.with_name(f".{path.name}.partial")
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    # A point of a curve is a line.
    text = re.sub(r"\[\s+([-+.\w]+(?:,\s+[-+.\w]+)*)\s+\]", _in_a_line, text)
    try:
        temporary.write_text(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error


def _in_a_line(numbers: re.Match) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def _kept(value: Any) -> Any:
    """Returns a tree without what says nothing."""
    if isinstance(value, dict):
        return {key: _kept(each) for key, each in value.items() if each not in (None, (), [], "")}
    return [_kept(each) for each in value] if isinstance(value, list | tuple) else value
