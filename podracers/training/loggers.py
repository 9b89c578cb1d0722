"""Loggers of a run's metrics: JSON lines, TensorBoard and the terminal.

Steps are agent steps over all environments. On resumption every log drops the values after the
checkpoint, so that an interrupted run leaves the same log as an uninterrupted one.
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TextIO

import rich.console
import rich.progress
import rich.text
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer import record_writer

from podracers import errors
from podracers.training import manifest, storage

_LOGGER = logging.getLogger(__name__)

# Metrics that the terminal shows, by label.
_SHOWN = {"return": "episode/return", "eval": "evaluation/return", "loss": "loss/total"}
_ROW = {"step": manifest.is_count, str: manifest.optional(manifest.is_number)}


class Logger(Protocol):
    """Receives the metrics of each log period."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs named numbers, measured up to `step`.

        Args:
          step: agent steps so far; never decreases.
          values: by name, such as `loss/total`; NaN stands for "nothing was measured".
        """

    def close(self) -> None:
        """Flushes and frees; nothing may be written afterwards."""


class JsonlLogger:
    """One JSON object a line: `{"step": 1024, "loss/total": 0.5}`; null stands for NaN.

    Args:
      path: the file.
      resume_step: on resumption, the last step to keep; None starts the file anew.
    """

    def __init__(self, path: str | pathlib.Path, resume_step: int | None = None):
        self._path = pathlib.Path(path)
        with _naming(self._path):
            if resume_step is not None and self._path.exists():
                partial = self._path.with_name(self._path.name + ".partial")
                with partial.open("w", encoding="utf-8") as file:
                    for row in read_rows(self._path):
                        if row["step"] <= resume_step:
                            file.write(json.dumps(row) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(self._path)
            mode = "w" if resume_step is None else "a"
            self._file = self._path.open(mode, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line, and flushes it."""
        row = {name: float(value) for name, value in values.items()}
        # JSON has neither NaN nor infinities.
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with _naming(self._path):
            self._file.write(json.dumps({"step": int(step), **finite}) + "\n")
            self._file.flush()
        storage.require_same(self._path, self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with _naming(self._path):
            self._file.close()


def read_rows(path: str | pathlib.Path) -> list[dict[str, float | None]]:
    """Returns the lines that `JsonlLogger` wrote; damaged lines are left out, with a warning.

    Half a line at the end, which a running or killed run leaves, is left out without one.

    Raises:
      errors.RunFailure: the file cannot be read.
    """
    path = pathlib.Path(path)
    with _naming(path, "read"):
        lines = path.read_bytes().split(b"\n")
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            if number < len(lines):
                damaged.append((number, error))
    if damaged:
        message = "%s: left out %d damaged lines, the first of them line %d (%s)"
        _LOGGER.warning(message, path, len(damaged), *damaged[0])
    return rows


def parse_row(line: str | bytes) -> dict[str, float | None]:
    """Returns the contents of one line of `JsonlLogger`.

    Raises:
      ValueError: the line is damaged.
    """
    return manifest.parse(line, _ROW)


class TensorBoardLogger:
    """TensorBoard scalars, written without TensorFlow.

    Args:
      directory: folder of the event files; each start of a run adds one.
      resume_step: on resumption, the last step to keep: TensorBoard hides later ones.
    """

    def __init__(self, directory: str | pathlib.Path, resume_step: int | None = None):
        self._directory = pathlib.Path(directory)
        with _naming(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads event files in the order of their names.
            start = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            stem = f"events.out.tfevents.{start}"
            number = len(list(self._directory.glob(stem + ".*")))
            self._path = self._directory / f"{stem}.{number}"
            # TensorBoard's own event writer writes from a thread, which hides a full disk.
            self._file = self._path.open("xb")
            self._writer = record_writer.RecordWriter(self._file)
            self._add(event_pb2.Event(file_version="brain.Event:2"))
            if resume_step is not None:
                session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(event_pb2.Event(step=int(resume_step) + 1, session_log=session))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve, and flushes them."""
        scalars = [
            summary_pb2.Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if not math.isnan(value)
        ]
        self._add(event_pb2.Event(step=int(step), summary=summary_pb2.Summary(value=scalars)))
        storage.require_same(self._path, self._file.fileno())

    def write_configuration(
        self, step: int, texts: Mapping[str, str], values: Mapping[str, bool | float | str]
    ) -> None:
        """Adds pages to the text dashboard, and this run's row to the HParams dashboard.

        Args:
          step: agent steps so far.
          texts: pages by name, shown as they are.
          values: hyperparameters by name.
        """
        for name, text in texts.items():
            code = "".join(f"    {line}\n" for line in text.splitlines())  # in Markdown
            self._add(event_pb2.Event(step=int(step), summary=text_summary.text_pb(name, code)))
        # Runs of one trial would share a row. The dashboard cuts the end of a long name.
        folder = self._directory.resolve()
        trial = f"{folder.name} in {folder.parent.as_posix()}"
        self._add(event_pb2.Event(summary=hparams_summary.hparams_pb(dict(values), trial_id=trial)))

    def close(self) -> None:
        """Closes the event file."""
        with _naming(self._directory):
            self._file.close()

    def _add(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        with _naming(self._directory):
            self._writer.write(event.SerializeToString())
            self._file.flush()


class TerminalLogger:
    """Shows progress, time left, speed, return and loss.

    A terminal gets two lines that are redrawn in place; a file or a pipe gets a plain line per log
    period, but at most one for each percent, or each ten seconds, of the run.

    Args:
      total_steps: agent steps at the end of the run.
      file: the stream to write to; stderr by default.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None):
        self._file = file or sys.stderr
        self._values: dict[str, float] = {}
        self._printed = (-math.inf, -math.inf)  # seconds and step of the latest plain line
        console = rich.console.Console(file=self._file, highlight=False)
        self._display = _Display(
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # no thread that competes with the run's own
            # Other output appears above the display, unless it goes to a file.
            redirect_stdout=sys.stdout.isatty(),
            speed_estimate_period=3600.0,  # longer than a log period; it excludes compilation
            expand=True,
        )
        self._display.add_task("compiling", total=max(int(total_steps), 1))
        self._is_live = self._file.isatty() and not console.is_dumb_terminal
        if self._is_live:
            self._display.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the newest values; a missing value or NaN leaves the previous one."""
        self._values |= {name: value for name, value in values.items() if not math.isnan(value)}
        (task,) = self._display.tasks
        numbers = [f"{_short(step)}/{_short(task.total)} steps"]
        if "steps_per_second" in self._values:
            numbers.append(f"{_short(self._values['steps_per_second'])} steps/s")
        for label, name in _SHOWN.items():
            if name in self._values:
                numbers.append(f"{label} {self._values[name]:.4g}")
        self._display.update(
            task.id, completed=int(step), description="  ".join(numbers), refresh=self._is_live
        )
        seconds, steps = (time.monotonic() - self._printed[0], step - self._printed[1])
        if task.finished or seconds >= 10 or steps >= task.total / 100:
            self._print()

    def close(self) -> None:
        """Leaves the latest values on the screen."""
        (task,) = self._display.tasks
        if self._is_live:
            self._display.stop()  # a second call has no effect
        elif task.completed and task.completed != self._printed[1]:
            self._print()

    def _print(self) -> None:
        """Prints a plain line, unless the display is redrawn in place."""
        (task,) = self._display.tasks
        self._printed = (time.monotonic(), task.completed)
        if not self._is_live:
            left = rich.progress.TimeRemainingColumn().render(task).plain
            line = f"{task.percentage:3.0f}%  {task.description}  {left} left"
            print(line, file=self._file, flush=True)


class _Display(rich.progress.Progress):
    """A progress bar with the task's description in a line of its own."""

    def get_renderables(self) -> Iterator[rich.console.RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield rich.text.Text(task.description, no_wrap=True, overflow="ellipsis")


class Loggers:
    """Several loggers as one, and a context manager that closes them all."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = tuple(loggers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to each in turn; the first that fails stops the run."""
        for logger in self._loggers:
            logger.write(step, values)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Closes every logger; raises the first failure unless the body failed before."""
        failures = [error] if error else []
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as failure:  # raised below
                failures.append(failure)
        if failures and error is None:
            raise failures[0]


def _short(number: float) -> str:
    """Returns a number in about three digits: 950, 12.3k, 1.05M."""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        scaled = number / size
        if scaled >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.0f}"


@contextlib.contextmanager
def _naming(path: pathlib.Path, verb: str = "write") -> Iterator[None]:
    """Turns an `OSError`, such as a full disk, into one line that names the file."""
    try:
        yield
    except OSError as error:
        message = f"could not {verb} {path}: {error.strerror or error}"
        raise errors.RunFailure(message) from error
