"""A contender that is measured in a process of its own: its memory and its threads are its own.

Between its turns it waits for a word from its parent, and takes no time from the others.
"""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from podracers import errors

FAKE = (
    "Fake devices share the machine's cores: this says that several devices work, and what they "
    "cost, not how well real ones scale."
)
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with a JAX backend may hang
_POLL_PERIOD = 0.25  # seconds between two looks at a contender that is watched


def fake_devices(count: int) -> dict[str, str]:
    """Returns the environment variables of a process that has so many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={count}"
    # Without threads to spare, those of one collective take the threads that another waits for.
    return {"XLA_FLAGS": flags, "PJRT_NPROC": str(max(2 * count, 4))}


class Contender:
    """Calls `make(*arguments)` in a child process when it is first asked something.

    Args:
      name: for error messages.
      make: a function of a module; what it returns takes a measurement when called.
      arguments: those of `make`; they are pickled.
      environment: variables of the process, over those of this one.
      log: a file that takes what the process prints; None for the output of this one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Callable[[], float]],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        log: pathlib.Path | None = None,
    ):
        self.name = name
        self._here, there = _SPAWN.Pipe()
        # Not a daemon: it may have processes of its own.
        self._process = _SPAWN.Process(target=_serve, args=(there, log, make, arguments))
        try:
            with _undisturbed(), mock.patch.dict(os.environ, environment or {}):
                self._process.start()
        except BaseException:  # such as a Ctrl-C that was held back
            self.kill()
            raise
        there.close()

    def __call__(self) -> float:
        """Takes a measurement."""
        try:
            return self.ask("__call__")
        except (errors.UserError, errors.RunFailure) as error:
            raise type(error)(f"'{self.name}' failed: {error}") from error

    def ask(self, name: str, watch: Callable[[], None] | None = None) -> Any:
        """Returns an attribute of what was made; of a method, what it returns.

        Args:
          name: the attribute's name.
          watch: called several times a second; what it raises ends the waiting.

        Raises:
          errors.UserError, errors.RunFailure: what the process raised, in one line.
        """
        try:
            self._here.send(name)
            while not self._here.poll(_POLL_PERIOD if watch else None):
                watch()
            answer = self._here.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise errors.RunFailure(_last_words(self._process.exitcode)) from error
        if isinstance(answer, errors.UserError | errors.RunFailure):
            raise answer
        return answer

    def memory(self) -> int:
        """Returns the peaks of resident bytes of the process and its own processes, added up."""
        total = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                if int(stat.read_text().rpartition(") ")[2].split()[3]) == self._process.pid:
                    total += _peak(stat.with_name("status"))
        return total

    def kill(self) -> None:
        """Ends the process, whatever it is at, and the processes that it started."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it leads no session yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def together(
    makers: Mapping[str, Callable[..., Callable[[], float]]],
    arguments: Sequence[Any] | Mapping[str, Sequence[Any]],
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[dict[str, Contender]]:
    """Starts contenders; however the context is left, their processes are gone.

    Args:
      makers: by name of the contender.
      arguments: those of all of them, or by name.
      environments: variables of their processes, by name.
    """
    contenders = {}
    try:
        for name, make in makers.items():
            own = arguments[name] if isinstance(arguments, Mapping) else arguments
            variables = (environments or {}).get(name)
            contenders[name] = Contender(name, make, *own, environment=variables)
        yield contenders
    finally:
        for each in contenders.values():
            each.kill()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back; processes that are started here never hear of a Ctrl-C."""
    heard = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in heard[:1]:
            signal.raise_signal(number)


def _serve(parent: Any, log: pathlib.Path | None, make: Callable[..., Any], arguments: Any) -> None:
    os.setsid()  # so that whatever it starts can be ended with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if log:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    made = None
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while name := parent.recv():
            try:
                # Made when it is first asked, not while the others are timed.
                made = make(*arguments) if made is None else made
                value = getattr(made, name)
                parent.send(value() if callable(value) else value)
            except (errors.UserError, errors.RunFailure) as error:
                parent.send(type(error)(errors.first_line(error)))
            except Exception as error:
                traceback.print_exc()
                parent.send(errors.RunFailure(_reason(error)))


def _end_with_parent() -> None:
    """Ends this process and those that it started once its parent has been killed."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _reason(error: Exception) -> str:
    message = f"{type(error).__name__}: {errors.first_line(error)}"
    return f"out of memory: {message}" if "RESOURCE_EXHAUSTED" in str(error) else message


def _last_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return "its process died"


def _peak(status: pathlib.Path) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
    return int(found[1]) * 1024 if found else 0
