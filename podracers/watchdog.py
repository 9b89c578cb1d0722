"""Ends a process that Python cannot end: one call hangs, and holds the interpreter's lock.

No other thread runs then, so nobody can notice, and no signal is heard. EnvPool's constructor is
such a call: it waits for every simulator to come up.
"""

import contextlib
import faulthandler
import threading
from collections.abc import Iterator

_STDERR = 2  # the file descriptor: `sys.stderr` may be something else in a notebook

_lock = threading.Lock()
_watched = 0


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Exits the process with code 1, and with every thread's stack on stderr, after some seconds.

    For what takes a moment, normally: a process that is suspended meanwhile, and resumed later than
    that, ends as well. Where several threads are inside, the one that came last sets the limit.
    """
    global _watched  # noqa: PLW0603  (there is one timer in a process)
    with _lock:
        _watched += 1
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        with _lock:
            _watched -= 1
            if not _watched:
                faulthandler.cancel_dump_traceback_later()
