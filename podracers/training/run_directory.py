"""The files of a run, the lock that keeps a second run out, and the provenance of its results."""

import collections
import contextlib
import fcntl
import importlib.metadata
import io
import logging
import os
import pathlib
import platform
import site
import socket
import subprocess
import sys
import weakref
from typing import Any

import jax

from podracers import errors
from podracers.training import manifest, storage

LOCK = ".lock"

_LOGGER = logging.getLogger(__name__)
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "podracers")


def _is_float(value: Any) -> bool:
    """Returns whether a JSON value is a finite number or NaN."""
    return manifest.is_number(value) or value != value  # noqa: PLR0124


_SUMMARY = {  # fields that other programs read
    "evaluation": {
        "return": _is_float,
        "return_by_seed": manifest.optional({str: _is_float}),
        "episodes": manifest.is_count,
    },
    "random_policy_return": _is_float,
    "environment_steps": manifest.is_count,
    "wall_time_s": manifest.is_duration,
    "steps_per_second": manifest.optional(manifest.is_duration),
    "first_dispatch_s": manifest.is_duration,
    "seed": manifest.is_count,
    "device": manifest.is_text,
    "platform": manifest.is_text,
    "host_cores": manifest.is_count,
    "versions": {"jax": manifest.is_text},
    "commit": manifest.optional(manifest.is_text),
}


class Lock:
    """The lock of one run directory, which the operating system frees when the process ends.

    It is an `flock` of a file that stays in the directory. Programs that this process starts and
    its copies by `fork`, which may outlive it, do not inherit the lock.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: pathlib.Path):
        self._path = directory / LOCK
        self._file: io.FileIO | None = None
        self._directory: int | None = None  # a descriptor of the locked directory

    def acquire(self) -> None:
        """Takes the lock, unless this object has it already.

        On a file system without locks it logs a warning and does not exclude other runs.

        Raises:
          errors.UserError: another run has it; the message names its process.
          errors.RunFailure: the file of the lock cannot be written.
        """
        if self._file is not None:
            return
        with contextlib.ExitStack() as on_failure:
            try:
                file = on_failure.enter_context(self._path.open("ab+", buffering=0))
                try:
                    self._flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    _LOGGER.warning(
                        "the run directory '%s' cannot be locked (%s): do not start a second run "
                        "in it",
                        self._path.parent,
                        error.strerror,
                    )
                file.truncate(0)
                file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
                self._directory = os.open(self._path.parent, os.O_RDONLY)
            except OSError as error:
                message = f"could not write '{self._path}': {error.strerror}"
                raise errors.RunFailure(message) from error
            on_failure.pop_all()
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Frees the lock, if this object has it."""
        if self._file is not None:
            self._file.close()
            os.close(self._directory)
            self._file = self._directory = None

    def __del__(self):
        self.release()

    def require_free(self) -> None:
        """Raises `errors.UserError` if another run has the lock; does not take it."""
        if self._file is None:
            with contextlib.suppress(OSError), self._path.open("rb") as file:
                self._flock(file, fcntl.LOCK_SH)

    def is_there(self) -> bool:
        """Returns whether the directory is the one that was locked; true where none was."""
        return self._file is None or storage.is_same(self._path.parent, self._directory)

    def require_there(self) -> None:
        """Checks that `is_there`, and takes the lock again if only its file was removed.

        Raises:
          errors.RunFailure: the directory was moved, removed or replaced.
          errors.UserError: the file was removed, and another run has taken the lock.
        """
        if self._file is None:
            return
        storage.require_same(self._path.parent, self._directory)
        if not storage.is_same(self._path, self._file.fileno()):
            self.release()
            self.acquire()

    def _flock(self, file: io.FileIO, operation: int) -> None:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._path.read_bytes()[:200].decode(errors="replace").strip()
            raise errors.UserError(
                f"the run directory '{self._path.parent}' is in use by "
                f"{holder or 'another process'}: wait until that run has ended, or end it"
            ) from error


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_copy() -> None:
    """Closes the files in a copy of this process, which would keep the locks while it lives."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_copy)


class RunDirectory:
    """The files of a run.

    Args:
      path: the folder.

    Attributes:
      checkpoints: the folder of the checkpoints, unless the experiment names another one.
      lock: keeps other runs out of the folder, once it is acquired.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.lock = Lock(self.path)
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints: storage.Path = self.path / "checkpoints"
        self.summary = self.path / "summary.json"

    def refuse_used(self) -> None:
        """Raises `errors.UserError` if the folder has files, but for a lock or partial files."""
        try:
            names = [each.name for each in self.path.iterdir()] if self.path.exists() else []
        except OSError as error:
            raise self._cannot_make(error) from error
        if any(name != LOCK and not name.endswith(".partial") for name in names):
            self.lock.require_free()
            raise errors.UserError(
                f"the run directory '{self.path}' is there already: continue it with --resume, or "
                "name another with --run_dir"
            )

    def create(self) -> None:
        """Makes the folder.

        Raises:
          errors.UserError: it exists and is used, or it cannot be made.
        """
        self.refuse_used()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_make(error) from error

    def _cannot_make(self, error: OSError) -> errors.UserError:
        return errors.UserError(f"cannot make the run directory '{self.path}': {error.strerror}")

    def require(self) -> None:
        """Raises `errors.UserError` unless the folder has the configuration of a run."""
        if not self.config.is_file():
            siblings = [str(config.parent) for config in self.path.parent.glob("*/config.gin")]
            raise errors.UserError(
                f"there is no run in '{self.path}' (no config.gin)"
                f"{errors.nearest(str(self.path), siblings)}"
            )

    def read_config(self) -> str:
        """Returns `config.gin`.

        Raises:
          errors.UserError: it cannot be read, or is not text.
        """
        try:
            return self.config.read_text()
        except OSError as error:
            raise errors.UserError(f"cannot read '{self.config}': {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise errors.UserError(
                f"'{self.config}' is damaged: byte {error.start} is no text"
            ) from error

    def read_summary(self) -> dict[str, Any]:
        """Returns `summary.json`.

        Raises:
          errors.RunFailure: it cannot be read, or lacks a field.
        """
        try:
            return manifest.parse(self.summary.read_bytes(), _SUMMARY)
        except OSError as error:
            raise errors.RunFailure(f"cannot read '{self.summary}': {error.strerror}") from error
        except ValueError as error:
            raise errors.RunFailure(
                f"'{self.summary}' is damaged ({error}): remove it, and continue the run with "
                "--resume, which writes it again"
            ) from error

    def write(self, path: pathlib.Path, content: str) -> None:
        """Writes a file whole or not at all."""
        try:
            storage.write(path, content)
        except OSError as error:
            raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error


def provenance() -> dict[str, Any]:
    """Returns the device, the versions and the commits that a result comes from."""
    devices = jax.devices()
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "platform": devices[0].platform,
        "host_cores": os.cpu_count(),
        "processes": jax.process_count(),
        "versions": versions,
        "commit": _commit(),
        "other_commits": _other_commits(),
    }


def _commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with `-dirty` where files differ; None without git.

    The results that this repository records while others train do not make it `-dirty`.
    """
    if not (root / ".git").exists():  # an installed copy inside of a checkout has no commit
        return None
    name = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*")
    ignored = (".", ":!docs/results.json") if root == _ROOT else (".",)
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *ignored)
    if not name or changes is None:
        return None
    return f"{name}-dirty" if changes else name


def _other_commits() -> dict[str, str | None]:
    """Returns the commits of the user's own packages: those loaded from other checkouts.

    A file that git does not track makes its package `-dirty`.
    """
    prefixes = (sys.prefix, sys.base_prefix, site.getusersitepackages())
    installed = {pathlib.Path(prefix).resolve() for prefix in prefixes}  # may be in a checkout
    files = collections.defaultdict(list)  # by package and checkout
    for name, module in list(sys.modules.items()):
        folders = pathlib.Path(getattr(module, "__file__", None) or "/").resolve().parents
        if _ROOT in folders or not installed.isdisjoint(folders):
            continue
        if root := next((folder for folder in folders if (folder / ".git").exists()), None):
            files[name.partition(".")[0], root].append(module.__file__)
    commits = {}
    for (package, root), paths in sorted(files.items()):
        commit = _commit(root)
        if commit and _git(root, "ls-files", "--others", *paths):
            commit = commit.removesuffix("-dirty") + "-dirty"
        commits[package] = commit
    return commits


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """Returns the output of git in a checkout; None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
