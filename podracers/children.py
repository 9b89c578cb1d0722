"""Ends the simulators that run in processes of their own, when nobody else will."""

import contextlib
import os
import pathlib
import signal


def kill() -> None:
    """Kills the children of this process, where /proc tells of them (Linux)."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            _, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
