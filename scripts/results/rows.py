"""Results of agents, docs/results.json: read and written.

The file is a list of rows. A row is an agent on an environment under a runner, with the experiment
that trains it, and its recorded runs, one for each seed.
"""

import collections
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracers import errors
from podracers.checkpoints import storage
from podracers.scripts.results import aggregates, markdown

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results.json"
_SAME_STEPS = 0.01  # relative: some rows were recorded in round numbers
_LAST_EVALUATIONS = 3  # their mean is the return of a run in tables
_LAST_UPDATE = 0.05  # relative: a run ends with a whole update


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run, of one seed."""

    seed: int
    final_return: float  # mean return of its final evaluation
    agent_steps: int
    episodes: int  # number in the final evaluation
    random_policy: float  # mean return of uniform legal actions
    date: str  # ISO 8601
    hardware: str
    jax: str  # version
    wall_time_s: float | None = None  # seconds, start-up, compilation and evaluations included
    commit: str | None = None  # ends with `-dirty` if files differed
    greedy_return: float | None = None  # missing if `final_return` is greedy
    metrics: dict[str, float] | None = None  # means of the final evaluation, if there are any
    settings: str | None = None  # `training_process.settings_digest`; None for old runs
    # Agent steps, seconds since the start and mean return of each evaluation.
    curve: tuple[tuple[float, float, float], ...] = ()

    @property
    def mean_return(self) -> float:
        """Mean return of its last three evaluations; of the final one if it has no curve."""
        last = [value for _, _, value in self.curve[-_LAST_EVALUATIONS:]]
        return statistics.fmean(last or [self.final_return])

    @property
    def actions(self) -> str:
        """How its evaluations choose actions."""
        return "greedy" if self.greedy_return is None else "sampled"

    def matches(self, steps: int, settings: str | None) -> bool:
        """Returns whether it was trained for `steps` agent steps with these settings.

        It may end with a whole update; unknown settings match.
        """
        has_steps = steps * (1 - _SAME_STEPS) < self.agent_steps < steps * (1 + _LAST_UPDATE)
        return has_steps and (None in (self.settings, settings) or self.settings == settings)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published result of the same task."""

    value: float  # mean return
    source: str
    steps: str  # number and unit
    error: float | None = None  # the number after the source's plus-minus sign
    protocol: str = ""  # differences from the row


@dataclasses.dataclass(frozen=True)
class Row:
    """An agent on an environment under a runner."""

    experiment: str  # a file of gin/experiments, by name, or any .gin file, by path
    runner: str  # the class; in lower case a file of gin/runners
    agent: str  # the class; after a comma, the variant
    environment: str  # name in tables
    drawn_with: str | None = None  # the environment of which this is another implementation
    gin_bindings: tuple[str, ...] = ()  # the seed is not among them
    variant: str = ""  # name of these bindings, if an experiment has several rows
    highest: float | None = None  # possible return
    atari_game: str | None = None  # name in `tables.ATARI_SCORES`
    suite: str | None = None  # see scripts/reproduce.py --suite
    published: tuple[Published, ...] = ()  # the first one is 1 in aggregates
    explanation: str = ""  # reason for a lower return than published
    note: str = ""
    runs: tuple[Run, ...] = ()  # one for each seed

    @property
    def short(self) -> str:
        """Name of the experiment and the variant."""
        name = pathlib.PurePath(self.experiment).stem
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def name(self) -> str:
        """Name of experiment, variant and runner."""
        return f"{self.short}-{self.runner.lower()}"

    @property
    def gin_file(self) -> str:
        """Path of the experiment's file."""
        is_path = self.experiment.endswith(".gin")
        return self.experiment if is_path else f"gin/experiments/{self.experiment}.gin"

    def command(self, seed: int) -> str:
        """Returns the command that trains one seed."""
        words = ["--gin_file", self.gin_file, "--runner", self.runner.lower()]
        for binding in (f"SEED = {seed}", *self.gin_bindings):
            words += ["--gin_bindings", binding]
        return shlex.join(["python", "scripts/train.py", *words])

    @property
    def returns(self) -> list[float]:
        """Returns by seed, each the mean of the last evaluations."""
        return [run.mean_return for run in self.runs]

    @property
    def sample(self) -> aggregates.Sample:
        """Summary of the returns; there must be a run."""
        return aggregates.Sample.of(self.returns)

    @property
    def random_policy(self) -> float:
        """Mean return of a random policy."""
        return aggregates.Sample.of([run.random_policy for run in self.runs]).mean

    def with_run(self, new: Run) -> "Row":
        """Returns the row with another run; runs of other steps or settings are dropped."""
        kept = [run for run in self.runs if run.matches(new.agent_steps, new.settings)]
        runs = [new, *(run for run in kept if run.seed != new.seed)]
        return dataclasses.replace(self, runs=tuple(sorted(runs, key=lambda run: run.seed)))


def read(path: pathlib.Path = PATH) -> dict[str, Row]:
    """Returns the rows of a file by name, in its order.

    Raises:
      errors.UserError: the file cannot be read, a row is incomplete, or two have the same name.
    """
    rows = markdown.read_json(path, lambda entries: [_row(entry) for entry in entries])
    by_name = {row.name: row for row in rows}
    if len(by_name) < len(rows):
        raise errors.UserError(f"'{path}': two rows have the same name")
    return by_name


def _row(entry: Mapping[str, Any]) -> Row:
    runs = [
        run | {"curve": tuple(map(tuple, run.get("curve", ())))} for run in entry.get("runs", ())
    ]
    fields: dict[str, Any] = {
        "gin_bindings": tuple(entry.get("gin_bindings", ())),
        "published": tuple(Published(**result) for result in entry.get("published", ())),
        "runs": tuple(Run(**run) for run in runs),
    }
    return Row(**{**entry, **fields})


def number(value: float) -> str:
    """Returns a return with the digits that tables show."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def interval(bounds: aggregates.Interval) -> str:
    """Returns an interval as tables show it."""
    return "none" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def levels(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the returns that curves of a task are compared with, by label.

    These are a random policy's, and the published ones; without any, the highest possible one.
    """
    random, published, highest = {}, collections.defaultdict(dict), {}
    for row in rows:
        if row.runs:
            random["random policy"] = row.random_policy
        if row.published:
            published[row.published[0].value][row.agent.partition(",")[0]] = None
        if row.highest is not None:
            highest["highest possible"] = row.highest
    if len(published) == 1:  # one value for all agents, perhaps another agent's
        return random | {"published": next(iter(published))}
    several = {f"published, {' and '.join(agents)}": value for value, agents in published.items()}
    return random | (several or highest)


def reference(agent: str, rows: Sequence[Row]) -> float | None:
    """Returns the return of a task that is 1 in aggregates over tasks; None if there is none.

    It is the first published one: of the agent, or else of another one; or the highest possible.
    """
    same = [row for row in rows if row.agent == agent]
    published = [row.published[0].value for row in (*same, *rows) if row.published]
    highest = [row.highest for row in rows if row.highest is not None]
    return next(iter(published + highest), None)


def find(
    rows: Mapping[str, Row],
    experiment: str | None = None,
    runner: str | None = None,
    suite: str | None = None,
) -> list[Row]:
    """Returns the rows with this experiment (`Row.short`), runner and suite; None means any.

    Raises:
      errors.UserError: there is none; names the nearest.
    """
    matches = list(rows.values())
    kinds = {"suite": suite, "short": experiment, "runner": runner}
    for kind, value in ((kind, value.lower()) for kind, value in kinds.items() if value):
        known = [(getattr(row, kind) or "").lower() for row in matches]
        name = "experiment" if kind == "short" else kind
        errors.require_known(f"no result with {name}", value, known)
        matches = [row for row, name in zip(matches, known) if name == value]
    return matches


def update(name: str, change: Callable[[Row], Row], path: pathlib.Path = PATH) -> None:
    """Replaces a row by `change(row)`, under a lock.

    Raises:
      errors.RunFailure: its folder cannot be locked, or the file cannot be written.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # leaves no file behind
            rows = read(path)
            write(rows | {name: change(rows[name])}, path)
        finally:
            os.close(folder)
    except OSError as error:
        raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error


def write(rows: Mapping[str, Row], path: pathlib.Path = PATH) -> None:
    """Writes all rows atomically, without empty fields, a line for each run."""
    entries = [markdown.without_empty(dataclasses.asdict(row)) for row in rows.values()]
    lines: list[str] = []
    for run in (run for entry in entries for run in entry.get("runs", ())):
        lines.append(json.dumps(run, ensure_ascii=False))
        run.clear()
        run["line"] = len(lines) - 1
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    text = re.sub(r'\{\s+"line": (\d+)\s+\}', lambda match: lines[int(match[1])], text)
    storage.write(path, text + "\n")
