"""Suites: rows of docs/results.json that are trained together, and what they show together.

A suite is trained seed by seed, so that every row has one before any has two. What a run reached is
recorded as soon as it ends: a machine that is lost costs one run.
"""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

from results import reproduction, training_process
from results import rows as results

from podracers import errors
from podracers.training import run as run_lib

_NICE = 10  # a suite runs for hours, beside other work
_AND = " and "


def select(
    rows: Mapping[str, results.Row],
    suite: str,
    experiment: str | None = None,
    runner: str | None = None,
) -> list[results.Row]:
    """Returns the rows of a suite.

    Args:
      rows: those of the file of results.
      suite: its name.
      experiment: the only one to return, as `Row.short` names it; None for all of the suite.
      runner: the only one to return; None for both.

    Raises:
      errors.UserError: there is no such suite or row; names the nearest.
    """
    known = {row.suite for row in rows.values() if row.suite}
    if suite not in known:
        raise errors.UserError(f"there is no suite '{suite}'{errors.nearest(suite, known)}")
    chosen = [row for row in rows.values() if row.suite == suite]
    for wanted, name in ((experiment, lambda row: row.short), (runner, lambda row: row.runner)):
        if wanted is not None:
            names = {name(row).lower() for row in chosen}
            if wanted.lower() not in names:
                nearest = errors.nearest(wanted, names)
                raise errors.UserError(f"suite '{suite}' has no row '{wanted}'{nearest}")
            chosen = [row for row in chosen if name(row).lower() == wanted.lower()]
    return chosen


def train(
    rows: Sequence[results.Row],
    seeds: int,
    output: pathlib.Path,
    path: pathlib.Path,
    say: Callable[[str], None],
) -> bool | None:
    """Trains the seeds that rows lack, and records each run in the file of results when it ends.

    A run that another process is at is left to that one.

    Args:
      rows: what `select` returned.
      seeds: how many each row is to have: 0, 1, ...
      output: takes a folder for each row, with run directories; runs that were begun there go on.
      path: the file of results.
      say: takes a line about each run.

    Returns:
      Whether all those rows have their seeds now; None where the work was stopped.

    Raises:
      errors.UserError: a configuration is mistaken.
      errors.RunFailure: a run failed while the work was being stopped; it is not recorded.
    """
    training_process.make_folder(output)
    left, seconds = _missing(rows, seeds, output)
    whole = True
    with run_lib.StopRequest() as stop:
        for number, (row, run) in enumerate(left):
            time = _time([row.name for row, _ in left[number:]], seconds)
            say(f"[{number + 1}/{len(left)}] {row.name}, seed {run.seed}; {time}")
            failure = ()
            if _left_out(run, say):
                whole = False
                continue
            try:
                if not run.train(stop, _NICE):
                    return None
            except (errors.UserError, errors.RunFailure) as error:
                if stop:
                    raise
                whole = False
                if _left_out(run, say):  # another process was a moment ahead
                    continue
                say(f"failed: {errors.first_line(error)}")
                failure = (results.Failure(run.seed, _message(error, run)),)
            else:
                seconds[row.name].append(run.directory.read_summary()["wall_time_s"])
            _record(path, row.name, run, failure)
    return whole


def _left_out(run: training_process.Run, say: Callable[[str], None]) -> bool:
    """Returns whether another process is at a run, and says so."""
    try:
        run.directory.lock.require_free()
    except errors.UserError as error:
        say(f"left out: {errors.first_line(error)}")
        return True
    return False


def _missing(
    rows: Sequence[results.Row], seeds: int, output: pathlib.Path
) -> tuple[list[tuple[results.Row, training_process.Run]], dict[str, list[float]]]:
    """Returns the runs that are not recorded, seed by seed, and seconds of those that are."""
    digest = training_process.settings_digest
    settings = [digest(reproduction.plan(row, 0, output).config) for row in rows]
    runs, seconds = [], collections.defaultdict(list)
    for seed in range(seeds):
        for row, setting in zip(rows, settings):
            # A folder for each configuration: one that has changed does not meet its old runs.
            run = reproduction.plan(row, seed, output / f"{row.name}-{setting}")
            known = [each for each in _kept(row, run.total_steps, setting) if each.seed == seed]
            seconds[row.name] += [each.wall_time_s for each in known if each.wall_time_s]
            if not known:
                runs.append((row, run))
    return runs, seconds


def _time(names: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns an estimate of how long runs of rows take, from other seeds of the same settings."""
    known = [statistics.fmean(seconds[name]) for name in names if seconds[name]]
    unknown = len(names) - len(known)
    said = f"about {sum(known) / 60:.0f} min left" if known else "time left unknown"
    return f"{said}, and {unknown} run(s) of unknown length" if known and unknown else said


def _message(error: Exception, run: training_process.Run) -> str:
    """Returns what is published of a failure: without the run's name and where it is."""
    line = errors.first_line(error).removeprefix(f"{run.name}: ")
    line = line.partition(training_process.MORE)[0]
    return line.replace(str(run.directory.path), run.directory.path.name)


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
    known, count = row.measured, len(others)
    random = new.random_policy
    if known.random_policy is not None:
        random = (count * known.random_policy + random) / (count + 1)
    return dataclasses.replace(
        new,
        hardware=_with(known.hardware, new.hardware),
        jax=_with(known.jax, new.jax),
        random_policy=random,
        runs=tuple(sorted([*others, *new.runs], key=lambda each: each.seed)),
        note=known.note,
    )


def _with(known: str, new: str) -> str:
    """Returns what seeds were trained with, where it may not be one and the same."""
    return known if new in known.split(_AND) else f"{known}{_AND}{new}"


def _kept(row: results.Row, total: int, settings: str | None) -> Sequence[results.SeedRun]:
    """Returns the recorded runs of `total` agent steps with the same settings."""
    known = row.measured
    if known is None or not reproduction.is_whole(known, total):
        return ()
    return [each for each in known.runs if each.is_of(settings)]
