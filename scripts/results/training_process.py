"""Training runs as child processes: started, watched, and never left behind.

A child has a process of its own, so nothing is shared with the next one and its device's memory is
free when it ends; no cache of compiled programs, unless the environment says otherwise, so that
every run pays for its own; and a session of its own, so that a Ctrl-C in the terminal reaches this
process alone, which passes it on once.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from podracers import errors
from podracers.training import config, experiment, loggers, run_directory
from podracers.training import run as run_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
MORE = "; more in "  # before the path of a log, in the message of a failure
_POLL_PERIOD = 0.1  # seconds
_ENVIRONMENT = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PYTHONUNBUFFERED": "1",  # lines in the order in which they came
}
_LEAVE_TIMEOUT = 300.0  # seconds for a child to save its checkpoint, once it is asked to leave
# Becomes the script named after it, once the kernel has promised (prctl, PR_SET_PDEATHSIG; Linux
# only) to ask it to leave should its parent be killed. Code of one's own between fork and exec
# (`preexec_fn`) would do it, too, but is not safe beside other threads.
_BECOME = """
import ctypes, os, signal, sys
os.nice(int(sys.argv[2]))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder where there is none.

    Raises:
      errors.UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"cannot make '{path}': {error.strerror}") from error


def flags(gin_files: Sequence[str], bindings: Sequence[str]) -> list[str]:
    """Returns the arguments of `scripts/train.py` that name files and bindings."""
    options = {"--gin_file": gin_files, "--gin_bindings": bindings}
    return [part for flag, values in options.items() for value in values for part in (flag, value)]


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    log: pathlib.Path,
    environment: Mapping[str, str] | None = None,
    nice: int = 0,
) -> Iterator[subprocess.Popen]:
    """Starts `scripts/train.py`; however the context is left, the process is gone.

    Args:
      arguments: those of the script.
      log: takes what the child prints.
      environment: variables over those of this process.
      nice: how much of its priority the child gives up, as of nice(1).
    """
    script = str(ROOT / "scripts" / "train.py")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(os.getpid()), str(nice), script, *arguments],
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


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run that is to be there; `plan` makes it."""

    label: str  # what is trained
    seed: int
    arguments: tuple[str, ...]  # of `scripts/train.py`, without the run directory
    directory: run_directory.RunDirectory
    total_steps: int  # agent steps
    config: str  # the whole configuration

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.label}, seed {self.seed}"

    @property
    def command(self) -> str:
        """The command that trains it."""
        run_dir = ("--run_dir", self.directory.path.as_posix())
        return shlex.join(["python", "scripts/train.py", *self.arguments, *run_dir])

    def train(self, stop: run_lib.StopRequest, nice: int = 0) -> bool:
        """Trains, or goes on with what was begun earlier, and shows how far it is.

        What the child prints goes to a log beside the run directory.

        Args:
          stop: true once this process is asked to leave: then the child is asked, too.
          nice: how much of its priority the child gives up.

        Returns:
          Whether the run was finished; False where it was stopped.

        Raises:
          errors.UserError: the directory has another run or cannot be made, or the child ended with
            a user's mistake, in its own words.
          errors.RunFailure: it ended with a failure.
        """
        path, begun = self.directory.path, self.directory.config.exists()
        if begun and _settings(self.directory.read_config()) != _settings(self.config):
            raise errors.UserError(
                f"the run in '{path}' has another configuration; name another folder, or remove it"
            )
        if self.directory.summary.exists() or stop:
            return self.directory.summary.exists()
        log = path.with_name(f"{path.name}.log")
        arguments = ["--resume"] if begun else self.arguments
        make_folder(path.parent)
        with started([*arguments, "--run_dir", str(path)], log, nice=nice) as process:
            display = loggers.TerminalLogger(self.total_steps)
            rows = _follow(self.directory.metrics)
            try:
                while process.poll() is None and not stop:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_PERIOD)
                    for row in next(rows):
                        display.write(row.pop("step"), row)
            finally:
                display.close()
            if process.poll() is None:
                _ask_to_leave(process, self.name)
        if stop and process.returncode == -signal.SIGTERM:  # before it was ready to be asked
            return False
        if process.returncode:
            error = failure(process.returncode, log)
            raise type(error)(f"{self.name}: {error}")
        return self.directory.summary.exists()


def plan(
    label: str,
    seed: int,
    gin_files: Sequence[str],
    bindings: Sequence[str],
    path: pathlib.Path,
) -> Run:
    """Reads the configuration of a run, and so finds out what is wrong before anything is trained.

    Args:
      label: name of what is trained, in messages.
      seed: the run's seed, bound before `bindings`.
      gin_files: paths of .gin files.
      bindings: those over the files.
      path: the run directory.

    Raises:
      errors.UserError: the configuration does not parse, or insists on another seed.
    """
    bindings = [f"SEED = {seed}", *bindings]
    try:
        settings = experiment.load(gin_files, bindings)
    except errors.UserError as error:
        raise errors.UserError(f"{label}: {errors.first_line(error)}") from error
    if settings.seed != seed:
        raise errors.UserError(
            f"{label}: expected the seed {seed}, but the configuration insists on {settings.seed}"
        )
    directory, arguments = run_directory.RunDirectory(path), tuple(flags(gin_files, bindings))
    return Run(label, seed, arguments, directory, settings.total_steps, config.text())


def train_all(runs: Sequence[Run], say: Callable[[str], None]) -> bool:
    """Trains runs one after the other, or what is missing; returns whether all are finished."""
    with run_lib.StopRequest() as stop:
        for number, run in enumerate(runs, 1):
            state = "resuming" if run.directory.config.exists() else "training"
            state = "there already" if run.directory.summary.exists() else state
            say(
                f"[{number}/{len(runs)}] {run.label}, seed {run.seed}: {state} "
                f"({run.directory.path})"
            )
            if not run.train(stop):
                return False
    return True


def _settings(text: str) -> list[str]:
    """Returns the lines of a configuration that set something, whichever process wrote it.

    Where files name one module by several names, gin writes any of them, another one in each
    process: modules have their whole names here, and lines the order of these. A long value, which
    gin breaks into lines, is one line.
    """
    text = re.sub(r" ?\\?\n +", " ", text)
    imports = re.findall(r"^from (\S+) import (\w+)(?: as (\w+))?$", text, re.MULTILINE)
    modules = {alias or name: f"{package}.{name}" for package, name, alias in imports}

    def whole(line: str) -> str:
        return re.sub(r"(?<![\w.'\"])\w+(?=\.)", lambda name: modules.get(name[0], name[0]), line)

    lines = [line for line in text.splitlines() if line]
    return sorted(whole(line) for line in lines if not re.match(r"#|from |import ", line))


def settings_digest(text: str) -> str:
    """Returns a digest of what a configuration sets, the seed apart."""
    lines = [line for line in _settings(text) if not line.startswith("SEED = ")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _ask_to_leave(process: subprocess.Popen, name: str) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_LEAVE_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise errors.RunFailure(
            f"{name}: did not end within {_LEAVE_TIMEOUT:.0f} s of being asked to, and was killed"
        ) from error


def failure(code: int, log: pathlib.Path) -> errors.UserError | errors.RunFailure:
    """Returns what a child said that it ended of."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^(?:error|failed): (.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    if code < 0:
        message = f"the run was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            message += ", as the system does when memory runs out"
    else:
        message = (said or lines or [f"the run ended with exit code {code}"])[-1]
    if code == errors.UserError.exit_code:
        return errors.UserError(message)
    return errors.RunFailure(message if said and code > 0 else f"{message}{MORE}'{log}'")


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
