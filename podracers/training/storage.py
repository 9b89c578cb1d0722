"""Where checkpoints lie: in a folder, or in a bucket (`gs://BUCKET/FOLDER`).

A rename in a bucket copies object by object, so a checkpoint in one is committed by a file that is
written last, and a folder without that file is no checkpoint.
"""

import contextlib
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from etils import epath

from podracers import errors
from podracers.hosts import processes
from podracers.training import manifest

COMMITTED = "commit_success.txt"  # as orbax names it
_SCHEME = "gs://"
_MARK = ".podracers"  # says that what lies in a folder are checkpoints of a run
_EXPECTED = "an absolute path, or gs://BUCKET/FOLDER"

# The methods of both that are used here have the same names.
Path = pathlib.Path | epath.Path


def check(option: str, place: str) -> None:
    """Raises `errors.UserError` unless the text of an option names a folder or a bucket's."""
    if isinstance(place, str):
        bucket, _, folder = place.removeprefix(_SCHEME).partition("/")
        is_folder = bucket and folder.strip("/")
        if is_folder if place.startswith(_SCHEME) else os.path.isabs(place):
            return
    raise errors.UserError(f"{option}: expected {_EXPECTED}, got {place!r}")


def path(place: str | os.PathLike) -> Path:
    """Returns the path of a folder, absolute, or of one in a bucket."""
    text = os.fspath(place)
    if not text.startswith(_SCHEME):
        return pathlib.Path(text).absolute()
    import fsspec  # noqa: PLC0415 (nobody else needs it)

    # What tensorstore and other processes write would be missing in listings that are remembered.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # tracebacks of what is raised here
    return epath.Path(text)


def is_bucket(folder: Path) -> bool:
    """Returns whether a folder is one of a bucket."""
    return os.fspath(folder).startswith(_SCHEME)


def make(directory: Path) -> int | None:
    """Makes a folder, and returns a descriptor of it; None for one in a bucket.

    Raises:
      errors.RunFailure: it cannot be made.
    """
    try:
        _make(directory)
        return None if is_bucket(directory) else os.open(directory, os.O_RDONLY)
    except Exception as error:  # libraries of buckets raise almost anything
        raise errors.RunFailure(f"could not make {directory}: {manifest.reason(error)}") from error


def _make(folder: Path) -> None:
    if not os.fspath(folder).startswith(_SCHEME):  # buckets have no folders, and would be made
        folder.mkdir(parents=True, exist_ok=True)


def write(file: Path, text: str) -> None:
    """Writes a file whole or not at all, as buckets do by themselves."""
    if is_bucket(file):
        file.write_text(text)
        return
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def remove(folder: Path) -> None:
    """Removes a folder with all that is in it, or a file; nothing where there is neither."""
    if is_bucket(folder):
        with contextlib.suppress(FileNotFoundError):
            epath.Path(folder).rmtree()
    elif folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def rename(folder: Path, target: Path) -> None:
    """Gives a folder another name, in the place of what had it; in a bucket file by file."""
    remove(target)
    if not is_bucket(folder):
        folder.rename(target)
        return
    for file in manifest.files(epath.Path(folder)):
        copy = epath.Path(target) / file.relative_to(folder)
        _make(copy.parent)
        file.copy(copy)
    remove(folder)


def remove_uncommitted(directory: Path) -> None:
    """Removes the folders in a bucket that a killed run left without their last file."""
    for folder in _entries(directory):
        if folder.name.isdigit() and not (folder / COMMITTED).exists():
            remove(folder)


def steps(directory: Path) -> list[int]:
    """Returns the steps whose checkpoints lie in a folder, in order."""
    names = [folder.name for folder in _entries(directory) if folder.name.isdigit()]
    if is_bucket(directory):
        names = [name for name in names if (directory / name / COMMITTED).exists()]
    return sorted(map(int, names))


def _entries(directory: Path) -> list[Path]:
    """Returns what is in a folder; nothing where there is none, as in buckets if it is empty."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_begun(place: str) -> bool:
    """Returns, to process 0, whether a folder that runs may share holds checkpoints.

    Raises:
      errors.UserError: it cannot be looked at.
    """
    with _mistakes(place, "cannot be read"):
        return bool(steps(path(place)))


def require(option: str, place: str, resume: bool) -> None:
    """Checks that all processes see the folder of an option, and can write to it.

    All processes call it. The folder is made, and a file in it says what it is for.

    Args:
      option: its name, for messages.
      place: the folder.
      resume: whether checkpoints may be in it.

    Raises:
      errors.UserError: it cannot be written, is not one and the same to all processes, or has
        something else in it.
    """
    directory, token = path(place), secrets.token_hex(8)
    probe = f"{_MARK}-{processes.on_lead(lambda: _begin(option, place, token, resume))}"
    fault = None
    try:
        if (directory / probe).exists():
            mine = directory / f"{probe}-{processes.index()}"
            mine.write_text(probe)
            mine.unlink()
        else:
            fault = "does not see what process 0 has written there: all have to share it"
    except Exception as error:  # see `make`
        fault = f"cannot write to it: {_cause(error)}"
    faults = processes.all_say(fault)
    processes.on_lead(lambda: _end(option, directory / probe, faults))


def _begin(option: str, place: str, token: str, resume: bool) -> str:
    """Writes, in process 0, what the others are to find; returns its name."""
    directory = path(place)
    with _mistakes(f"{option} = '{place}'", "cannot be written"):
        _make(directory)
        found = {entry.name for entry in _entries(directory)}
        if resume or not (other := {name for name in found if not name.startswith(_MARK)}):
            (directory / _MARK).write_text("checkpoints of one run\n")
            (directory / f"{_MARK}-{token}").write_text(token)
            return token
    raise errors.UserError(
        f"{option} = '{place}' is in use (it has '{min(other)}' in it): continue that run with "
        "--resume, or name another folder"
    )


def _end(option: str, probe: Path, faults: list[str | None]) -> None:
    """Removes, in process 0, what the others were to find, and says what went wrong."""
    with contextlib.suppress(OSError):
        probe.unlink()
    for index, fault in enumerate(faults):
        if fault:
            where = f"{option} = '{probe.parent}'"
            raise errors.UserError(f"{where}: process {index} {fault}")


@contextlib.contextmanager
def _mistakes(what: str, how: str) -> Iterator[None]:
    """Makes of all that goes wrong within a mistake of the user."""
    try:
        yield
    except Exception as error:  # see `make`
        raise errors.UserError(f"{what} {how}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Returns one line that says what went wrong; of a missing package, how to get it."""
    if isinstance(error, ImportError):
        return "buckets need the package gcsfs: pip install 'podracers[gcs]'"
    return manifest.reason(error)
