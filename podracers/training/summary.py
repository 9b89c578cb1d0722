"""The provenance of a run's results: device, versions, and commits of the code."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

import jax

from podracers import errors

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "podracers")
_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")


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
        "cpu": _cpu(),
        "processes": jax.process_count(),
        "versions": versions,
        "commit": _commit() or _installed_commit(),
        **_other_code(),
    }


def rounding() -> dict[str, str | None]:
    """Returns settings, outside of an experiment, that change the rounding of its results."""
    return {
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": jax.default_backend(),
        "jax_default_matmul_precision": jax.config.values["jax_default_matmul_precision"],
        **{name: os.environ.get(name) for name in _COMPILER_FLAGS},
    }


def _cpu() -> str:
    """Returns the name of this machine's processor, or else of its architecture."""
    information = pathlib.Path("/proc/cpuinfo")  # Linux, where `platform` has no model
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def _commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with `-dirty` where files differ; None without git."""
    if not (root / ".git").exists():  # an installed copy inside of a checkout has no commit
        return None
    name = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*")
    paths = (".", ":!docs", ":!README.md")  # recorded results change them while others train
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    if not name or changes is None:
        return None
    return f"{name}-dirty" if changes else name


def _installed_commit() -> str | None:
    """Returns the commit from which pip has installed this copy; None if it had a file instead."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, FileNotFoundError):
        package = importlib.metadata.distribution("podracers")
        if os.path.samefile(str(package.locate_file("podracers")), _ROOT / "podracers"):
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
        if errors.is_library(name_of_file):
            continue
        file = pathlib.Path(name_of_file).resolve()
        if _ROOT in file.parents or not file.is_file():
            continue
        hashes[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        if root := next((parent for parent in file.parents if (parent / ".git").exists()), None):
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
