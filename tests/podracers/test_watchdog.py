"""Tests of the last resort: in processes of their own, which it ends."""

import subprocess
import sys

PROGRAM = """
import ctypes, threading, time
from podracers import watchdog

def seize():  # sleeps, and lets no other thread run
    ctypes.PyDLL(None).sleep(60)

with watchdog.limited(0.3):
    pass
time.sleep(0.6)  # what is over has no limit
threading.Timer(0.2, lambda: None).start()
with watchdog.limited(60.0), watchdog.limited({limit}):
    pass
print("alive", flush=True)
{body}
"""


def _run(body, limit=60.0):
    program = PROGRAM.format(body=body, limit=limit)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )


def test_what_ends_in_time_is_let_alone():
    ended = _run("", limit=0.2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_a_call_that_lets_nobody_else_run_ends_with_the_process():
    ended = _run("with watchdog.limited(0.5):\n    seize()")
    assert ended.returncode == 1
    assert ended.stdout == "alive\n"
    assert "in seize" in ended.stderr
