"""Processes that would outlive their parent, found through /proc (Linux)."""

import contextlib
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Iterable

_PROC = pathlib.Path("/proc")
_KILL_TIMEOUT = 5.0  # seconds


def of(parent: int) -> list[int]:
    """Returns the children of a process."""
    found: list[int] = []
    for thread in (_PROC / str(parent) / "task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            found += map(int, (thread / "children").read_text().split())
    return found


def within(directory: str) -> list[int]:
    """Returns the other processes whose working directory this is."""
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            if os.readlink(process / "cwd") == directory and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def is_stopped(process: int) -> bool:
    """Returns whether a process is suspended, by a signal or by a debugger."""
    with contextlib.suppress(OSError):
        after_name = (_PROC / str(process) / "stat").read_bytes().rpartition(b") ")[2]
        return after_name[:1] in (b"T", b"t")
    return False


def kill(processes: Iterable[int]) -> None:
    """Kills processes; a process that has just ended is ignored."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_within(directory: str, timeout: float) -> None:
    """Ends the processes that were started in a directory; removes it and their shared memory.

    Args:
      directory: the path of the directory.
      timeout: seconds until processes that have not ended are killed; a process that survives this
        (its file system hangs) is left after `_KILL_TIMEOUT` more.
    """
    directory, deadline = os.path.realpath(directory), time.monotonic() + timeout
    shared: set[str] = set()
    while (left := within(directory)) and time.monotonic() < deadline + _KILL_TIMEOUT:
        for process in left:
            with contextlib.suppress(OSError):
                maps = (_PROC / str(process) / "maps").read_text(errors="replace").splitlines()
                shared.update(line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line)
        if time.monotonic() > deadline:
            kill(left)
        time.sleep(0.02)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(directory, ignore_errors=True)
