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
from podracers.hosts import processes
from podracers.training import manifest

COMMITTED = "commit_success.txt"  # orbax's name
_SCHEME = "gs://"
_PROBE = ".podracers"  # first part of the names of files that tests of access write

Path = epath.Path


@contextlib.contextmanager
def failures(action: str) -> Iterator[None]:
    """Raises `errors.RunFailure`, "could not `action`" with the cause, where files fail."""
    try:
        yield
    except (errors.RunFailure, errors.UserError):
        raise
    except Exception as error:  # clients of buckets raise almost anything
        raise errors.RunFailure(f"could not {action}: {manifest.reason(error)}") from error


def check(option: str, place: str) -> None:
    """Raises `errors.UserError` unless the value of an option names a folder or a bucket's."""
    if isinstance(place, str):
        bucket, _, folder = place.removeprefix(_SCHEME).partition("/")
        is_folder = bucket and folder.strip("/")
        if is_folder if place.startswith(_SCHEME) else os.path.isabs(place):
            return
    raise errors.UserError(
        f"{option}: expected an absolute path, or gs://BUCKET/FOLDER, got {place!r}"
    )


def path(place: str | os.PathLike) -> Path:
    """Returns the path of a folder, absolute, or of one in a bucket."""
    text = os.fspath(place)
    if not text.startswith(_SCHEME):
        return Path(os.path.abspath(text))
    import fsspec  # noqa: PLC0415 (only buckets need it)

    # A cached listing would lack the files of tensorstore and of other processes.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its errors are raised here
    return Path(text)


def is_bucket(folder: Path) -> bool:
    """Returns whether a folder is one of a bucket."""
    return os.fspath(folder).startswith(_SCHEME)


def make(folder: Path) -> None:
    """Makes a folder on a disk; buckets need no folders, and `mkdir` would make a bucket."""
    if not is_bucket(folder):
        folder.mkdir(parents=True, exist_ok=True)


def is_same(path: os.PathLike, descriptor: int) -> bool:
    """Returns whether a path still leads to the open file or folder `descriptor`.

    An open file accepts writes after its removal, and libraries make missing folders anew: without
    this check a run could end with success and leave nothing. A path that cannot be examined now
    counts as the same: the next write fails with the reason.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def require_same(path: os.PathLike, descriptor: int) -> None:
    """Raises `errors.RunFailure` where `is_same` is false."""
    if is_same(path, descriptor):
        return
    fate = "moved or removed"
    with contextlib.suppress(OSError):  # only Linux has this
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        fate = "removed" if place.endswith(" (deleted)") else f"moved to '{place}'"
    raise errors.RunFailure(f"'{path}' was {fate} while the run wrote to it")


def write(file: pathlib.Path | Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def steps(directory: Path) -> list[int]:
    """Returns the steps of the committed checkpoints in a folder, in order."""
    names = [folder.name for folder in _entries(directory) if folder.name.isdigit()]
    if is_bucket(directory):
        names = [name for name in names if (directory / name / COMMITTED).exists()]
    return sorted(map(int, names))


def partial(directory: Path) -> list[Path]:
    """Returns the folders of checkpoints that are not committed."""
    found = _entries(directory)
    if is_bucket(directory):
        return [each for each in found if each.name.isdigit() and not (each / COMMITTED).exists()]
    return [each for each in found if manifest.UNFINISHED in each.name]


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

    All processes call it, before the first update. Process 0 writes a file, and the others look for
    it.

    Args:
      option: name of the folder, for messages.
      place: the folder.
      resume: whether there may be files in it; None: only if there are checkpoints in it.
      advice: end of the message for processes that do not share the folder.

    Returns:
      `resume`; where that is None, whether there are checkpoints.

    Raises:
      errors.UserError: a process cannot write to it or sees another folder, or it is in use.
    """
    directory = path(place)
    where = f"{option} = '{directory}'"

    def write_probe() -> tuple[str, bool]:
        name = f"{_PROBE}-{secrets.token_hex(8)}"
        try:
            make(directory)
            resumed = bool(steps(directory)) if resume is None else resume
            names = (each.name for each in _entries(directory))
            used = min((name for name in names if not name.startswith(_PROBE)), default=None)
            if resumed or not used:
                (directory / name).write_text("")
                return name, resumed
        except Exception as error:  # clients of buckets raise almost anything
            reason = manifest.reason(error)
            raise errors.UserError(f"{where} cannot be written: {reason}") from error
        raise errors.UserError(
            f"{where} is in use (it contains '{used}'): continue that run with --resume, or name "
            "another folder"
        )

    name, resumed = processes.on_lead(write_probe)
    fault = None
    try:
        if (directory / name).exists():
            own = directory / f"{name}-{processes.index()}"
            own.write_text("")
            own.unlink()
        else:
            fault = f"does not see the files of process 0{advice}"
    except Exception as error:  # see `write_probe`
        fault = f"cannot write to it: {manifest.reason(error)}"
    faults = processes.all_gather(fault)

    def remove_probe() -> None:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
        for index, each in enumerate(faults):
            if each:
                raise errors.UserError(f"{where}: process {index} {each}")

    processes.on_lead(remove_probe)
    return resumed
