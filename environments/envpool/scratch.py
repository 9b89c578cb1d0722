"""Temporary working directory for simulators that write files into the working directory."""

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from podracers.supervision import watchdog

_CLONE_FS = 0x200  # linux/sched.h
_CLOSING = 5.0  # seconds for processes to end by themselves


class Directory:
    """A new directory, removed by `close` or at the end of this process.

    The simulator expects the subdirectories `folders` in its working directory.
    """

    def __init__(self, folders: Sequence[str] = ()):
        self.path = os.path.realpath(tempfile.mkdtemp(prefix="podracers-"))
        self._folders = folders
        watchdog.add_directory(self.path)

    def start(self, start: Callable[[], Any]) -> Any:
        """Returns `start()`, which runs in the directory.

        Only one thread changes its working directory (Linux); threads and processes that it starts
        inherit it. Where the system forbids that, as Docker does by default, `start()` runs in the
        working directory of the process, with a warning; files of the simulator stay there.
        """
        future: futures.Future[Any] = futures.Future()

        # EnvPool starts several processes at once. The first fork ends OpenBLAS's threads, and two
        # forks that end them at the same time never return. The argument `group` makes Python
        # call `fork`; `vfork` does not end the threads.
        subprocess.run([sys.executable, "-ISc", ""], group=os.getgid(), check=True)

        def run() -> None:
            try:
                self._enter()
                future.set_result(start())
            except Exception as error:  # raised by the waiting thread
                future.set_exception(error)

        # A daemon, because it may never return.
        threading.Thread(target=run, daemon=True).start()
        return future.result()

    def _enter(self) -> None:
        """Makes the directory this thread's working directory, if the system allows it."""
        if error := _unshare_working_directory():
            warnings.warn(
                f"a thread cannot have a working directory of its own here ({os.strerror(error)}): "
                f"the simulator writes files into '{os.getcwd()}'",
                stacklevel=1,
            )
        else:
            os.chdir(self.path)
        for folder in self._folders:
            os.makedirs(folder, exist_ok=True)

    def close(self) -> None:
        """Waits for the processes that were started in the directory, and removes it."""
        watchdog.end_within(self.path, _CLOSING)


def _unshare_working_directory() -> int:
    """Gives this thread a working directory of its own; returns 0, or the error number."""
    failed = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
    return ctypes.get_errno() if failed else 0
