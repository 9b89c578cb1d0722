"""A directory of its own for simulators that write files wherever they are started."""

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

_CLONE_FS = 0x200  # linux/sched.h


def in_directory(
    start: Callable[[], Any],
) -> tuple[Callable[[], Any], tempfile.TemporaryDirectory]:
    """Returns `start`, to run in a new directory, and the directory.

    The process keeps its working directory: only one thread changes its own (Linux), and what that
    thread starts, threads and processes, inherits it.
    """
    directory = tempfile.TemporaryDirectory(prefix="podracers-")

    def run() -> Any:
        outcome: dict[str, Any] = {}
        thread = threading.Thread(target=_start_apart, args=(start, directory.name, outcome))
        thread.start()
        thread.join()
        if "error" in outcome:
            directory.cleanup()
            raise outcome["error"]
        return outcome["result"]

    return run, directory


def _start_apart(start: Callable[[], Any], directory: str, outcome: dict[str, Any]) -> None:
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS):
            raise OSError(ctypes.get_errno(), "cannot give a thread a working directory of its own")
        os.chdir(directory)
        outcome["result"] = start()
    except Exception as error:  # raised by the thread that waits
        outcome["error"] = error
