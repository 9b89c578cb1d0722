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

import rich.console
from results import comparison, contenders

from podracers import command_line, errors
from podracers.training import signals


def main() -> int:
    """Parses the command line, trains what is missing, and writes the comparison."""
    arguments = _parse()
    output = pathlib.Path(
        arguments.output_dir or f"comparisons/{pathlib.Path(arguments.gin_file[0]).stem}"
    )
    taken: dict[str, None] = {}
    plans = contenders.plan(arguments, output, taken.setdefault)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    for line in taken:
        console.print(line, markup=False)
    try:
        (output / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"cannot make '{output}': {error.strerror}") from error
    with signals.StopRequest() as stop:
        for number, plan in enumerate(plans, 1):
            console.print(f"[{number}/{len(plans)}] {plan.headline}", markup=False)
            if not plan.train(stop):
                console.print("stopped: the same command goes on where this one was")
                return 0
    results = [
        comparison.read(plan.label, plan.seed, plan.command, plan.directory) for plan in plans
    ]
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
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gin_file", action="append", required=True, metavar="PATH")
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    parser.add_argument("--runners", nargs="+", required=True, metavar="[LABEL=]NAME")
    parser.add_argument("--runner_gin", action="append", default=[], metavar="LABEL:PATH")
    parser.add_argument(
        "--runner_bindings", action="append", default=[], metavar="'LABEL:NAME = VALUE'"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ... (default: 3)")
    parser.add_argument("--total_steps", type=int, help="agent steps of each run")
    parser.add_argument("--output_dir", metavar="DIR", help="default: comparisons/<experiment>")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        raise errors.UserError(f"--seeds: expected at least 1, got {arguments.seeds}")
    return arguments


if __name__ == "__main__":
    command_line.run(main)
