"""Training runs as child processes, one after the other: started, watched, and never left behind.

A child has a process of its own, so nothing is shared with the next one and its device's memory is
free when it ends; no cache of compiled programs, unless the environment says otherwise, so that
every run pays for its own; and a session of its own, so that a Ctrl-C in the terminal reaches this
process alone, which passes it on once.
"""

import contextlib
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from podracers import errors
from podracers.training import loggers, run_directory, signals

TRAIN = pathlib.Path(__file__).resolve().parents[1] / "train.py"
_LOOK = 0.1  # seconds between two looks at a child
_ENVIRONMENT = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PYTHONUNBUFFERED": "1",  # lines in the order in which they came
}
_PATIENCE = 300.0  # seconds that a child gets for its checkpoint, once it was asked to leave
# Becomes the script named after it, once the kernel has promised (prctl, PR_SET_PDEATHSIG; Linux
# only) to ask it to leave should its parent be killed. Code of one's own between fork and exec
# (`preexec_fn`) would do it, too, but is not safe beside other threads.
_BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def train(
    arguments: Sequence[str],
    directory: run_directory.RunDirectory,
    total_steps: int,
    log: pathlib.Path,
    stop: signals.StopRequest,
) -> bool:
    """Runs `scripts/train.py` to its end, and shows how far it is.

    Args:
      arguments: of the script.
      directory: where the run writes; its log is what is shown.
      total_steps: agent steps of the whole run.
      log: takes what the child prints.
      stop: true once this process is asked to leave: then the child is asked, too.

    Returns:
      Whether the run was finished; False where it was stopped.

    Raises:
      errors.UserError: the child ended with a user's mistake, in its own words.
      errors.RunFailure: it ended with a failure.
    """
    if stop:
        return False
    with log.open("w") as output, _child(arguments, output) as process:
        display = loggers.TerminalLogger(total_steps)
        follower = _Follower(directory.metrics)
        try:
            while process.poll() is None and not stop:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                for row in follower.new_rows():
                    display.write(row.pop("step"), row)
        finally:
            display.close()
        if process.poll() is None:
            _ask_to_leave(process)
    if process.returncode:
        _fail(process.returncode, log)
    return directory.summary.exists()


@contextlib.contextmanager
def _child(arguments: Sequence[str], output) -> Iterator[subprocess.Popen]:
    """Starts the script; however the context is left, the process is gone."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME, str(os.getpid()), str(TRAIN), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**_ENVIRONMENT, **os.environ},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the simulators' processes
            process.wait()


def _ask_to_leave(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise errors.RunFailure(
            f"the run did not end within {_PATIENCE:.0f} s of being asked to, and was killed"
        ) from error


def _fail(code: int, log: pathlib.Path) -> None:
    """Raises what the child said that it died of."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^(?:error|failed): (.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    if code < 0:
        message = f"the run was killed by {signal.Signals(-code).name}"
    else:
        message = (said or lines or [f"the run ended with exit code {code}"])[-1]
    if code == errors.UserError.exit_code:
        raise errors.UserError(message)
    raise errors.RunFailure(message if said and code > 0 else f"{message}; more in '{log}'")


class _Follower:
    """Reads the lines that a growing file of JSON lines gains from now on."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_rows(self) -> list[dict[str, float]]:
        """Returns what whole lines were added since the last call, NaN where null stands."""
        try:
            with self._path.open("rb") as file:
                # A run that resumes cuts the file back to its checkpoint.
                self._position = min(self._position, file.seek(0, os.SEEK_END))
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        rows = []
        for line in data.splitlines():
            # A file that was cut back and has grown again is read from the middle of a line.
            with contextlib.suppress(ValueError):
                rows.append(loggers.parse_row(line))
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in rows
        ]
