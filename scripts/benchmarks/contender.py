"""A contender that is measured in a process of its own: its memory and its threads are its own.

Between its turns it waits for a word from its parent, and takes no time from the others.
"""

import contextlib
import multiprocessing
import os
import pathlib
import re
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from podracers import errors

FAKE = (
    "Fake devices share the machine's cores: this says that several devices work, and what they "
    "cost, not how well real ones scale."
)
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with a JAX backend may hang


def fake_devices(count: int) -> dict[str, str]:
    """Returns what a process's environment says so that it has so many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={count}"
    # Without threads to spare, those of one collective take the threads that another waits for.
    return {"XLA_FLAGS": flags, "PJRT_NPROC": str(max(2 * count, 4))}


class Contender:
    """Calls `make(*arguments)` in a child process, and then what that returned, once for each turn.

    What `make` returns takes a measurement when called; it may have `close()`, and `facts`: numbers
    by name that are no turn's.

    Args:
      name: for error messages.
      make: a function of a module.
      arguments: of it; they are pickled.
      environment: variables of the process, over those of this one.

    Attributes:
      memory: the most bytes that were resident, known once it is closed.
      facts: known once it is closed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Callable[[], float]],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        self._here, there = _SPAWN.Pipe()
        # Not a daemon: it may have processes of its own.
        self._process = _SPAWN.Process(target=_serve, args=(there, make, arguments), name=name)
        with _environment(environment or {}):
            self._process.start()
        there.close()
        self.memory = 0
        self.facts: dict[str, float] = {}

    def __call__(self) -> float:
        """Takes a measurement."""
        return self._ask("turn")

    def close(self) -> None:
        """Ends the process."""
        if self._process.is_alive():
            self.memory, self.facts = self._ask("close")
        self._process.join()

    def kill(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.join()

    def _ask(self, word: str) -> Any:
        try:
            self._here.send(word)
            answer = self._here.recv()
        except (EOFError, OSError) as error:
            raise errors.RunFailure(f"the process of '{self.name}' died") from error
        if isinstance(answer, str):
            raise errors.RunFailure(f"'{self.name}' failed: {answer}")
        return answer


@contextlib.contextmanager
def together(
    makers: Mapping[str, Callable[..., Callable[[], float]]],
    arguments: Sequence[Any] | Mapping[str, Sequence[Any]],
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[dict[str, Contender]]:
    """Starts contenders; however the context is left, their processes are gone.

    Args:
      makers: by name of the contender.
      arguments: of all of them, or by name.
      environments: of their processes, by name.
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
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(parent, make, arguments) -> None:
    try:
        turn = None
        while parent.recv() == "turn":
            # Made in its first turn, not beside the others, who are timed from their making on.
            if turn is None:
                turn = make(*arguments)
            parent.send(turn())
        getattr(turn, "close", lambda: None)()
        parent.send((_peak_memory(), getattr(turn, "facts", {})))
    except EOFError:
        return  # the parent is gone
    except Exception as error:
        traceback.print_exc()
        parent.send(f"{type(error).__name__}: {error}")


def _peak_memory() -> int:
    """Returns the most bytes that this process had resident."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # `getrusage` also counts what the parent had when it made this process.
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
