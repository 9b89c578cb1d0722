"""Repeats a recorded result: podracers-reproduce EXPERIMENT [--runner RUNNER].

--list prints the results of docs/results.json (with --suite NAME, the suite's).

Trains the seeds behind a row (`scripts/train.py`, each seed in its own process), and compares new
returns with old ones. Exit code 1: they differ (Welch's test of equal means has p < 0.05, or
neither varies and they are unequal). There is no verdict if agent steps, settings or the kind of
evaluation differ.

With --record, the new runs replace the old ones, and the exit code is 0. After Ctrl-C, the same
--out continues.

--suite trains the missing seeds of all rows of a suite (of EXPERIMENT or --runner
only, if given), and records each run when it ends. Exit code 1: a run failed, or another process
trains it.

Pages and pictures of recorded results are made again, as by `python scripts/report.py`.
"""

import argparse
import dataclasses
import datetime
import functools
import pathlib

from podracers import errors
from podracers.commands import command_line
from podracers.scripts import report
from podracers.scripts.results import reproduction, training_process
from podracers.scripts.results import rows as results

_SEEDS = 3  # seeds of a row without runs


def main() -> int:
    """Parses the command line, trains the missing runs, and compares or records them."""
    options = _parse()
    rows = results.read(options.results)
    selected = results.find(rows, options.experiment, options.runner, options.suite)
    if options.list:
        print(reproduction.listing(selected))
        return 0
    if options.suite:
        if options.record:
            raise errors.UserError("--suite: expected no --record; runs are recorded")
        output = pathlib.Path(options.out or f"runs/suite-{options.suite}")
        missing = reproduction.missing(selected, options.seeds or _SEEDS, output)

        def record(run: training_process.Run) -> None:
            new = reproduction.finished(run)
            results.update(run.label, lambda row: row.with_run(new), options.results)

        done = training_process.train_all(missing, record)
        _update_pages(options.results)
        if done is None:
            print("stopped: the same command continues")
            return 0
        return 0 if done else errors.RunFailure.exit_code
    if options.experiment is None:
        raise errors.UserError("expected an experiment; --list prints them")
    return _reproduce(selected[0], options)


def _reproduce(row: results.Row, options: argparse.Namespace) -> int:
    count = options.seeds or len(row.runs) or _SEEDS
    if options.record and count < len(row.runs):
        raise errors.UserError(f"--record: {count} seed(s) would replace {len(row.runs)}")
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    output = pathlib.Path(options.out or f"runs/reproduce-{row.name}-{now}")
    runs = [reproduction.plan(row, seed, output) for seed in range(count)]
    if not training_process.train_all(runs):
        print(f"stopped: --out {output} continues")
        return 0
    new = tuple(reproduction.finished(run) for run in runs)
    for name, known in (("old", row.runs), ("new", new)):
        print(f"{name}: {reproduction.summary(known) if known else 'no runs'}")
    verdict, differs = reproduction.verdict(row.runs, new)
    print(verdict)
    if not options.record:
        return errors.RunFailure.exit_code if differs else 0
    changes = {"runs": new, "note": ""}  # the remark was about the old runs
    results.update(row.name, lambda old: dataclasses.replace(old, **changes), options.results)
    _update_pages(options.results)
    return 0


def _update_pages(path: pathlib.Path) -> None:
    for page in report.update() if path == results.PATH else ():
        print(page)


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("experiment", nargs="?", metavar="EXPERIMENT", help="see --list")
    add("--runner", metavar="NAME", help="default: the first in --list; of a suite, both")
    add("--suite", metavar="NAME", help="all rows of a suite, or those of EXPERIMENT")
    add("--list", action="store_true", help="print results and expected minutes")
    seeds = "number of seeds (default: those recorded; 3 of a suite)"
    add("--seeds", type=command_line.count, help=seeds)
    add("--out", metavar="DIR", help="default: runs/reproduce-... or runs/suite-<suite>")
    add("--record", action="store_true", help="keep the new runs")
    add("--results", type=pathlib.Path, default=results.PATH, metavar="PATH")
    options = parser.parse_args()
    writes = options.record or (options.suite and not options.list)
    if writes and options.results == results.PATH and not (report.ROOT / "README.md").exists():
        raise errors.UserError(
            "--record and --suite write docs/results.json of a clone of the repository: run "
            "scripts/reproduce.py there, or name another file by --results"
        )
    return options


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
