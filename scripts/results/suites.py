"""Suites: rows of docs/results.json that are trained together, and what they show together.

A suite is trained seed by seed, so that every row has one before any has two. What a run reached is
recorded as soon as it ends: a machine that is lost costs one run.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from results import reproduction, training_process
from results import rows as results

from podracers import errors
from podracers.training import signals

_NICE = 10  # a suite runs for hours, beside other work


def select(rows: Mapping[str, results.Row], suite: str) -> list[results.Row]:
    """Returns the rows of a suite.

    Raises:
      errors.UserError: there is no such suite; names the nearest.
    """
    known = {row.suite for row in rows.values() if row.suite}
    if suite not in known:
        raise errors.UserError(f"there is no suite '{suite}'{errors.nearest(suite, known)}")
    return [row for row in rows.values() if row.suite == suite]


def train(
    suite: str,
    seeds: int,
    output: pathlib.Path,
    path: pathlib.Path,
    say: Callable[[str], None],
    experiment: str | None = None,
) -> bool | None:
    """Trains what a suite lacks, and records each run in the file of results when it ends.

    Args:
      suite: its name.
      seeds: how many each row is to have: 0, 1, ...
      output: takes a folder for each row, with run directories; runs that were begun there go on.
      path: the file of results.
      say: takes a line about each run.
      experiment: the only row to be trained, as `Row.short` names it; None for all of the suite.

    Returns:
      Whether all those rows have their seeds now; None where the work was stopped.

    Raises:
      errors.UserError: there is no such suite or row, or a configuration is mistaken.
    """
    rows = select(results.read(path), suite)
    if experiment is not None:
        names = {row.short for row in rows}
        if experiment not in names:
            nearest = errors.nearest(experiment, names)
            raise errors.UserError(f"suite '{suite}' has no row '{experiment}'{nearest}")
        rows = [row for row in rows if row.short == experiment]
    left = _missing(rows, seeds, output)
    failed = 0
    with signals.StopRequest() as stop:
        for number, (row, run) in enumerate(left):
            say(f"[{number + 1}/{len(left)}] {row.name}, seed {run.seed}; {_time(left[number:])}")
            run.directory.path.parent.mkdir(parents=True, exist_ok=True)
            failure = ()
            try:
                if not run.train(stop, _NICE):
                    return None
            except (errors.UserError, errors.RunFailure) as error:
                failed += 1
                failure = (results.Failure(run.seed, errors.first_line(error)),)
                say(f"failed: {failure[0].message}")
            _record(path, row.name, run, failure)
    return not failed


def _missing(
    rows: Sequence[results.Row], seeds: int, output: pathlib.Path
) -> list[tuple[results.Row, training_process.Run]]:
    """Returns the runs that are not recorded, seed by seed."""
    digest = training_process.settings_digest
    settings = [digest(reproduction.plan(row, 0, output).config) for row in rows]
    runs = []
    for seed in range(seeds):
        for row, setting in zip(rows, settings):
            # A folder for each configuration: one that has changed does not meet its old runs.
            run = reproduction.plan(row, seed, output / f"{row.name}-{setting}")
            if seed not in {each.seed for each in _kept(row, run.total_steps, setting)}:
                runs.append((row, run))
    return runs


def _time(left: Sequence[tuple[results.Row, training_process.Run]]) -> str:
    """Returns an estimate of how long runs take, from those of their rows that are known."""
    known = [row.measured.wall_times for row, _ in left if row.measured]
    times = [sum(each) / len(each) for each in known if each]
    unknown = len(left) - len(times)
    said = f"about {sum(times) / 60:.0f} min left" if times else "time left unknown"
    return f"{said}, and {unknown} run(s) of unknown length" if times and unknown else said


def _record(
    path: pathlib.Path,
    name: str,
    run: training_process.Run,
    failure: tuple[results.Failure, ...],
) -> None:
    """Adds a run to its row, as the file has it by now."""

    def added(row: results.Row) -> results.Row:
        failures = tuple(each for each in row.failures if each.seed != run.seed) + failure
        row = dataclasses.replace(row, failures=failures)
        return row if failure else dataclasses.replace(row, measured=_joined(row, run))

    results.update(name, added, path)


def _joined(row: results.Row, run: training_process.Run) -> results.Measured:
    """Returns what a row and a new run of it say together."""
    new = reproduction.measured(run.directory.path.parent, [run.seed], "")
    kept = _kept(row, new.agent_steps, new.runs[0].settings)
    others = [each for each in kept if each.seed != run.seed]
    if not others:
        return new
    known, count = row.measured, len(row.measured.runs)
    random = new.random_policy
    if known.random_policy is not None:
        random = (count * known.random_policy + random) / (count + 1)
    runs = sorted([*others, *new.runs], key=lambda each: each.seed)
    return dataclasses.replace(new, runs=tuple(runs), random_policy=random, note=known.note)


def _kept(row: results.Row, total: int, settings: str | None) -> Sequence[results.SeedRun]:
    """Returns the recorded runs of `total` agent steps with the same settings."""
    known = row.measured
    if known is None or not reproduction.is_whole(known, total):
        return ()
    return [each for each in known.runs if each.is_of(settings)]
