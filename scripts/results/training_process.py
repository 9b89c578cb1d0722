"""Training runs as child processes: started, watched, and never left behind.

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
from collections.abc import Iterator, Mapping, Sequence

from podracers import errors
from podracers.training import loggers, run_directory, signals

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def flags(gin_files: Sequence[str], bindings: Sequence[str]) -> list[str]:
    """Returns the arguments of `scripts/train.py` that name files and bindings."""
    options = {"--gin_file": gin_files, "--gin_bindings": bindings}
    return [part for flag, values in options.items() for value in values for part in (flag, value)]


@contextlib.contextmanager
def started(
    arguments: Sequence[str], log: pathlib.Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Starts `scripts/train.py`; however the context is left, the process is gone.

    Args:
      arguments: of the script.
      log: takes what the child prints.
      environment: variables over those of this process.
    """
    script = str(ROOT / "scripts" / "train.py")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(os.getpid()), script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the simulators' processes
            process.wait()


def train(
    name: str,
    arguments: Sequence[str],
    directory: run_directory.RunDirectory,
    total_steps: int,
    log: pathlib.Path,
    stop: signals.StopRequest,
) -> bool:
    """Runs `scripts/train.py` to its end, and shows how far it is.

    Args:
      name: of the run, for error messages.
      arguments: of the script, unless there is a run to resume.
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
    if directory.summary.exists() or stop:
        return directory.summary.exists()
    arguments = ["--resume"] if directory.config.exists() else arguments
    with started([*arguments, "--run_dir", str(directory.path)], log) as process:
        display = loggers.TerminalLogger(total_steps)
        rows = _follow(directory.metrics)
        try:
            while process.poll() is None and not stop:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                for row in next(rows):
                    display.write(row.pop("step"), row)
        finally:
            display.close()
        if process.poll() is None:
            _ask_to_leave(process, name)
    if process.returncode:
        error = failure(process.returncode, log)
        raise type(error)(f"{name}: {error}")
    return directory.summary.exists()


def _ask_to_leave(process: subprocess.Popen, name: str) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise errors.RunFailure(
            f"{name}: did not end within {_PATIENCE:.0f} s of being asked to, and was killed"
        ) from error


def failure(code: int, log: pathlib.Path) -> errors.UserError | errors.RunFailure:
    """Returns what a child said that it ended of."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^(?:error|failed): (.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    if code < 0:
        message = f"the run was killed by {signal.Signals(-code).name}"
    else:
        message = (said or lines or [f"the run ended with exit code {code}"])[-1]
    if code == errors.UserError.exit_code:
        return errors.UserError(message)
    return errors.RunFailure(message if said and code > 0 else f"{message}; more in '{log}'")


def _follow(path: pathlib.Path) -> Iterator[list[dict[str, float]]]:
    """Yields again and again what lines a file of JSON lines gained, NaN where null stands."""
    position = path.stat().st_size if path.exists() else 0
    while True:
        data = b""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            # A run that resumes cuts the file back to its checkpoint.
            position = min(position, file.seek(0, os.SEEK_END))
            file.seek(position)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        rows = []
        for line in data.splitlines():
            # A file that was cut back and has grown again is read from the middle of a line.
            with contextlib.suppress(ValueError):
                row = loggers.parse_row(line)
                rows.append({k: math.nan if v is None else v for k, v in row.items()})
        yield rows
