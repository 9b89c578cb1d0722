"""The folder of a run: what is in it, and what it says of the machine that made it."""

import collections
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import site
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from podracers import errors
from podracers.training import presence, run_lock, schema, storage

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "podracers")

_SUMMARY = {  # what others read of it
    "evaluation": {
        "return": (schema.REAL, float),  # NaN, too
        "return_by_seed": schema.Optional({str: (schema.REAL, float)}),
        "episodes": schema.COUNT,
    },
    "random_policy_return": (schema.REAL, float),
    "environment_steps": schema.COUNT,
    "wall_time_s": schema.DURATION,
    "steps_per_second": (schema.DURATION, None),
    "first_dispatch_s": schema.DURATION,
    "seed": schema.COUNT,
    "device": str,
    "platform": str,
    "host_cores": schema.COUNT,
    "versions": {"jax": str},
    "commit": (str, None),
}


class RunDirectory:
    """Names the files of a run.

    Args:
      path: the folder.

    Attributes:
      checkpoints: where they are, unless the experiment says otherwise.
      lock: keeps other runs out of the folder, once it is acquired.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.lock = run_lock.RunLock(self.path)
        self._config_text: str | None = None
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints: storage.Path = self.path / "checkpoints"
        self.summary = self.path / "summary.json"

    def refuse_used(self) -> None:
        """Raises `errors.UserError` if there is something already."""
        try:
            used = self.path.exists() and (
                not self.path.is_dir() or any(map(_is_kept, self.path.iterdir()))
            )
        except OSError as error:
            raise self._cannot_make(error) from error
        if used:
            self.lock.require_free()
            raise errors.UserError(
                f"the run directory '{self.path}' is there already: continue it with --resume, or "
                "name another with --run_dir"
            )

    def create(self) -> None:
        """Makes the folder.

        Raises:
          errors.UserError: there is something already, or it cannot be made.
        """
        self.refuse_used()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_make(error) from error

    def _cannot_make(self, error: OSError) -> errors.UserError:
        return errors.UserError(f"cannot make the run directory '{self.path}': {error.strerror}")

    def require(self) -> None:
        """Raises `errors.UserError` unless a run was begun here."""
        if not self.config.is_file():
            siblings = [str(config.parent) for config in self.path.parent.glob("*/config.gin")]
            raise errors.UserError(
                f"there is no run in '{self.path}' (no config.gin)"
                f"{errors.nearest(str(self.path), siblings)}"
            )

    def require_there(self) -> None:
        """Checks that the folder is the one that was locked, and that its configuration is kept.

        Raises:
          errors.RunFailure: it was moved, removed or replaced; the message says what is left of it.
        """
        if not self.lock.is_there():
            location = self.lock.location()
            raise errors.RunFailure(
                f"the run directory '{self.path}' was {presence.fate(location)} while the run "
                f"wrote to it; {self._left(location)}"
            )
        self.lock.keep()
        if self._config_text is not None and not self.config.exists():
            self.write(self.config, self._config_text)

    def _left(self, location: str | None) -> str:
        """Returns what is left of a run whose folder is not where it was."""
        folder = self.checkpoints
        if folder.is_relative_to(self.path):
            if location is None:
                return "what is left of it could not be found"
            folder = pathlib.Path(location) / folder.name
        steps = storage.steps(folder) if location or folder is self.checkpoints else []
        if not steps:
            return "no checkpoint is left"
        return f"its newest checkpoint is of step {max(steps):,}"

    def read_config(self) -> str:
        """Returns `config.gin`.

        Raises:
          errors.UserError: it cannot be read, or is no text.
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
          errors.RunFailure: it cannot be read, or lacks what a run writes.
        """
        try:
            return schema.parse(self.summary.read_bytes(), _SUMMARY)
        except OSError as error:
            raise errors.RunFailure(f"cannot read '{self.summary}': {error.strerror}") from error
        except ValueError as error:
            raise errors.RunFailure(
                f"'{self.summary}' is damaged ({error}): remove it, and continue the run with "
                "--resume, which writes it anew"
            ) from error

    def write_config(self, text: str) -> None:
        """Writes `config.gin`, and once more whenever `require_there` misses it."""
        self._config_text = text
        self.write(self.config, text)

    def write(self, path: pathlib.Path, content: str) -> None:
        """Writes a file whole or not at all."""
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_text(content)
            os.replace(temporary, path)
        except OSError as error:
            raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        self.write(self.summary, json.dumps(values, indent=2) + "\n")


def _is_kept(path: pathlib.Path) -> bool:
    """Returns whether a file is more than a lock, or what is left of one that was half written."""
    return path.name != run_lock.NAME and not (
        path.name.startswith(".") and path.name.endswith(".partial")
    )


def provenance() -> dict[str, Any]:
    """Returns which device, versions and commits a result comes from."""
    devices = jax.devices()
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "platform": devices[0].platform,
        "host_cores": os.cpu_count(),
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "other_commits": _other_commits(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with `-dirty` where files differ; None without git.

    A folder within one is none: what was installed there has no commit that git would know. The
    file of this repository that results are recorded in while others train is no part of what
    trains them.
    """
    if not (root / ".git").exists():
        return None
    name = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*")
    ignored = (".", ":!docs/results.json") if root == _ROOT else (".",)
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *ignored)
    if not name or changes is None:
        return None
    return f"{name}-dirty" if changes else name


def _other_commits() -> dict[str, str | None]:
    """Returns the commit of each loaded package whose code is in another checkout than this one.

    These are the user's own agents, environments and networks, and what they import from there. A
    file that git does not know makes its package `-dirty`.
    """
    files = collections.defaultdict(list)  # by package and checkout
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (root := _checkout(pathlib.Path(path).resolve())) not in (None, _ROOT):
            files[name.partition(".")[0], root].append(path)
    commits = {}
    for (package, root), paths in sorted(files.items()):
        commit = _commit(root)
        if commit and not commit.endswith("-dirty") and _git(root, "ls-files", "--others", *paths):
            commit += "-dirty"
        commits[package] = commit
    return commits


def _checkout(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the git checkout that a file is in; None for what was installed."""
    if any(path.is_relative_to(prefix) for prefix in _installed()):
        return None
    return next((folder for folder in path.parents if (folder / ".git").exists()), None)


@functools.cache
def _installed() -> frozenset[pathlib.Path]:
    """Returns where Python and what is installed for it are, which may lie within a checkout."""
    prefixes = (sys.prefix, sys.base_prefix, site.getusersitepackages())
    return frozenset(pathlib.Path(prefix).resolve() for prefix in prefixes)


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """Returns what git prints about a checkout; None where it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
