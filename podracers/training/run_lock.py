"""Keeps a second run out of a run directory for as long as the first one lives."""

import contextlib
import fcntl
import io
import logging
import os
import pathlib
import socket
import weakref

from podracers import errors
from podracers.training import presence

NAME = ".lock"

_LOGGER = logging.getLogger(__name__)
_NO_LOCKS = "the run directory '%s' cannot be locked (%s): do not start a second run in it"


class RunLock:
    """The lock of one run directory, which the operating system frees when the process ends.

    It is one of `flock`, on a file that stays behind. It is not passed on: neither to programs that
    this process starts nor to its copies by `fork`, which may outlive it.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: pathlib.Path):
        self.path = directory / NAME
        self._file: io.FileIO | None = None
        self._directory: int | None = None  # a descriptor of the directory that was locked

    def acquire(self) -> None:
        """Takes the lock; nothing happens where this object has it already.

        On a file system without locks it warns, and lets everybody in.

        Raises:
          errors.UserError: another run has it; the message says which.
          errors.RunFailure: its file cannot be written.
        """
        if self._file is not None:
            return
        with contextlib.ExitStack() as on_failure:
            try:
                file = on_failure.enter_context(self.path.open("ab+", buffering=0))
                self._exclude(file)
                file.truncate(0)
                file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
                self._directory = os.open(self.path.parent, os.O_RDONLY)
            except OSError as error:
                message = f"could not write '{self.path}': {error.strerror}"
                raise errors.RunFailure(message) from error
            on_failure.pop_all()
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Lets others in; nothing happens where this object does not have the lock."""
        if self._file is not None:
            self._file.close()
            os.close(self._directory)
            self._file = self._directory = None

    def __del__(self):
        self.release()

    def require_free(self) -> None:
        """Raises `errors.UserError` if another run has the lock; does not take it."""
        if self._file is not None:
            return
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            self._flock(file, fcntl.LOCK_SH)

    def is_there(self) -> bool:
        """Returns whether the directory is the one that was locked; true where none was."""
        return self._file is None or presence.is_there(self.path.parent, self._directory)

    def location(self) -> str | None:
        """Returns where the locked directory is now; see `presence.location`."""
        return presence.location(self._directory)

    def keep(self) -> None:
        """Takes the lock anew if its file was removed, which alone ends no run.

        Raises:
          errors.UserError: another run has taken it meanwhile.
        """
        if self._file is not None and not presence.is_there(self.path, self._file.fileno()):
            self.release()
            self.acquire()

    def _exclude(self, file: io.FileIO) -> None:
        try:
            self._flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _LOGGER.warning(_NO_LOCKS, self.path.parent, error.strerror)

    def _flock(self, file: io.FileIO, operation: int) -> None:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = self.path.read_bytes()[:200].decode(errors="replace").strip()
            raise errors.UserError(
                f"the run directory '{self.path.parent}' is in use by {who or 'another process'}: "
                "wait until that run has ended, or end it"
            ) from error


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget() -> None:
    """In a copy of this process: closes the files, or it would keep the locks for its own life."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget)
