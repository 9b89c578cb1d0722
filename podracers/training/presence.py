"""Notices that what a run writes to was removed, moved or replaced under it.

An open file goes on to take what is written after it was removed, and libraries make missing
folders anew, so without this a run could end well and leave nothing. What a path leads to is
compared with a descriptor of it that was kept open.
"""

import os
import pathlib

from podracers import errors


def require(path: pathlib.Path, descriptor: int) -> None:
    """Checks that a path still leads to the file or folder that is open.

    Raises:
      errors.RunFailure: it does not.
    """
    if is_there(path, descriptor):
        return
    raise errors.RunFailure(f"'{path}' was {fate(location(descriptor))} while the run wrote to it")


def is_there(path: pathlib.Path, descriptor: int) -> bool:
    """Returns whether a path leads to the file or folder that is open.

    Where that cannot be found out now, it counts as there: what is written next says why.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def location(descriptor: int) -> str | None:
    """Returns the path of an open file or folder: empty if removed, None where nobody says.

    Linux says so.
    """
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return "" if path.endswith(" (deleted)") else path


def fate(location: str | None) -> str:
    """Returns in words what became of a file or folder that now has this `location`."""
    if location is None:
        return "moved or removed"
    return f"moved to '{location}'" if location else "removed"
