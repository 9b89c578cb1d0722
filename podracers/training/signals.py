"""Lets a run end in order when it is asked to."""

import contextlib
import signal
import sys
import threading
from types import FrameType


class StopRequest:
    """Notes SIGTERM and SIGINT (Ctrl-C) instead of dying of them; a context manager.

    A second Ctrl-C interrupts at once, as it does without this. Outside the main thread, where
    Python allows no handlers, it notes nothing.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        # The signal may have come in the middle of a write to the same stream.
        with contextlib.suppress(RuntimeError):
            print(f"{self.signal.name}: saving a checkpoint, then leaving", file=sys.stderr)
