"""The request of a signal to end a run."""

import contextlib
import signal
import sys
import threading
from types import FrameType

from podracers.supervision import watchdog


class StopRequest:
    """Records `watchdog.STOP_SIGNALS` instead of ending the process; a context manager.

    True once a signal has arrived. A second Ctrl-C raises `KeyboardInterrupt`. Outside the main
    thread, where Python allows no signal handlers, it is never true.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in watchdog.STOP_SIGNALS:
                # `nohup` ignores SIGHUP; a program around this one may handle the others.
                is_default = signal.getsignal(number) is signal.SIG_DFL
                if is_default or number in (signal.SIGTERM, signal.SIGINT):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        # The signal may have interrupted a write to the same stream, or ended its reader.
        with contextlib.suppress(RuntimeError, OSError):
            print(f"{self.signal.name}: saving a checkpoint, then leaving", file=sys.stderr)
