"""Repeats a published result: python scripts/reproduce.py EXPERIMENT [--runner RUNNER].

--list says which results there are.

Trains what is behind a row of docs/results.json (`scripts/train.py`, each seed in a process of its
own, one after the other), then sets the new returns beside the old ones. Exit code 1 says that they
differ: a test of equal means (Welch's) has p < 0.05, or neither varies and they are not the same.
Nothing is judged where agent steps were others, as of a run that was stopped early, or where only
one side was evaluated by sampled actions.

With --record, the new numbers take the place of the old ones, and the exit code is 0 whatever they
are; `python scripts/report.py` then makes docs/results.md anew, and the table of README.md. Stopped
by Ctrl-C, or lost with its machine, it goes on with the same --out.
"""

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table
from results import aggregates
from results import rows as results
from results import training_process as children

from podracers import command_line, errors
from podracers.training import experiment, run_directory, signals

_SIGNIFICANT = 0.05
_SAME_STEPS = 0.01  # relative: some rows were recorded in round numbers
_SEEDS = 3  # of a row that nobody has recorded yet


def main() -> int:
    """Parses the command line, trains what is missing, and compares."""
    arguments = _parse()
    path = pathlib.Path(arguments.results)
    rows = results.read(path)
    if arguments.list:
        print(_listing(rows))
        return 0
    if arguments.experiment is None:
        raise errors.UserError("which result? name an experiment; --list says which there are")
    row = results.find(rows, arguments.experiment, arguments.runner)
    recorded = row.measured.sample.runs if row.measured else 0
    count = arguments.seeds or recorded or _SEEDS
    if arguments.record and count < recorded:
        raise errors.UserError(
            f"--record: {count} seed(s) would take the place of {recorded}; name at least as many"
        )
    output = pathlib.Path(
        arguments.out or f"runs/reproduce-{row.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    if not _train_all(row, count, output):
        print(f"stopped: it goes on with --out {output}")
        return 0
    new = _measured([_directory(output, seed) for seed in range(count)], arguments.note)
    _print_comparison(row, new)
    said, differs = _verdict(row.measured, new)
    print(said)
    if not arguments.record:
        return errors.RunFailure.exit_code if differs else 0
    rows = results.read(path)  # again: others may have recorded meanwhile
    row = dataclasses.replace(results.find(rows, row.short, row.runner), measured=new)
    results.write(rows | {row.name: row}, path)
    print(f"recorded in {path}; now: python scripts/report.py")
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="see --list")
    parser.add_argument(
        "--runner", metavar="NAME", help="anakin or sebulba; default: the first that --list names"
    )
    parser.add_argument("--list", action="store_true", help="all results, with expected minutes")
    parser.add_argument("--seeds", type=int, help="how many: 0, 1, ... (default: as recorded)")
    parser.add_argument(
        "--out", metavar="DIR", help="default: runs/reproduce-<experiment>-<runner>-<date>-<time>"
    )
    parser.add_argument("--record", action="store_true", help="keep the new numbers")
    parser.add_argument("--note", default="", help="what readers of the new numbers have to know")
    parser.add_argument("--results", default=str(results.PATH), metavar="PATH")
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 1:
        raise errors.UserError(f"--seeds: expected at least 1, got {arguments.seeds}")
    return arguments


def _listing(rows: Mapping[str, results.Row]) -> str:
    """Returns a line for each row; minutes are of all its seeds, one after the other."""
    width = max(len(row.short) for row in rows.values())
    lines = [f"{'experiment':<{width}}  runner   minutes  seeds        return"]
    for row in rows.values():
        minutes, seeds, mean = "unknown", 0, "not measured"
        if known := row.measured:
            minutes = minutes if known.seconds is None else f"{known.seconds / 60:.1f}"
            seeds, mean = known.sample.runs, results.number(known.sample.mean)
        named = f"{row.short:<{width}}  {row.runner.lower():<7}"
        what = f"{row.agent}, {row.environment}{_stopped_early(row)}"
        lines.append(f"{named}  {minutes:>7}  {seeds:>5}  {mean:>12}  {what}")
    return "\n".join(lines)


def _stopped_early(row: results.Row) -> str:
    """Returns a remark on a row that was recorded before its end, and is compared with nothing."""
    try:
        total = _total_steps(row, 0)
    except errors.UserError as error:  # such as an extra that is not installed
        return f"; does not load: {error}"
    if row.measured is None or row.measured.agent_steps > total * (1 - _SAME_STEPS):
        return ""
    return f"; recorded at {row.measured.agent_steps:,} of {total:,} agent steps: no verdict"


def _total_steps(row: results.Row, seed: int) -> int:
    """Returns the agent steps of a run, and so finds out what is wrong before anything is trained.

    Raises:
      errors.UserError: the configuration does not parse, or insists on another seed.
    """
    files = [row.gin_file, command_line.runner_file(row.runner.lower())]
    settings = experiment.load(files, [f"SEED = {seed}", *row.gin_bindings])
    if settings.seed != seed:
        raise errors.UserError(f"'{row.name}' insists on the seed {settings.seed}")
    return settings.total_steps


def _train_all(row: results.Row, count: int, output: pathlib.Path) -> bool:
    """Trains the seeds that are not there yet; returns whether all are."""
    steps = [_total_steps(row, seed) for seed in range(count)]
    _claim(output, row)
    with signals.StopRequest() as stop:
        for seed in range(count):
            print(f"[{seed + 1}/{count}] {row.command(seed)}", flush=True)
            if not _train(row, seed, steps[seed], output, stop):
                return False
    return True


def _claim(output: pathlib.Path, row: results.Row) -> None:
    """Makes the folder of a reproduction; refuses one that holds anything else.

    Raises:
      errors.UserError: it does, or it cannot be made.
    """
    wanted = {"name": row.name, "command": row.command(0)}
    mark = output / "reproduction.json"
    try:
        if mark.exists():
            if json.loads(mark.read_text()) != wanted:
                raise errors.UserError(f"'{output}' holds something else; name another --out")
            return
        run_directory.RunDirectory(output).create()
        mark.write_text(json.dumps(wanted, indent=1) + "\n")
    except (OSError, json.JSONDecodeError) as error:
        raise errors.UserError(f"cannot use '{output}': {error}") from error


def _directory(output: pathlib.Path, seed: int) -> run_directory.RunDirectory:
    return run_directory.RunDirectory(output / f"seed-{seed}")


def _train(
    row: results.Row, seed: int, total_steps: int, output: pathlib.Path, stop: signals.StopRequest
) -> bool:
    """Trains one seed, or what is missing of it; returns whether it is finished."""
    directory = _directory(output, seed)
    if directory.summary.exists():
        return True
    arguments = ["--resume"] if directory.config.exists() else row.arguments(seed)
    log = output / f"seed-{seed}.log"
    try:
        return children.train(
            [*arguments, "--run_dir", str(directory.path)], directory, total_steps, log, stop
        )
    except (errors.UserError, errors.RunFailure) as error:
        raise type(error)(f"{row.name}, seed {seed}: {error}") from error


def _measured(directories: Sequence[run_directory.RunDirectory], note: str) -> results.Measured:
    """Returns what finished runs, one for each seed, have reached."""
    summaries = [directory.read_summary() for directory in directories]
    last = summaries[-1]
    written = max(directory.summary.stat().st_mtime for directory in directories)
    return results.Measured(
        date=datetime.datetime.fromtimestamp(written, datetime.UTC).date().isoformat(),
        hardware=_hardware(last),
        jax=last["versions"]["jax"],
        agent_steps=last["environment_steps"],
        episodes=last["evaluation"]["episodes"],
        random_policy=aggregates.sample([s["random_policy_return"] for s in summaries]).mean,
        runs=tuple(
            results.SeedRun(
                seed=s["seed"],
                final_return=s["evaluation"]["return"],
                wall_time_s=s["wall_time_s"],
                commit=s["commit"],
                greedy_return=s["evaluation"].get("greedy_return"),
            )
            for s in summaries
        ),
        note=note,
    )


def _hardware(summary: dict[str, Any]) -> str:
    """Returns in words what a run was made on; this machine has made it."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")  # Linux, where `platform` does not know the model
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((name.strip() for key, _, name in lines if key.strip() == "model name"), model)
    host = f"{summary['host_cores']} cores, {model}"
    return (
        f"{host}, no accelerator"
        if summary["platform"] == "cpu"
        else f"{summary['device']}; {host}"
    )


def _print_comparison(row: results.Row, new: results.Measured) -> None:
    """Prints returns by seed, then what they say together, old beside new."""
    sides = {"old": row.measured, "new": new} if row.measured else {"new": new}
    table = rich.table.Table(title=row.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in sides:
        table.add_column(heading, justify="right", no_wrap=True)
    by_seed = [{run.seed: run.final_return for run in each.runs} for each in sides.values()]
    for seed in sorted({seed for known in by_seed for seed in known}):
        cells = [results.number(known[seed]) if seed in known else "-" for known in by_seed]
        table.add_row(f"return of seed {seed}", *cells)
    for label, cell in (
        ("mean", lambda each: results.number(each.sample.mean)),
        ("95%, bootstrap", lambda each: results.interval(each.bootstrap_interval())),
        ("95%, Student's t", lambda each: results.interval(each.sample.student_interval())),
        ("random policy", lambda each: results.number(each.random_policy)),
        ("agent steps, each seed", lambda each: f"{each.agent_steps:,}"),
    ):
        table.add_row(label, *map(cell, sides.values()))
    rich.console.Console(highlight=False).print(table)
    for heading, each in sides.items():
        print(f"{heading}: {each.date}, {each.hardware}, jax {each.jax}")


def _verdict(old: results.Measured | None, new: results.Measured) -> tuple[str, bool]:
    """Returns whether two measurements agree, in words, and whether they clearly do not."""
    if old is None:
        return "nothing to compare with: this was not measured before", False
    if other := _otherwise_measured(old, new):
        return f"no verdict: {other}", False
    before = {run.seed: run.final_return for run in old.runs}
    common = [run for run in new.runs if run.seed in before]
    if common and all(run.final_return == before[run.seed] for run in common):
        return f"identical: {len(common)} seed(s) with the very same returns", False
    p = aggregates.p_of_equal_means(old.sample, new.sample)
    difference = new.sample.mean - old.sample.mean
    if p is None:
        return (
            f"no verdict: the means differ by {difference:+.3g}, and of one seed nobody knows how "
            "much it varies",
            False,
        )
    if math.isnan(p):
        return (
            f"no test: the means differ by {difference:+.3g}, and how much seeds vary was not kept",
            False,
        )
    differs = p < _SIGNIFICANT
    word = "differ" if differs else "agree"
    return f"{word}: the means differ by {difference:+.3g}, p = {p:.2g} (Welch's t-test)", differs


def _otherwise_measured(old: results.Measured, new: results.Measured) -> str:
    """Returns what two measurements do not have in common, in words; empty where all is."""
    if not math.isclose(old.agent_steps, new.agent_steps, rel_tol=_SAME_STEPS):
        return f"other agent steps, {old.agent_steps:,} then and {new.agent_steps:,} now"
    kinds = [
        "sampled" if any(run.greedy_return is not None for run in measured.runs) else "greedy"
        for measured in (old, new)
    ]
    if kinds[0] != kinds[1]:
        return f"other evaluations, of {kinds[0]} actions then and {kinds[1]} ones now"
    return ""


if __name__ == "__main__":
    command_line.run(main)
