"""Folders of checkpoints: on a disk, or in a bucket (`gs://BUCKET/FOLDER`).

A rename in a bucket copies object by object, so a checkpoint in one is committed by a file that is
written last, and a folder without that file is no checkpoint.
"""

import contextlib
import logging
import os
import pathlib
import secrets
from collections.abc import Iterator

from etils import epath

from podracers import errors
from podracers.checkpoints import integrity
from podracers.hosts import processes

COMMITTED = "commit_success.txt"  # orbax's name
_SCHEME = "gs://"
_PROBE = ".podracers"  # first part of the names of files that tests of access write
_UNSAFE = "*?[\\"  # patterns for orbax's globs; and tensorstore reads a backslash as a slash

Path = epath.Path


@contextlib.contextmanager
def failures(action: str) -> Iterator[None]:
    """Raises `errors.RunFailure`, "could not `action`" with the cause, where files fail."""
    try:
        yield
    except (errors.RunFailure, errors.UserError):
        raise
    except Exception as error:  # clients of buckets raise almost anything
        raise errors.RunFailure(f"could not {action}: {integrity.reason(error)}") from error


def check(option: str, place: str) -> None:
    """Raises `errors.UserError` unless an option names a folder, or a bucket's, for checkpoints."""
    if isinstance(place, str):
        bucket, _, folder = place.removeprefix(_SCHEME).partition("/")
        is_folder = bucket and folder.strip("/")
        if is_folder if place.startswith(_SCHEME) else os.path.isabs(place):
            return require_safe(option, place)
    raise errors.UserError(
        f"{option}: expected an absolute path, or gs://BUCKET/FOLDER, got {place!r}"
    )


def require_safe(option: str, place: str | os.PathLike) -> None:
    """Raises `errors.UserError` for a folder in which checkpoints would be lost."""
    text = os.fspath(path(place))
    if (unsafe := next((letter for letter in text if letter in _UNSAFE), None)) is not None:
        raise errors.UserError(
            f"{option}: expected a path without '{unsafe}', below which orbax loses checkpoints; "
            f"got '{text}'"
        )


def path(place: str | os.PathLike) -> Path:
    """Returns the path of a folder: absolute on a disk, or in a bucket."""
    text = os.fspath(place)
    if not text.startswith(_SCHEME):
        return Path(os.path.abspath(text))
    import fsspec  # noqa: PLC0415 (only buckets need it)

    # A cached listing would lack the files of tensorstore and of other processes.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its errors are raised here
    return Path(text)


def is_bucket(folder: Path) -> bool:
    """Returns whether a folder is in a bucket."""
    return os.fspath(folder).startswith(_SCHEME)


def make(folder: Path) -> None:
    """Makes a folder on a disk; buckets need no folders, and `mkdir` would make a bucket."""
    require_safe("checkpoints", folder)
    if not is_bucket(folder):
        folder.mkdir(parents=True, exist_ok=True)


def require_same(path: os.PathLike, descriptor: int) -> None:
    """Raises `errors.RunFailure` unless a path still leads to the open file or folder `descriptor`.

    An open file accepts writes after its removal, and libraries make missing folders again: without
    this check a run could end with success and leave nothing. A path that cannot be examined now
    counts as the same: the next write fails with the reason.
    """
    fate = "moved or removed"
    try:
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            return
    with contextlib.suppress(OSError):  # only Linux has this
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        fate = "removed" if place.endswith(" (deleted)") else f"moved to '{place}'"
    raise errors.RunFailure(f"'{path}' was {fate} while the run wrote to it")


def write(file: pathlib.Path | Path, data: str | bytes) -> None:
    """Writes a file whole or not at all; raises `errors.RunFailure` if it cannot."""
    with failures(f"write '{file}'"):
        partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
        partial.replace(file)


def steps(directory: Path) -> list[int]:
    """Returns the steps of the committed checkpoints in a folder, in order."""
    names = [folder.name for folder in _entries(directory) if folder.name.isdigit()]
    if is_bucket(directory):
        names = [name for name in names if (directory / name / COMMITTED).exists()]
    return sorted(map(int, names))


def partial(directory: Path) -> list[Path]:
    """Returns the folders of checkpoints that are not committed."""
    entries = _entries(directory)
    if is_bucket(directory):
        return [item for item in entries if item.name.isdigit() and not (item / COMMITTED).exists()]
    return [item for item in entries if integrity.UNFINISHED in item.name]


def _entries(directory: Path) -> list[Path]:
    """Returns the contents of a folder; a bucket has no empty folders."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def require_shared(
    option: str, place: str | os.PathLike, resume: bool | None, advice: str = ""
) -> bool:
    """Checks that all processes can write to the same folder, and makes it.

    All processes call it, before the first update. Each writes a file, and process 0 looks for it.
    `resume` allows files in it; None allows them only where there are checkpoints. Messages have
    the folder's name, `option`, and `advice` for processes that do not share it.

    Returns:
      `resume`; where that is None, whether there are checkpoints.

    Raises:
      errors.UserError: a process cannot write to it or sees another folder, or it is in use.
    """
    directory = path(place)
    name = processes.on_lead(lambda: f"{_PROBE}-{secrets.token_hex(8)}")
    probe, fault = directory / f"{name}-{processes.index()}", None
    try:
        make(directory)
        probe.write_bytes(b"")
    except Exception as error:  # clients of buckets raise almost anything
        fault = f"cannot be written: {integrity.reason(error)} (process {processes.index()})"
    faults = processes.all_gather(fault)

    def examine() -> bool:
        for fault in filter(None, faults):
            raise errors.UserError(f"{option} = '{directory}' {fault}")
        with failures(f"list '{directory}'"):
            names = [entry.name for entry in _entries(directory)]
            resumed = bool(steps(directory)) if resume is None else resume
        for index in range(processes.count()):
            if f"{name}-{index}" not in names:
                raise errors.UserError(
                    f"{option} = '{directory}': process {index} does not see the files of "
                    f"process 0{advice}"
                )
        used = [entry for entry in names if not entry.startswith(_PROBE)]
        if used and not resumed:
            raise errors.UserError(
                f"{option} = '{directory}' is in use (it contains '{min(used)}'): continue that "
                "run with --resume, or name another folder"
            )
        return resumed

    try:
        resumed = processes.on_lead(examine)
    finally:
        with contextlib.suppress(Exception):
            probe.unlink()
    processes.all_gather(None)  # process 0 may look into the folder next: no file is left there
    return resumed
