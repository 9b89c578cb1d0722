"""Watches over the other processes of a run, so that none of them waits for one that is gone.

Every process has a connection to process 0, over which both say each second that they live. One
that closes or falls silent, or a process that says why it fails, ends all: process 0 passes the
first cause on, and everybody says it in one line. A collective that waits for a process that is
gone may never return, so a thread has to end the process.
"""

import contextlib
import multiprocessing.connection
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from podracers import children, errors

_PERIOD = 1.0  # seconds between two signs of life
_LINGER = 3.0  # seconds that a process which fails stays, for the others to hear why
_FINISHING = 30.0  # seconds that what is being written may take, once another process failed
_ALIVE, _DONE, _FAILED = "alive", "done", "failed"


class Address(NamedTuple):
    """Where process 0 listens."""

    port: int
    token: str  # so that nobody else is listened to


class Failure(NamedTuple):
    """The first cause."""

    line: str
    exit_code: int


class _Peers:
    """The connections of this process, and the thread that listens to them."""

    def __init__(self, process: int, timeout: float):
        self._process, self._timeout = process, timeout
        self._lock = threading.Lock()  # of sending
        self._connections: dict[int, Any] = {}
        self._heard: dict[int, float] = {}
        self._done: set[int] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self, connections: dict[int, Any]) -> None:
        """Begins to listen to each of the given processes."""
        self._connections = connections
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._thread.start()

    def _run(self) -> None:
        said = 0.0
        while not self._closing:
            if time.monotonic() - said > _PERIOD:
                said = time.monotonic()
                self.send((_ALIVE,))
            open_ = {c: peer for peer, c in self._connections.items() if not c.closed}
            for connection in multiprocessing.connection.wait(list(open_), _PERIOD):
                self._hear(open_[connection], connection)
            self._find_silent()

    def _hear(self, peer: int, connection: Any) -> None:
        try:
            kind, *rest = connection.recv()
        except (EOFError, OSError):
            connection.close()
            if peer not in self._done and not self._closing:
                self._end(Failure(f"failed: process {peer} was lost: it closed its connection", 1))
            return
        self._heard[peer] = time.monotonic()
        if kind == _DONE:
            self._done.add(peer)
        elif kind == _FAILED:
            self._end(Failure(*rest))

    def _find_silent(self) -> None:
        now = time.monotonic()
        for peer, heard in self._heard.items():
            if now - heard > self._timeout and peer not in self._done and not self._closing:
                line = f"failed: process {peer} was lost: nothing was heard of it for"
                self._end(Failure(f"{line} {self._timeout:g} s", 1))

    def send(self, message: tuple) -> None:
        """Says something to everybody who is connected."""
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError, ValueError):  # who is gone is noticed elsewhere
                    connection.send(message)

    def _end(self, failure: Failure) -> None:
        """Passes the cause on, says it, and ends this process."""
        try:
            self.send((_FAILED, *failure))
            print(failure.line, file=sys.stderr, flush=True)
            sys.stdout.flush()
            children.kill()
            limit = time.monotonic() + _FINISHING
            while any(busy() for busy in _busy) and time.monotonic() < limit:
                time.sleep(0.1)
            if self._process == 0:
                self.linger()
        finally:
            os._exit(failure.exit_code)

    def linger(self) -> None:
        """Waits until the others have gone: the connections of JAX's own end with process 0."""
        limit = time.monotonic() + _LINGER
        left = [c for c in self._connections.values() if not c.closed]
        while left and time.monotonic() < limit:
            for connection in multiprocessing.connection.wait(left, 0.1):
                try:
                    connection.recv()
                except (EOFError, OSError):
                    left.remove(connection)

    def close(self, message: tuple) -> None:
        """Says a last message, and stops listening."""
        self._closing = True
        self.send(message)
        self._thread.join(2 * _PERIOD)


_watching: list[_Peers] = []  # at most one
_busy: list[Callable[[], bool]] = []


class Host:
    """The end in process 0, to which the others connect."""

    def __init__(self):
        self._token = secrets.token_hex(16)
        self._listener = multiprocessing.connection.Listener(
            ("", 0), backlog=128, authkey=self._token.encode()
        )
        self._connections: dict[int, Any] = {}
        self._arrived = threading.Condition()

    @property
    def address(self) -> Address:
        """Where the others find it."""
        return Address(self._listener.address[1], self._token)

    def watch(self, count: int, timeout: float, patience: float) -> None:
        """Waits until all `count` processes have connected, and watches over them from then on.

        Args:
          count: of processes, this one among them.
          timeout: seconds of silence after which one counts as lost.
          patience: seconds until all have to be there.

        Raises:
          errors.RunFailure: they are not.
        """
        # A thread, for whoever else knocks and says nothing would keep it waiting.
        threading.Thread(target=self._accept, args=(count,), daemon=True).start()
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._connections) == count - 1, patience):
                missing = sorted({*range(1, count)} - {*self._connections})
                names = ", ".join(map(str, missing))
                raise errors.RunFailure(
                    f"within {patience:g} s nothing was heard of process {names}"
                )
        self._listener.close()
        _watch(0, self._connections, timeout)

    def _accept(self, count: int) -> None:
        while len(self._connections) < count - 1:
            # Whoever else knocks is none of them.
            with contextlib.suppress(multiprocessing.AuthenticationError, EOFError, OSError):
                connection = self._listener.accept()
                process = connection.recv()
                with self._arrived:
                    self._connections[process] = connection
                    self._arrived.notify_all()


def watch(process: int, host: str, address: Address, timeout: float) -> None:
    """Connects to process 0, and watches over it from then on.

    Args:
      process: which this is.
      host: of process 0.
      address: where it listens.
      timeout: seconds of silence after which it counts as lost.
    """
    connection = multiprocessing.connection.Client(
        (host, address.port), authkey=address.token.encode()
    )
    connection.send(process)
    _watch(process, {0: connection}, timeout)


def _watch(process: int, connections: dict[int, Any], timeout: float) -> None:
    peers = _Peers(process, timeout)
    _watching.append(peers)
    peers.start(connections)


def finish_first(busy: Callable[[], bool]) -> None:
    """Lets this process live, once another one failed, for as long as `busy()`, within limits."""
    _busy.append(busy)


def leave() -> None:
    """Says that this process ends in order; nothing where it is alone."""
    _close((_DONE,))


def fail(process: int, cause: str, exit_code: int) -> None:
    """Says why this process fails, and gives the others time to hear it; nothing where it is alone.

    Args:
      process: which this is.
      cause: in one line.
      exit_code: with which the others end too.
    """
    kind = "error" if exit_code == errors.UserError.exit_code else "failed"
    peers = _close((_FAILED, f"{kind}: process {process}: {cause}", exit_code))
    if peers and process == 0:
        peers.linger()


def is_watching() -> bool:
    """Returns whether there are other processes, and none is known to have failed."""
    return bool(_watching)


def _close(message: tuple) -> _Peers | None:
    if not _watching:
        return None
    peers = _watching.pop()
    peers.close(message)
    return peers
