"""A program that is measured in its own process, so that its memory and threads are its own."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from podracers import errors

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with a JAX backend may hang


class Contender:
    """Calls `make(*arguments)` in a child process at the first request; idle between requests.

    `make` is a function of a module, whose result takes a measurement when called. The arguments
    are pickled.
    """

    def __init__(self, make: Callable[..., Callable[[], float]], *arguments: Any):
        self._here, there = _SPAWN.Pipe()
        # Not a daemon: it may start processes.
        self._process = _SPAWN.Process(target=_serve, args=(there, make, arguments))
        # The child inherits the mask: Ctrl-C reaches the parent alone, which ends the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        except BaseException:  # such as a Ctrl-C during the start
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            self.kill()
            raise
        there.close()

    def __call__(self) -> float:
        """Takes a measurement.

        Raises:
          errors.UserError, errors.RunFailure: the error of the process, in one line.
        """
        try:
            self._here.send(None)
            answer = self._here.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            code = self._process.exitcode or 0
            cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else "died"
            raise errors.RunFailure(f"the process {cause}") from error
        if isinstance(answer, errors.UserError | errors.RunFailure):
            raise answer
        return answer

    def memory(self) -> int:
        """Returns the sum of peak resident bytes of the process and its children."""
        assert self._process.pid is not None
        return peak_memory(self._process.pid)

    def kill(self) -> None:
        """Ends the process and the processes that it started."""
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it leads no session yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def peak_memory(session: int) -> int:
    """Returns the sum of peak resident bytes of the processes of a session."""
    total = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            if int(stat.read_text().rpartition(") ")[2].split()[3]) == session:
                status = stat.with_name("status").read_text()
                peak = re.search(r"VmHWM:\s*(\d+) kB", status)
                total += int(peak[1]) * 1024 if peak else 0
    return total


@contextlib.contextmanager
def together(
    makers: Mapping[str, Callable[..., Callable[[], float]]], *arguments: Any
) -> Iterator[dict[str, Contender]]:
    """Starts contenders with the same arguments, and kills them on exit."""
    with contextlib.ExitStack() as stack:
        contenders = {}
        for name, make in makers.items():
            contenders[name] = Contender(make, *arguments)
            stack.callback(contenders[name].kill)
        yield contenders


def _serve(parent: Any, make: Callable[..., Any], arguments: Any) -> None:
    os.setsid()  # the processes that it starts end with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    instance = None
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while True:
            parent.recv()
            try:
                instance = make(*arguments) if instance is None else instance
                parent.send(instance())
            except (errors.UserError, errors.RunFailure) as error:
                parent.send(type(error)(errors.first_line(error)))
            except Exception as error:
                traceback.print_exc()
                parent.send(errors.RunFailure(errors.one_line(error)))


def _end_with_parent() -> None:
    """Ends this process and its children after the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
