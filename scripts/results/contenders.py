"""The runs that `scripts/compare.py` compares: which there are to be, and their training."""

import argparse
import dataclasses
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence

from results import training_process

from podracers import command_line, errors
from podracers.training import config, experiment, run_directory, signals


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that is to be there."""

    label: str
    seed: int
    arguments: tuple[str, ...]  # of `scripts/train.py`, without the run directory
    directory: run_directory.RunDirectory
    total_steps: int  # agent steps
    config: str  # the whole configuration

    @property
    def command(self) -> str:
        """The command that trains it."""
        run_dir = ("--run_dir", self.directory.path.as_posix())
        return shlex.join(["python", "scripts/train.py", *self.arguments, *run_dir])

    @property
    def headline(self) -> str:
        """What is about to happen to it."""
        state = "training"
        if self.directory.config.exists():
            state = "there already" if self.directory.summary.exists() else "resuming"
        return f"{self.label}, seed {self.seed}: {state} ({self.directory.path})"

    def train(self, stop: signals.StopRequest) -> bool:
        """Trains it, or what is missing of it; returns whether it is finished."""
        path, begun = self.directory.path, self.directory.config.exists()
        if begun and _settings(self.directory.read_config()) != _settings(self.config):
            raise errors.UserError(
                f"the run in '{path}' has another configuration; name another --output_dir, or "
                "remove it"
            )
        name, log = f"{self.label}, seed {self.seed}", path.with_name(f"{path.name}.log")
        return training_process.train(
            name, self.arguments, self.directory, self.total_steps, log, stop
        )


def _settings(text: str) -> list[str]:
    """Returns the lines of a configuration that set something."""
    return [line for line in text.splitlines() if line and not re.match(r"#|from |import ", line)]


def plan(
    arguments: argparse.Namespace, output: pathlib.Path, say: Callable[[str], None]
) -> list[Planned]:
    """Reads the configuration of all runs: what is wrong with the last is said before the first.

    Args:
      arguments: of the command line.
      output: the folder of the comparison.
      say: takes a line for each value that one file takes from another one before it.

    Raises:
      errors.UserError: one does not parse, or settles itself what the script is to settle.
    """
    files, bindings = _of_runners(arguments)
    return [
        _plan(arguments, label, seed, (files[label], bindings[label]), output, say)
        for seed in range(arguments.seeds)  # runners take turns: a machine that drifts, drifts
        for label in files  # for all of them
    ]


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


def _plan(
    arguments: argparse.Namespace,
    label: str,
    seed: int,
    own: tuple[Sequence[str], Sequence[str]],
    output: pathlib.Path,
    say: Callable[[str], None],
) -> Planned:
    steps, gin_files = arguments.total_steps, [*arguments.gin_file, *own[0]]
    settled = [f"SEED = {seed}"] + ([] if steps is None else [f"TOTAL_STEPS = {steps}"])
    bindings = [*settled, *arguments.gin_bindings, *own[1]]
    try:
        settings = experiment.load(gin_files, bindings, say)
    except errors.UserError as error:
        raise errors.UserError(f"{label}: {errors.first_line(error)}") from error
    if settings.seed != seed:
        raise errors.UserError(
            f"{label}: seeds are chosen by --seeds, but the configuration insists on "
            f"{settings.seed}"
        )
    if steps not in (None, settings.total_steps):
        raise errors.UserError(
            f"{label}: --total_steps is {steps}, but the configuration insists on "
            f"{settings.total_steps}"
        )
    flags = tuple(training_process.flags(gin_files, bindings))
    directory = run_directory.RunDirectory(output / "runs" / f"{label}-{seed}")
    return Planned(label, seed, flags, directory, settings.total_steps, config.text())
