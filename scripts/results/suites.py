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
    suite: str, seeds: int, output: pathlib.Path, path: pathlib.Path, say: Callable[[str], None]
) -> bool | None:
    """Trains what a suite lacks, and records each run in the file of results when it ends.

    Args:
      suite: its name.
      seeds: how many each row is to have: 0, 1, ...
      output: takes a folder for each row, with run directories; runs that were begun there go on.
      path: the file of results.
      say: takes a line about each run.

    Returns:
      Whether all rows have their seeds now; None where the work was stopped.

    Raises:
      errors.UserError: there is no such suite, or a configuration is mistaken.
    """
    left = _missing(select(results.read(path), suite), seeds, output)
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
    runs = []
    for seed in range(seeds):
        for row in rows:
            run = reproduction.plan(row, seed, output / row.name)
            known = row.measured
            as_planned = known is not None and reproduction.same_steps(known, run.total_steps)
            if not as_planned or seed not in {each.seed for each in known.runs}:
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
    rows = results.read(path)
    row = rows[name]
    failures = tuple(each for each in row.failures if each.seed != run.seed) + failure
    if not failure:
        new = reproduction.measured(run.directory.path.parent, [run.seed], "")
        known = row.measured
        if known is not None and reproduction.same_steps(known, new.agent_steps) and known.runs:
            others = [each for each in known.runs if each.seed != run.seed]
            runs = sorted([*others, *new.runs], key=lambda each: each.seed)
            new = dataclasses.replace(new, runs=tuple(runs), note=known.note)
        row = dataclasses.replace(row, measured=new)
    results.write(rows | {name: dataclasses.replace(row, failures=failures)}, path)
