"""How far each process of a group has come, and which of them keeps the others waiting.

All take the same stages in the same order. One that is alive and stays in a stage while another is
beyond it holds all of them up; where all stay in the same stage, it is in a program of the devices,
and nobody can say whose. How long a stage may last is known once it has been left twice: the first
time it compiles.
"""

import sys
import sysconfig
import threading
from collections.abc import Mapping
from typing import NamedTuple

ANYTHING = "going on"  # a stage of which nobody has said what it is: it has no limit
_PATIENCE = 10  # times the longest that a stage took before, where that is more than the limit
_PATIENCE_FOR_ALL = 30  # times the same, or the limit, where no process is behind another
_GAP = 2.0  # seconds at most between two looks that count: a process that is suspended is not late
_LEARNT = 2  # how often a stage is left before it has a limit


class Report(NamedTuple):
    """Where a process is; what JSON can hold."""

    stage: int  # how many stages came before
    doing: str  # what the stage is, in words
    idle: float  # seconds without a sign of progress
    longest: float | None  # seconds that such a stage has taken; None where that is not known
    where: str = ""  # the line of code that the main thread is at


class Progress:
    """The stages of this process, told by its main thread and timed by another one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._stage, self._doing = 0, "starting"
        self._idle = self._spent = 0.0  # seconds: without a sign, and in the stage
        self._left: dict[str, int] = {}
        self._longest: dict[str, float] = {}

    def reach(self, doing: str) -> None:
        """Begins the next stage; `doing` says what it is."""
        with self._lock:
            if self._left.setdefault(self._doing, 0):  # the first time compiles
                longest = self._longest.get(self._doing, 0.0)
                self._longest[self._doing] = max(longest, self._spent)
            self._left[self._doing] += 1
            self._stage, self._doing = self._stage + 1, doing
            self._idle = self._spent = 0.0

    def touch(self) -> None:
        """Shows that the stage goes on."""
        with self._lock:
            self._idle = 0.0

    def tick(self, seconds: float) -> None:
        """Lets time pass, as the thread that calls this saw it."""
        with self._lock:
            self._idle += min(seconds, _GAP)
            self._spent += min(seconds, _GAP)

    def report(self) -> Report:
        """Returns where this process is."""
        with self._lock:
            known = self._doing != ANYTHING and self._left.get(self._doing, 0) >= _LEARNT
            longest = self._longest[self._doing] if known else None
            return Report(self._stage, self._doing, self._idle, longest, _main_thread())


def judge(reports: Mapping[int, Report], timeout: float) -> str | None:
    """Returns who makes no progress, in a line; None where nobody is known not to.

    Args:
      reports: those of all processes, by number.
      timeout: seconds that a process may keep the others waiting, or ten times as long as the same
        took before; where none is behind another, thirty times either.
    """
    furthest = max(report.stage for report in reports.values())
    for process, report in sorted(reports.items()):
        ahead = [other.idle for other in reports.values() if other.stage > report.stage]
        if not ahead or report.longest is None:
            continue
        if min(report.idle, max(ahead)) > max(timeout, _PATIENCE * report.longest):
            at = f" ({report.where})" if report.where else ""
            return (
                f"process {process} makes no progress: {report.doing} for {report.idle:.0f} s"
                f"{at}, and the others wait"
            )
    if any(report.stage < furthest or report.longest is None for report in reports.values()):
        return None
    if all(r.idle > _PATIENCE_FOR_ALL * max(timeout, r.longest) for r in reports.values()):
        first = reports[min(reports)]
        return (
            f"no process makes progress: {first.doing} for {first.idle:.0f} s, and never more than "
            f"{first.longest:.0f} s before"
        )
    return None


def _main_thread() -> str:
    """Returns the innermost line of the main thread that is of no library."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    libraries = (sysconfig.get_path("stdlib"), "<frozen")
    while frame:
        code = frame.f_code
        if not code.co_filename.startswith(libraries) and "-packages" not in code.co_filename:
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
