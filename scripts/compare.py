r"""Compares runners on one experiment, over seeds: curves by step and by second, and speed.

  podracers-compare --gin_file gin/experiments/snake_ppo.gin \
      --runners anakin sebulba --seeds 3

trains every runner with every seed (`scripts/train.py`, each in its own process), then writes
comparison.png beside the runs, and prints a table of their summaries. The same command continues
after it was stopped, and trains no run twice.

A runner is a file of gin/runners, by name or by path; it is read after the experiment's files.
`LABEL=NAME` gives it another name, so that a runner can be compared with itself. Files and bindings
of one runner follow its label and a colon, and are read last:

  --runners anakin sebulba --runner_gin sebulba:gin/environments/envpool_snake.gin
  --runners waits=sebulba overlaps=sebulba --runner_bindings 'waits:Sebulba.lag = 0'
"""

import argparse
import collections
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.results import aggregates, curves, plotting, training_process

Runners = Mapping[str, Sequence[training_process.Run]]  # finished runs by label
_METRIC = "episode/return"


def main() -> int:
    """Parses the command line, trains the missing runs, and writes the comparison."""
    options = _parse()
    experiment = pathlib.Path(options.gin_file[0]).stem
    output = pathlib.Path(options.output_dir or f"comparisons/{experiment}")
    runs = _plan(options, output)
    if not training_process.train_all(runs):
        print("stopped: the same command continues")
        return 0
    runners: dict[str, list[training_process.Run]] = {}
    for run in runs:
        runners.setdefault(run.label, []).append(run)
    page = plotting.page([panel(runners)], _METRIC, plotting.COLUMNS)
    plotting.save(page, output / "comparison.png")
    summaries = {
        label: [run.directory.read_summary() for run in group] for label, group in runners.items()
    }
    print(table({label: numbers(group) for label, group in summaries.items()}))
    print(output / "comparison.png")
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add, several = parser.add_argument, command_line.SEVERAL
    add("--gin_file", **several, required=True, metavar="PATH")
    add("--gin_bindings", **several, metavar="'NAME = VALUE'")
    add("--runners", **several, required=True, metavar="[LABEL=]NAME")
    add("--runner_gin", **several, metavar="LABEL:PATH")
    add("--runner_bindings", **several, metavar="'LABEL:NAME = VALUE'")
    add("--seeds", type=command_line.count, default=3, help="number of seeds (default: 3)")
    add("--output_dir", metavar="DIR", help="default: comparisons/<experiment>")
    return parser.parse_args()


def _plan(options: argparse.Namespace, output: pathlib.Path) -> list[training_process.Run]:
    """Reads the configurations of all runs, so that mistakes are found before any training."""
    files: dict[str, list[str]] = {}
    for entry in options.runners:
        label, _, name = entry.rpartition("=")
        path = command_line.runner_file(name)
        label = label or pathlib.Path(path).stem
        if not re.fullmatch(r"[\w.-]+", label):
            raise errors.UserError(f"--runners {entry}: a label is letters, digits, '.', '_', '-'")
        if label in files:
            raise errors.UserError(f"--runners: '{label}' occurs twice; use labels: other={name}")
        files[label] = [*options.gin_file, path]
    bindings = {label: [*options.gin_bindings] for label in files}
    for option, lists in (("runner_gin", files), ("runner_bindings", bindings)):
        for entry in getattr(options, option):
            label, colon, value = (part.strip() for part in entry.partition(":"))
            if not colon:
                raise errors.UserError(f"--{option}: expected a label and a colon, got '{entry}'")
            errors.require_known(f"--{option}: --runners has no", label, files)
            lists[label].append(value)
    return [
        training_process.plan(label, seed, files[label], bindings[label], output / "runs")
        for seed in range(options.seeds)  # runners alternate: the machine's speed drifts
        for label in files
    ]


def numbers(summaries: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the numbers of one runner from the summaries of its runs; None means unknown.

    Means are over seeds, times in seconds, rates in agent steps/s. `steps_per_second` leaves out
    compilation, `wall_time_s` includes it and evaluations.
    """
    evaluations = [summary["evaluation"] for summary in summaries]
    returns = [x for e in evaluations for x in e.get("return_by_seed", {"": e["return"]}).values()]
    sample = aggregates.Sample.of(returns)
    column: dict[str, float | None] = {"final_return": sample.mean, "seeds": sample.runs}
    column["standard_error"] = sample.standard_error if sample.runs > 1 else None
    for name in ("random_policy_return", "steps_per_second", "wall_time_s", "first_dispatch_s"):
        known = [summary[name] for summary in summaries if summary[name] is not None]
        column[name] = float(np.mean(known)) if known else None
    return column


def table(columns: Mapping[str, dict[str, float | None]]) -> str:
    """Returns a column of numbers for each runner, for the terminal."""
    rows = [("runner", *columns)]
    for name in next(iter(columns.values())):
        values = [row[name] for row in columns.values()]
        cells = ("-" if x is None else f"{x:,.2f}".removesuffix(".00") for x in values)
        rows.append((name.replace("_", " "), *cells))
    return command_line.table(rows)


def panel(runners: Runners) -> plotting.Panel:
    """Returns a curve for each runner that finished an episode."""
    seeds, runs = collections.defaultdict(list), []
    for label, run in ((label, run) for label, group in runners.items() for run in group):
        runs += (members := curves.read(str(run.directory.path)))
        name = f"{members[0].values['Experiment.agent']}, {label}"
        seeds[name] += filter(len, (curves.curve(member, _METRIC) for member in members))
    title = " and ".join(dict.fromkeys(run.environment for run in runs))
    drawn = {name: points for name, points in seeds.items() if points}
    return plotting.Panel(title, drawn, curves.levels(runs))


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
