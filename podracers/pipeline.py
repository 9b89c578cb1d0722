"""Supervised threads, bounded queues and versioned values: the only threading code.

One consumer (the learner, in the thread that made the `Supervisor`) works with several workers (the
actors, a thread each). Three rules keep a run from hanging:

- What a worker raises is kept, and the consumer raises it at its next call.
- While the consumer waits for something, no worker may spend longer than `timeout` in any one
  activity, waiting included: a simulator that hangs and a deadlock are found in the same way.
- Closing wakes everybody who waits. A thread that does not come back even then is abandoned, and
  `abandoned` says so: a process that wants to end has to end without it.
"""

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_JOIN_SECONDS = 10.0  # a step of a simulator that is slow, but not stuck, ends within it
_SLICE_SECONDS = 1.0  # how often a wait looks at the clock; being notified does not wait for it

COMPILING = "compiling"  # an activity that may take as long as it likes

_abandoned: list[threading.Thread] = []


class Cancelled(Exception):
    """The consumer is closing: a worker that meets this leaves."""


class WorkerError(RuntimeError):
    """A worker failed; the cause is chained to it."""


def abandoned() -> list[str]:
    """Returns the names of threads that did not end when they were asked to."""
    return [thread.name for thread in _abandoned if thread.is_alive()]


class Timer:
    """Adds up the seconds that one thread spends on each of its activities."""

    def __init__(self):
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._activity = ""
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Counts what happens inside as `activity`; activities do not nest."""
        self._switch(activity)
        try:
            yield
        finally:
            self._switch("")

    def _switch(self, activity: str) -> None:
        with self._lock:
            self._account(time.perf_counter())
            self._activity = activity

    def _account(self, now: float) -> None:
        spent = self._seconds.get(self._activity, 0.0)
        self._seconds[self._activity] = spent + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Returns the seconds of each activity since the last call; `""` is all the rest."""
        with self._lock:
            self._account(time.perf_counter())
            taken, self._seconds = self._seconds, {}
            return taken


class Worker:
    """One supervised thread.

    Attributes:
      name: of the thread.
      timer: of its activities.
      activity: what it is at.
      since: when that began, by `time.monotonic`.
    """

    def __init__(self, name: str, supervisor: "Supervisor"):
        self.name = name
        self.timer = Timer()
        self._supervisor = supervisor
        self.activity, self.since = "", time.monotonic()

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Says, and times, what this thread is at; leaves with `Cancelled` if it is to end."""
        self._supervisor.raise_if_ended()
        self.activity, self.since = activity, time.monotonic()
        try:
            with self.timer(activity):
                yield
        finally:
            self.activity, self.since = "", time.monotonic()


class Supervisor:
    """Starts workers, and fails with the first of them that does.

    Args:
      timeout: seconds that one activity of a worker may last while the consumer waits.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._changed = threading.Condition()
        self._failure: tuple[str, BaseException] | None = None
        self._closing = False
        self._threads: list[tuple[threading.Thread, Worker]] = []
        self._consumer = threading.current_thread()

    def start(self, name: str, target: Callable[[Worker], None]) -> Worker:
        """Runs `target(worker)` in a thread of its own; it should return only when cancelled."""
        worker = Worker(name, self)

        def run() -> None:
            try:
                target(worker)
                raise RuntimeError(f"{name} ended, though nobody had asked it to")
            except Cancelled:
                pass
            except BaseException as error:  # nothing may be lost in a thread
                with self._changed:
                    self._failure = self._failure or (name, error)
                    self._changed.notify_all()

        # A daemon: a simulator that never returns must not keep the interpreter alive.
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append((thread, worker))
        thread.start()
        return worker

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock of everything shared, and wakes those that wait for a change of it."""
        with self._changed:
            self.raise_if_ended()
            yield
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits; the caller holds the lock afterwards if it held it before (see `changing`).

        Raises:
          Cancelled: the pipeline is closing (in a worker).
          WorkerError: a worker failed, or made no progress in time (in the consumer).
        """
        is_consumer = threading.current_thread() is self._consumer
        began = time.monotonic()
        with self._changed:
            while True:
                self.raise_if_ended()
                if ready():
                    return
                self._changed.wait(min(_SLICE_SECONDS, self._timeout))
                if is_consumer:
                    self._require_progress(began)
                elif not self._consumer.is_alive():
                    raise Cancelled

    def raise_if_ended(self) -> None:
        """Raises what the calling thread has to know: see `wait_until`."""
        if threading.current_thread() is not self._consumer:
            if self._closing or self._failure:
                raise Cancelled
        elif self._failure:
            name, error = self._failure
            raise WorkerError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _require_progress(self, began: float) -> None:
        now = time.monotonic()
        for thread, worker in self._threads:
            activity, since = worker.activity, worker.since
            seconds = now - max(since, began)
            if activity == COMPILING or seconds <= self._timeout:
                continue
            frame = sys._current_frames().get(thread.ident)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            raise WorkerError(
                f"{worker.name} hangs: {seconds:.0f} s of '{activity or 'host work'}', and the "
                f"limit is {self._timeout:g} s. It is here:\n{stack}"
            )

    def close(self) -> None:
        """Ends every worker; those that do not come back are abandoned, and children killed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        limit = time.monotonic() + min(self._timeout, _JOIN_SECONDS)
        for thread, _ in self._threads:
            thread.join(max(limit - time.monotonic(), 0.0))
        stuck = [thread for thread, _ in self._threads if thread.is_alive()]
        self._threads = []
        if stuck:
            _abandoned.extend(stuck)
            # Simulators in processes of their own belong to a thread that will not close them.
            for child in multiprocessing.active_children():
                child.kill()


class Queue:
    """A queue of bounded length between one worker and the consumer.

    Args:
      supervisor: of both.
      capacity: how many items may wait.
    """

    def __init__(self, supervisor: Supervisor, capacity: int):
        self._supervisor, self._capacity = supervisor, capacity
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Adds an item; waits while the queue is full."""
        self._supervisor.wait_until(lambda: len(self._items) < self._capacity)
        with self._supervisor.changing():
            self._items.append(item)

    def get(self) -> Any:
        """Returns the oldest item; waits while there is none."""
        self._supervisor.wait_until(lambda: bool(self._items))
        with self._supervisor.changing():
            return self._items.popleft()


class Versions:
    """A value of which the consumer publishes one version after another.

    Args:
      supervisor: of the consumer and the workers.
    """

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._values: dict[int, Any] = {}

    def publish(self, version: int, value: Any, oldest: int) -> None:
        """Makes a version known, and forgets those before `oldest`."""
        with self._supervisor.changing():
            self._values[version] = value
            for old in [known for known in self._values if known < oldest]:
                del self._values[old]

    def get(self, least: int, exact: bool) -> tuple[int, Any]:
        """Waits for version `least`; returns it, or where it need not be `exact`, the newest."""
        self._supervisor.wait_until(lambda: any(known >= least for known in self._values))
        with self._supervisor.changing():
            version = least if exact else max(self._values)
            return version, self._values[version]
