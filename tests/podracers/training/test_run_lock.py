"""Tests of the lock of a run directory: real processes, which die."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from podracers import errors
from podracers.training import presence, run_lock
from tests import processes

# Takes the lock, starts what may outlive it, says so, and waits.
_HOLD = """
import os, pathlib, subprocess, sys, time
from podracers.training import run_lock

lock = run_lock.RunLock(pathlib.Path(sys.argv[1]))
lock.acquire()
child = 0
if sys.argv[2] == "fork":
    begun, begins = os.pipe()
    if not (child := os.fork()):
        os.close(1)
        os.write(begins, b".")
        time.sleep(60)
    os.read(begun, 1)
if sys.argv[2] == "program":
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid
if sys.argv[2] == "inheriting":
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False).pid
if sys.argv[2] == "workers":
    import gymnasium
    from environments.gymnasium import async_vector, sync_vector

    class Slow(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(60)

    factory = sync_vector.EnvFactory(gymnasium.spec("CartPole-v1"), {}, (Slow,))
    vector = async_vector.AsyncVector(factory, [0, 1], [0, 1], 2)
    vector.reset()
    vector.send([0, 0])
    child = vector._processes[0].pid
print(child, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _holder(directory: pathlib.Path, child: str = ""):
    """A process that holds the lock; yields it, and the process that it has started."""
    command = [sys.executable, "-c", _HOLD, str(directory), child]
    process = subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.PIPE, text=True)
    started = int(process.stdout.readline())
    try:
        yield process, started
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)


def test_a_second_run_is_told_who_is_there(tmp_path):
    lock = run_lock.RunLock(tmp_path)
    lock.require_free()
    assert not list(tmp_path.iterdir())
    with _holder(tmp_path) as (process, _):
        who = f"process {process.pid} on host {re.escape(socket.gethostname())}: wait"
        for attempt in (lock.acquire, lock.require_free, lock.acquire):
            with pytest.raises(errors.UserError, match=f"'{tmp_path}' is in use by {who}"):
                attempt()
        assert process.poll() is None


@pytest.mark.parametrize("child", ["", "fork", "program", "inheriting", "workers"])
def test_a_lock_is_free_once_its_process_was_killed(tmp_path, child):
    with _holder(tmp_path, child) as (process, started):
        process.kill()
        process.wait()
        if started:
            os.kill(started, 0)  # it lives
        lock = run_lock.RunLock(tmp_path)
        lock.require_free()
        lock.acquire()
        lock.release()


def test_a_lock_is_taken_once_and_given_back(tmp_path):
    lock, other = run_lock.RunLock(tmp_path), run_lock.RunLock(tmp_path)
    lock.acquire()
    lock.acquire()
    with pytest.raises(errors.UserError, match=f"process {os.getpid()} on"):
        other.acquire()
    lock.require_free()
    lock.release()
    lock.release()
    other.acquire()
    del other  # so does a lock that nobody refers to any more
    lock.acquire()
    lock.release()


def test_a_directory_that_was_moved_is_not_there(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    lock = run_lock.RunLock(folder)
    assert lock.is_there()
    lock.acquire()
    assert lock.is_there()
    folder.rename(moved)
    assert not lock.is_there()
    folder.mkdir()
    assert not lock.is_there()
    if pathlib.Path("/proc/self/fd").exists():
        assert lock.location() == str(moved)
        shutil.rmtree(moved)
        assert lock.location() == ""
    lock.release()


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path):
    lock, other = run_lock.RunLock(tmp_path), run_lock.RunLock(tmp_path)
    lock.acquire()
    lock.path.unlink()
    assert lock.is_there()
    lock.keep()
    with pytest.raises(errors.UserError, match=f"in use by process {os.getpid()} on"):
        other.acquire()
    lock.path.unlink()
    other.acquire()
    with pytest.raises(errors.UserError, match="in use by process"):
        lock.keep()
    other.release()


def test_a_directory_that_cannot_be_looked_at_now_is_there(tmp_path, monkeypatch):
    lock = run_lock.RunLock(tmp_path)
    lock.acquire()

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(presence.os, "stat", fail)
        is_there = lock.is_there()
    assert is_there


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / run_lock.NAME).mkdir()
    with pytest.raises(errors.RunFailure, match=r"could not write '.*/\.lock': Is a directory$"):
        run_lock.RunLock(tmp_path).acquire()


def test_a_file_system_without_locks_lets_everybody_in_and_says_so(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no such file system can be mounted here
    lock, other = run_lock.RunLock(tmp_path), run_lock.RunLock(tmp_path)
    lock.require_free()
    assert not caplog.records
    lock.acquire()
    other.require_free()
    other.acquire()
    (message, _) = (record.message for record in caplog.records)
    assert message.startswith(f"the run directory '{tmp_path}' cannot be locked (No locks avail")
    assert lock.is_there() and other.is_there()
    lock.release()
    other.release()
