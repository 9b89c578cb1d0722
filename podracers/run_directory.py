"""The folder of a run: what is in it, and what it says of the machine that made it."""

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import jax

from podracers import errors

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "podracers")


class RunDirectory:
    """Names the files of a run.

    Args:
      path: the folder.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
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
    """Returns whether a file is more than what was left of one that was being written."""
    return not (path.name.startswith(".") and path.name.endswith(".partial"))


def provenance() -> dict[str, Any]:
    """Returns which device, versions and commit a result comes from."""
    devices = jax.devices()
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "platform": devices[0].platform,
        "host_cores": os.cpu_count(),
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """Returns the commit of this checkout, with `-dirty` where files differ; None without git."""
    root = pathlib.Path(__file__).resolve().parent.parent
    try:
        described = subprocess.run(
            [
                "git",
                "-C",
                str(root),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
