r"""Compares runners on one experiment, over seeds: curves by step and by second, and speed.

  python scripts/compare.py --gin_file gin/experiments/snake_ppo.gin \
      --runners anakin sebulba --seeds 3

trains every runner with every seed (`scripts/train.py`, each in its own process, in turns), then
writes comparison.png and comparison.json beside the runs, and prints a table. The same command
continues after it was stopped, and trains no run twice.

A runner is a file of gin/runners, by name or by path; it is read after the experiment's files.
`LABEL=NAME` gives it another name, so that a runner can be compared with itself. Files and bindings
of one runner follow its label and a colon, and are read last:

  --runners anakin sebulba --runner_gin sebulba:gin/environments/envpool_snake.gin
  --runners waits=sebulba overlaps=sebulba --runner_bindings 'waits:Sebulba.lag = 0'
"""

import argparse
import pathlib
import re

import rich.console
from results import comparison, plotting, training_process

from podracers import command_line, errors


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
    given = {name: value for name, value in vars(options).items() if value}
    numbers = comparison.write(runners, given, output / "comparison.json")
    page = plotting.page([comparison.panel(runners)], comparison.METRIC, plotting.COLUMNS)
    plotting.save(page, output / "comparison.png")
    rich.console.Console(highlight=False).print(comparison.table(numbers))
    print(f"{output / 'comparison.png'}\n{output / 'comparison.json'}")
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add, several = parser.add_argument, {"action": "append", "default": []}
    add("--gin_file", action="append", required=True, metavar="PATH")
    add("--gin_bindings", **several, metavar="'NAME = VALUE'")
    add("--runners", nargs="+", required=True, metavar="[LABEL=]NAME")
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
            if label not in files:
                hint = errors.nearest(label, files)
                raise errors.UserError(f"--{option}: '{label}' is none of --runners{hint}")
            lists[label].append(value)
    return [
        training_process.plan(label, seed, files[label], bindings[label], output / "runs")
        for seed in range(options.seeds)  # runners take turns: the machine's speed drifts
        for label in files
    ]


if __name__ == "__main__":
    command_line.run(main)
