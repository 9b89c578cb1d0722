"""Ends all processes of a run when one of them fails, is lost or stuck, with the first cause.

Every process has a connection to process 0, over which both send a heartbeat each second, with the
number of agreements that its main thread has come to (`processes`). One that closes or falls
silent, a process that reports a failure, or one that stays behind the others for `_PATIENCE` times
the timeout ends all: process 0 passes the first cause on, and every process prints it in one line.
A collective that waits for a process that is gone may never return, so a thread has to end the
process.

The connections are made before all others, those of JAX among them, so that a process which is lost
while they start is noticed like any other.
"""

# Why JAX's own heartbeat does not do this: with JAX 0.10.2, three processes on CPUs, a
# heartbeat_timeout_seconds of 8, and one process killed,
# - by default the others abort in C++ (exit code 134, over 20 lines, no Python runs): after 6 s, or
#   at once if it was process 0;
# - a missed_heartbeat_callback, for which `jax.distributed.initialize` has no argument, is never
#   called: its binding cannot convert the status (std::bad_cast), and the process aborts;
# - with jax_enable_recoverability, `get_live_nodes` misses process 1 after 6 s and nobody aborts,
#   but if it was process 0, all others still abort at once, and a process that does not come at the
#   start aborts the others after initialization_timeout, without being named.

import contextlib
import json
import multiprocessing.connection
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracers import errors
from podracers.supervision import watchdog

_HEARTBEAT_PERIOD = 1.0  # seconds
_PATIENCE = 10  # timeouts that a live process may stay behind: it may compile while others need not
_LINGER_TIMEOUT = 3.0  # seconds that a process which fails stays, for the others to hear why
_FINISH_TIMEOUT = 30.0  # seconds that what is being written may take, once another process failed
_RETRY_PERIOD = 0.2  # seconds until process 0 is called again
_MAX_MESSAGE = 2**20  # bytes
_READ_TIMEOUT = struct.pack("ll", 5, 0)  # seconds for the rest of a message that began to arrive
_HELLO, _BEGIN, _ALIVE, _DONE, _FAILED = "hello", "begin", "alive", "done", "failed"

_Connection = multiprocessing.connection.Connection


class _Peers:
    """The connections of this process, and the thread that reads them.

    Args:
      process: the number of this process.
      count: number of processes.
      timeout: seconds of silence after which one counts as lost.
      listener: the socket that the others connect to, in process 0.
      connections: those that are there already, by process.
    """

    def __init__(
        self,
        process: int,
        count: int,
        timeout: float,
        listener: socket.socket | None = None,
        connections: Mapping[int, _Connection] | None = None,
    ):
        self.process = process
        self._count, self._timeout, self._listener = count, timeout, listener
        self._changed = threading.Condition()  # also the lock of sending
        self._unknown: list[_Connection] = []  # have not said yet which process they are
        self._connections = dict(connections or {})
        self._checked = time.monotonic()  # when `_find_silent` last ran
        self._heard = dict.fromkeys(self._connections, self._checked)
        self._done: set[int] = set()
        self.position = 0, 0  # agreements that the main thread has come to, and signs of life since
        self._positions: dict[int, tuple[Sequence[int], float]] = {}  # by process, and since when
        self._begin: list[Any] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

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

    def wait_to_begin(self) -> Any:
        """Returns the message with which process 0 lets this one go on.

        Raises:
          errors.RunFailure: it does not, in time.
        """
        timeout = self._timeout + _LINGER_TIMEOUT  # process 0 may have more to say about it
        with self._changed:
            if not self._changed.wait_for(lambda: self._begin, timeout):
                raise errors.RunFailure(f"within {timeout:g} s process 0 did not begin")
            return self._begin[0]

    def _run(self) -> None:
        sent = 0.0
        while not self._closing:
            if time.monotonic() - sent > _HEARTBEAT_PERIOD:
                sent = time.monotonic()
                self._note(self.process, self.position)
                self.send(_ALIVE, *self.position)
            known = {c: peer for peer, c in self._connections.items() if not c.closed}
            new = [*self._unknown, *([self._listener] if self._listener else [])]
            for ready in multiprocessing.connection.wait([*known, *new], _HEARTBEAT_PERIOD / 4):
                if ready is self._listener:
                    with contextlib.suppress(OSError):  # it has gone again
                        self._unknown.append(_connection(self._listener.accept()[0]))
                elif ready in known:
                    self._read(known[ready], ready)
                else:
                    self._admit(ready)
            self._find_silent()
            self._find_stuck(time.monotonic())
            if self._listener and len(self._connections) == self._count - 1:
                self._stop_listening()

    def _admit(self, connection: _Connection) -> None:
        """Reads which process has connected; whoever is none of them is turned away."""
        self._unknown.remove(connection)
        try:
            kind, process, count = _receive(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            return
        problem = None
        if kind != _HELLO or process not in range(1, self._count):
            problem = f"no process {process} is expected"
        elif count != self._count:
            problem = f"--num_processes is {count} here, and {self._count} in process 0"
        elif process in self._connections:
            problem = f"--process_id {process} was given to two processes"
        if problem is None:
            with self._changed:
                self._heard[process] = time.monotonic()
                self._connections[process] = connection
            return
        with contextlib.suppress(OSError):
            _send(connection, _FAILED, f"error: {problem}", errors.UserError.exit_code)
        connection.close()

    def _stop_listening(self) -> None:
        """Lets nobody in any more: all are there."""
        for each in (self._listener, *self._unknown):
            each.close()
        with self._changed:
            self._listener, self._unknown = None, []
            self._changed.notify_all()

    def _read(self, peer: int, connection: _Connection) -> None:
        try:
            kind, *rest = _receive(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            self._lose(peer, "it closed its connection")
            return
        self._heard[peer] = time.monotonic()
        if kind == _ALIVE:
            self._note(peer, rest)
        elif kind == _DONE:
            self._done.add(peer)
        elif kind == _FAILED and not self._closing:
            self._end(*rest)
        elif kind == _BEGIN:
            with self._changed:
                self._begin = rest
                self._changed.notify_all()

    def _find_silent(self) -> None:
        now = time.monotonic()
        if now - self._checked > max(self._timeout / 2, _HEARTBEAT_PERIOD):
            # This process was suspended, and the others may have been, too: they wake up first.
            self._heard = dict.fromkeys(self._heard, now)
            self._positions.clear()
        self._checked = now
        for peer, heard in self._heard.items():
            if now - heard > self._timeout:
                self._lose(peer, f"nothing was heard of it for {self._timeout:g} s")

    def _note(self, peer: int, position: Sequence[int]) -> None:
        """Notes how far a process has come, and since when."""
        position = tuple(position)
        if peer not in self._positions or self._positions[peer][0] != position:
            self._positions[peer] = position, time.monotonic()

    def _find_stuck(self, now: float) -> None:
        """Ends all, in process 0, if one of them lives and keeps the others waiting."""
        if self.process or self._done or self._closing:
            return
        for peer, (position, since) in self._positions.items():
            ahead = [at for other, at in self._positions.values() if other[0] > position[0]]
            waited = now - max(since, min(ahead)) if ahead else 0.0
            if waited > _PATIENCE * self._timeout:
                self._end(
                    f"failed: process {peer} makes no progress: the others have waited for it for "
                    f"{waited:.0f} s",
                    1,
                )

    def _lose(self, peer: int, how: str) -> None:
        if peer not in self._done and not self._closing:
            self._end(f"failed: process {peer} was lost: {how}", 1)

    def send(self, *message: Any) -> None:
        """Sends a message to everybody who is connected."""
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError, ValueError):  # who is gone is noticed elsewhere
                    _send(connection, *message)

    def _end(self, cause: str, exit_code: int) -> None:
        """Passes the first cause on, prints it, and ends this process."""
        try:
            self.send(_FAILED, cause, exit_code)
            print(cause, file=sys.stderr, flush=True)
            sys.stdout.flush()
            watchdog.kill_children()
            limit = time.monotonic() + _FINISH_TIMEOUT
            while any(busy() for busy in _busy) and time.monotonic() < limit:
                time.sleep(0.1)
            if self.process == 0:
                self.linger()
        finally:
            os._exit(exit_code)

    def linger(self) -> None:
        """Waits until the others have gone: the connections of JAX's own end with process 0."""
        limit = time.monotonic() + _LINGER_TIMEOUT
        left = [c for c in self._connections.values() if not c.closed]
        while left and time.monotonic() < limit:
            for connection in multiprocessing.connection.wait(left, 0.1):
                try:
                    _receive(connection)
                except (EOFError, OSError, ValueError):
                    left.remove(connection)

    def close(self, *message: Any) -> None:
        """Sends a last message, and stops reading."""
        self._closing = True
        self.send(*message)
        self._thread.join(2 * _HEARTBEAT_PERIOD)


_watching: list[_Peers] = []  # at most one
_busy: list[Callable[[], bool]] = []


def lead(host: str, port: int, count: int, timeout: float) -> None:
    """Waits, as process 0, until all others have come, and watches over them from then on.

    Args:
      host: name or address of this machine at which to listen; "" for all that it has.
      port: the one at which to listen.
      count: number of processes, this one among them.
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
      process: the number of this process.
      host: name or address of process 0.
      port: the one at which it listens.
      count: number of processes.
      timeout: seconds for process 0 to be there, and of silence after which it counts as lost.

    Returns:
      The message of process 0's `begin`.

    Raises:
      errors.RunFailure: it is not there.
    """
    connection = _call(host, port, timeout)
    with contextlib.suppress(OSError):  # it is noticed below
        _send(connection, _HELLO, process, count)
    peers = _Peers(process, count, timeout, connections={0: connection})
    _watching.append(peers)
    return peers.wait_to_begin()


def begin(message: Any) -> None:
    """Lets the others go on, once they are all there, with a message that JSON can hold."""
    _watching[0].send(_BEGIN, message)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine; "" stands for all of them."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def _call(host: str, port: int, timeout: float) -> _Connection:
    limit = time.monotonic() + timeout
    while True:
        try:
            left = max(limit - time.monotonic(), _RETRY_PERIOD)
            end = socket.create_connection((host, port), left)
            # On one machine, a call to a port that nobody listens on may come from that very port.
            if end.getsockname() != end.getpeername():
                return _connection(end)
            end.close()
        except OSError as error:
            if time.monotonic() + _RETRY_PERIOD > limit:
                raise errors.RunFailure(
                    f"within {timeout:g} s nothing was heard of process 0 at {host}:{port}: "
                    f"{error.strerror or error}"
                ) from error
        time.sleep(_RETRY_PERIOD)


def _connection(end: socket.socket) -> _Connection:
    end.settimeout(None)
    # A peer that sends only the beginning of a message would block the thread.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _READ_TIMEOUT)
    return _Connection(end.detach())


def _send(connection: _Connection, *message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: _Connection) -> list:
    """Returns a message. It is no pickle: anyone who reaches the port could run code with one.

    Raises:
      EOFError, OSError: the connection is closed.
      ValueError: it is no message.
    """
    try:
        message = json.loads(connection.recv_bytes(_MAX_MESSAGE))
    except RecursionError as error:
        raise ValueError("brackets in brackets") from error
    if not isinstance(message, list) or not message:
        raise ValueError(f"expected a list, got {type(message).__name__}")
    return message


def finish_first(busy: Callable[[], bool]) -> None:
    """Lets this process live, once another one failed, for as long as `busy()`, within limits."""
    _busy.append(busy)


def advance() -> None:
    """Counts an agreement that all processes come to in the same order."""
    for each in _watching:
        each.position = each.position[0] + 1, 0


def touch() -> None:
    """Shows that this process works on what comes before its next agreement."""
    for each in _watching:
        each.position = each.position[0], each.position[1] + 1


def leave() -> None:
    """Tells the others that this process ends in order; nothing where it is alone."""
    if _watching:
        _watching.pop().close(_DONE)


def fail(cause: str, exit_code: int) -> None:
    """Tells the others why this process fails, and gives them time to hear it.

    Nothing where it is alone.

    Args:
      cause: one line.
      exit_code: the one with which the others end, too.
    """
    if not _watching:
        return
    peers = _watching.pop()
    kind = "error" if exit_code == errors.UserError.exit_code else "failed"
    peers.close(_FAILED, f"{kind}: process {peers.process}: {cause}", exit_code)
    if peers.process == 0:
        peers.linger()


def is_watching() -> bool:
    """Returns whether there are other processes, and none is known to have failed."""
    return bool(_watching)
