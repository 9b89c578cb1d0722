"""Finished runs of several runners side by side: numbers and a picture.

Seeds are runs, or members of a run's population.
"""

import collections
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.table
from results import aggregates, curves, markdown, plotting, training_process

Runners = Mapping[str, Sequence[training_process.Run]]  # finished runs by label
METRIC = "episode/return"


def numbers(summaries: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the numbers of one runner from the summaries of its runs; None means unknown.

    Means are over seeds, times in seconds, rates in agent steps/s. `steps_per_second` leaves out
    compilation, `wall_time_s` includes it and evaluations.
    """
    found = [each["evaluation"] for each in summaries]
    returns = [x for e in found for x in e.get("return_by_seed", {"": e["return"]}).values()]
    sample = aggregates.Sample.of(returns)
    made = {"final_return": sample.mean, "seeds": sample.runs}
    made["standard_error"] = sample.standard_error if sample.runs > 1 else None
    for name in ("random_policy_return", "steps_per_second", "wall_time_s", "first_dispatch_s"):
        known = [each[name] for each in summaries if each[name] is not None]
        made[name] = float(np.mean(known)) if known else None
    return made


def table(found: Mapping[str, dict[str, float | None]]) -> rich.table.Table:
    """Returns the numbers of each runner, for the terminal."""
    names = list(next(iter(found.values())))
    headings = (name.replace("_", "\n") for name in ("runner", *names))
    made = rich.table.Table(*headings, box=rich.box.SIMPLE_HEAD)
    for label, row in found.items():
        cells = ["-" if value is None else f"{value:,.2f}" for value in row.values()]
        made.add_row(label, *(cell.removesuffix(".00") for cell in cells))
    return made


def panel(runners: Runners) -> plotting.Panel:
    """Returns a curve for each runner that finished an episode."""
    found, runs = collections.defaultdict(list), []
    for label, run in ((label, run) for label, own in runners.items() for run in own):
        runs += (members := curves.read(str(run.directory.path)))
        name = f"{members[0].values['Experiment.agent']}, {label}"
        found[name] += filter(len, (curves.curve(each, METRIC) for each in members))
    title = " and ".join(dict.fromkeys(run.environment for run in runs))
    drawn = {name: own for name, own in found.items() if own}
    return plotting.Panel(title, drawn, curves.levels(runs))


def write(
    runners: Runners, options: Mapping[str, Any], path: pathlib.Path
) -> dict[str, dict[str, float | None]]:
    """Writes all numbers and summaries as JSON, and returns the numbers by runner."""
    found, runs = {}, []
    for label, own in runners.items():
        summaries = [run.directory.read_summary() for run in own]
        found[label] = numbers(summaries)
        for run, summary in zip(own, summaries):
            made = {"runner": label, "seed": run.seed, "run_dir": str(run.directory.path)}
            words = ["scripts/train.py", *run.arguments, "--run_dir", made["run_dir"]]
            runs.append(made | {"command": shlex.join(["python", *words]), "summary": summary})
    provenance = ("commit", "versions", "device", "platform", "host_cores")
    shared = {name: runs[0]["summary"][name] for name in provenance}  # see each run's summary
    values = {"options": dict(options), **shared, "runners": found, "runs": runs}
    markdown.write(path, json.dumps(values, indent=1) + "\n")
    return found
