"""Tests of the last resort: in processes of their own, which it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from podracers.supervision import children

PROGRAM = """
import atexit, ctypes, os, pathlib, signal, subprocess, sys, tempfile, threading, time
from podracers.supervision import watchdog

watchdog._GRACE = 1.0

def seize(seconds=60):  # sleeps, and lets no other thread run
    ctypes.PyDLL(None).sleep(seconds)

{body}
print("alive", flush=True)
"""
LEAVE = """
directory = tempfile.mkdtemp()
watchdog.add_directory(os.path.realpath(directory))
child = subprocess.Popen(["sleep", "60"], cwd=directory, process_group=0)
print(directory, child.pid, flush=True)
"""


def _start(body):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(body):
    process = _start(body)
    out, err = process.communicate(timeout=50)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _assert_cleared(out):
    directory, child = out.splitlines()[0].split()
    assert not os.path.exists(directory)
    assert not _is_alive(int(child))


def _is_alive(pid):
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_what_ends_in_time_is_let_alone():
    ended = _run("""
watch = watchdog.Watch(2.0)
seize(1)
time.sleep(4.0)  # other threads run
watch.end()
seize(4)  # what is over has no limit
""")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_a_call_that_lets_nobody_else_run_ends_with_the_process_and_what_it_started():
    began = time.monotonic()
    ended = _run(LEAVE + "watchdog.Watch(1.0)\nseize()")
    assert time.monotonic() - began < 30.0
    assert ended.returncode == 1
    assert ended.stderr.startswith("failed: for ")
    assert "no thread of Python has run" in ended.stderr.splitlines()[0]
    assert "in seize" in ended.stderr
    _assert_cleared(ended.stdout)


@pytest.mark.slow
def test_where_hangups_are_ignored_the_process_is_killed():
    ended = _run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from podracers.supervision import guardian
watchdog.Watch(1.0)
seize()
""")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr.count("\n") == 1


def test_time_in_which_the_process_is_suspended_does_not_count():
    process = _start("watchdog.Watch(1.0)\nprint('ready', flush=True)\ntime.sleep(3.0)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out, err) == (0, "alive\n", "")


@pytest.mark.parametrize("way", ["exit", "kill"])
def test_what_a_process_leaves_is_cleared_up_however_it_ends(way):
    ends = {"exit": "os._exit(0)", "kill": "os.kill(os.getpid(), signal.SIGKILL)"}
    _assert_cleared(_run(LEAVE + ends[way]).stdout)


def test_the_latest_directories_are_what_the_guardian_knows():
    """A line that takes long to build is not sent after a newer one."""
    ended = _run("""
dumps = watchdog.json.dumps

def slow_dumps(message):
    time.sleep(1.0 if len(message[1]) == 1 else 0.0)
    return dumps(message)

watchdog.json.dumps = slow_dumps
watchdog._guardian().be_silent()
directories = [os.path.realpath(tempfile.mkdtemp()) for _ in range(2)]
threads = [threading.Thread(target=watchdog.add_directory, args=[each]) for each in directories]
for thread in threads:
    thread.start()
    time.sleep(0.2)
for thread in threads:
    thread.join()
print(*directories)
""")
    directories = ended.stdout.splitlines()[0].split()
    assert len(directories) == 2, ended.stderr
    assert not any(map(os.path.exists, directories))


def test_a_forked_copy_does_not_keep_the_pipe_to_the_guardian():
    ended = _run("""
watchdog.Watch(30.0)
pipe = watchdog._guardian().process.stdin.fileno()
if not (child := os.fork()):
    try:
        os.fstat(pipe)
    except OSError:
        os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
os.fstat(pipe)
""")
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


def test_processes_that_no_signal_ends_are_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(children, "_KILL_TIMEOUT", 0.2)
    monkeypatch.setattr(children, "within", lambda directory: [os.getpid()])
    monkeypatch.setattr(children, "kill", lambda processes: None)
    monkeypatch.setattr(children, "_shared_memory", lambda process: set())
    directory = tmp_path / "theirs"
    directory.mkdir()
    children.end_within(str(directory), 0.1)
    assert not directory.exists()


def test_the_end_of_the_interpreter_has_a_limit():
    ended = _run("""
watchdog.Watch(1.0).end()
atexit.register(time.sleep, 60)
watchdog.expect_end()
""")
    assert ended.returncode == 1
    assert "alive" in ended.stdout
    assert "no thread of Python has run" in ended.stderr


def test_the_guardian_starts_where_only_an_import_hook_finds_the_project(tmp_path):
    program = """
import subprocess
from podracers.supervision import watchdog
guardian = watchdog._Guardian()
try:
    guardian.process.wait(2.0)
    raise SystemExit("the guardian has ended")
except subprocess.TimeoutExpired:
    pass
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
