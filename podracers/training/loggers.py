"""Where the numbers of a run go: JSON lines, TensorBoard and the terminal.

Steps are agent steps over all environments. On resumption every log forgets what came after the
checkpoint, so that a run that was killed leaves the same log as one that was left alone.
"""

import contextlib
import datetime
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
import rich.live
import rich.progress_bar
import rich.table
import rich.text
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer import record_writer
from tensorboard.util import tensor_util

from podracers import errors
from podracers.training import presence, schema

_LOGGER = logging.getLogger(__name__)

# What the terminal shows, by label.
_SHOWN = {"return": "episode/return", "eval": "evaluation/return", "loss": "loss/total"}
_ROW = {"step": schema.COUNT, str: (schema.REAL, None)}


class Logger(Protocol):
    """Takes what was measured, once per log period."""

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
        with _saying_which(self._path):
            if resume_step is not None and self._path.exists():
                _keep_lines_until(self._path, resume_step)
            mode = "w" if resume_step is None else "a"
            self._file = self._path.open(mode, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line, and flushes it."""
        finite = {name: _finite(value) for name, value in values.items()}
        with _saying_which(self._path):
            self._file.write(json.dumps({"step": int(step), **finite}) + "\n")
            self._file.flush()
        presence.require(self._path, self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with _saying_which(self._path):
            self._file.close()


def read_rows(path: str | pathlib.Path) -> list[dict[str, float | None]]:
    """Returns the lines that `JsonlLogger` wrote, without those that were damaged meanwhile.

    Of these it warns; not of half a line at the end, which a run that goes on or was killed leaves.

    Raises:
      errors.RunFailure: the file cannot be read.
    """
    path = pathlib.Path(path)
    with _saying_which(path, "read"):
        lines = path.read_bytes().split(b"\n")
    half = lines.pop()
    rows, damaged = [], {}
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            damaged[number] = str(error)
    if damaged:
        _LOGGER.warning("%s: left out what is damaged: %s", path, _listed(damaged))
    if half:
        with contextlib.suppress(ValueError):
            rows.append(parse_row(half))
    return rows


def parse_row(line: str | bytes) -> dict[str, float | None]:
    """Returns what one line of `JsonlLogger` says.

    Raises:
      ValueError: it is no such line.
    """
    return schema.parse(line, _ROW)


def _listed(damaged: Mapping[int, str], most: int = 5) -> str:
    """Returns in words which lines are damaged, and what is wrong with the first."""
    numbers = [str(number) for number in damaged]
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    lines = f"line{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:most])}{more}"
    return f"{lines} ({next(iter(damaged.values()))})"


class TensorBoardLogger:
    """TensorBoard scalars, written without TensorFlow.

    Args:
      directory: folder of the event files; each start of a run adds one.
      resume_step: on resumption, the last step to keep: TensorBoard hides what came after it.
    """

    def __init__(self, directory: str | pathlib.Path, resume_step: int | None = None):
        self._directory = pathlib.Path(directory)
        with _saying_which(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path = _new_event_file(self._directory)
            # TensorBoard's own event writer writes from a thread, where a full disk goes unheard.
            self._file = self._path.open("xb")
            self._writer = record_writer.RecordWriter(self._file)
            self._add(event_pb2.Event(file_version="brain.Event:2"))
            if resume_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(event_pb2.Event(step=int(resume_step) + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve, and flushes them."""
        scalars = [
            summary_pb2.Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if not math.isnan(value)
        ]
        with _saying_which(self._directory):
            summary = summary_pb2.Summary(value=scalars)
            self._add(event_pb2.Event(step=int(step), summary=summary))
        presence.require(self._path, self._file.fileno())

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Adds pages to the text dashboard, shown as they are.

        Args:
          step: agent steps so far.
          texts: by the names that they are shown under.
        """
        metadata = text_metadata.create_summary_metadata(display_name="", description="")
        pages = [
            summary_pb2.Summary.Value(
                tag=name, metadata=metadata, tensor=tensor_util.make_tensor_proto(_as_code(text))
            )
            for name, text in texts.items()
        ]
        with _saying_which(self._directory):
            self._add(event_pb2.Event(step=int(step), summary=summary_pb2.Summary(value=pages)))

    def write_hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Fills this run's row of the HParams dashboard, which finds the metrics by itself."""
        # Runs of one trial would be one row. Of a long name the dashboard shows the beginning.
        folder = self._directory.resolve()
        trial = f"{folder.name} in {folder.parent.as_posix()}"
        summary = hparams_summary.hparams_pb(dict(values), trial_id=trial)
        with _saying_which(self._directory):
            self._add(event_pb2.Event(summary=summary))

    def close(self) -> None:
        """Closes the event file."""
        with _saying_which(self._directory):
            self._file.close()

    def _add(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._file.flush()


class TerminalLogger:
    """Shows progress, speed, return, loss and the time left.

    A terminal gets two lines that are redrawn in place; a file or a pipe gets a plain line per log
    period, but no more than one for each percent, or each ten seconds, of the run.

    Args:
      total_steps: agent steps at the end of the run.
      file: the stream to write to; stderr by default.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None):
        self._total = max(int(total_steps), 1)
        self._file = file or sys.stderr
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._first: tuple[float, int] | None = None  # when the first values came, and their step
        self._printed: tuple[float, int] = (-math.inf, -self._total)
        self._live = None
        console = rich.console.Console(file=self._file, highlight=False)
        if self._file.isatty() and not console.is_dumb_terminal:
            self._live = rich.live.Live(
                self._render(),
                console=console,
                # Drawn when there is something new: no thread that competes with the run's own.
                auto_refresh=False,
                # What others print appears above the display, unless it goes to a file.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start(refresh=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the newest values; those that are missing or NaN stay as they were."""
        now = time.monotonic()
        self._step = int(step)
        self._first = self._first or (now, self._step)
        self._values |= {name: value for name, value in values.items() if not math.isnan(value)}
        if self._live:
            self._live.update(self._render(), refresh=True)
        elif self._is_due(now):
            self._print(now)

    def close(self) -> None:
        """Leaves the last values on the screen."""
        if self._live:
            self._live.stop()  # a second time does nothing
        elif self._step is not None and self._printed[1] != self._step:
            self._print(time.monotonic())

    def _is_due(self, now: float) -> bool:
        seconds, steps = now - self._printed[0], self._step - self._printed[1]
        return self._step >= self._total or seconds >= 10 or steps >= self._total / 100

    def _print(self, now: float) -> None:
        self._printed = (now, self._step)
        parts = [f"{self._percent():3d}%", *self._numbers(), self._time_left()]
        print("  ".join(parts), file=self._file, flush=True)

    def _render(self) -> rich.console.RenderableType:
        bar = rich.table.Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            rich.progress_bar.ProgressBar(total=self._total, completed=self._step or 0),
            f"{self._percent():3d}%  {self._time_left()}",
        )
        numbers = "  ".join(self._numbers()) if self._step is not None else "compiling"
        return rich.console.Group(bar, rich.text.Text(numbers, no_wrap=True, overflow="ellipsis"))

    def _numbers(self) -> list[str]:
        parts = [f"{_short(self._step)}/{_short(self._total)} steps"]
        if "steps_per_second" in self._values:
            parts.append(f"{_short(self._values['steps_per_second'])} steps/s")
        parts += [
            f"{label} {self._values[name]:.4g}"
            for label, name in _SHOWN.items()
            if name in self._values
        ]
        return parts

    def _percent(self) -> int:
        return min(100 * (self._step or 0) // self._total, 100)

    def _time_left(self) -> str:
        """Judges by the whole run, evaluations included, but not by its compilation."""
        if self._step is None:
            return "-:--:-- left"
        if self._step >= self._total:
            return "0:00:00 left"
        seconds, steps = time.monotonic() - self._first[0], self._step - self._first[1]
        rate = steps / seconds if steps > 0 else self._values.get("steps_per_second", 0.0)
        if rate <= 0.0:
            return "-:--:-- left"
        left = datetime.timedelta(seconds=math.ceil((self._total - self._step) / rate))
        return f"{left} left"


class Loggers:
    """Several loggers as one, and a context manager that closes them all."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = tuple(loggers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to each in turn; the first that fails stops the run."""
        for logger in self._loggers:
            logger.write(step, values)

    def close(self) -> None:
        """Closes every one, even if some fail; raises the first failure afterwards."""
        failures = []
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:  # raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        else:
            # What went wrong first is what the user has to see.
            with contextlib.suppress(Exception):
                self.close()


def _new_event_file(directory: pathlib.Path) -> pathlib.Path:
    """Returns a path that is free, and comes last by name: the order in which they are read."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    return directory / f"{stem}.{len(list(directory.glob(stem + '.*')))}"


def _as_code(text: str) -> str:
    """Returns text as Markdown that shows every character of it."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _keep_lines_until(path: pathlib.Path, step: int) -> None:
    """Drops the lines beyond `step`, and damaged ones, by replacing the file at once."""
    kept = [row for row in read_rows(path) if row["step"] <= step]
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinities."""
    value = float(value)
    return value if math.isfinite(value) else None


def _short(number: float) -> str:
    """Returns a number in three digits or so: 950, 12.3k, 1.05M."""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        scaled = number / size
        if scaled >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.0f}"


@contextlib.contextmanager
def _saying_which(path: pathlib.Path, what: str = "write") -> Iterator[None]:
    """Turns a full disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        message = f"could not {what} {path}: {error.strerror or error}"
        raise errors.RunFailure(message) from error
