"""The files of a run, the lock that keeps a second run out, and the provenance of its results."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import platform
import socket
import subprocess
import sys
from typing import Any

import jax

from podracers import errors
from podracers.training import config, storage

LOCK = ".lock"

_LOGGER = logging.getLogger(__name__)
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "podracers")


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
        self.checkpoints: storage.Path = self.path / "checkpoints"  # experiments may name others
        self.summary = self.path / "summary.json"
        self.orbax_log = self.path / "orbax.log"

    def create(self, dry_run: bool = False) -> None:
        """Makes and locks the folder; with `dry_run` only checks it.

        Raises:
          errors.UserError: it cannot be made, cannot hold checkpoints, has files other than a lock
            and partial files, or another run has the lock.
        """
        storage.require_safe("the run directory", self.path)
        names = []
        try:
            if not dry_run:
                self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                names = [each.name for each in self.path.iterdir()]
        except OSError as error:
            message = f"cannot make the run directory '{self.path}': {error.strerror}"
            raise errors.UserError(message) from error
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
        try:
            return self.config.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise errors.UserError(f"cannot read '{self.config}': {error}") from error

    def require_gin(self) -> None:
        """Raises `errors.UserError` if `config.gin` is empty, as of a run from Python.

        Logs what it imports from outside of this project, which loading it executes.
        """
        if not (text := self.read_config()):
            raise errors.UserError(
                f"the run in '{self.path}' was configured in Python, not by gin: see "
                "`trained.params(path, parts)` and `run.Run(..., resume=True)`"
            )
        if names := config.other_code(text, str(self.config)):
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
        "commit": _commit() or _installed_commit(),
        **_other_code(),
    }


def _commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with `-dirty` where files differ; None without git."""
    if not (root / ".git").exists():  # an installed copy inside of a checkout has no commit
        return None
    name = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*")
    paths = (".", ":!docs/results.json")  # results that are recorded while others train
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    if not name or changes is None:
        return None
    return f"{name}-dirty" if changes else name


def _installed_commit() -> str | None:
    """Returns the commit from which pip has installed this copy; None if it had a file instead."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, FileNotFoundError):
        package = importlib.metadata.distribution("podracers")
        if package.locate_file("podracers").samefile(_ROOT / "podracers"):
            origin = json.loads(package.read_text("direct_url.json") or "{}")
            return origin.get("vcs_info", {}).get("commit_id")
    return None


def _other_code() -> dict[str, dict[str, str | None]]:
    """Returns commits and hashes of the modules that are neither this project's nor installed.

    `other_commits` has the packages that were loaded from other checkouts, and `other_modules` the
    SHA-256 of each file, by path.
    """
    roots, hashes = {}, {}
    for name, module in list(sys.modules.items()):
        name_of_file = getattr(module, "__file__", None) or "<none>"
        file = pathlib.Path(name_of_file).resolve()
        if errors.is_library(name_of_file) or _ROOT in file.parents or not file.is_file():
            continue
        hashes[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        if root := next((each for each in file.parents if (each / ".git").exists()), None):
            roots[name.partition(".")[0]] = root
    commits = {package: _commit(root) for package, root in sorted(roots.items())}
    return {"other_commits": commits, "other_modules": dict(sorted(hashes.items()))}


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """Returns the output of git in a checkout; None if it fails."""
    command = ["git", "-C", root, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
