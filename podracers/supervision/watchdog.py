"""Ends a process that Python cannot end: one call hangs, and holds the interpreter's lock.

No other thread runs then, so nobody can notice, and no signal is heard. EnvPool's constructor is
such a call, which waits for every simulator to come up, and so may be any step, and the end of any
simulator. Hence another process watches (`guardian`): a thread tells it each second that Python
runs. Time in which this process is suspended does not count.

However this process ends, the other one removes the directories that were given to it, and the
processes that were started in them.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading

from podracers.supervision import children

_PERIOD = 1.0  # seconds between two signs of life
_GRACE = 4.0  # seconds beyond the limit: a machine may be busy
_STDERR = 2  # the file descriptor: `sys.stderr` may be something else in a notebook


class _Guardian:
    """The process that watches this one, and the thread that tells it so."""

    def __init__(self):
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from podracers.supervision import guardian; guardian.watch({os.getpid()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C is not for it
        )
        self.limits: dict[object, float] = {}
        self.directories: list[str] = []
        self.longest = 0.0  # seconds, of all limits so far
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()

    def tell(self) -> None:
        """Says that Python runs, and how long it may be silent from now on."""
        limit = min(self.limits.values(), default=None)
        line = json.dumps([limit, self.directories]) + "\n"
        with self._lock, contextlib.suppress(OSError):  # somebody killed it
            os.write(self.process.stdin.fileno(), line.encode())

    def _beat(self) -> None:
        while not self._over.wait(_PERIOD):
            self.tell()

    def be_silent(self) -> None:
        """Ends the thread: the limit is from now on."""
        self._over.set()


_guardians: list[_Guardian] = []  # at most one
_starting = threading.Lock()


def _guardian() -> _Guardian:
    with _starting:
        if not _guardians:
            _prepare()
            _guardians.append(_Guardian())
        return _guardians[0]


def _prepare() -> None:
    """Lets SIGHUP print every thread's stack and exit with code 1, without any Python.

    It would end the process anyway; where it is ignored (nohup) or handled, nothing is changed, and
    the guardian has to kill. The number of the signal, which is its handler's argument, is 1: a
    handler `_exit` gives the exit code of a failure.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGHUP, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(signal.SIGHUP, file=_STDERR, all_threads=True, chain=True)


class Watch:
    """Ends the process once Python has not run for so long; in force until it is ended.

    Args:
      seconds: the limit.
    """

    def __init__(self, seconds: float):
        guardian = _guardian()
        guardian.limits[self] = seconds + _GRACE
        guardian.longest = max(guardian.longest, seconds + _GRACE)
        guardian.tell()

    def end(self) -> None:
        """Lifts the limit."""
        guardian = _guardian()
        guardian.limits.pop(self, None)
        guardian.tell()


def expect_end() -> None:
    """Gives this process as long to end as its longest limit, whatever it does meanwhile."""
    if _guardians and _guardians[0].longest:
        guardian = _guardians[0]
        guardian.be_silent()
        guardian.limits[expect_end] = guardian.longest
        guardian.tell()


def add_directory(path: str) -> None:
    """Has a directory removed, with the processes in it, once this process is no more."""
    guardian = _guardian()
    guardian.directories = [*guardian.directories, path]
    guardian.tell()


def remove_directory(path: str) -> None:
    """Forgets a directory."""
    guardian = _guardian()
    guardian.directories = [each for each in guardian.directories if each != path]
    guardian.tell()


def kill_children() -> None:
    """Kills what this process has started, when nobody else will, but for its guardian."""
    spared = {guardian.process.pid for guardian in _guardians}
    children.kill(set(children.of(os.getpid())) - spared)
