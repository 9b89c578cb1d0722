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
import dataclasses
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence

import rich.console
from results import comparison
from results import training_process as children

from podracers import command_line, errors
from podracers.training import config, experiment, run_directory, signals


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of the runners that are compared: what its runs read after the experiment's own files."""

    label: str
    gin_files: tuple[str, ...]
    gin_bindings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that is to be there.

    Attributes:
      label: of the runner.
      seed: of the run.
      arguments: of `scripts/train.py`, without the run directory.
      directory: of the run.
      total_steps: agent steps.
      config: the whole configuration.
    """

    label: str
    seed: int
    arguments: tuple[str, ...]
    directory: run_directory.RunDirectory
    total_steps: int
    config: str

    @property
    def command(self) -> str:
        """The command that trains it."""
        run_dir = ("--run_dir", self.directory.path.as_posix())
        return shlex.join(["python", "scripts/train.py", *self.arguments, *run_dir])


def main() -> int:
    """Parses the command line, trains what is missing, and writes the comparison."""
    arguments = _parse()
    output = pathlib.Path(
        arguments.output_dir or f"comparisons/{pathlib.Path(arguments.gin_file[0]).stem}"
    )
    taken: list[str] = []
    plans = [
        _plan(arguments, contender, seed, output, taken.append)
        for seed in range(arguments.seeds)  # runners take turns: a machine that drifts, drifts
        for contender in _contenders(arguments)  # for all of them
    ]
    console = rich.console.Console(highlight=False, soft_wrap=True)
    for line in dict.fromkeys(taken):
        console.print(line, markup=False)
    _make(output)
    with signals.StopRequest() as stop:
        for number, plan in enumerate(plans, 1):
            console.print(_headline(plan, f"{number}/{len(plans)}"), markup=False)
            if not _train(plan, stop):
                console.print("stopped: the same command goes on where this one was")
                return 0
    results = [
        comparison.read(plan.label, plan.seed, plan.command, plan.directory) for plan in plans
    ]
    _write(results, arguments, output)
    rich.console.Console(highlight=False).print(comparison.table(results))
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


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Returns what is compared, by what `--runners` and the options of single runners say."""
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
    return [Contender(name, tuple(files[name]), tuple(bindings[name])) for name in files]


def _plan(
    arguments: argparse.Namespace,
    contender: Contender,
    seed: int,
    output: pathlib.Path,
    say: Callable[[str], None],
) -> Planned:
    """Reads a run's configuration, so that what is wrong with the last is said before the first.

    Args:
      arguments: of the command line.
      contender: the runner.
      seed: of the run.
      output: the folder of all runs.
      say: takes a line for each value that one file takes from another one before it.

    Raises:
      errors.UserError: it does not parse, or settles itself what this script is to settle.
    """
    gin_files = [*arguments.gin_file, *contender.gin_files]
    bindings = [f"SEED = {seed}"]
    if arguments.total_steps is not None:
        bindings.append(f"TOTAL_STEPS = {arguments.total_steps}")
    bindings += [*arguments.gin_bindings, *contender.gin_bindings]
    try:
        settings = experiment.load(gin_files, bindings, say)
    except errors.UserError as error:
        raise errors.UserError(f"{contender.label}: {errors.first_line(error)}") from error
    if settings.seed != seed:
        raise errors.UserError(
            f"{contender.label}: seeds are chosen by --seeds, but the configuration insists on "
            f"{settings.seed}"
        )
    if arguments.total_steps not in (None, settings.total_steps):
        raise errors.UserError(
            f"{contender.label}: --total_steps is {arguments.total_steps}, but the configuration "
            f"insists on {settings.total_steps}"
        )
    flags = [flag for path in gin_files for flag in ("--gin_file", path)]
    flags += [flag for binding in bindings for flag in ("--gin_bindings", binding)]
    directory = run_directory.RunDirectory(output / "runs" / f"{contender.label}-{seed}")
    return Planned(
        contender.label, seed, tuple(flags), directory, settings.total_steps, config.text()
    )


def _headline(plan: Planned, number: str) -> str:
    state = "training"
    if plan.directory.config.exists():
        state = "there already" if plan.directory.summary.exists() else "resuming"
    return f"[{number}] {plan.label}, seed {plan.seed}: {state} ({plan.directory.path})"


def _train(plan: Planned, stop: signals.StopRequest) -> bool:
    """Trains a run, or what is missing of it; returns whether it is finished."""
    directory = plan.directory
    begun = directory.config.exists()
    if begun and _settings(directory.read_config()) != _settings(plan.config):
        raise errors.UserError(
            f"the run in '{directory.path}' has another configuration; name another --output_dir, "
            "or remove it"
        )
    if begun and directory.summary.exists():
        return True
    arguments = ("--resume",) if begun else plan.arguments
    log = directory.path.with_name(f"{directory.path.name}.log")
    try:
        return children.train(
            [*arguments, "--run_dir", str(directory.path)], directory, plan.total_steps, log, stop
        )
    except (errors.UserError, errors.RunFailure) as error:
        raise type(error)(f"{plan.label}, seed {plan.seed}: {error}") from error


def _settings(text: str) -> list[str]:
    """Returns the lines of a configuration that set something."""
    return [line for line in text.splitlines() if line and not re.match(r"#|from |import ", line)]


def _make(output: pathlib.Path) -> None:
    try:
        (output / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"cannot make '{output}': {error.strerror}") from error


def _write(
    results: Sequence[comparison.Result], arguments: argparse.Namespace, output: pathlib.Path
) -> None:
    summary = results[0].summary
    names = ", ".join(pathlib.Path(path).stem for path in arguments.gin_file)
    seeds = f"{arguments.seeds} seed{'s' if arguments.seeds > 1 else ''}"
    title = f"{names}: {seeds}, {summary['device']}, {summary['host_cores']} host cores"
    comparison.draw(results, title, output / "comparison.png")
    options = {name: value for name, value in vars(arguments).items() if value}
    comparison.write(results, options, output / "comparison.json")


if __name__ == "__main__":
    command_line.run(main)
