"""A directory of its own for simulators that write files wherever they are started."""

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from podracers.supervision import children, watchdog

_CLONE_FS = 0x200  # linux/sched.h
_CLOSING = 5.0  # seconds that processes get to end by themselves


class Directory:
    """A new directory; it is removed by `close`, or else when this process ends.

    Args:
      folders: to make in it.
    """

    def __init__(self, folders: Sequence[str] = ()):
        self.path = os.path.realpath(tempfile.mkdtemp(prefix="podracers-"))
        watchdog.add_directory(self.path)
        for folder in folders:
            os.mkdir(os.path.join(self.path, folder))

    def start(self, start: Callable[[], Any]) -> Any:
        """Returns `start()`, which runs in the directory.

        The process keeps its working directory: only one thread changes its own (Linux), and what
        that thread starts, threads and processes, inherits it.
        """
        outcome: dict[str, Any] = {}
        # A daemon, for it may never return.
        thread = threading.Thread(target=self._start, args=(start, outcome), daemon=True)
        thread.start()
        thread.join()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    def _start(self, start: Callable[[], Any], outcome: dict[str, Any]) -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS):
                raise OSError(
                    ctypes.get_errno(), "cannot give a thread a working directory of its own"
                )
            os.chdir(self.path)
            outcome["result"] = start()
        except Exception as error:  # raised by the thread that waits
            outcome["error"] = error

    def close(self) -> None:
        """Waits for the processes that were started in the directory, and removes it."""
        children.end_within(self.path, _CLOSING)
        watchdog.remove_directory(self.path)
