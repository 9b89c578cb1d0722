"""Tests of the watchdog, in processes of their own, most of which it ends."""

import os
import signal
import sys
import time

import psutil
import pytest

from podracers.supervision import watchdog
from tests import processes

PROGRAM = """
import atexit, ctypes, os, signal, subprocess, tempfile, time
from podracers.supervision import watchdog

watchdog._GRACE = 1.0

def hang(seconds=60):  # sleeps, and lets no other thread run
    ctypes.PyDLL(None).sleep(seconds)

def leave():  # two scratch directories, a child in one of them and a child elsewhere
    directories = [os.path.realpath(tempfile.mkdtemp()) for _ in range(2)]
    for folder in directories:
        watchdog.add_directory(folder)
    null = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    places = (directories[0], "/")
    pids = [subprocess.Popen(["sleep", "60"], cwd=folder, **null).pid for folder in places]
    print(*directories, *pids, flush=True)

"""
BODIES = {
    "hang": "leave(); watchdog.set_limit(hang, 1.0); hang()",
    "hang with handlers": """
for number in watchdog.STOP_SIGNALS:  # as a run has
    signal.signal(number, lambda *_: None)
watchdog.set_limit(hang, 1.0)
hang()
""",
    "exit": "leave(); os._exit(0)",
    "kill": "leave(); os.kill(os.getpid(), signal.SIGKILL)",
    "slow exit": """
watchdog._EXIT_LIMIT = 1.0
watchdog.set_limit(hang, 60.0)
watchdog.set_limit(hang, None)
atexit.register(time.sleep, 60)
watchdog.expect_end()
""",
    "in time": """
watchdog.set_limit(hang, 2.0)
hang(1)
time.sleep(4)  # other threads run
watchdog.set_limit(hang, None)
hang(4)
print("alive")
""",
}


def _start(body):
    # The watchdog finds its modules from anywhere.
    return processes.spawn([sys.executable, "-c", PROGRAM + body], cwd="/")


@pytest.fixture(scope="module", name="ended")
def _ended():
    """All programs, which run at the same time: `ended[name]`."""
    started = {name: _start(body) for name, body in BODIES.items()}
    return {name: processes.finish(process, None) for name, process in started.items()}


@pytest.mark.parametrize("name", ["hang", "slow exit", "hang with handlers"])
def test_a_call_that_holds_the_lock_too_long_ends_the_process_with_its_stacks(ended, name):
    assert ended[name].returncode == 3
    cause, *stacks = ended[name].stderr.splitlines()
    assert cause.startswith("failed: for ") and "no thread of Python has run" in cause
    assert "Sebulba.timeout" in cause
    assert any("most recent call first" in line for line in stacks)
    assert any("in hang" in line for line in stacks) == ("hang" in name)


def test_calls_within_the_limit_or_without_one_continue(ended):
    assert (ended["in time"].returncode, ended["in time"].stdout) == (0, "alive\n")
    assert ended["in time"].stderr == ""


@pytest.mark.parametrize("name", ["hang", "exit", "kill"])
def test_scratch_directories_and_their_processes_are_removed_at_any_end(ended, name):
    *directories, within, elsewhere = ended[name].stdout.split()
    assert not any(map(os.path.exists, directories))
    assert not processes.is_alive(int(within))
    if processes.is_alive(int(elsewhere)):
        os.kill(int(elsewhere), signal.SIGKILL)
        assert name != "hang"


def test_time_in_which_the_process_is_suspended_does_not_count():
    process = _start("watchdog.set_limit(hang, 1.0); print('ready', flush=True); time.sleep(3.0)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=processes.PATIENCE) == ("", "")
    assert process.returncode == 0


def test_processes_that_no_signal_ends_are_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "_KILL_TIMEOUT", 0.2)
    monkeypatch.setattr(watchdog, "within", lambda directory: [psutil.Process()])
    monkeypatch.setattr(watchdog, "_kill", lambda processes: None)
    directory = tmp_path / "theirs"
    directory.mkdir()
    watchdog.end_within(str(directory), 0.1)
    assert not directory.exists()
