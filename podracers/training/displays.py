"""TensorBoard and the terminal as loggers; a run imports them, and their libraries, late.

On resumption TensorBoard drops the values after the checkpoint (see `training.loggers`).
"""

import contextlib
import math
import os
import pathlib
import socket
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import rich.console
import rich.progress
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer import record_writer

from podracers.checkpoints import storage
from podracers.training import loggers

# Metrics that the terminal shows, with their formats.
_SHOWN = {
    "steps_per_second": "{:,.0f} steps/s",
    "episode/return": "return {:.4g}",
    "episode/success": "success {:.4g}",
    "evaluation/return": "eval {:.4g}",
    "loss/total": "loss {:.4g}",
}
_HPARAMS = "events.out.tfevents.0.hparams"  # read before the files of all starts
_LINE_PERIOD = 10.0  # seconds between two lines of a log file


class TensorBoardLogger(loggers.Logger):
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

    def write_configuration(
        self, step: int, texts: Mapping[str, str], values: loggers.Options
    ) -> None:
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


class TerminalLogger(loggers.Logger):
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
