"""What a run looks like in the terminal: a live display, or plain lines where there is none."""

import datetime
import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

_SHOWN = {"return": "episode/return", "eval": "evaluation/return", "loss": "loss/total"}


class TerminalLogger:
    """Shows progress, speed, return, loss and the time left.

    A terminal gets two lines that are redrawn in place; a file or a pipe gets a plain line per log
    period, but no more than one for each percent, or each ten seconds, of the run.

    Args:
      total_steps: agent steps at the end of the run.
      file: where to write; stderr by default.
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


def _short(number: float) -> str:
    """Returns a number in three digits or so: 950, 12.3k, 1.05M."""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        scaled = number / size
        if scaled >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.0f}"
