r"""Compares runners on one experiment, over seeds: curves by step and by second, and speed.

  python scripts/compare.py --gin_file gin/experiments/snake_ppo.gin \
      --runners anakin sebulba --seeds 3

trains every runner with every seed (`scripts/train.py`, each in a process of its own, one after the
other; runners take turns), then writes comparison.png and comparison.json beside the runs, and
prints a table. The same command goes on where an earlier one was stopped, and trains nothing twice.

A runner is a file of gin/runners, by name or by path; it is read after the experiment's files. With
`LABEL=NAME` it goes by another name, so that one runner can be compared with itself. What only one
of them should read follows its label and a colon, and is read last:

  --runners anakin sebulba --runner_gin sebulba:gin/environments/envpool_snake.gin
  --runners waits=sebulba overlaps=sebulba --runner_bindings 'waits:Sebulba.lag = 0'
"""

import argparse
import pathlib
import re

import rich.console
from results import comparison, training_process

from podracers import command_line, errors


def main() -> int:
    """Parses the command line, trains what is missing, and writes the comparison."""
    arguments = _parse()
    output = pathlib.Path(
        arguments.output_dir or f"comparisons/{pathlib.Path(arguments.gin_file[0]).stem}"
    )
    runs = _plan(arguments, output)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if not training_process.train_all(runs, lambda line: console.print(line, markup=False)):
        console.print("stopped: the same command goes on where this one was")
        return 0
    results = [comparison.read(run.label, run.seed, run.command, run.directory) for run in runs]
    summary = results[0].summary
    names = ", ".join(pathlib.Path(path).stem for path in arguments.gin_file)
    seeds = f"{arguments.seeds} seed{'s' if arguments.seeds > 1 else ''}"
    title = f"{names}: {seeds}, {summary['device']}, {summary['host_cores']} host cores"
    compared = comparison.Comparison(results)
    compared.draw(title, output / "comparison.png")
    options = {name: value for name, value in vars(arguments).items() if value}
    compared.write(options, output / "comparison.json")
    rich.console.Console(highlight=False).print(compared.table())
    console.print(f"{output / 'comparison.png'}\n{output / 'comparison.json'}", markup=False)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--gin_file", action="append", required=True, metavar="PATH")
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    parser.add_argument("--runners", nargs="+", required=True, metavar="[LABEL=]NAME")
    parser.add_argument("--runner_gin", action="append", default=[], metavar="LABEL:PATH")
    parser.add_argument(
        "--runner_bindings", action="append", default=[], metavar="'LABEL:NAME = VALUE'"
    )
    parser.add_argument(
        "--seeds", type=command_line.count, default=3, help="how many: 0, 1, ... (default: 3)"
    )
    parser.add_argument("--total_steps", type=int, help="agent steps of each run")
    parser.add_argument("--output_dir", metavar="DIR", help="default: comparisons/<experiment>")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace, output: pathlib.Path) -> list[training_process.Run]:
    """Reads the configuration of all runs: what is wrong with the last is said before the first.

    Args:
      arguments: those of the command line.
      output: the folder of the comparison.

    Raises:
      errors.UserError: one does not parse, or settles itself what the script is to settle.
    """
    files, bindings = _of_runners(arguments)
    steps, runs = arguments.total_steps, []
    settled = [] if steps is None else [f"TOTAL_STEPS = {steps}"]
    for seed in range(arguments.seeds):  # runners take turns: a machine that drifts, drifts for all
        for label in files:
            run = training_process.plan(
                label,
                seed,
                [*arguments.gin_file, *files[label]],
                [*settled, *arguments.gin_bindings, *bindings[label]],
                output / "runs" / f"{label}-{seed}",
            )
            if steps not in (None, run.total_steps):
                raise errors.UserError(
                    f"{label}: --total_steps is {steps}, but the configuration insists on "
                    f"{run.total_steps}"
                )
            runs.append(run)
    return runs


def _of_runners(arguments: argparse.Namespace) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns what each runner alone reads, by label: files, and bindings."""
    files: dict[str, list[str]] = {}
    for entry in arguments.runners:
        label, _, name = entry.rpartition("=")
        path = command_line.runner_file(name)
        label = label or pathlib.Path(path).stem
        if not re.fullmatch(r"[\w.-]+", label):
            raise errors.UserError(f"--runners {entry}: a label is letters, digits, '.', '_', '-'")
        if label in files:
            raise errors.UserError(
                f"--runners: '{label}' is there twice; give each a label, such as other={name}"
            )
        files[label] = [path]
    bindings = {label: [] for label in files}
    for option, entries, lists in (
        ("--runner_gin", arguments.runner_gin, files),
        ("--runner_bindings", arguments.runner_bindings, bindings),
    ):
        for entry in entries:
            label, colon, value = entry.partition(":")
            if not colon:
                raise errors.UserError(f"{option} '{entry}': expected a label, a colon and a value")
            if label.strip() not in files:
                hint = errors.nearest(label, files)
                raise errors.UserError(f"{option}: '{label}' is none of --runners{hint}")
            lists[label.strip()].append(value.strip())
    return files, bindings


if __name__ == "__main__":
    command_line.run(main)
