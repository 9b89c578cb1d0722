"""Loggers of a run's metrics: JSON lines, TensorBoard, the terminal, Weights & Biases.

Steps are agent steps over all environments. On resumption every log drops the values after the
checkpoint, so that an interrupted run leaves the same log as an uninterrupted one.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import rich.console
import rich.progress
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer import record_writer

from podracers import errors
from podracers.checkpoints import storage
from podracers.training import run_directory

_LOGGER = logging.getLogger(__name__)

# Metrics that the terminal shows, with their formats.
_SHOWN = {
    "steps_per_second": "{:,.0f} steps/s",
    "episode/return": "return {:.4g}",
    "episode/success": "success {:.4g}",
    "evaluation/return": "eval {:.4g}",
    "loss/total": "loss {:.4g}",
}
_WANDB_MODES = ("online", "offline", "disabled")
_HPARAMS = "events.out.tfevents.0.hparams"  # read before the files of all starts
_LINE_PERIOD = 10.0  # seconds between two lines of a log file

Options = Mapping[str, bool | float | str]  # hyperparameters by name


class Logger:
    """Receives the metrics of each log period, the configuration and the summary of a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs named numbers, measured up to `step`, which never decreases.

        Names are such as `loss/total`; NaN stands for "nothing was measured".
        """
        raise NotImplementedError

    def write_configuration(self, step: int, texts: Mapping[str, str], values: Options) -> None:
        """Logs the files of the configuration and the hyperparameters, at each start of a run.

        There are no `texts` if an earlier start has logged the same ones.
        """

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Logs the summary of a run that has ended."""

    def close(self) -> None:
        """Flushes and frees; nothing may be written afterwards."""


class JsonlLogger(Logger):
    """One JSON object a line: `{"step": 1024, "loss/total": 0.5}`; null stands for NaN.

    On resumption, rows up to `resume_step` are kept; None starts a new file.
    """

    def __init__(self, path: str | pathlib.Path, resume_step: int | None = None):
        self._path = pathlib.Path(path)
        kept = []
        if resume_step is not None and self._path.exists():
            kept = [row for row in read_rows(self._path) if (row["step"] or 0) <= resume_step]
        storage.write(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        with storage.failures(f"write {self._path}"):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinities.
        finite = {name: float(x) if math.isfinite(x) else None for name, x in values.items()}
        with storage.failures(f"write {self._path}"):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()

    def close(self) -> None:
        with storage.failures(f"write {self._path}"):
            self._file.close()


def read_rows(path: str | pathlib.Path) -> list[dict[str, float | None]]:
    """Returns the lines that `JsonlLogger` wrote.

    Half a line at the end, which a running or killed run leaves, is left out with a warning.

    Raises:
      errors.RunFailure: the file cannot be read, or a line before the last one is damaged.
    """
    path = pathlib.Path(path)
    with storage.failures(f"read {path}"):
        lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                expected = f"expected an object with a 'step', got {line[:40]!r}"
                raise errors.RunFailure(f"{path}, line {number}: {expected}") from error
            _LOGGER.warning("%s: left out the damaged last line (line %d)", path, number)
    return rows


class TensorBoardLogger(Logger):
    """TensorBoard scalars, written without TensorFlow; each start of a run adds event files.

    The members of a population are runs of TensorBoard in subfolders, such as
    `seed_3,learning_rate=0.001`, so that a chart has a curve for each of them. `members` has their
    options by seed. On resumption, TensorBoard hides the steps after `resume_step`.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        resume_step: int | None = None,
        members: Mapping[int, Mapping[str, float]] | None = None,
    ):
        folder, self._members = pathlib.Path(directory), members or {}
        self._folders = {"": folder}  # keys are the ends of metrics' names
        for seed, options in self._members.items():
            words = [f"{name.rpartition('.')[2]}={x:g}" for name, x in options.items()]
            self._folders[f"/seed_{seed}"] = folder / ",".join([f"seed_{seed}", *words])
        # TensorBoard reads event files in the order of their names.
        self._name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        for folder in self._folders.values():
            with storage.failures(f"write {folder}"):
                folder.mkdir(exist_ok=True)
            self._add(folder, event_pb2.Event(file_version="brain.Event:2"))
            if resume_step is not None:
                session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(folder, event_pb2.Event(step=resume_step + 1, session_log=session))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summaries = {end: summary_pb2.Summary() for end in self._folders}
        for name, value in values.items():
            metric, mark, seed = name.rpartition("/seed_")
            if mark + seed not in summaries:
                metric, mark, seed = name, "", ""
            if not math.isnan(value):
                summaries[mark + seed].value.add(tag=metric, simple_value=float(value))
        for end, summary in summaries.items():
            self._add(self._folders[end], event_pb2.Event(step=step, summary=summary))

    def write_configuration(self, step: int, texts: Mapping[str, str], values: Options) -> None:
        """Adds pages to the text dashboard, and a row for each seed to the HParams dashboard."""
        for name, text in texts.items():
            code = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown
            page = event_pb2.Event(step=step, summary=text_summary.text_pb(name, code))
            self._add(self._folders[""], page)
        shared = {name: x for name, x in values.items() if not name.endswith(".population_values")}
        rows = {
            f"/seed_{seed}": {**shared, "Experiment.seed": seed, **options}
            for seed, options in self._members.items()
        }
        for end, row in (rows or {"": shared}).items():
            # Runs of one trial would share a row. The dashboard cuts the end of a long name.
            folder = self._folders[end].resolve()
            trial = f"{folder.name} in {folder.parent.as_posix()}"
            trial = trial.encode(errors="surrogateescape").decode(errors="replace")  # any file name
            # TensorBoard keeps a row's first values: a later start replaces them.
            with storage.failures(f"write {folder}"):
                (folder / _HPARAMS).unlink(missing_ok=True)
            summary = hparams_summary.hparams_pb(row, trial_id=trial)
            self._add(folder, event_pb2.Event(summary=summary), _HPARAMS)

    def _add(self, folder: pathlib.Path, event: event_pb2.Event, name: str | None = None) -> None:
        event.wall_time = time.time()
        # TensorBoard's own event writer writes from a thread, which hides a full disk.
        path = folder / (name or self._name)
        with storage.failures(f"write {folder}"), path.open("ab") as file:
            record_writer.RecordWriter(file).write(event.SerializeToString())


class TerminalLogger(Logger):
    """Shows progress, time left, speed, return and loss.

    A terminal gets a line that is redrawn in place; a file or a pipe gets a line each ten seconds.
    The stream is stderr by default.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None):
        self._values: dict[str, float] = {}
        self._printed = time.monotonic()  # time of the latest line, in seconds
        self._is_printed = True  # the newest values are on the screen
        self._display = rich.progress.Progress(
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=None),
            console=rich.console.Console(file=file or sys.stderr, highlight=False),
            auto_refresh=False,  # no thread that competes with the run's own
            # Other output appears above the display, unless it goes to a file.
            redirect_stdout=sys.stdout.isatty(),
            speed_estimate_period=3600.0,  # longer than a log period; it excludes compilation
            expand=True,
        )
        self._display.add_task("compiling", total=max(total_steps, 1))
        self._is_live = self._display.console.is_interactive
        if self._is_live:
            self._display.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the newest values; a missing value or NaN leaves the previous one."""
        self._values |= {name: value for name, value in values.items() if not math.isnan(value)}
        shown = [text.format(self._values[n]) for n, text in _SHOWN.items() if n in self._values]
        (task,) = self._display.tasks
        self._display.update(
            task.id, completed=step, description="  ".join(shown), refresh=self._is_live
        )
        self._is_printed = self._is_live
        if not self._is_live and time.monotonic() - self._printed >= _LINE_PERIOD:
            self._print()

    def close(self) -> None:
        """Leaves the latest values on the screen."""
        if self._is_live:
            self._display.stop()  # a second call has no effect
        elif not self._is_printed:
            self._print()

    def _print(self) -> None:
        self._printed, self._is_printed = time.monotonic(), True
        (task,) = self._display.tasks
        left = rich.progress.TimeRemainingColumn().render(task).plain
        line = f"{task.percentage:3.0f}%  {left} left  {task.completed:,} steps  {task.description}"
        with contextlib.suppress(OSError):  # such as a full disk under a log: the run has its own
            print(line, file=self._display.console.file, flush=True)


def require_wandb() -> Any:
    """Returns the package `wandb`; raises `errors.UserError` if it is not installed."""
    try:
        import wandb.errors  # noqa: PLC0415 (optional; a folder `wandb` has no `wandb.errors`)
    except ImportError as error:
        message = "WeightsAndBiases needs the package wandb: pip install wandb"
        raise errors.UserError(message) from error
    return wandb


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
    """Weights & Biases (https://docs.wandb.ai): `Experiment.tracker = @WeightsAndBiases()`.

    These are options of `wandb.init`; None follows wandb's environment and settings.
    The package `wandb` is optional.
    """

    project: str | None = None  # `WANDB_PROJECT`
    entity: str | None = None  # user or team that owns the project, `WANDB_ENTITY`
    group: str | None = None  # `WANDB_RUN_GROUP`
    name: str | None = None  # name of the run, `WANDB_NAME`; by default the run directory's
    # "online", "offline" (written to the run directory, for `wandb sync`) or "disabled".
    mode: str | None = None  # `WANDB_MODE`

    def __post_init__(self):
        errors.require_known("WeightsAndBiases.mode: got", self.mode, (None, *_WANDB_MODES))

    def open(self, directory: run_directory.RunDirectory, resume: bool) -> "WandbLogger":
        """Starts a W&B run, or continues the one whose id is stored in the run directory.

        Raises:
          errors.UserError: wandb is not installed, or refuses the key or an option.
          errors.RunFailure: W&B cannot be reached.
        """
        wandb, id_file = require_wandb(), directory.path / "wandb_id"
        options = dataclasses.asdict(self)
        options["name"] = self.name or os.environ.get("WANDB_NAME") or directory.path.resolve().name
        if resume and id_file.is_file():
            options["id"] = id_file.read_text("utf-8").strip()
        try:
            run = wandb.init(
                **options,
                dir=str(directory.path),
                resume="allow",
                reinit="create_new",  # leaves other runs of this process alone
                settings=wandb.Settings(console="off", finish_timeout=60.0),
            )
        except Exception as error:
            mistakes = wandb.errors.UsageError | wandb.errors.AuthenticationError
            kind = errors.UserError if isinstance(error, mistakes) else errors.RunFailure
            message = errors.first_line(error).rstrip(".")
            raise kind(
                f"Weights & Biases: {message} (or set WeightsAndBiases.mode = 'offline')"
            ) from error
        storage.write(id_file, run.id)
        return WandbLogger(run)


class WandbLogger(Logger):
    """Logs to a run of W&B, which discards steps that a resumed run repeats.

    Metrics are sent by `run.log`: `sync_tensorboard` follows only event writers that wandb patches,
    and a run writes its event files without them. At its first failure it logs a warning and does
    nothing from then on.
    """

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        present = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        self._try(lambda run: run.log(present, step=step, commit=True))

    def write_configuration(self, step: int, texts: Mapping[str, str], values: Options) -> None:
        """Sets the run's configuration, by name; a resumed run may have another one."""
        self._try(lambda run: run.config.update(dict(values), allow_val_change=True))

    def write_summary(self, values: Mapping[str, Any]) -> None:
        self._try(lambda run: run.summary.update(dict(values)))

    def close(self) -> None:
        """Uploads the rest, for a minute at most."""
        exit_code = int(sys.exception() is not None)
        self._try(lambda run: run.finish(exit_code=exit_code))
        self._run = None

    def _try(self, action: Callable[[Any], None]) -> None:
        try:
            if self._run is not None:
                action(self._run)
        except Exception as error:  # a failure of W&B ends no training
            self._run = None
            message = "Weights & Biases: %s; the run continues without it"
            _LOGGER.warning(message, errors.first_line(error))
