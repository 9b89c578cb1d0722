"""Ends a process whose native code hangs while it holds Python's lock, and cleans up after it.

In such a process no other thread runs and no signal is handled. EnvPool's constructor is such a
call, and any step of a simulator may be. Hence a second process, the watchdog, reads a line from
this one each second. After the limit without a line it makes this process print the stacks of its
threads and exit with code 3, or kills it. Time in which this process is suspended does not count.

However this process ends, the watchdog removes its scratch directories and the processes that were
started in them.
"""

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import psutil

_PERIOD = 1.0  # seconds between two lines
_GRACE = 4.0  # seconds added to each limit: a machine may be busy
_EXIT_LIMIT = 60.0  # seconds for the interpreter to exit
_DUMP_TIMEOUT = 5.0  # seconds for a process to print its stacks
_CLOSE_TIMEOUT = 1.0  # seconds for simulators to end after the process that started them
_KILL_TIMEOUT = 5.0  # seconds for a process to end after it was killed
_STDERR = 2  # the file descriptor: `sys.stderr` may be something else in a notebook

# Signals that end a run in order; its child processes ignore them. Slurm sends SIGUSR1 or SIGUSR2
# before a time limit, and the system SIGHUP when a terminal closes.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_lock = threading.Lock()  # guards the following variables
_processes: list[subprocess.Popen] = []  # the watchdog; empty until it is needed
# Seconds by owner, while it exists; the shortest counts.
_limits: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_directories: set[str] = set()


def set_limit(owner: Any, seconds: float | None) -> None:
    """Ends this process once no Python thread has run for so many seconds; None ends the limit."""
    with _lock:
        _limits.pop(owner, None)
        if seconds is not None:
            _limits[owner] = seconds + _GRACE
        _send()


def expect_end() -> None:
    """Ends this process, if it has a watchdog, unless it exits within `_EXIT_LIMIT`."""
    if _processes:
        set_limit(expect_end, _EXIT_LIMIT)


def add_directory(path: str) -> None:
    """Makes the watchdog remove a directory, with the processes in it, when this process ends."""
    with _lock:
        _directories.add(path)
        _send()


def end_within(directory: str, timeout: float) -> None:
    """Ends the processes that were started in a directory; removes it and their shared memory.

    After `timeout` seconds it kills those that have not ended; a process that survives this (its
    file system hangs) is left after `_KILL_TIMEOUT` more.
    """
    path, deadline = os.path.realpath(directory), time.monotonic() + timeout
    shared: set[str] = set()
    while (left := within(path)) and time.monotonic() < deadline + _KILL_TIMEOUT:
        for process in left:
            with contextlib.suppress(psutil.Error):
                shared.update(m.path for m in process.memory_maps() if "/dev/shm/" in m.path)
        if time.monotonic() > deadline:
            _kill(left)
        time.sleep(0.02)
    for file in shared:
        with contextlib.suppress(OSError):
            os.unlink(file)
    shutil.rmtree(path, ignore_errors=True)
    with _lock:
        _directories.discard(directory)


def within(directory: str) -> list[psutil.Process]:
    """Returns the other processes whose working directory this is."""
    processes = psutil.process_iter(["cwd"])  # None where it belongs to another user
    return [x for x in processes if x.info["cwd"] == directory and x.pid != os.getpid()]


def kill_children() -> None:
    """Kills the children of this process, except for the watchdog."""
    helpers = {helper.pid for helper in _processes}
    _kill(child for child in psutil.Process().children() if child.pid not in helpers)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.kill()


def _send() -> None:
    """Writes a line to the watchdog; starts it if there is none."""
    if not _processes:
        _start()
    line = json.dumps([min(_limits.values(), default=math.inf), [*_directories]])
    pipe = _processes[0].stdin
    assert pipe is not None  # `subprocess.PIPE`
    with contextlib.suppress(OSError):  # it was killed
        os.write(pipe.fileno(), f"{line}\n".encode())


def _start() -> None:
    root = str(pathlib.Path(__file__).resolve().parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        f"from podracers.supervision import watchdog; watchdog.main({os.getpid()})"
    )
    _processes.append(
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal does not reach it
        )
    )
    # A handler that runs without Python: it prints all stacks, then calls `_exit` with the number
    # of the signal, 3.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], None
    libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True, chain=True)
    threading.Thread(target=_send_lines, name="watchdog", daemon=True).start()


def _send_lines() -> None:
    while expect_end not in _limits:
        with _lock:
            _send()
        time.sleep(_PERIOD)


def main(process: int) -> None:
    """Watches a process, whose lines arrive at standard input: the program of the watchdog."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    limit, directories, orphans, silent = math.inf, [], [], 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends at any moment
        while True:
            before = time.monotonic()
            if select.select([0], [], [], _PERIOD / 2)[0]:
                lines = os.read(0, 2**16).splitlines()
                if not lines:
                    break  # the pipe is closed: the process has ended
                limit, directories = json.loads(lines[-1])
                silent = 0.0
            elif os.getppid() != process:
                break  # it has ended, and a fork of it keeps the pipe open
            elif psutil.Process(process).status() not in (psutil.STATUS_STOPPED, "tracing-stop"):
                # Where all processes were suspended, `select` takes long.
                silent += min(time.monotonic() - before, _PERIOD)
            if silent > limit:
                print(
                    f"failed: for {silent:.0f} s no thread of Python has run: a call into native "
                    "code hangs, and holds the interpreter's lock (limit: Sebulba.timeout, or "
                    f"{_EXIT_LIMIT:g} s at the end)",
                    file=sys.stderr,
                    flush=True,
                )
                hung = psutil.Process(process)
                orphans = [child for child in hung.children() if child.pid != os.getpid()]
                hung.send_signal(signal.SIGQUIT)
                with contextlib.suppress(psutil.TimeoutExpired):
                    hung.wait(_DUMP_TIMEOUT)
                _kill([hung])
                break
    for directory in directories:  # first: it reads the memory maps of these processes
        end_within(directory, _CLOSE_TIMEOUT)
    _kill(orphans)
