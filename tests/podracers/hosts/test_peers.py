"""Tests of connections between processes, without JAX: faults, and the cause that ends all.

All groups of processes run at the same time, because they wait most of the time.
"""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from podracers.hosts import peers
from tests import groups, processes

TIMEOUT = 6  # seconds, where a process is missing or silent
PROGRAM = """
import os, signal, sys, threading, time
from podracers import errors
from podracers.hosts import peers

process, port, count = map(int, sys.argv[1:])
print("started", flush=True)
sys.stdin.readline()  # all begin together
peers._PATIENCE = 0.1  # times 30 s
peers._LINGER_TIME = 0.5

def raise_(condition, error):
    if condition:
        raise error

def signal_self(condition, number):
    if condition:
        os.kill(os.getpid(), number)

def begin(timeout=30, count=count):
    peers.connect(process, count, "127.0.0.1", port, "127.0.0.1", timeout)
    print("ready", flush=True)

def agree(times=100):  # each waits for a second
    for _ in range(times):
        peers.advance()
        time.sleep(1.0)

def main():
    BODY

try:
    main()
except (errors.UserError, errors.RunFailure) as error:
    peers.fail(str(error), error.exit_code)
    print(f"{'error' if error.exit_code == 2 else 'failed'}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
peers.leave()
print("left", flush=True)
"""
FULL = "errors.RunFailure('the disk is full')"
LOST = "failed: process {} was lost: it closed its connection"
# By name: number of processes, body, and by process its exit code and a part of stderr.
CASES = {
    "fails": (
        3,
        f"begin(); raise_(process == 2, {FULL}); agree()",
        {
            0: (1, "failed: process 2: the disk is full"),
            1: (1, "failed: process 2: the disk is full"),
            2: (1, "failed: the disk is full"),
        },
    ),
    "process 0 fails": (
        3,
        "begin(); raise_(process == 0, errors.UserError('no such option')); agree()",
        dict.fromkeys(range(3), (2, "error: ")),
    ),
    "is killed": (
        3,
        "begin(); signal_self(process == 1, signal.SIGKILL); agree()",
        {0: (1, LOST.format(1)), 1: (-9, ""), 2: (1, LOST.format(1))},
    ),
    "process 0 is killed": (
        2,
        "begin(); signal_self(process == 0, signal.SIGKILL); agree()",
        {0: (-9, ""), 1: (1, LOST.format(0))},
    ),
    "is silent": (
        2,
        "peers._PATIENCE = 10; "
        f"begin({TIMEOUT}); signal_self(process == 1, signal.SIGSTOP); agree()",
        {0: (1, f"failed: process 1 was lost: no message came for {TIMEOUT} s")},
    ),
    "loops": (
        3,
        "begin(); agree(1 if process == 1 else 2); time.sleep(60)",
        dict.fromkeys(range(3), (1, "failed: process 1 makes no progress: the others have waited")),
    ),
    "is busy": (
        2,
        """
    begin()
    for _ in range(5 if process == 1 else 0):
        peers.touch()
        time.sleep(1.0)
    peers.advance()
    time.sleep(1.0 if process == 1 else 6.0)
""",
        {0: (0, ""), 1: (0, "")},
    ),
    "saves": (
        2,
        f"""
    begin()
    raise_(process == 1, {FULL})
    written = []
    peers.finish_first(lambda: not written)
    threading.Timer(2.0, lambda: (print("written", flush=True), written.append(1))).start()
    agree()
""",
        {0: (1, "failed: process 1: the disk is full"), 1: (1, "failed: the disk is full")},
    ),
    "is missing": (
        3,
        f"begin({TIMEOUT}) if process != 1 else None",
        {
            0: (1, "no message came from process 1: process 0 listens on 127.0.0.1:"),
            2: (1, f"failed: process 0: within {TIMEOUT} s no message came from process 1"),
        },
    ),
    "process 0 is missing": (
        2,
        f"begin({TIMEOUT}) if process else None",
        {1: (1, f"within {TIMEOUT} s no message came from process 0 at 127.0.0.1:")},
    ),
    "is lost before all have connected": (
        3,
        """
    if process == 1:
        peers._Peers.await_begin = lambda self: signal_self(True, signal.SIGKILL)
    begin() if process != 2 else None
""",
        {0: (1, LOST.format(1))},
    ),
    "counts differently": (
        2,
        f"begin({TIMEOUT}, count=2 + process)",
        {0: (1, "no message came from process 1"), 1: (2, "--num_processes is 3 here, and 2 in")},
    ),
}


def _start(body, count, process, port):
    program = PROGRAM.replace("BODY", body)
    command = [sys.executable, "-c", program, process, port, count]
    return processes.spawn(command, stdin=subprocess.PIPE)


def _begin(*group):
    """Lets processes begin together, once all of them have imported their modules."""
    for process in group:
        assert process.stdout.readline() == "started\n", process.communicate()[1]
    for process in group:
        process.stdin.write("begin\n")
        process.stdin.flush()


@pytest.fixture(scope="module", name="ended")
def _ended():
    """The exit code, stdout and stderr of each process of each case: `ended[name][process]`."""
    started = {}
    for name, (count, body, _) in CASES.items():
        port = groups.free_port()
        started[name] = [_start(body, count, number, port) for number in range(count)]
    for group in started.values():
        _begin(*group)
    ended = {}
    for name, group in started.items():
        ended[name] = {}
        for number in CASES[name][2]:
            out, err = group[number].communicate(timeout=processes.PATIENCE)
            ended[name][number] = group[number].returncode, out, err
        for process in group:
            process.kill()
            process.communicate()
    return ended


@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_all_processes_with_the_first_cause(ended, name):
    for number, (code, phrase) in CASES[name][2].items():
        actual, out, err = ended[name][number]
        assert actual == code, (number, err)
        assert phrase in err
        assert err.count("\n") == (0 if code in (0, -9) else 1), err
        assert ("left" in out) == (code == 0)
    if name == "saves":
        assert "written" in ended[name][0][1]


@pytest.fixture(name="start")
def _start_two():
    """Starts a process of two by its number; all are ended with the test."""
    port, started = groups.free_port(), []

    def start(process, timeout):
        started.append(_start(f"begin({timeout}); sys.stdin.readline()", 2, process, port))
        return started[-1]

    start.port = port
    yield start
    for process in started:
        process.kill()
        process.communicate()


def _assert_ready(*group):
    for process in group:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]


def _assert_leave(*group):
    for process in group:
        out, err = process.communicate("leave\n", timeout=processes.PATIENCE)
        assert (process.returncode, out, err) == (0, "left\n", "")


def test_suspending_all_processes_is_no_failure(start):
    group = start(0, 2.0), start(1, 2.0)
    _begin(*group)
    _assert_ready(*group)
    for number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 1.0)):
        for process in group:
            process.send_signal(number)
        time.sleep(seconds)
    _assert_leave(*group)


def test_other_connections_are_refused(start):
    """They send nothing (a port scanner), nonsense, or the number of a process of another run."""
    first, second = (start(number, processes.PATIENCE) for number in range(2))
    _begin(first)
    silent = peers._call("127.0.0.1", start.port, processes.PATIENCE)
    nonsense = (b"[" * 100_000, b"null", b"[]", b'["hello"]', b'["hello", [], {}]', b"GET / HTTP")
    for message in nonsense:
        with peers._call("127.0.0.1", start.port, processes.PATIENCE) as stranger:
            stranger.send_bytes(message)
            with contextlib.suppress(EOFError, ConnectionError):  # it was closed
                assert b"no process [] is expected" in stranger.recv_bytes()
    _begin(second)
    _assert_ready(first, second)
    _assert_leave(first, second)
    silent.close()
