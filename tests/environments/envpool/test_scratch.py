"""Simulators run in a directory of their own; processes that they start there end with it."""

import errno
import os
import pathlib
import subprocess
import threading

import pytest

from environments.envpool import scratch
from podracers.supervision import watchdog
from tests import processes


@pytest.mark.parametrize(
    ("delay", "closing", "code"),
    [(0.3, processes.PATIENCE, -15), (processes.PATIENCE, 1.0, -9)],
    ids=["ends by itself", "is killed"],
)
def test_only_the_simulator_works_in_its_directory(delay, closing, code, monkeypatch):
    monkeypatch.setattr(scratch, "_CLOSING", closing)
    directory, before = scratch.Directory(("made",)), os.getcwd()

    def start():
        pathlib.Path("made", "file").touch()
        return os.getcwd(), subprocess.Popen(["sleep", "1000"])

    where, process = directory.start(start)
    assert where == directory.path and os.getcwd() == before
    assert pathlib.Path(directory.path, "made", "file").exists()
    assert [child.pid for child in watchdog.within(directory.path)] == [process.pid]
    timer = threading.Timer(delay, process.terminate)
    timer.start()
    threading.Thread(target=process.wait, daemon=True).start()
    directory.close()
    timer.cancel()
    assert process.wait() == code
    assert not os.path.exists(directory.path)


def test_an_error_of_the_simulator_is_raised_by_start():
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
