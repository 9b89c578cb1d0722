"""Processes that would outlive their parent, found through /proc (Linux)."""

import contextlib
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable

_PROC = pathlib.Path("/proc")
_SHARED_MEMORY = "/dev/shm/"
_KILL_TIMEOUT = 5.0  # seconds


def of(parent: int) -> list[int]:
    """Returns the children of a process."""
    return _find(lambda process: int(_stat(process)[1]) == parent)


def within(directory: str) -> list[int]:
    """Returns the other processes whose working directory this is."""
    own = str(os.getpid())
    return _find(lambda process: process.name != own and os.readlink(process / "cwd") == directory)


def is_stopped(process: int) -> bool:
    """Returns whether a process is suspended, by a signal or by a debugger."""
    with contextlib.suppress(OSError):
        return _stat(_PROC / str(process))[0] in (b"T", b"t")
    return False


def kill(processes: Iterable[int]) -> None:
    """Kills processes; those that have just ended are no mistake."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_within(directory: str, timeout: float) -> None:
    """Ends the processes that were started in a directory, and removes it.

    What they share memory by is removed as well: nobody else would.

    Args:
      directory: the path of the directory.
      timeout: seconds until processes that have not ended are killed; those that a kill does not
        end (a file system hangs) are left after `_KILL_TIMEOUT` more.
    """
    directory = os.path.realpath(directory)
    limit = time.monotonic() + timeout
    left, shared = within(directory), set()
    while left and time.monotonic() < limit + _KILL_TIMEOUT:
        for process in left:
            shared.update(_shared_memory(process))
        if time.monotonic() > limit:
            kill(left)
        time.sleep(0.02)
        left = within(directory)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(directory, ignore_errors=True)


def _find(wanted: Callable[[pathlib.Path], bool]) -> list[int]:
    found = []
    for process in _PROC.glob("[0-9]*"):
        # It may have just ended, or be somebody else's; and names are any bytes.
        with contextlib.suppress(OSError, ValueError):
            if wanted(process):
                found.append(int(process.name))
    return found


def _stat(process: pathlib.Path) -> list[bytes]:
    """Returns what comes after a process's name: its state, its parent, ..."""
    return (process / "stat").read_bytes().rpartition(b") ")[2].split()


def _shared_memory(process: int) -> set[str]:
    with contextlib.suppress(OSError):
        maps = (_PROC / str(process) / "maps").read_text(errors="replace").splitlines()
        return {line.split(maxsplit=5)[5] for line in maps if _SHARED_MEMORY in line}
    return set()
