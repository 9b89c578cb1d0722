"""What tells a whole checkpoint from a damaged one, and a fitting one from a foreign one.

Array files carry no checksums of their own, so a flipped bit in one would restore in silence. A
manifest of the size and the CRC-32 of every file is written into a checkpoint before its commit.
Where several processes write a checkpoint, each sums up its own part of it.
"""

import errno
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podracers import errors, types
from podracers.training import schema

MANIFEST = "manifest.json"
_SUMS = {str: [schema.COUNT, schema.COUNT]}  # by file: size, CRC-32
_CHUNK = 1 << 20  # bytes read at a time
_UNFINISHED = ".orbax-checkpoint-tmp"  # what orbax adds to names until the commit


# What says nothing of a file but that it cannot be read now, or by this process.
_NOT_NOW = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ESTALE}
_NOT_NOW_WORDS = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED"
)
_CLIENTS = {"aiohttp", "gcsfs", "google", "requests"}  # of buckets


class DamagedError(Exception):
    """One checkpoint cannot be used; the text says why, in one line."""


def unreadable(what: str, error: BaseException) -> DamagedError | errors.RunFailure:
    """Returns what to raise where something of a checkpoint could not be read.

    A checkpoint that is called damaged is set aside, so lack of memory, of file descriptors, of
    permission or of a connection does not count as damage: it ends the run.
    """
    text = f"{what}: {reason(error)}" if what else reason(error)
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in causes:
        is_lost = isinstance(cause, MemoryError | ConnectionError | TimeoutError)
        is_lost |= type(cause).__module__.partition(".")[0] in _CLIENTS
        is_lost |= isinstance(cause, OSError) and cause.errno in _NOT_NOW
        if is_lost or _NOT_NOW_WORDS.search(str(cause)):
            return errors.RunFailure(f"could not read a checkpoint: {text}")
    return DamagedError(text)


def write(folder: pathlib.Path, known: Mapping[str, list[int]] | None = None) -> None:
    """Writes the manifest of every file in the sub-folders of `folder`.

    Files of the top level are left out: orbax still writes there when it commits.

    Args:
      folder: the checkpoint.
      known: what `part` has returned of some of the files, whose sums it takes as they are.

    Raises:
      FileNotFoundError: one of them is not there.
    """
    known = known or {}
    names = [_name(folder, path) for item in _folders(folder) for path in files(item)]
    if missing := set(known) - set(names):
        raise FileNotFoundError(errno.ENOENT, f"{min(missing)} was written, and is not there")
    sums = {name: known.get(name) or _checksum(folder / name) for name in names}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1))


def part(folder: pathlib.Path, process: int) -> dict[str, list[int]]:
    """Returns the sums of what one of several processes has written into a checkpoint.

    Args:
      folder: the checkpoint, not committed yet.
      process: the number of the process; orbax gives each a folder of its own.
    """
    own = [item / f"ocdbt.process_{process}" for item in _folders(folder)]
    found = [path for each in own if each.exists() for path in files(each)]
    return {_name(folder, path): _checksum(path) for path in found}


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [item for item in sorted(folder.iterdir()) if item.is_dir()]


def files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files in a folder and its sub-folders, in order."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def _name(folder: pathlib.Path, path: pathlib.Path) -> str:
    """Returns the name of a file in its checkpoint, which orbax gives its items at the end."""
    item, *rest = path.relative_to(folder).parts
    return "/".join([item.partition(_UNFINISHED)[0], *rest])


def verify(folder: pathlib.Path, items: Sequence[str], share: tuple[int, int] = (0, 1)) -> None:
    """Checks that the sub-folders `items` hold what was written.

    Args:
      folder: the checkpoint.
      items: names of sub-folders.
      share: `(i, n)`: check the `i`-th of `n` shares of the files.

    Raises:
      DamagedError: a file is missing, cut short or changed.
      errors.RunFailure: a file cannot be read now, see `unreadable`.
    """
    try:
        sums = schema.parse((folder / MANIFEST).read_bytes(), _SUMS)
    except (OSError, ValueError) as error:
        raise unreadable(MANIFEST, error) from error
    names = [name for name in sums if name.split("/")[0] in items]
    if missing := set(items) - {name.split("/")[0] for name in names}:
        raise DamagedError(f"{MANIFEST}: nothing on {min(missing)}")
    for name in names[share[0] :: share[1]]:
        try:
            found = _checksum(folder / name)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise unreadable(name, error) from error
        if found != sums[name]:
            raise DamagedError(f"{name}: checksum does not match")


def _checksum(path: pathlib.Path) -> list[int]:
    """Returns `[size, CRC-32]` of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def structure(tree: types.PyTree) -> list[list[Any]]:
    """Returns `[path, shape, dtype]` of every leaf, as JSON can hold it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        [
            jax.tree_util.keystr(path, simple=True, separator="/"),
            list(np.shape(leaf)),
            str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__,
        ]
        for path, leaf in leaves
    ]


def difference(found: list[list[Any]], expected: list[list[Any]]) -> str | None:
    """Returns a phrase on the first leaf in which two structures differ, or None."""
    found_leaves = {path: f"{dtype}{shape}" for path, shape, dtype in found}
    expected_leaves = {path: f"{dtype}{shape}" for path, shape, dtype in expected}
    for path, leaf in expected_leaves.items():
        if path not in found_leaves:
            return f"it has no leaf '{path}' ({leaf})"
        if found_leaves[path] != leaf:
            return f"'{path}' should be {leaf}, and is {found_leaves[path]}"
    for path, leaf in found_leaves.items():
        if path not in expected_leaves:
            return f"it has a leaf '{path}' ({leaf}) that is not expected"
    return None


def reason(error: BaseException) -> str:
    """Returns one line that says what went wrong at the root of `error`."""
    while error.__cause__ is not None and not isinstance(error, OSError):
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))  # tensorstore wraps it in a paragraph
    return text if len(text) <= 200 else text[:197] + "..."
