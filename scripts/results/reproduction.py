"""Rows of docs/results.json, trained again: runs, results, agreement, suites.

A suite is trained seed by seed, so that every row has one before any has two. Each run is recorded
when it ends.
"""

import dataclasses
import datetime
import functools
import pathlib
import platform
import re
import statistics
from collections.abc import Sequence
from typing import Any

import rich.table
from results import aggregates, plotting, training_process
from results import rows as results

from podracers import command_line, errors
from podracers.training import run as run_lib
from podracers.training import run_directory

_SIGNIFICANT = 0.05
_NICE = 10  # a suite runs for hours, beside other work
report = functools.partial(print, flush=True)


def plan(row: results.Row, seed: int, folder: pathlib.Path) -> training_process.Run:
    """Returns the run of one seed, in a folder of the row."""
    files = [row.gin_file, command_line.runner_file(row.runner.lower())]
    path = folder / f"seed-{seed}"
    return training_process.plan(row.name, seed, files, row.gin_bindings, path)


def finished(run: training_process.Run) -> results.Run:
    """Returns the results of a finished run."""
    directory = run.directory
    summary = directory.read_summary()
    evaluation, log = summary["evaluation"], plotting.read_log(directory.path)
    end, evaluated = summary["environment_steps"], plotting.curves(log, "evaluation/return")
    curve = [
        (int(step), round(second, 1), round(value, 4))
        for step, second, value in evaluated[None].tolist()
        if step < end
    ]
    written = datetime.datetime.fromtimestamp(directory.summary.stat().st_mtime, datetime.UTC)
    return results.Run(
        seed=summary["seed"],
        final_return=evaluation["return"],
        agent_steps=end,
        episodes=evaluation["episodes"],
        random_policy=summary["random_policy_return"],
        date=written.date().isoformat(),
        hardware=_hardware(summary),
        jax=summary["versions"]["jax"],
        wall_time_s=summary["wall_time_s"],
        commit=summary["commit"],
        greedy_return=evaluation.get("greedy_return"),
        settings=training_process.settings_digest(directory.read_config()),
        curve=(*curve, (end, round(summary["wall_time_s"], 1), round(evaluation["return"], 4))),
    )


def processor() -> str:
    """Returns the name of this machine's processor; empty if unknown."""
    information = pathlib.Path("/proc/cpuinfo")  # Linux, where `platform` has no model
    text = information.read_text() if information.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def _hardware(summary: dict[str, Any]) -> str:
    host = f"{summary['host_cores']} cores, {processor() or platform.machine()}"
    if summary["platform"] == "cpu":
        return f"{host}, no accelerator"
    return f"{summary['device']}; {host}"


def listing(rows: Sequence[results.Row]) -> str:
    """Returns a line for each row; minutes are of all its seeds, one after the other."""
    width = max((len(row.short) for row in rows), default=0)
    lines = [f"{'experiment':<{width}}  runner   minutes  seeds        return"]
    for row in rows:
        minutes = "unknown" if row.seconds is None else f"{row.seconds / 60:.1f}"
        mean = results.number(row.sample.mean) if row.runs else "not measured"
        name = f"{row.short:<{width}}  {row.runner.lower():<7}"
        task = f"{row.agent}, {row.environment}"
        lines.append(f"{name}  {minutes:>7}  {len(row.runs):>5}  {mean:>12}  {task}")
    return "\n".join(lines)


def table(row: results.Row, new: Sequence[results.Run]) -> rich.table.Table:
    """Returns recorded and new returns by seed, with their summaries."""
    made = rich.table.Table(title=row.name, title_justify="left", box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    sides = [runs for runs in (row.runs, new) if runs]
    for heading in ("old", "new")[-len(sides) :]:
        made.add_column(heading, justify="right", no_wrap=True)
    returns = [{run.seed: run.final_return for run in runs} for runs in sides]
    for seed in sorted({seed for known in returns for seed in known}):
        cells = [results.number(known[seed]) if seed in known else "-" for known in returns]
        made.add_row(f"return of seed {seed}", *cells)
    samples = [aggregates.Sample.of(list(known.values())) for known in returns]
    made.add_row("mean", *(results.number(sample.mean) for sample in samples))
    intervals = [results.interval(sample.interval()) for sample in samples]
    made.add_row("95%, Student's t", *intervals)
    made.add_row("agent steps, each seed", *(f"{runs[-1].agent_steps:,}" for runs in sides))
    for name in ("date", "hardware", "jax"):
        made.add_row(name, *(getattr(runs[-1], name) for runs in sides))
    return made


def verdict(old: Sequence[results.Run], new: Sequence[results.Run]) -> tuple[str, bool]:
    """Returns whether two sets of runs agree, in words, and whether they significantly differ."""
    comparable = all(
        one.has_steps(other.agent_steps)
        and one.is_of(other.settings)
        and one.actions == other.actions
        for one in old
        for other in new
    )
    if not old or not comparable:
        return "no verdict: no earlier run has the same steps, settings and evaluation", False
    known, returns = ({run.seed: run.final_return for run in runs} for runs in (old, new))
    if (common := known.keys() & returns) and all(known[n] == returns[n] for n in common):
        return f"identical: {len(common)} seed(s) with equal returns", False
    one, other = [*known.values()], [*returns.values()]
    p = aggregates.p_of_equal_means(one, other)
    if p is None:
        return "no verdict: one seed has no spread", False
    differs = p < _SIGNIFICANT
    difference = f"the means differ by {statistics.fmean(other) - statistics.fmean(one):+.3g}"
    return (
        f"{'differ' if differs else 'agree'}: {difference}, p = {p:.2g} (Welch's t-test)",
        differs,
    )


def train_suite(
    rows: Sequence[results.Row], seeds: int, output: pathlib.Path, path: pathlib.Path
) -> bool | None:
    """Trains the missing seeds of rows, and records each run in the file of results.

    A failed run, or one that another process trains, is reported, and the others continue.

    Args:
      rows: of the suite.
      seeds: number of seeds of each row.
      output: folder for the run directories; stopped runs continue there.
      path: the file of results.

    Returns:
      Whether all rows have their seeds; None if the work was stopped.
    """
    missing, complete = _missing(rows, seeds, output), True
    with run_lib.StopRequest() as stop:
        for number, (row, run) in enumerate(missing, 1):
            report(f"[{number}/{len(missing)}] {run.name}")
            try:
                if not run.train(stop, _NICE):
                    return None
            except (errors.UserError, errors.RunFailure) as error:
                if stop:
                    raise
                report(f"failed: {errors.first_line(error)}")
                complete = False
                continue
            results.update(row.name, lambda row, run=run: row.with_run(finished(run)), path)
    return complete


def _missing(
    rows: Sequence[results.Row], seeds: int, output: pathlib.Path
) -> list[tuple[results.Row, training_process.Run]]:
    """Returns the runs that are not recorded, seed by seed."""
    found = []
    for seed in range(seeds):
        for row in rows:
            # A folder for each configuration, so that changed settings start new runs.
            run = plan(row, seed, output)
            digest = training_process.settings_digest(run.config)
            path = output / f"{row.name}-{digest}" / f"seed-{seed}"
            run = dataclasses.replace(run, directory=run_directory.RunDirectory(path))
            if seed not in {each.seed for each in row.kept(run.total_steps, digest)}:
                found.append((row, run))
    return found
