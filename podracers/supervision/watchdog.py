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
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from podracers.supervision import children

_PERIOD = 1.0  # seconds between two signs of life
_GRACE = 4.0  # seconds beyond the limit: a machine may be busy
_STDERR = 2  # the file descriptor: `sys.stderr` may be something else in a notebook


class _Guardian:
    """The process that watches this one, and the thread that tells it so."""

    def __init__(self):
        # An editable installation may be found by an import hook, which `-S` leaves out.
        path = [*sys.path, str(pathlib.Path(__file__).resolve().parents[2])]
        program = (
            f"import sys; sys.path[:] = {path!r}\n"
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

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Lets one thread change the limits and directories, then sends them as a sign of life."""
        with self._lock:
            yield
            limit = min(self.limits.values(), default=None)
            line = json.dumps([limit, self.directories]) + "\n"
            with contextlib.suppress(OSError):  # somebody killed it
                os.write(self.process.stdin.fileno(), line.encode())

    def _beat(self) -> None:
        while not self._over.wait(_PERIOD):
            with self.changing():
                pass

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


def _forget() -> None:
    """In a forked copy of this process, which has no thread that would tell: closes the pipe.

    Else the guardian would not learn from it that this process has ended.
    """
    while _guardians:
        _guardians.pop().process.stdin.close()


os.register_at_fork(after_in_child=_forget)


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
        with guardian.changing():
            guardian.limits[self] = seconds + _GRACE
            guardian.longest = max(guardian.longest, seconds + _GRACE)

    def end(self) -> None:
        """Lifts the limit."""
        guardian = _guardian()
        with guardian.changing():
            guardian.limits.pop(self, None)


def expect_end() -> None:
    """Gives this process as long to end as its longest limit, whatever it does meanwhile."""
    if _guardians and _guardians[0].longest:
        guardian = _guardians[0]
        guardian.be_silent()
        with guardian.changing():
            guardian.limits[expect_end] = guardian.longest


def add_directory(path: str) -> None:
    """Has a directory removed, with the processes in it, once this process is no more."""
    guardian = _guardian()
    with guardian.changing():
        guardian.directories.append(path)


def remove_directory(path: str) -> None:
    """Forgets a directory."""
    guardian = _guardian()
    with guardian.changing(), contextlib.suppress(ValueError):
        guardian.directories.remove(path)


def kill_children() -> None:
    """Kills what this process has started, when nobody else will, but for its guardian."""
    spared = {guardian.process.pid for guardian in _guardians}
    children.kill(set(children.of(os.getpid())) - spared)
