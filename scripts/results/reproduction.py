"""A published result, trained once more: its runs, what they reached, and how that compares."""

import datetime
import functools
import math
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
from results import aggregates, plotting, training_process
from results import rows as results

from podracers import command_line, errors
from podracers.training import run_directory

_SIGNIFICANT = 0.05
_SAME_STEPS = 0.01  # relative: some rows were recorded in round numbers
_LAST_UPDATE = 0.05  # relative: a run ends with a whole update
_RETURN = "evaluation/return"


def stopped_early(row: results.Row) -> str:
    """Returns a remark on a row that was recorded before its end, and is compared with nothing."""
    try:
        total = plan(row, 0, pathlib.Path()).total_steps
    except errors.UserError as error:  # such as an extra that is not installed
        return f"; does not load: {error}"
    if row.measured is None or _is_long_enough(row.measured, total):
        return ""
    return f"; recorded at {row.measured.agent_steps:,} of {total:,} agent steps: no verdict"


def plan(row: results.Row, seed: int, output: pathlib.Path) -> training_process.Run:
    """Returns the run of one seed, in a folder of the row."""
    files = [row.gin_file, command_line.runner_file(row.runner.lower())]
    path = output / f"seed-{seed}"
    return training_process.plan(row.name, seed, files, row.gin_bindings, path)


def same_steps(known: results.Measured, steps: int) -> bool:
    """Returns whether the seeds of a row were trained for so many agent steps."""
    return math.isclose(known.agent_steps, steps, rel_tol=_SAME_STEPS)


def is_whole(known: results.Measured, total: int) -> bool:
    """Returns whether the seeds of a row were trained for `total` agent steps and no longer."""
    return _is_long_enough(known, total) and known.agent_steps < total * (1 + _LAST_UPDATE)


def _is_long_enough(known: results.Measured, total: int) -> bool:
    return known.agent_steps > total * (1 - _SAME_STEPS)


def train(row: results.Row, count: int, output: pathlib.Path) -> bool:
    """Trains the first so many seeds, or what is missing of them; returns whether all are there.

    Raises:
      errors.UserError: the configuration is mistaken, or the folder holds something else.
      errors.RunFailure: a run failed.
    """
    runs = [plan(row, seed, output) for seed in range(count)]
    return training_process.train_all(runs, functools.partial(print, flush=True))


def measured(output: pathlib.Path, seeds: Sequence[int], note: str) -> results.Measured:
    """Returns what finished runs have reached."""
    directories = [run_directory.RunDirectory(output / f"seed-{seed}") for seed in seeds]
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
                curve=_curve(directory, s),
                settings=training_process.settings_digest(directory.read_config()),
            )
            for directory, s in zip(directories, summaries)
        ),
        note=note,
    )


def _curve(
    directory: run_directory.RunDirectory, summary: Mapping[str, Any]
) -> tuple[tuple[float, float, float], ...]:
    """Returns agent steps, seconds and return of each evaluation, the final one included."""
    log = plotting.read_log(directory.path)
    seconds, values = plotting.series(log, _RETURN, "wall_time")
    steps, _ = plotting.series(log, _RETURN)
    points = [
        (int(step), round(second, 1), round(value, 4))
        for step, second, value in zip(steps, seconds, *values)
    ]
    end = summary["environment_steps"]
    final = (end, round(summary["wall_time_s"], 1), round(summary["evaluation"]["return"], 4))
    return (*(point for point in points if point[0] < end), final)


def processor() -> str:
    """Returns what this machine's processor is called; empty where nobody says so."""
    information = pathlib.Path("/proc/cpuinfo")  # Linux, where `platform` does not know the model
    text = information.read_text() if information.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def _hardware(summary: Mapping[str, Any]) -> str:
    """Returns in words what a run was made on; this machine has made it."""
    host = f"{summary['host_cores']} cores, {processor() or platform.machine()}"
    if summary["platform"] == "cpu":
        return f"{host}, no accelerator"
    return f"{summary['device']}; {host}"


def table(name: str, sides: Mapping[str, results.Measured]) -> rich.table.Table:
    """Returns returns by seed, then what they say together, one measurement beside the other."""
    made = rich.table.Table(title=name, title_justify="left", box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    for heading in sides:
        made.add_column(heading, justify="right", no_wrap=True)
    by_seed = [{run.seed: run.final_return for run in each.runs} for each in sides.values()]
    for seed in sorted({seed for known in by_seed for seed in known}):
        cells = [results.number(known[seed]) if seed in known else "-" for known in by_seed]
        made.add_row(f"return of seed {seed}", *cells)
    for label, cell in (
        ("mean", lambda each: results.number(each.sample.mean)),
        ("95%, bootstrap", lambda each: results.interval(each.bootstrap_interval())),
        ("95%, Student's t", lambda each: results.interval(each.sample.student_interval())),
        ("random policy", lambda each: results.number(each.random_policy)),
        ("agent steps, each seed", lambda each: f"{each.agent_steps:,}"),
    ):
        made.add_row(label, *map(cell, sides.values()))
    return made


def verdict(old: results.Measured | None, new: results.Measured) -> tuple[str, bool]:
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
    difference = f"the means differ by {new.sample.mean - old.sample.mean:+.3g}"
    if p is None:
        return f"no verdict: {difference}, and of one seed nobody knows how much it varies", False
    if math.isnan(p):
        return f"no test: {difference}, and how much seeds vary was not kept", False
    differs = p < _SIGNIFICANT
    word = "differ" if differs else "agree"
    return f"{word}: {difference}, p = {p:.2g} (Welch's t-test)", differs


def _otherwise_measured(old: results.Measured, new: results.Measured) -> str:
    """Returns what two measurements do not have in common, in words; empty where all is."""
    if not same_steps(old, new.agent_steps):
        return f"other agent steps, {old.agent_steps:,} then and {new.agent_steps:,} now"
    if not all(one.is_of(other.settings) for one in old.runs for other in new.runs):
        return "the configuration was another one then"
    kinds = [kind(measured.runs) for measured in (old, new)]
    if kinds[0] != kinds[1]:
        return f"other evaluations, of {kinds[0]} actions then and {kinds[1]} ones now"
    return ""


def kind(runs: Sequence[results.SeedRun]) -> str:
    """Returns which actions the evaluations of runs took: sampled ones, or greedy."""
    return "sampled" if any(run.greedy_return is not None for run in runs) else "greedy"
