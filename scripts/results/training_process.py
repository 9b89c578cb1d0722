"""Training runs as child processes.

Each run has its own process, which frees the device's memory at the end. Unless the environment
enables a cache of compiled programs, every run compiles its own. Each run has its own session:
Ctrl-C reaches this process alone, which forwards it once.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from podracers import errors
from podracers.training import experiment, run_directory, stop_request

ROOT = pathlib.Path(__file__).resolve().parents[2]
_POLL_PERIOD = 0.1  # seconds
_ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONUNBUFFERED": "1"}
# Starts the script after asking the kernel (prctl, PR_SET_PDEATHSIG; Linux only) to send SIGTERM if
# the parent is killed. Code between fork and exec (`preexec_fn`) is not safe beside threads.
_START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A planned training run; see `plan`."""

    label: str
    seed: int
    arguments: tuple[str, ...]  # arguments of `scripts/train.py` but the run directory
    directory: run_directory.RunDirectory
    total_steps: int  # agent steps
    settings: str  # see `settings_digest`

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.label}, seed {self.seed}"

    def train(self, stop: stop_request.StopRequest) -> bool:
        """Trains, or continues a run that was stopped; its output goes to this process's.

        After this process received a signal, `stop` is true, and the child is stopped, too.

        Returns:
          Whether the run is finished; False if it was stopped.

        Raises:
          SystemExit: the child ended with this exit code, after it printed the cause.
          errors.RunFailure: the child was killed.
        """
        if self.directory.summary.exists() or stop:
            return self.directory.summary.exists()
        script = str(ROOT / "scripts" / "train.py")
        path = ("--resume_if_begun", "--run_dir", str(self.directory.path))
        start = [sys.executable, "-c", _START, str(os.getpid())]
        process = subprocess.Popen(
            [*start, script, *self.arguments, *path],
            stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stop:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_PERIOD)
            if stop:
                process.send_signal(signal.SIGTERM)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the processes that it started end, too
                process.wait()
        if stop and code == -signal.SIGTERM:  # its handler was not installed yet
            return False
        if code > 0:
            raise SystemExit(code)
        if code < 0:
            raise errors.RunFailure(f"{self.name}: killed by {signal.Signals(-code).name}")
        return self.directory.summary.exists()


def plan(
    label: str, seed: int, gin_files: Sequence[str], bindings: Sequence[str], folder: pathlib.Path
) -> Run:
    """Reads the configuration of a run, so that mistakes are found before any training.

    The seed is bound before `bindings`. The label is the name in messages and, with a digest of the
    settings, of the run's folder in `folder`: changed settings start a new run.

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
    options = {"--gin_file": gin_files, "--gin_bindings": bindings}
    words = tuple(word for flag, values in options.items() for x in values for word in (flag, x))
    digest = settings_digest(settings.text())
    directory = run_directory.RunDirectory(folder / f"{label}-{digest}" / f"seed-{seed}")
    return Run(label, seed, words, directory, int(settings.total_steps), digest)


def train_all(runs: Sequence[Run], record: Callable[[Run], None] | None = None) -> bool | None:
    """Trains runs one after the other; finished runs are not trained again.

    `record` is called after each run; if given, a failed run is reported, and the others continue.

    Returns:
      Whether all are finished; None if the work was stopped.
    """
    complete = True
    with stop_request.StopRequest() as stop:
        for number, run in enumerate(runs, 1):
            state = "resuming" if run.directory.config.exists() else "training"
            state = "finished before" if run.directory.summary.exists() else state
            place = f"{run.name}: {state} ({run.directory.path})"
            print(f"[{number}/{len(runs)}] {place}", flush=True)
            try:
                if not run.train(stop):
                    return None
            except (SystemExit, errors.RunFailure) as error:
                if stop or record is None:
                    raise
                print(f"failed: {run.name} ({error})", flush=True)
                complete = False
            else:
                if record:
                    record(run)
    return complete


def settings_digest(text: str) -> str:
    """Returns a digest of a configuration's bindings without the seed.

    gin may write any of the names by which files import a module, and breaks long values into
    lines; the digest has full names, and a line for each binding.
    """
    text = re.sub(r" ?\\?\n +", " ", text)
    imports = re.findall(r"^from (\S+) import (\w+)(?: as (\w+))?$", text, re.MULTILINE)
    modules = {alias or name: f"{package}.{name}" for package, name, alias in imports}

    def full(line: str) -> str:
        return re.sub(r"(?<![\w.'\"])\w+(?=\.)", lambda name: modules.get(name[0], name[0]), line)

    lines = [line for line in text.splitlines() if line and not re.match(r"#|from |import ", line)]
    lines = sorted(full(line) for line in lines if not line.startswith("SEED = "))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
