"""Tests of the folder of a run, and of its lock: real processes, which are killed."""

import errno
import fcntl
import json
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
from podracers.checkpoints import storage
from podracers.training import run_directory
from tests import processes


def test_makes_a_folder_that_is_not_used(tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "runs" / "one")
    directory.create(dry_run=True)
    assert not list(tmp_path.iterdir())
    directory.create()
    other = run_directory.RunDirectory(directory.path)
    with pytest.raises(errors.UserError, match="in use by process"):
        other.create()
    directory.lock.release()
    other.create()  # a lock file alone is no use
    storage.write(directory.config, "SEED = 0\n")
    for dry_run in (True, False):
        with pytest.raises(errors.UserError, match="continue it with --resume"):
            other.create(dry_run)
        for path in (directory.config, directory.config / "run"):
            with pytest.raises(errors.UserError, match="cannot make the run directory"):
                run_directory.RunDirectory(path).create(dry_run)


def test_writes_whole_files_or_none(tmp_path, monkeypatch):
    directory = run_directory.RunDirectory(tmp_path)
    storage.write(directory.config, "SEED = 0\n")

    def fail(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", fail)
    with pytest.raises(errors.RunFailure, match=r"config\.gin.*No space left"):
        storage.write(directory.config, "SEED = 1\n")
    assert directory.config.read_text() == "SEED = 0\n"


def test_two_writers_of_a_file_at_once_both_succeed(tmp_path, monkeypatch):
    """Workers of a sweep end together."""
    replace = pathlib.Path.replace

    def interrupted(partial, file):
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "replace", replace)
            storage.write(file, b"other")
        return replace(partial, file)

    monkeypatch.setattr(pathlib.Path, "replace", interrupted)
    storage.write(tmp_path / "best.gin", "this")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["this"]


def test_the_first_configuration_up_to_a_step_is_kept(tmp_path):
    directory = run_directory.RunDirectory(tmp_path)
    storage.write(directory.config, "a")
    for text, step in (("b", 64), ("c", 64), ("d", 128)):
        directory.replace_config(text, step)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"config.64.gin": "a", "config.128.gin": "c", "config.gin": "d"}


def test_a_damaged_file_is_one_line(tmp_path):
    directory = run_directory.RunDirectory(tmp_path)
    directory.summary.write_text(json.dumps({"seed": 3}))
    assert directory.read_summary() == {"seed": 3}
    directory.summary.write_text('{"seed": ')
    directory.config.write_bytes(b"SEED = \xff\xfe\n")
    for read, kind, name in (
        (directory.read_config, errors.UserError, "config.gin"),
        (directory.read_summary, errors.RunFailure, "summary.json"),
    ):
        with pytest.raises(kind, match=f"^(cannot|could not) read '.*{name}': .*$"):
            read()
        (tmp_path / name).unlink()
        with pytest.raises(kind, match=f"^(cannot|could not) read '.*{name}': .*No such file.*$"):
            read()


# Takes the lock, starts two programs that outlive it, prints their process ids, and waits.
_HOLD = """
import os, pathlib, subprocess, sys, time
from podracers.training import run_directory

lock = run_directory.Lock(pathlib.Path(sys.argv[1]))
lock.acquire()
begun, begins = os.pipe()
if not (copy := os.fork()):
    os.close(1)
    os.write(begins, b".")
    time.sleep(60)
os.read(begun, 1)
inheriting = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(copy, inheriting.pid, flush=True)
time.sleep(60)
"""


def test_a_lock_is_free_once_its_process_was_killed(tmp_path):
    """Until then errors name its process; copies and children do not keep it."""
    lock = run_directory.Lock(tmp_path)
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.PIPE, text=True)
    children = [int(child) for child in holder.stdout.readline().split()]
    try:
        who = f"process {holder.pid} on host {re.escape(socket.gethostname())}: wait"
        for _ in range(2):
            with pytest.raises(errors.UserError, match=f"'{tmp_path}' is in use by {who}"):
                lock.acquire()
        holder.kill()
        holder.wait()
        for child in children:
            os.kill(child, 0)  # it lives
        lock.acquire()
    finally:
        holder.kill()
        holder.communicate()
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("fate", ["moved", "removed", "replaced", "lock removed"])
def test_a_directory_that_was_moved_removed_or_replaced_is_noticed(tmp_path, fate):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    lock = run_directory.Lock(folder)
    lock.require_there()
    lock.acquire()
    lock.require_there()
    if fate == "lock removed":
        (folder / run_directory.LOCK).unlink()
    else:
        folder.rename(moved)
    if fate == "removed":
        shutil.rmtree(moved)
    if fate == "replaced":
        folder.mkdir()
        run_directory.Lock(folder).acquire()
    place = "removed" if "removed" in fate else f"moved to '{moved}/.lock'"
    message = f"^'{folder}/.lock' was {place} while the run wrote"
    with pytest.raises(errors.RunFailure, match=message):
        lock.require_there()


def test_a_directory_that_cannot_be_examined_now_counts_as_there(tmp_path, monkeypatch):
    lock = run_directory.Lock(tmp_path)
    lock.acquire()
    examined = []

    def fail(path, **_):
        examined.append(pathlib.Path(path))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, "stat", fail)
        lock.require_there()
    assert tmp_path / run_directory.LOCK in examined


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / run_directory.LOCK).mkdir()
    with pytest.raises(errors.RunFailure, match=r"could not write '.*/\.lock': Is a directory$"):
        run_directory.Lock(tmp_path).acquire()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no such file system can be mounted here
    locks = [run_directory.Lock(tmp_path) for _ in range(2)]
    for lock in locks:
        lock.acquire()
        lock.require_there()
    message = f"the run directory '{tmp_path}' cannot be locked (No locks avail"
    assert [record.message[: len(message)] for record in caplog.records] == [message] * 2
