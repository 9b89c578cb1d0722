"""Integrity of checkpoints: checksums of files.

Array files have no checksums of their own, so a flipped bit in one would be restored silently. A
manifest with the size and the CRC-32 of every file is written into a checkpoint before its commit.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from podracers import errors

MANIFEST = "manifest.json"
_CHUNK = 1 << 20  # bytes read at a time
UNFINISHED = ".orbax-checkpoint-tmp"  # orbax's suffix for names of folders before the commit


class DamagedError(Exception):
    """One checkpoint cannot be used; the message gives the reason in one line."""


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raises `DamagedError` where a file of a checkpoint is damaged: it is set aside then.

    Lack of memory, file descriptors, permission or a connection is no damage, and ends the run with
    `errors.RunFailure`.
    """
    try:
        yield
    except Exception as error:  # clients of buckets raise almost anything
        text = f"{name}: {reason(error)}"
        is_damage = isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
        if is_damage or getattr(error, "errno", None) == errno.EIO:
            raise DamagedError(text) from error
        raise errors.RunFailure(f"could not read a checkpoint: {text}") from error


def load(path: epath.Path) -> Any:
    """Returns the value of a JSON file of a checkpoint; raises as `reading`."""
    with reading(path.name):
        return json.loads(path.read_bytes())


def reason(error: BaseException) -> str:
    """Returns the root cause of `error` in one line."""
    while error.__cause__ is not None and not isinstance(error, OSError):
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))  # tensorstore wraps it in a paragraph
    return text if len(text) <= 200 else text[:197] + "..."


def write_part(folder: epath.Path, process: int) -> None:
    """Writes the checksums of the files that one of several processes has written.

    Orbax gives each process a folder of its own. The checkpoint is not committed yet.
    """
    parts = [item / f"ocdbt.process_{process}" for item in folder.iterdir()]
    paths = [path for part in parts if part.exists() for path in _files(part)]
    sums = {_name(folder, path): _checksum(path) for path in paths}
    (folder / f"manifest.{process}.json").write_text(json.dumps(sums))


def write(folder: epath.Path) -> None:
    """Writes the manifest of every file in the sub-folders of a checkpoint.

    Checksums that several processes have written by `write_part` are reused. Files of the top level
    are left out: orbax still writes there when it commits.
    """
    sums = {}
    for part in folder.iterdir():  # a glob would read the folder's own path as a pattern
        if part.name.startswith("manifest."):
            sums |= json.loads(part.read_text())
            part.unlink()
    for path in _files(folder):
        if path.parent != folder and (name := _name(folder, path)) not in sums:
            sums[name] = _checksum(path)
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1))


def verify(folder: epath.Path, items: Sequence[str], share: tuple[int, int] = (0, 1)) -> None:
    """Checks that the sub-folders `items` hold the files that were written.

    With the share `(i, n)` it checks the `i`-th of `n` shares of the files.

    Raises:
      DamagedError: a file is missing, truncated or changed.
      errors.RunFailure: a file cannot be read now, see `reading`.
    """
    sums = load(folder / MANIFEST)
    names = [name for name in sums if name.split("/")[0] in items]
    if missing := set(items) - {name.split("/")[0] for name in names}:
        raise DamagedError(f"{MANIFEST}: no files of {min(missing)}")
    for name in itertools.islice(names, share[0], None, share[1]):
        with reading(name):
            checksum = _checksum(folder / name)
        if checksum != sums[name]:
            raise DamagedError(f"{name}: checksum does not match")


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _name(folder: epath.Path, path: epath.Path) -> str:
    """Returns the name that a file has in its checkpoint after the commit."""
    item, *rest = path.relative_to(folder).parts
    return "/".join([item.partition(UNFINISHED)[0], *rest])


def _checksum(path: epath.Path) -> list[int]:
    """Returns `[size, CRC-32]` of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]
