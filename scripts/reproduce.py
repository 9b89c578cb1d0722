"""Repeats a published result: python scripts/reproduce.py EXPERIMENT [--runner RUNNER].

--list says which results there are (with --suite NAME, in that suite); --suite NAME alone works
through all rows of a suite instead.

Trains what is behind a row of docs/results.json (`scripts/train.py`, each seed in a process of its
own, one after the other), then sets the new returns beside the old ones. Exit code 1 says that they
differ: a test of equal means (Welch's) has p < 0.05, or neither varies and they are not the same.
Nothing is judged where agent steps were others, as of a run that was stopped early, or where only
one side was evaluated by sampled actions.

With --record, the new numbers take the place of the old ones, and the exit code is 0 whatever they
are; `python scripts/report.py` then makes docs/results.md anew, and the table of README.md. Stopped
by Ctrl-C, or lost with its machine, it goes on with the same --out.

--suite trains, at low priority, what the rows of a suite lack of so many seeds, and records each
run as it ends; what is recorded is not trained again. A run that fails is recorded, too, and the
others go on; the exit code is 1 then, and where a run was left to another process that is at it.
With EXPERIMENT or --runner, only their rows are trained.
"""

import argparse
import dataclasses
import datetime
import functools
import pathlib
from collections.abc import Collection, Mapping, Sequence

import rich.console
from results import reproduction, suites
from results import rows as results

from podracers import command_line, errors

_SEEDS = 3  # of a row that nobody has recorded yet


def main() -> int:
    """Parses the command line, trains what is missing, and compares."""
    arguments = _parse()
    path = pathlib.Path(arguments.results)
    rows = results.read(path)
    if arguments.list:
        print(_listing(_of_suite(rows, arguments) if arguments.suite else rows.values()))
        return 0
    if arguments.suite:
        return _train_suite(_of_suite(rows, arguments), arguments, path)
    if arguments.experiment is None:
        raise errors.UserError("which result? name an experiment; --list says which there are")
    row = results.find(rows, arguments.experiment, arguments.runner)
    recorded = row.measured.sample.runs if row.measured else 0
    count = arguments.seeds or recorded or _SEEDS
    if arguments.record:
        _require_no_fewer(row, count)
    output = pathlib.Path(
        arguments.out or f"runs/reproduce-{row.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    if not reproduction.train(row, count, output):
        print(f"stopped: it goes on with --out {output}")
        return 0
    new = reproduction.measured(output, range(count), arguments.note)
    sides = {"old": row.measured, "new": new} if row.measured else {"new": new}
    rich.console.Console(highlight=False).print(reproduction.table(row.name, sides))
    for heading, each in sides.items():
        print(f"{heading}: {each.date}, {each.hardware}, jax {each.jax}")
    said, differs = reproduction.verdict(row.measured, new)
    print(said)
    if not arguments.record:
        return errors.RunFailure.exit_code if differs else 0

    def recorded_anew(row: results.Row) -> results.Row:
        _require_no_fewer(row, count)  # others may have recorded some meanwhile
        failures = tuple(each for each in row.failures if each.seed >= count)
        return dataclasses.replace(row, measured=new, failures=failures)

    results.update(row.name, recorded_anew, path)
    print(f"recorded in {path}; now: python scripts/report.py")
    return 0


def _require_no_fewer(row: results.Row, count: int) -> None:
    """Raises `errors.UserError` if a row has more seeds than are to take their place."""
    recorded = row.measured.sample.runs if row.measured else 0
    if count < recorded:
        raise errors.UserError(
            f"--record: {count} seed(s) would take the place of {recorded}; name at least as many"
        )


def _of_suite(rows: Mapping[str, results.Row], arguments: argparse.Namespace) -> list[results.Row]:
    return suites.select(rows, arguments.suite, arguments.experiment, arguments.runner)


def _train_suite(
    rows: Sequence[results.Row], arguments: argparse.Namespace, path: pathlib.Path
) -> int:
    if arguments.note or arguments.record:
        raise errors.UserError("--suite: expected neither --note nor --record (it always records)")
    output = pathlib.Path(arguments.out or f"runs/suite-{arguments.suite}")
    say = functools.partial(print, flush=True)
    done = suites.train(rows, arguments.seeds or _SEEDS, output, path, say)
    if done is None:
        print("stopped: the same command goes on")
        return 0
    print(f"all runs that ended are in {path}; now: python scripts/report.py")
    return 0 if done else errors.RunFailure.exit_code


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="see --list")
    parser.add_argument(
        "--runner",
        metavar="NAME",
        help="anakin or sebulba; default: the first that --list names, and both of a suite",
    )
    parser.add_argument("--suite", metavar="NAME", help="all rows of a suite, or EXPERIMENT's")
    parser.add_argument("--list", action="store_true", help="results, with expected minutes")
    parser.add_argument(
        "--seeds",
        type=command_line.count,
        help="how many: 0, 1, ... (default: as recorded; 3 of a suite)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="default: runs/reproduce-<experiment>-<runner>-<date>-<time>, or runs/suite-<suite>",
    )
    parser.add_argument("--record", action="store_true", help="keep the new numbers")
    parser.add_argument("--note", default="", help="what readers of the new numbers have to know")
    parser.add_argument("--results", default=str(results.PATH), metavar="PATH")
    return parser.parse_args()


def _listing(rows: Collection[results.Row]) -> str:
    """Returns a line for each row; minutes are of all its seeds, one after the other."""
    width = max((len(row.short) for row in rows), default=0)
    lines = [f"{'experiment':<{width}}  runner   minutes  seeds        return"]
    for row in rows:
        minutes, seeds, mean = "unknown", 0, "not measured"
        if known := row.measured:
            minutes = minutes if known.seconds is None else f"{known.seconds / 60:.1f}"
            seeds, mean = known.sample.runs, results.number(known.sample.mean)
        named = f"{row.short:<{width}}  {row.runner.lower():<7}"
        what = f"{row.agent}, {row.environment}{reproduction.stopped_early(row)}"
        lines.append(f"{named}  {minutes:>7}  {seeds:>5}  {mean:>12}  {what}")
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(main)
