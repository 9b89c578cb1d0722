"""Watches over the other processes of a run, so that none of them waits for one that is gone.

Every process has a connection to process 0, over which both say each second that they live. One
that closes or falls silent, or a process that says why it fails, ends all: process 0 passes the
first cause on, and everybody says it in one line. A collective that waits for a process that is
gone may never return, so a thread has to end the process.

The connections are made before all others, those of JAX among them, so that a process which is lost
while they start is noticed like any other.
"""

import contextlib
import json
import multiprocessing.connection
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from podracers import errors
from podracers.supervision import watchdog

_PERIOD = 1.0  # seconds between two signs of life
_LINGER = 3.0  # seconds that a process which fails stays, for the others to hear why
_FINISHING = 30.0  # seconds that what is being written may take, once another process failed
_RETRY = 0.2  # seconds until process 0 is called again
_LONGEST = 2**20  # bytes of a message
_READING = struct.pack("ll", 5, 0)  # seconds for the rest of a message that has begun to arrive
_HELLO, _BEGIN, _ALIVE, _DONE, _FAILED = "hello", "begin", "alive", "done", "failed"

_Connection = multiprocessing.connection.Connection


class Failure(NamedTuple):
    """The first cause."""

    line: str
    exit_code: int


class _Peers:
    """The connections of this process, and the thread that listens to them.

    Args:
      process: which this is.
      count: how many there are.
      timeout: seconds of silence after which one counts as lost.
      listener: where the others come to, in process 0.
    """

    def __init__(
        self, process: int, count: int, timeout: float, listener: socket.socket | None = None
    ):
        self.process = process
        self._count, self._timeout, self._listener = count, timeout, listener
        self._changed = threading.Condition()  # also holds the lock of sending
        self._knocking: list[_Connection] = []  # have not said yet who they are
        self._connections: dict[int, _Connection] = {}
        self._heard: dict[int, float] = {}
        self._done: set[int] = set()
        self._begin: tuple[Any, ...] = ()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def add(self, peer: int, connection: _Connection) -> None:
        """Listens to one more process."""
        with self._changed:
            self._heard[peer] = time.monotonic()
            self._connections[peer] = connection
            self._changed.notify_all()

    def gather(self) -> None:
        """Waits, in process 0, until all have come.

        Raises:
          errors.RunFailure: they have not, in time.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._listener is None, self._timeout):
                return
            missing = sorted({*range(1, self._count)} - {*self._connections})
            host, port = self._listener.getsockname()[:2]
        raise errors.RunFailure(
            f"within {self._timeout:g} s nothing was heard of process "
            f"{', '.join(map(str, missing))}: process 0 listens on {host}:{port}"
        )

    def begin(self, message: Any) -> None:
        """Lets the others go on, with a message."""
        self.send((_BEGIN, message))

    def wait_to_begin(self) -> Any:
        """Returns the message with which process 0 lets this one go on.

        Raises:
          errors.RunFailure: it does not, in time.
        """
        patience = self._timeout + _LINGER  # process 0 may have more to say about it
        with self._changed:
            if not self._changed.wait_for(lambda: self._begin, patience):
                raise errors.RunFailure(f"within {patience:g} s process 0 did not begin")
            return self._begin[0]

    def _run(self) -> None:
        said = 0.0
        while not self._closing:
            if time.monotonic() - said > _PERIOD:
                said = time.monotonic()
                self.send((_ALIVE,))
            open_ = {c: peer for peer, c in self._connections.items() if not c.closed}
            new = [*self._knocking, *([self._listener] if self._listener else [])]
            for ready in multiprocessing.connection.wait([*open_, *new], _PERIOD / 4):
                if ready is self._listener:
                    with contextlib.suppress(OSError):  # it has gone again
                        self._knocking.append(_connection(self._listener.accept()[0]))
                elif ready in open_:
                    self._hear(open_[ready], ready)
                else:
                    self._admit(ready)
            self._find_silent()
            if self._listener and len(self._connections) == self._count - 1:
                self._close_door()

    def _admit(self, connection: _Connection) -> None:
        """Hears who has come; whoever is none of the processes is turned away."""
        self._knocking.remove(connection)
        try:
            kind, process, count = _receive(connection)
        except (EOFError, OSError, ValueError, TypeError):
            connection.close()
            return
        said = None
        if kind != _HELLO or process not in range(1, self._count):
            said = f"no process {process} is expected"
        elif count != self._count:
            said = f"--num_processes is {count} here, and {self._count} in process 0"
        elif process in self._connections:
            said = f"--process_id {process} was given to two processes"
        if said is None:
            self.add(process, connection)
            return
        with contextlib.suppress(OSError):
            _send(connection, (_FAILED, f"error: {said}", errors.UserError.exit_code))
        connection.close()

    def _close_door(self) -> None:
        """Lets nobody in any more: all are there."""
        for each in (self._listener, *self._knocking):
            each.close()
        with self._changed:
            self._listener, self._knocking = None, []
            self._changed.notify_all()

    def _hear(self, peer: int, connection: _Connection) -> None:
        try:
            kind, *rest = _receive(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            if peer not in self._done and not self._closing:
                self._end(Failure(f"failed: process {peer} was lost: it closed its connection", 1))
            return
        self._heard[peer] = time.monotonic()
        if kind == _DONE:
            self._done.add(peer)
        elif kind == _FAILED and not self._closing:
            self._end(Failure(*rest))
        elif kind == _BEGIN:
            with self._changed:
                self._begin = tuple(rest)
                self._changed.notify_all()

    def _find_silent(self) -> None:
        now = time.monotonic()
        for peer, heard in self._heard.items():
            if now - heard > self._timeout and peer not in self._done and not self._closing:
                line = f"failed: process {peer} was lost: nothing was heard of it for"
                self._end(Failure(f"{line} {self._timeout:g} s", 1))

    def send(self, message: tuple) -> None:
        """Says something to everybody who is connected."""
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError, ValueError):  # who is gone is noticed elsewhere
                    _send(connection, message)

    def _end(self, failure: Failure) -> None:
        """Passes the cause on, says it, and ends this process."""
        try:
            self.send((_FAILED, *failure))
            print(failure.line, file=sys.stderr, flush=True)
            sys.stdout.flush()
            watchdog.kill_children()
            limit = time.monotonic() + _FINISHING
            while any(busy() for busy in _busy) and time.monotonic() < limit:
                time.sleep(0.1)
            if self.process == 0:
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
                    _receive(connection)
                except (EOFError, OSError, ValueError):
                    left.remove(connection)

    def close(self, message: tuple) -> None:
        """Says a last message, and stops listening."""
        self._closing = True
        self.send(message)
        self._thread.join(2 * _PERIOD)


_watching: list[_Peers] = []  # at most one
_busy: list[Callable[[], bool]] = []


def lead(host: str, port: int, count: int, timeout: float) -> None:
    """Waits, as process 0, until all others have come, and watches over them from then on.

    Args:
      host: name or address of this machine at which to listen; "" for all that it has.
      port: at which to listen.
      count: of processes, this one among them.
      timeout: seconds for all to come, and of silence after which one counts as lost.

    Raises:
      errors.UserError: it is impossible to listen there.
      errors.RunFailure: they have not come.
    """
    try:
        listener = listen(host, port)
    except OSError as error:
        raise errors.UserError(
            f"process 0 cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error
    peers = _Peers(0, count, timeout, listener)
    _watching.append(peers)
    peers.gather()


def follow(process: int, host: str, port: int, count: int, timeout: float) -> Any:
    """Connects to process 0, watches over it from then on, and waits for it to begin.

    Args:
      process: which this is.
      host: of process 0.
      port: at which it listens.
      count: of processes.
      timeout: seconds for process 0 to be there, and of silence after which it counts as lost.

    Returns:
      What process 0 says in `begin`.

    Raises:
      errors.RunFailure: it is not there.
    """
    connection = _call(host, port, timeout)
    with contextlib.suppress(OSError):  # it is noticed below
        _send(connection, (_HELLO, process, count))
    peers = _Peers(process, count, timeout)
    _watching.append(peers)
    peers.add(0, connection)
    return peers.wait_to_begin()


def begin(message: Any) -> None:
    """Lets the others go on, once they are all there, with a message that JSON can hold."""
    _watching[0].begin(message)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine; "" stands for all of them."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def _call(host: str, port: int, timeout: float) -> _Connection:
    limit = time.monotonic() + timeout
    while True:
        try:
            left = max(limit - time.monotonic(), _RETRY)
            end = socket.create_connection((host, port), left)
            # On one machine, a call to a port that nobody listens on may come from that very port.
            if end.getsockname() != end.getpeername():
                return _connection(end)
            end.close()
        except OSError as error:
            if time.monotonic() + _RETRY > limit:
                raise errors.RunFailure(
                    f"within {timeout:g} s nothing was heard of process 0 at {host}:{port}: "
                    f"{error.strerror or error}"
                ) from error
        time.sleep(_RETRY)


def _connection(end: socket.socket) -> _Connection:
    end.settimeout(None)
    # Whoever sends the beginning of a message only would keep the others waiting.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _READING)
    return _Connection(end.detach())


def _send(connection: _Connection, message: tuple) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: _Connection) -> list:
    """Returns a message. It is no pickle: whoever reaches the port could run code with one."""
    return json.loads(connection.recv_bytes(_LONGEST))


def finish_first(busy: Callable[[], bool]) -> None:
    """Lets this process live, once another one failed, for as long as `busy()`, within limits."""
    _busy.append(busy)


def leave() -> None:
    """Says that this process ends in order; nothing where it is alone."""
    _close((_DONE,))


def fail(cause: str, exit_code: int) -> None:
    """Says why this process fails, and gives the others time to hear it; nothing where it is alone.

    Args:
      cause: in one line.
      exit_code: with which the others end too.
    """
    if not _watching:
        return
    kind = "error" if exit_code == errors.UserError.exit_code else "failed"
    process = _watching[0].process
    peers = _close((_FAILED, f"{kind}: process {process}: {cause}", exit_code))
    if process == 0:
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
