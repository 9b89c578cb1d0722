"""Connections between processes of plain Python: who is lost, who is not, who is turned away."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from podracers.hosts import peers
from tests import groups

_PROGRAM = """
import sys
from podracers.hosts import peers
process, port, timeout = int(sys.argv[1]), int(sys.argv[2]), 3.0
if process == 0:
    peers.lead("127.0.0.1", port, 2, timeout)
    peers.begin("begin")
else:
    assert peers.follow(process, "127.0.0.1", port, 2, timeout) == "begin"
print("ready", flush=True)
sys.stdin.readline()
peers.leave()
print("left", flush=True)
"""


@pytest.fixture(name="start")
def _start():
    """Starts a process by its number; all are ended with the test."""
    port, started = groups.free_port(), []

    def start(process):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", _PROGRAM, str(process), str(port)]
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    start.port = port
    yield start
    for each in started:
        each.kill()
        each.communicate()


def _assert_ready(*processes):
    for each in processes:
        assert each.stdout.readline() == "ready\n", each.communicate()[1]


def _assert_leave(*processes):
    for each in processes:
        out, err = each.communicate("leave\n", timeout=30)
        assert (each.returncode, out, err) == (0, "left\n", "")


@pytest.mark.slow
def test_a_group_that_was_suspended_as_a_whole_goes_on(start):
    group = start(0), start(1)
    _assert_ready(*group)
    for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 2.0)):
        for each in group:
            each.send_signal(number)
        time.sleep(seconds)
    _assert_leave(*group)


def test_one_that_is_suspended_alone_is_lost(start):
    first, second = start(0), start(1)
    _assert_ready(first, second)
    second.send_signal(signal.SIGSTOP)
    assert first.wait(timeout=30) == 1
    line = "failed: process 1 was lost: nothing was heard of it for 3 s\n"
    assert first.stderr.read() == line


_NONSENSE = (b"[" * 100_000, b"null", b"[]", b'["hello"]', b'["hello", [], {}]', b"GET / HTTP")


def test_whoever_speaks_nonsense_is_turned_away(start):
    first = start(0)
    for message in _NONSENSE:
        with peers._call("127.0.0.1", start.port, 10.0) as stranger:
            stranger.send_bytes(message)
            with contextlib.suppress(EOFError, ConnectionError):  # it was closed
                assert b"no process [] is expected" in stranger.recv_bytes()
    second = start(1)
    _assert_ready(first, second)
    _assert_leave(first, second)


def test_process_0_is_known_before_the_thread_that_reads_runs(monkeypatch):
    known = []
    monkeypatch.setattr(peers._Peers, "_run", lambda self: known.extend(self._heard))
    made = peers._Peers(1, 2, 3.0, connections={0: None})
    made._thread.join()
    assert known == [0]
