"""Training runs as child processes.

Each run has its own process, which frees the device's memory when it ends; no cache of compiled
programs, unless the environment enables it, so that every run pays for its own compilation; and its
own session, so that Ctrl-C reaches this process alone, which forwards it once.
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
from collections.abc import Callable, Iterator, Sequence

from podracers import errors
from podracers.training import config, experiment, loggers, run_directory
from podracers.training import run as run_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
_POLL_PERIOD = 0.1  # seconds
_ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONUNBUFFERED": "1"}
_LEAVE_TIMEOUT = 300.0  # seconds for a child to save its checkpoint after SIGTERM
# Starts the script after asking the kernel (prctl, PR_SET_PDEATHSIG; Linux only) to send SIGTERM if
# the parent is killed. Code between fork and exec (`preexec_fn`) is not safe beside threads.
_START = """
import ctypes, os, signal, sys
os.nice(int(sys.argv[2]))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def flags(gin_files: Sequence[str], bindings: Sequence[str]) -> list[str]:
    """Returns the arguments of `scripts/train.py` for files and bindings."""
    options = {"--gin_file": gin_files, "--gin_bindings": bindings}
    return [part for flag, values in options.items() for value in values for part in (flag, value)]


@dataclasses.dataclass(frozen=True)
class Run:
    """A planned training run; see `plan`."""

    label: str
    seed: int
    arguments: tuple[str, ...]  # of `scripts/train.py`, without the run directory
    directory: run_directory.RunDirectory
    total_steps: int  # agent steps
    config: str  # the whole configuration

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.label}, seed {self.seed}"

    @property
    def command(self) -> str:
        """The command that trains it."""
        run_dir = ("--run_dir", self.directory.path.as_posix())
        return shlex.join(["python", "scripts/train.py", *self.arguments, *run_dir])

    def train(self, stop: run_lib.StopRequest, nice: int = 0) -> bool:
        """Trains, or continues a run that was stopped, and shows its progress.

        The child's output goes to a log beside the run directory.

        Args:
          stop: true after this process received a signal; then the child is stopped, too.
          nice: decrease of the child's priority.

        Returns:
          Whether the run is finished; False if it was stopped.

        Raises:
          errors.UserError: the directory has another run or cannot be made, or the child ended with
            a user's mistake.
          errors.RunFailure: the child failed.
        """
        path, begun = self.directory.path, self.directory.config.exists()
        if begun and _settings(self.directory.read_config()) != _settings(self.config):
            raise errors.UserError(
                f"the run in '{path}' has another configuration; name another folder, or remove it"
            )
        if self.directory.summary.exists() or stop:
            return self.directory.summary.exists()
        log = path.with_name(f"{path.name}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.UserError(f"cannot make '{path.parent}': {error.strerror}") from error
        words = ["--resume"] if begun else self.arguments
        with _started([*words, "--run_dir", str(path)], log, nice) as process:
            display = loggers.TerminalLogger(self.total_steps)
            running = True
            while running and not stop:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_PERIOD)
                running = process.poll() is None
                _show_last_row(self.directory.metrics, display)
            display.close()
            if running:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_LEAVE_TIMEOUT)
                except subprocess.TimeoutExpired as error:
                    raise errors.RunFailure(
                        f"{self.name}: killed; it did not stop within {_LEAVE_TIMEOUT:.0f} s"
                    ) from error
        if stop and process.returncode == -signal.SIGTERM:  # before it installed its handler
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
    """Reads the configuration of a run, so that mistakes are found before any training.

    Args:
      label: name in messages.
      seed: the run's seed, bound before `bindings`.
      gin_files: paths of .gin files.
      bindings: over the files.
      path: the run directory.

    Raises:
      errors.UserError: the configuration does not parse, or binds another seed.
    """
    bindings = [f"SEED = {seed}", *bindings]
    try:
        settings = experiment.load(gin_files, bindings)
    except errors.UserError as error:
        raise errors.UserError(f"{label}: {errors.first_line(error)}") from error
    if settings.seed != seed:
        raise errors.UserError(f"{label}: expected the seed {seed}, got {settings.seed}")
    directory, arguments = run_directory.RunDirectory(path), tuple(flags(gin_files, bindings))
    return Run(label, seed, arguments, directory, settings.total_steps, config.text())


def train_all(runs: Sequence[Run], report: Callable[[str], None]) -> bool:
    """Trains the missing runs one after the other; returns whether all are finished."""
    with run_lib.StopRequest() as stop:
        for number, run in enumerate(runs, 1):
            state = "resuming" if run.directory.config.exists() else "training"
            state = "finished before" if run.directory.summary.exists() else state
            report(f"[{number}/{len(runs)}] {run.name}: {state} ({run.directory.path})")
            if not run.train(stop):
                return False
    return True


@contextlib.contextmanager
def _started(words: Sequence[str], log: pathlib.Path, nice: int) -> Iterator[subprocess.Popen]:
    """Starts `scripts/train.py`, and kills it on exit if it still runs."""
    script = str(ROOT / "scripts" / "train.py")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), str(nice), script, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_ENVIRONMENT | os.environ,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and its processes
            process.wait()


def _show_last_row(metrics: pathlib.Path, display: loggers.TerminalLogger) -> None:
    """Shows the last complete line of a run's metrics."""
    data = b""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 2**16, 0))
        data = file.read()
    complete, _, _ = data.rpartition(b"\n")
    with contextlib.suppress(ValueError):
        row = loggers.parse_row(complete.rpartition(b"\n")[2])
        values = {name: math.nan if x is None else x for name, x in row.items()}
        display.write(values.pop("step"), values)


def _settings(text: str) -> list[str]:
    """Returns the bindings of a configuration, sorted, with full names of modules.

    gin may write any of the names by which files import a module, and breaks long values into
    lines.
    """
    text = re.sub(r" ?\\?\n +", " ", text)
    imports = re.findall(r"^from (\S+) import (\w+)(?: as (\w+))?$", text, re.MULTILINE)
    modules = {alias or name: f"{package}.{name}" for package, name, alias in imports}

    def full(line: str) -> str:
        return re.sub(r"(?<![\w.'\"])\w+(?=\.)", lambda name: modules.get(name[0], name[0]), line)

    lines = [line for line in text.splitlines() if line]
    return sorted(full(line) for line in lines if not re.match(r"#|from |import ", line))


def settings_digest(text: str) -> str:
    """Returns a digest of a configuration's bindings without the seed."""
    lines = [line for line in _settings(text) if not line.startswith("SEED = ")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def failure(code: int, log: pathlib.Path) -> errors.UserError | errors.RunFailure:
    """Returns the error with which a child ended, from its log."""
    text = log.read_text(errors="replace")
    reported = re.findall(r"^(?:error|failed): (.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    if code < 0:
        message = f"the run was killed by {signal.Signals(-code).name}"
        message += " (out of memory?)" if code == -signal.SIGKILL else ""
    else:
        message = (reported or lines or [f"the run ended with exit code {code}"])[-1]
    if code == errors.UserError.exit_code:
        return errors.UserError(message)
    return errors.RunFailure(message if reported and code > 0 else f"{message}; more in '{log}'")
