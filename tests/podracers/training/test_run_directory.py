"""Tests of the folder of a run, and of its lock: real processes, which are killed."""

import errno
import fcntl
import importlib
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
from podracers.training import run_directory, storage
from tests import processes


def test_makes_a_folder_that_is_not_used(tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "runs" / "one")
    directory.create()
    directory.lock.acquire()
    other = run_directory.RunDirectory(directory.path)
    other.create()  # a lock alone is no use
    directory.write(directory.config, "SEED = 0\n")
    with pytest.raises(errors.UserError, match="in use by process"):
        other.create()
    directory.lock.release()
    with pytest.raises(errors.UserError, match="continue it with --resume"):
        other.create()
    for path in (directory.config, directory.config / "run"):
        with pytest.raises(errors.UserError, match="run directory"):
            run_directory.RunDirectory(path).create()


def test_names_the_nearest_run(tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "snake-3")
    directory.create()
    directory.write(directory.config, "")
    directory.require()
    with pytest.raises(errors.UserError, match=r"no config\.gin.*did you mean '.*/snake-3'"):
        run_directory.RunDirectory(tmp_path / "snake-2").require()


def test_writes_whole_files_or_none(tmp_path, monkeypatch):
    directory = run_directory.RunDirectory(tmp_path)
    directory.write(directory.config, "SEED = 0\n")

    def fail(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", fail)
    with pytest.raises(errors.RunFailure, match=r"config\.gin.*No space left"):
        directory.write(directory.config, "SEED = 1\n")
    assert directory.config.read_text() == "SEED = 0\n"


def test_provenance():
    found = run_directory.provenance()
    assert (found["device"], found["platform"]) == ("4 x cpu", "cpu")
    assert {"python", "jax", "flax", "optax", "podracers"} <= found["versions"].keys()


def _git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(name="own")
def _own(tmp_path, monkeypatch):
    """Imports a package and a module of the user, and yields the checkout."""
    root = tmp_path / "mine"
    (root / "my_games").mkdir(parents=True)
    (root / "my_games" / "__init__.py").write_text("")
    (root / "my_games" / "corridor.py").write_text("LENGTH = 3\n")
    (root / "my_agent.py").write_text("")
    _git(root, "init", "--quiet")
    _git(root, "add", "-A")
    _git(root, "commit", "--quiet", "-m", "first")
    # Outside of any checkout.
    (tmp_path / "my_script.py").write_text("")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_games", "my_games.corridor", "my_agent", "my_script"):
        importlib.import_module(name)
    yield root
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def test_provenance_has_the_commits_of_the_users_own_code(own):
    head = _git(own, "rev-parse", "HEAD")
    assert run_directory.provenance()["other_commits"] == {"my_agent": head, "my_games": head}
    (own / "my_games" / "late.py").write_text("")  # not tracked
    importlib.invalidate_caches()
    importlib.import_module("my_games.late")
    found = run_directory.provenance()["other_commits"]
    assert found == {"my_agent": head, "my_games": f"{head}-dirty"}
    (own / "my_games" / "corridor.py").write_text("LENGTH = 4\n")
    found = run_directory.provenance()["other_commits"]
    assert set(found.values()) == {f"{head}-dirty"}
    _git(own, "update-ref", "-d", "HEAD")
    found = run_directory.provenance()["other_commits"]
    assert found == {"my_agent": None, "my_games": None}


def test_recorded_results_are_no_change_of_this_repository(own, monkeypatch):
    (own / "docs").mkdir()
    results = own / "docs" / "results.json"
    results.write_text("[]")
    _git(own, "add", "-A")
    _git(own, "commit", "--quiet", "-m", "second")
    head = _git(own, "rev-parse", "HEAD")
    results.write_text("[1]")
    assert run_directory._commit(own) == f"{head}-dirty"
    monkeypatch.setattr(run_directory, "_ROOT", own)
    assert run_directory._commit(own) == head


def test_a_configuration_that_is_no_text_is_a_mistake(tmp_path):
    directory = run_directory.RunDirectory(tmp_path)
    directory.config.write_bytes(b"SEED = \xff\xfe\n")
    with pytest.raises(errors.UserError, match=r"config\.gin' is damaged: byte 7 is no text$"):
        directory.read_config()
    directory.config.unlink()
    with pytest.raises(errors.UserError, match=r"cannot read '.*config\.gin': No such file"):
        directory.read_config()


SUMMARY = {
    "evaluation": {"return": float("nan"), "return_by_seed": {"3": 1.0}, "episodes": 8},
    "random_policy_return": -0.5,
    "environment_steps": 640,
    "wall_time_s": 1.5,
    "steps_per_second": None,
    "first_dispatch_s": 1,
    "seed": 3,
    "device": "1 x cpu",
    "platform": "cpu",
    "host_cores": 2,
    "versions": {"jax": "0.1"},
    "commit": None,
}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "Unterminated"),
        (lambda text: text.replace("640", '"640"'), "'environment_steps' is '640'"),
        (lambda text: text.replace('"seed": 3,', ""), "'seed' is None"),
        (lambda text: text.replace('{"3": 1.0}', "[]"), "'evaluation.return_by_seed' is []"),
    ],
)
def test_a_damaged_summary_is_one_line(tmp_path, damage, reason):
    directory = run_directory.RunDirectory(tmp_path)
    directory.summary.write_text(json.dumps(SUMMARY))
    assert directory.read_summary()["versions"] == {"jax": "0.1"}
    directory.summary.write_text(damage(directory.summary.read_text()))
    with pytest.raises(errors.RunFailure, match=r"summary\.json' is damaged \(") as caught:
        directory.read_summary()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


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
    lock.require_free()
    assert not list(tmp_path.iterdir())
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.PIPE, text=True)
    children = [int(child) for child in holder.stdout.readline().split()]
    try:
        who = f"process {holder.pid} on host {re.escape(socket.gethostname())}: wait"
        for attempt in (lock.acquire, lock.require_free, lock.acquire):
            with pytest.raises(errors.UserError, match=f"'{tmp_path}' is in use by {who}"):
                attempt()
        assert holder.poll() is None
        holder.kill()
        holder.wait()
        for child in children:
            os.kill(child, 0)  # it lives
        lock.require_free()
        lock.acquire()
        lock.release()
    finally:
        holder.kill()
        holder.communicate()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_lock_is_taken_once_and_given_back(tmp_path):
    lock, other = run_directory.Lock(tmp_path), run_directory.Lock(tmp_path)
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


@pytest.mark.parametrize("fate", ["moved", "removed", "replaced"])
def test_a_directory_that_was_moved_removed_or_replaced_is_noticed(tmp_path, fate):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    lock = run_directory.Lock(folder)
    lock.acquire()
    lock.require_there()
    folder.rename(moved)
    if fate == "removed":
        shutil.rmtree(moved)
    if fate == "replaced":
        folder.mkdir()
    assert not lock.is_there()
    place = "removed" if fate == "removed" else f"moved to '{moved}'"
    with pytest.raises(errors.RunFailure, match=f"^'{folder}' was {place} while the run wrote"):
        lock.require_there()
    lock.release()


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path):
    lock, other = run_directory.Lock(tmp_path), run_directory.Lock(tmp_path)
    lock.acquire()
    (tmp_path / run_directory.LOCK).unlink()
    lock.require_there()
    with pytest.raises(errors.UserError, match=f"in use by process {os.getpid()} on"):
        other.acquire()
    (tmp_path / run_directory.LOCK).unlink()
    other.acquire()
    with pytest.raises(errors.UserError, match="in use by process"):
        lock.require_there()
    other.release()


def test_a_directory_that_cannot_be_examined_now_counts_as_there(tmp_path, monkeypatch):
    lock = run_directory.Lock(tmp_path)
    lock.acquire()

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, "stat", fail)
        is_there = lock.is_there()
    assert is_there


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / run_directory.LOCK).mkdir()
    with pytest.raises(errors.RunFailure, match=r"could not write '.*/\.lock': Is a directory$"):
        run_directory.Lock(tmp_path).acquire()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no such file system can be mounted here
    lock, other = run_directory.Lock(tmp_path), run_directory.Lock(tmp_path)
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
