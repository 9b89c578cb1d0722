"""Ends all processes of a run when one of them fails, is lost or stuck, with the first cause.

Every process has a connection to process 0, over which both send a heartbeat each second, with the
number of agreements that the main thread has reached (`processes`). A connection that closes or
falls silent, a failure that a process reports, or a process that stays behind the others for
`_PATIENCE` times the timeout ends all: process 0 passes the first cause on, and every process
prints it in one line. A collective that waits for a lost process may never return, so a thread ends
the process.

The connections are made before those of JAX, so that the loss of a process while JAX starts is
detected as well. JAX's own heartbeat cannot do this (JAX 0.10.2): when a process is lost, the
others abort in C++ (exit code 134, no cause) before any Python runs, and
`missed_heartbeat_callback` cannot be called from Python (std::bad_cast). With
`jax_enable_recoverability` the loss of process 0 still aborts all.
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
from typing import Any

from podracers import errors
from podracers.supervision import watchdog

_HEARTBEAT_PERIOD = 1.0  # seconds
_PATIENCE = 10  # timeouts that a live process may stay behind: it may compile while others need not
_CAUSE_TIMEOUT = 2.0  # seconds for the first cause to arrive from another process
_LINGER_TIME = 2.0  # seconds that process 0 outlives the others: JAX's connections end with it
_FINISH_TIMEOUT = 30.0  # seconds for a checkpoint to be written after another process has failed
_RETRY_PERIOD = 0.2  # seconds between two attempts to connect to process 0
_MAX_MESSAGE = 2**20  # bytes
_READ_TIMEOUT = struct.pack("ll", 5, 0)  # seconds for the rest of a message that began to arrive
_HELLO, _BEGIN, _ALIVE, _DONE, _FAILED = "hello", "begin", "alive", "done", "failed"

_Connection = multiprocessing.connection.Connection


class _Peers:
    """The connections of this process, and the thread that reads them.

    A process that is silent for `timeout` seconds counts as lost. Process 0 has the `listener` that
    the others connect to; the others have `connections`, `{0: connection}`.
    """

    def __init__(
        self,
        process: int,
        count: int,
        timeout: float,
        listener: socket.socket | None = None,
        connections: dict[int, _Connection] | None = None,
    ):
        self.process, self._count, self._timeout = process, count, timeout
        # Agreements that the main thread has reached, and signs of progress since the last one.
        self.position = [0, 0]
        self._changed = threading.Condition()  # also the lock of sending
        self._listener = listener
        self._unidentified: list[_Connection] = []  # their process number is unknown
        self._connections = connections or {}
        self._checked = time.monotonic()
        self._received = dict.fromkeys(self._connections, self._checked)  # latest time, by process
        self._positions: dict[int, tuple[list[int], float]] = {}  # processes' start times, too
        self._done: set[int] = set()
        self._jax_port: int | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def gather(self) -> None:
        """Waits, in process 0, until all have connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._listener is None, self._timeout)
            if self._listener is None:
                return
            missing = sorted({*range(1, self._count)} - {*self._connections})
            host, port = self._listener.getsockname()[:2]
        raise errors.RunFailure(
            f"within {self._timeout:g} s no message came from process "
            f"{', '.join(map(str, missing))}: process 0 listens on {host}:{port}"
        )

    def await_begin(self) -> int:
        """Waits, elsewhere, until all have connected; returns the port of JAX's coordinator."""
        timeout = self._timeout + _LINGER_TIME  # process 0 may report which process is missing
        with self._changed:
            self._changed.wait_for(lambda: self._jax_port is not None, timeout)
            if self._jax_port is not None:
                return self._jax_port
        raise errors.RunFailure(f"within {timeout:g} s process 0 did not begin")

    def _run(self) -> None:
        sent = 0.0
        while not self._closing:
            if time.monotonic() - sent > _HEARTBEAT_PERIOD:
                sent = time.monotonic()
                self._set_position(self.process, self.position)
                self.send(_ALIVE, self.position)
            known = {c: peer for peer, c in self._connections.items() if not c.closed}
            new = [*self._unidentified, *([self._listener] if self._listener else [])]
            for ready in multiprocessing.connection.wait([*known, *new], _HEARTBEAT_PERIOD / 4):
                if isinstance(ready, socket.socket):
                    with contextlib.suppress(OSError):  # it has closed again
                        self._unidentified.append(_connection(ready.accept()[0]))
                elif isinstance(ready, _Connection) and ready in known:
                    self._read(known[ready], ready)
                elif isinstance(ready, _Connection):
                    self._admit(ready)
            if self._listener and len(self._connections) == self._count - 1:
                for channel in (self._listener, *self._unidentified):
                    channel.close()
                with self._changed:
                    self._listener, self._unidentified = None, []
                    self._changed.notify_all()
            self._check(time.monotonic())

    def _admit(self, connection: _Connection) -> None:
        """Reads the number of a new process; refuses a process of another run."""
        self._unidentified.remove(connection)
        try:
            kind, process, count = _receive(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            return
        if kind != _HELLO or process not in range(1, self._count):
            problem = f"no process {process} is expected"
        elif count != self._count:
            problem = f"--num_processes is {count} here, and {self._count} in process 0"
        elif process in self._connections:
            problem = f"--process_id {process} was given to two processes"
        else:
            with self._changed:
                self._received[process] = time.monotonic()
                self._connections[process] = connection
            return
        with contextlib.suppress(OSError):
            _send(connection, _FAILED, f"error: {problem}", errors.UserError.exit_code)
        connection.close()

    def _read(self, peer: int, connection: _Connection) -> None:
        try:
            kind, *rest = _receive(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            self._lose(peer, "it closed its connection")
            return
        self._received[peer] = time.monotonic()
        if kind == _ALIVE:
            self._set_position(peer, *rest)
        elif kind == _DONE:
            self._done.add(peer)
        elif kind == _FAILED and not self._closing:
            self._end(*rest)
        elif kind == _BEGIN:
            with self._changed:
                (self._jax_port,) = rest
                self._changed.notify_all()

    def _set_position(self, peer: int, position: list[int]) -> None:
        if self._positions.get(peer, (None,))[0] != position:
            self._positions[peer] = list(position), time.monotonic()

    def _check(self, now: float) -> None:
        """Ends all if a process is silent or, in process 0, if one makes the others wait."""
        if now - self._checked > max(self._timeout / 2, _HEARTBEAT_PERIOD):
            # This process was suspended; the others may have been, too, and need time to resume.
            self._received = dict.fromkeys(self._received, now)
            self._positions.clear()
        self._checked = now
        for peer, received in self._received.items():
            if now - received > self._timeout:
                self._lose(peer, f"no message came for {self._timeout:g} s")
        for peer, (position, since) in self._positions.items():
            ahead = [start for other, start in self._positions.values() if other[0] > position[0]]
            waited = now - max(since, min(ahead)) if ahead else 0.0
            if waited > _PATIENCE * self._timeout and self.process == 0 and not self._done:
                self._end(
                    f"failed: process {peer} makes no progress: the others have waited for it for "
                    f"{waited:.0f} s",
                    errors.RunFailure.exit_code,
                )

    def _lose(self, peer: int, how: str) -> None:
        if peer not in self._done and not self._closing:
            self._end(f"failed: process {peer} was lost: {how}", errors.RunFailure.exit_code)

    def send(self, *message: Any) -> None:
        """Sends a message over all connections."""
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError, ValueError):  # `_read` detects a lost process
                    _send(connection, *message)

    def _end(self, cause: str, exit_code: int) -> None:
        """Passes the first cause on, prints it, and ends this process."""
        try:
            self.send(_FAILED, cause, exit_code)
            print(cause, file=sys.stderr, flush=True)
            sys.stdout.flush()
            watchdog.kill_children()
            deadline = time.monotonic() + _FINISH_TIMEOUT
            while any(is_busy() for is_busy in _busy) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self.process == 0:
                time.sleep(_LINGER_TIME)
        finally:
            os._exit(exit_code)

    def close(self, *message: Any) -> None:
        """Sends a last message, and stops reading."""
        self._closing = True
        self.send(*message)
        self._thread.join(2 * _HEARTBEAT_PERIOD)


_peers: list[_Peers] = []  # its length is 0 or 1
_busy: list[Callable[[], bool]] = []


def connect(process: int, count: int, host: str, port: int, bind: str, timeout: float) -> int:
    """Waits until all processes are connected, and starts to watch them.

    Process 0 listens at a port of its address `bind` ("" for all), to which the others connect by
    its name or address `host`. The timeout holds for all to connect, and for silence after which a
    process counts as lost, in seconds.

    Returns:
      Another port of process 0, for JAX's coordinator.

    Raises:
      errors.UserError: process 0 cannot listen there.
      errors.RunFailure: not all have connected in time.
    """
    if process:
        connection = _call(host, port, timeout)
        with contextlib.suppress(OSError):  # detected below
            _send(connection, _HELLO, process, count)
        _peers.append(_Peers(process, count, timeout, connections={0: connection}))
        return _peers[0].await_begin()
    try:
        listener = _listen(bind, port)
    except OSError as error:
        cause = error.strerror or error
        raise errors.UserError(f"process 0 cannot listen on {bind}:{port}: {cause}") from error
    _peers.append(_Peers(0, count, timeout, listener))
    _peers[0].gather()
    with _listen(bind, 0) as free:
        jax_port = free.getsockname()[1]
    _peers[0].send(_BEGIN, jax_port)
    return jax_port


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def _call(host: str, port: int, timeout: float) -> _Connection:
    deadline = time.monotonic() + timeout
    while True:
        try:
            left = max(deadline - time.monotonic(), _RETRY_PERIOD)
            end = socket.create_connection((host, port), left)
            # On one machine, a call to a port without a listener may come from that very port.
            if end.getsockname() != end.getpeername():
                return _connection(end)
            end.close()
        except OSError as error:
            if time.monotonic() + _RETRY_PERIOD > deadline:
                raise errors.RunFailure(
                    f"within {timeout:g} s no message came from process 0 at {host}:{port}: "
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
    """Returns a message; not a pickle, with which any machine that reaches the port could run code.

    Raises:
      EOFError, OSError: the connection is closed.
      ValueError: it is not a message.
    """
    try:
        message = json.loads(connection.recv_bytes(_MAX_MESSAGE))
    except RecursionError as error:
        raise ValueError("nested brackets") from error
    if not isinstance(message, list) or not message:
        raise ValueError(f"expected a list, got {type(message).__name__}")
    return message


def finish_first(is_busy: Callable[[], bool]) -> None:
    """Delays the end of this process, after another has failed, while `is_busy()`."""
    _busy.append(is_busy)


def advance() -> None:
    """Counts an agreement, which all processes reach in the same order."""
    for peer in _peers:
        peer.position = [peer.position[0] + 1, 0]


def touch() -> None:
    """Shows that this process makes progress towards its next agreement."""
    for peer in _peers:
        peer.position = [peer.position[0], peer.position[1] + 1]


def leave() -> None:
    """Reports to the others, if it watches any, that this process ends in order."""
    while _peers:
        _peers.pop().close(_DONE)


def await_cause() -> None:
    """Waits for another process to report the first cause of a failure, which ends this process.

    A collective that fails reports only that a connection was closed.
    """
    if _peers:
        time.sleep(_CAUSE_TIMEOUT)


def fail(cause: str, exit_code: int) -> None:
    """Reports a failure, in one line, to the other processes; they end with the same exit code."""
    if not _peers:
        return
    peers = _peers.pop()
    kind = "error" if exit_code == errors.UserError.exit_code else "failed"
    peers.close(_FAILED, f"{kind}: process {peers.process}: {cause}", exit_code)
    if peers.process == 0:
        time.sleep(_LINGER_TIME)
