"""Simulators get a directory of their own, and what they start there ends with it."""

import errno
import os
import pathlib
import subprocess
import threading
import time

import pytest

from environments.envpool import scratch
from podracers import errors
from podracers.supervision import children


def test_only_what_is_started_there_works_in_it():
    directory, before = scratch.Directory(("made",)), os.getcwd()

    def start():
        pathlib.Path("made", "file").touch()
        return os.getcwd(), subprocess.Popen(["sleep", "60"])

    where, process = directory.start(start)
    assert where == directory.path and os.getcwd() == before
    assert pathlib.Path(directory.path, "made", "file").exists()
    assert children.within(directory.path) == [process.pid]
    # Ends by itself, soon: nobody kills it.
    threading.Timer(0.3, process.terminate).start()
    began = time.monotonic()
    threading.Thread(target=process.wait, daemon=True).start()
    directory.close()
    assert process.wait() == -15
    assert time.monotonic() - began < 4.0
    assert not os.path.exists(directory.path)


def test_what_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(scratch, "_CLOSING", 0.2)
    directory = scratch.Directory()
    process = directory.start(lambda: subprocess.Popen(["sleep", "60"]))
    threading.Thread(target=process.wait, daemon=True).start()
    directory.close()
    assert process.wait() == -9
    assert not os.path.exists(directory.path)


def test_what_fails_raises_where_it_was_asked_for():
    directory = scratch.Directory()
    with pytest.raises(ZeroDivisionError):
        directory.start(lambda: 1 // 0)
    directory.close()
    assert not os.path.exists(directory.path)


def test_without_permission_the_simulator_starts_in_the_working_directory(tmp_path, monkeypatch):
    """Docker's default seccomp profile answers `unshare` with EPERM."""
    monkeypatch.setattr(scratch, "_unshare_working_directory", lambda: errno.EPERM)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()  # by an earlier run
    directory = scratch.Directory(("made", "new"))
    with pytest.warns(UserWarning, match=rf"not permitted.*writes files into '{tmp_path}'"):
        assert directory.start(os.getcwd) == str(tmp_path)
    directory.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "new"]
    assert not os.path.exists(directory.path)


@pytest.mark.filterwarnings("ignore:a thread cannot have")
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_unshare_working_directory", lambda: errno.EPERM)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").touch()
    directory = scratch.Directory(("made",))
    with pytest.raises(errors.UserError, match=r"needs the directory '.*/made', which cannot be"):
        directory.start(os.getcwd)
    directory.close()
