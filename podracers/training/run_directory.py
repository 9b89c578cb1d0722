"""The files of a run, and the lock that keeps a second run out."""

import contextlib
import fcntl
import io
import json
import logging
import os
import pathlib
import socket
from typing import Any

from podracers import errors
from podracers.checkpoints import storage
from podracers.training import config

LOCK = ".lock"

_LOGGER = logging.getLogger(__name__)


class Lock:
    """The lock of one run directory, which the operating system frees when the process ends.

    It is an `flock` of a file that stays in the directory. Programs that this process starts and
    its copies by `fork`, which may outlive it, do not inherit the lock.
    """

    def __init__(self, directory: pathlib.Path):
        self._path = directory / LOCK
        self._file: io.FileIO | None = None

    def acquire(self) -> None:
        """Takes the lock, unless this object has it already.

        On a file system without locks it logs a warning and does not exclude other runs.

        Raises:
          errors.UserError: another run has it; the message names its process.
          errors.RunFailure: the file of the lock cannot be written.
        """
        if self._file is not None:
            return
        with contextlib.ExitStack() as files, storage.failures(f"write '{self._path}'"):
            file = files.enter_context(self._path.open("ab+", buffering=0))
            os.register_at_fork(after_in_child=file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = self._path.read_bytes()[:200].decode(errors="replace").strip()
                raise errors.UserError(
                    f"the run directory '{self._path.parent}' is in use by "
                    f"{holder or 'another process'}: wait until that run has ended, or end it"
                ) from error
            except OSError as error:
                message = "the run directory '%s' cannot be locked (%s): start no second run in it"
                _LOGGER.warning(message, self._path.parent, error.strerror)
            file.truncate(0)
            file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
            files.pop_all()
            self._file = file

    def release(self) -> None:
        """Frees the lock, if this object has it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self):
        self.release()

    def require_there(self) -> None:
        """Raises `errors.RunFailure` if the directory or its lock was moved or removed."""
        if self._file is not None:
            storage.require_same(self._path, self._file.fileno())


class RunDirectory:
    """The files of a run, in the folder `path`."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.lock = Lock(self.path)  # keeps other runs out, once it is acquired
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.metrics = self.path / "metrics.jsonl"
        # Experiments may name others.
        self.checkpoints: pathlib.Path | storage.Path = self.path / "checkpoints"
        self.summary = self.path / "summary.json"

    def create(self, dry_run: bool = False) -> None:
        """Makes and locks the folder; with `dry_run` only checks it.

        Raises:
          errors.UserError: it cannot be made, cannot hold checkpoints, has files other than a lock
            and partial files, or another run has the lock.
        """
        storage.require_safe("the run directory", self.path)
        names = []
        with errors.file_errors(f"make the run directory '{self.path}'"):
            if not dry_run:
                self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                names = [file.name for file in self.path.iterdir()]
        if any(name != LOCK and not name.endswith(".partial") for name in names):
            raise errors.UserError(
                f"the run directory '{self.path}' is there already: continue it with --resume, or "
                "name another with --run_dir"
            )
        if not dry_run:
            self.lock.acquire()

    def require(self) -> None:
        """Raises `errors.UserError` unless the folder has the configuration of a run."""
        if not self.config.is_file():
            siblings = [str(config.parent) for config in self.path.parent.glob("*/config.gin")]
            raise errors.UserError(
                f"there is no run in '{self.path}' (no config.gin)"
                f"{errors.nearest(str(self.path), siblings)}"
            )

    def read_config(self) -> str:
        """Returns `config.gin`; raises `errors.UserError` if it cannot be read or is not text."""
        with errors.file_errors(f"read '{self.config}'"):
            return self.config.read_text("utf-8")

    def read_values(self) -> dict[str, Any]:
        """Returns the values that `config.gin` binds, by name (`config.Contents`)."""
        return config.read(self.read_config(), str(self.config)).values

    def earlier_checkpoints(self) -> str | None:
        """Returns the run's own folder, or `config.gin`'s, if there are checkpoints in it."""
        places = [self.path / "checkpoints"]
        if self.config.is_file():
            begun = self.read_values().get("Experiment.checkpoint_directory")
            places += filter(None, [begun])
        for place in places:
            with storage.failures(f"list '{place}'"):
                if storage.steps(storage.path(place)):
                    return str(place)
        return None

    def require_gin(self) -> None:
        """Raises `errors.UserError` if `config.gin` is empty, as of a run from Python.

        Logs its imports from outside of this project, which loading it executes.
        """
        if not (text := self.read_config()):
            raise errors.UserError(
                f"the run in '{self.path}' was configured in Python, not by gin: see "
                "`trained.params(path, parts)` and `run.Run(..., resume=True)`"
            )
        if names := config.read(text, str(self.config)).other_code:
            _LOGGER.warning("%s imports other code: %s", self.config, ", ".join(names))

    def replace_config(self, text: str, step: int) -> None:
        """Replaces `config.gin`; keeps the configuration up to `step` as `config.<step>.gin`."""
        earlier = self.path / f"config.{step}.gin"
        if not earlier.exists():  # else the steps of `config.gin` were lost
            storage.write(earlier, self.read_config())
        storage.write(self.config, text)

    def read_summary(self) -> dict[str, Any]:
        """Returns `summary.json`; raises `errors.RunFailure` if it cannot be read."""
        with storage.failures(f"read '{self.summary}'"):
            return json.loads(self.summary.read_bytes())
