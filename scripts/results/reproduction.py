"""Rows of docs/results.json, trained again: runs, results, agreement, suites.

A suite is trained seed by seed, so that every row has one before any has two. Each run is recorded
when it ends.
"""

import datetime
import pathlib
import statistics
from collections.abc import Sequence

from podracers.commands import command_line
from podracers.scripts.results import aggregates, plotting, training_process
from podracers.scripts.results import rows as results
from podracers.training import loggers

_SIGNIFICANT = 0.05


def plan(row: results.Row, seed: int, folder: pathlib.Path) -> training_process.Run:
    """Returns the run of one seed."""
    files = [row.gin_file, command_line.runner_file(row.runner.lower())]
    return training_process.plan(row.name, seed, files, row.gin_bindings, folder)


def finished(run: training_process.Run) -> results.Run:
    """Returns the results of a finished run."""
    directory = run.directory
    summary, log = directory.read_summary(), loggers.read_rows(directory.metrics)
    evaluation, end = summary["evaluation"], summary["environment_steps"]
    curve = [
        (int(step), round(second, 1), round(value, 4))
        for step, second, value in plotting.curves(log, "evaluation/return")[None].tolist()
        if step < end
    ]
    # Runs from before 2026-11-28 have no name of the processor.
    host = f"{summary['host_cores']} cores, {summary.get('cpu', 'unknown processor')}"
    on_cpu = summary["platform"] == "cpu"
    written = datetime.datetime.fromtimestamp(directory.summary.stat().st_mtime, datetime.UTC)
    return results.Run(
        seed=summary["seed"],
        final_return=evaluation["return"],
        agent_steps=end,
        episodes=evaluation["episodes"],
        random_policy=summary["random_policy_return"],
        date=written.date().isoformat(),
        hardware=f"{host}, no accelerator" if on_cpu else f"{summary['device']}; {host}",
        jax=summary["versions"]["jax"],
        wall_time_s=summary["wall_time_s"],
        commit=summary["commit"],
        greedy_return=evaluation.get("greedy_return"),
        metrics=evaluation.get("metrics"),
        settings=run.settings,
        curve=(*curve, (end, round(summary["wall_time_s"], 1), round(evaluation["return"], 4))),
    )


def listing(rows: Sequence[results.Row]) -> str:
    """Returns a line for each row; minutes are of all its seeds, one after the other."""
    lines = [("experiment", "runner", "minutes", "seeds", "return", "task")]
    for row in rows:
        known = [run.wall_time_s / 60 for run in row.runs if run.wall_time_s is not None]
        minutes = f"{statistics.fmean(known) * len(row.runs):.1f}" if known else "unknown"
        mean = results.number(row.sample.mean) if row.runs else "not measured"
        task = f"{row.agent}, {row.environment}"
        lines.append((row.short, row.runner.lower(), minutes, str(len(row.runs)), mean, task))
    return command_line.table(lines)


def summary(runs: Sequence[results.Run]) -> str:
    """Returns the returns of runs by seed, and where they come from, in a line."""
    sample = aggregates.Sample.of([run.mean_return for run in runs])
    returns = ", ".join(f"seed {run.seed}: {results.number(run.mean_return)}" for run in runs)
    bounds, last = results.interval(sample.interval()), runs[-1]
    return (
        f"{results.number(sample.mean)} (95%: {bounds}; {returns}), {last.agent_steps:,} agent "
        f"steps, {last.date}, {last.hardware}, jax {last.jax}"
    )


def verdict(old: Sequence[results.Run], new: Sequence[results.Run]) -> tuple[str, bool]:
    """Returns whether two sets of runs agree, in words, and whether they significantly differ."""
    comparable = all(
        one.matches(other.agent_steps, other.settings) and one.actions == other.actions
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
    text = f"{'differ' if differs else 'agree'}: {difference}, p = {p:.2g} (Welch's t-test)"
    return text, differs


def missing(
    rows: Sequence[results.Row], seeds: int, output: pathlib.Path
) -> list[training_process.Run]:
    """Returns the runs that are not recorded, seed by seed."""
    planned = [(row, plan(row, seed, output)) for seed in range(seeds) for row in rows]
    return [
        run
        for row, run in planned
        if not any(
            known.seed == run.seed and known.matches(run.total_steps, run.settings)
            for known in row.runs
        )
    ]
