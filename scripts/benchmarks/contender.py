"""A program that is measured in its own process, so that its memory and threads are its own.

For each line on its standard input it prints a rate, and at the end of the input it ends: also when
the process that measures was killed.
"""

import contextlib
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from podracers import errors
from podracers.commands import command_line


class Contender:
    """Starts a program at the first request for a measurement; it is idle between requests.

    `options` are those of `subprocess.Popen`.
    """

    def __init__(self, *command: object, **options: Any):
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # programs share a device
        options["env"] = shared | {**options.get("env", os.environ)}
        self._command, self._options = [*map(str, command)], options
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`close`)
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def of(cls, make: Callable[..., Callable[[], float]], *arguments: Any) -> "Contender":
        """Returns a program that calls `make(*arguments)`, and then the result for each line.

        `make` is a function of a module; arguments are values of JSON.
        """
        words = ["-m", __name__, make.__module__, make.__qualname__, json.dumps(arguments)]
        return cls(sys.executable, *words)

    def __call__(self) -> float:
        """Returns a rate, agent steps per second; raises errors.RunFailure if the program fails."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process alone
                **self._options,
            )
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(file=self._process.stdin, flush=True)
        if rate := self._process.stdout.readline():
            return float(rate)
        self._log.seek(0)
        text = self._log.read()
        sys.stderr.write(text)
        if (code := self._process.wait()) < 0:  # such as for a lack of memory
            raise errors.RunFailure(f"a program was killed by {signal.Signals(-code).name}")
        raise errors.RunFailure((text.strip().splitlines() or ["no output"])[-1])

    def memory(self) -> int:
        """Returns the sum of peak resident bytes of the process and its children."""
        assert self._process is not None
        total = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                session = stat.read_text().rpartition(") ")[2].split()[3]
                status = stat.with_name("status").read_text()
                peak = re.search(r"VmHWM:\s*(\d+) kB", status)
                if int(session) == self._process.pid and peak:
                    total += int(peak[1]) * 1024
        return total

    def close(self) -> None:
        """Ends the process and those that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        self._log.close()


def _serve() -> None:
    module, name, arguments = sys.argv[1:]
    out, turn = os.dup(1), None
    os.dup2(2, 1)  # other output is no answer
    with contextlib.suppress(BrokenPipeError):  # the other process was killed meanwhile
        for _ in sys.stdin:
            turn = turn or getattr(importlib.import_module(module), name)(*json.loads(arguments))
            os.write(out, f"{turn()}\n".encode())
    os.killpg(0, signal.SIGKILL)  # threads, and the processes that it started


if __name__ == "__main__":
    command_line.run(_serve)
