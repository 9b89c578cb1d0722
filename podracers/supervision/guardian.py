"""A process that watches another one from outside, and clears up behind it.

The other one says every second that it runs. `watchdog` starts it; it imports nothing heavy.
"""

import contextlib
import json
import math
import os
import select
import signal
import sys
import time

from podracers.supervision import children

_PERIOD = 0.5  # seconds between two looks
_ENDING = 5.0  # seconds that a process gets to say where it hangs
_CLOSING = 1.0  # seconds that processes get which have lost the one that started them


def watch(process: int) -> None:
    """Ends a process that falls silent, and then whatever it leaves behind: a `main`.

    Standard input brings lines of JSON: the seconds of silence that are the limit (null for none),
    and directories which belong to the process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the other one
    limit, directories, rest = math.inf, [], b""
    silent, before, left = 0.0, time.monotonic(), set()
    while True:
        ready, _, _ = select.select([0], [], [], _PERIOD)
        now = time.monotonic()
        # Where all processes were suspended, the time between two looks is long.
        silent += 0.0 if children.is_stopped(process) else min(now - before, 2 * _PERIOD)
        before = now
        if ready:
            received = os.read(0, 2**16)
            if not received:
                break
            *lines, rest = (rest + received).split(b"\n")
            if lines:
                seconds, directories = json.loads(lines[-1])
                limit, silent = math.inf if seconds is None else seconds, 0.0
        elif os.getppid() != process:
            break  # it is no more, though a child of its own may keep the pipe open
        elif silent > limit:
            left = _end(process, silent)
            break
    for directory in directories:  # first, for it looks at what these processes share
        children.end_within(directory, _CLOSING)
    children.kill(left)


def _end(process: int, seconds: float) -> set[int]:
    """Says why, ends the process, and returns what were its children."""
    print(
        f"failed: for {seconds:.0f} s no thread of Python has run: a call into native code hangs, "
        "and holds the interpreter's lock",
        file=sys.stderr,
        flush=True,
    )
    left = set(children.of(process)) - {os.getpid()}
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGHUP)  # see `watchdog`
        limit = time.monotonic() + _ENDING
        while time.monotonic() < limit:
            os.kill(process, 0)
            if select.select([0], [], [], 0.1)[0] and not os.read(0, 2**16):
                break
        else:
            os.kill(process, signal.SIGKILL)
    return left
