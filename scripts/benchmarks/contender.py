"""A contender that is measured in a process of its own: its memory and its threads are its own.

Between its turns it waits for a word from its parent, and takes no time from the others.
"""

import multiprocessing
import pathlib
import re
import resource
import traceback
from collections.abc import Callable
from typing import Any

from podracers import errors

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with a JAX backend may hang


class Contender:
    """Calls `make(*arguments)` in a child process, and then what that returned, once for each turn.

    What `make` returns takes a measurement when called, and may have `close()`.

    Args:
      name: for error messages.
      make: a function of a module.
      arguments: of it; they are pickled.
    """

    def __init__(self, name: str, make: Callable[..., Callable[[], float]], *arguments: Any):
        self.name = name
        self._here, there = _SPAWN.Pipe()
        # Not a daemon: it may have processes of its own.
        self._process = _SPAWN.Process(target=_serve, args=(there, make, arguments), name=name)
        self._process.start()
        there.close()
        self.memory = 0  # the most bytes that were resident, known once it is closed

    def __call__(self) -> float:
        """Takes a measurement."""
        return self._ask("turn")

    def close(self) -> None:
        """Ends the process."""
        if self._process.is_alive():
            self.memory = self._ask("close")
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


def _serve(parent, make, arguments) -> None:
    try:
        turn = make(*arguments)
        while parent.recv() == "turn":
            parent.send(turn())
        getattr(turn, "close", lambda: None)()
        parent.send(_peak_memory())
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
