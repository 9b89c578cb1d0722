"""Supervised threads, bounded queues and versioned values: the only threading code.

One consumer (the learner, in the thread that made the `Supervisor`) works with several workers (the
actors, one thread each). Three rules keep a run from hanging:

- An exception in a worker is kept, and the consumer raises it at its next call.
- While the consumer waits, no worker may spend longer than `timeout` in one activity. A worker may
  wait for as long as another one works. This detects simulators that hang, and deadlocks.
- Closing wakes every thread that waits. A thread that does not return even then is abandoned:
  `abandoned` names it, and the process has to exit without it.

The end of the interpreter closes all pipelines, because it aborts a process with a thread in JAX.
"""

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from podracers import environment as environment_lib
from podracers import errors
from podracers.supervision import watchdog

_LOGGER = logging.getLogger(__name__)

_JOIN_TIMEOUT = 10.0  # seconds, for a step of a simulator that is slow, but not stuck
_POLL_PERIOD = 1.0  # seconds between two checks of the clock; a notification is not delayed

# Activities with a special meaning. Compiling alone has no limit.
COMPILING, STARTING = "compiling", "starting"

close_failures: list[Exception] = []  # the exit code of the process reports them


class Cancelled(Exception):
    """The consumer is closing: a worker that gets this exception ends."""


class WorkerError(RuntimeError):
    """A worker hangs; the traceback shows its thread."""


def abandoned() -> list[str]:
    """Returns the names of the workers that are alive; call it once everything is closed."""
    return sorted(worker.name for worker in _alive())


def _alive() -> list["Worker"]:
    return [thread for thread in threading.enumerate() if isinstance(thread, Worker)]


@atexit.register  # after JAX, whose import registers the end of its devices: the last runs first
def _end_workers() -> None:
    for worker in _alive():
        worker.supervisor.close()
        while worker.is_alive() and worker.timer.activity[0] == COMPILING:  # which ends
            worker.join(_POLL_PERIOD)


def close_environments(host: environment_lib.HostEnvironment) -> None:
    """Closes simulators without raising: a failure here must not replace a result or a cause.

    Failures are kept in `close_failures`, and the first one is logged.
    """
    try:
        host.close()
    except Exception as error:
        close_failures.append(error)
        if close_failures[0] is error:  # threads close at the same time
            _LOGGER.warning("failed: closing an environment failed: %s", errors.one_line(error))


class Timer:
    """Adds up the seconds that one thread spends on each of its activities.

    While the profiler captures a trace, the activities are spans in it.

    Attributes:
      activity: the current activity and its start (`time.monotonic`); other threads may read it.
    """

    def __init__(self):
        self.activity = "", time.monotonic()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Counts the time of the context as `activity`; activities do not nest."""
        self.switch(activity)
        try:
            with jax.profiler.TraceAnnotation(activity, thread=threading.current_thread().name):
                yield
        finally:
            self.switch("")

    def switch(self, activity: str) -> None:
        """Counts the time from now on as `activity`."""
        with self._lock:
            self._add_time()
            self.activity = activity, self._since

    def take(self) -> dict[str, float]:
        """Returns the seconds of each activity since the last call; `""` is all the rest."""
        with self._lock:
            self._add_time()
            taken, self._seconds = self._seconds, {}
            return taken

    def _add_time(self) -> None:
        before, self._since = self._since, time.monotonic()
        activity, _ = self.activity
        self._seconds[activity] = self._seconds.get(activity, 0.0) + self._since - before


class Worker(threading.Thread):
    """One supervised thread, started by `Supervisor.start`, whose arguments it has.

    Context managers of JAX around the start, such as `jax.debug_nans`, hold in it.

    Attributes:
      timer: seconds by activity.
      supervisor: the supervisor that started it.
    """

    def __init__(self, name: str, work: Callable[["Worker"], None], supervisor: "Supervisor"):
        # A daemon: a simulator that never returns must not keep the interpreter alive.
        super().__init__(name=name, daemon=True)
        self.timer = Timer()
        self._work, self.supervisor = work, supervisor
        self._settings = jax.config.values  # of the thread that starts it

    def run(self) -> None:
        """Works until an exception; the supervisor keeps it, because a thread only prints it."""
        try:
            with contextlib.ExitStack() as contexts:
                for name, current in jax.config.values.items():
                    if (value := self._settings[name]) != current:  # `with jax.debug_nans(True)`
                        contexts.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
                self._work(self)
        except Cancelled:
            pass
        except BaseException as error:
            if not isinstance(error, Exception):  # SystemExit: the consumer must not raise it
                error = RuntimeError(repr(error)).with_traceback(error.__traceback__)
            self.supervisor.fail(self.name, error)

    def doing(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Times an activity; raises `Cancelled` if the thread is to end."""
        self.supervisor.raise_if_ended()
        return self.timer(activity)


class Supervisor:
    """Starts workers, and fails with the first of them that fails.

    Attributes:
      timeout: seconds that one activity of a worker may last while the consumer waits.
    """

    def __init__(self, timeout: float | None):
        self.timeout = math.inf if timeout is None else timeout
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._deadline = math.inf  # time by which workers end; infinite until the end begins
        self._workers: list[Worker] = []
        self._waiting: set[threading.Thread] = set()
        self._consumer = threading.current_thread()
        watchdog.set_limit(self, timeout)  # native code may keep the consumer from running

    def start(self, name: str, work: Callable[[Worker], None]) -> Worker:
        """Starts a thread that calls `work(worker)`."""
        worker = Worker(name, work, self)
        self._workers.append(worker)
        worker.start()
        return worker

    def fail(self, name: str, error: Exception) -> None:
        """Makes the consumer raise the exception of a worker, if it is the first."""
        error.add_note(f"in the thread '{name}'")
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @contextlib.contextmanager
    def wait_until(self, ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Waits until `ready()`; holds the lock of all shared state within the context.

        The end of the context wakes the threads that wait for a change.

        Raises:
          Cancelled: the pipeline is closing (in a worker).
          WorkerError: a worker made no progress in time (in the consumer).
          Exception: the exception of a worker (in the consumer).
        """
        thread, began = threading.current_thread(), time.monotonic()
        period = min(_POLL_PERIOD, self.timeout)
        with self._changed:
            self._waiting.add(thread)
            try:
                while True:
                    self.raise_if_ended()
                    if ready():
                        break
                    if thread is self._consumer:
                        self._require_progress(began)
                    before = time.monotonic()
                    self._changed.wait(period)
                    if time.monotonic() - before > period + self.timeout / 2:
                        began = time.monotonic()  # the process was suspended, and its threads too
            finally:
                self._waiting.discard(thread)
            yield
            self._changed.notify_all()

    def raise_if_ended(self) -> None:
        """Raises, in a worker, `Cancelled` if it is to end; in the consumer, a worker's error."""
        if threading.current_thread() is not self._consumer:
            if self._deadline < math.inf or self._failure:
                raise Cancelled
        elif self._failure:
            raise self._failure

    def _require_progress(self, began: float) -> None:
        """Raises if an activity lasts too long; waiting counts only where all threads wait."""
        working = [worker for worker in self._workers if worker not in self._waiting]
        for worker in working or self._workers:
            activity, since = worker.timer.activity
            seconds = time.monotonic() - max(since, began)
            if seconds > self.timeout and activity != COMPILING:
                # The worker's stack as traceback: its innermost line is the place of the failure.
                stack, frame = None, sys._current_frames().get(worker.ident or 0)
                while frame is not None:
                    stack = types.TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
                    frame = frame.f_back
                raise WorkerError(
                    f"{worker.name} hangs: {seconds:.0f} s of '{activity or 'host work'}', and the "
                    f"limit is {self.timeout:g} s (Sebulba.timeout)"
                ).with_traceback(stack)

    def cancel(self) -> None:
        """Begins the end of every worker; takes no lock, so finalizers may call it."""
        self._deadline = min(self._deadline, time.monotonic() + min(self.timeout, _JOIN_TIMEOUT))

    def close(self) -> None:
        """Ends every worker; a worker that does not return in time is abandoned."""
        self.cancel()
        with self._changed:
            self._changed.notify_all()
        for worker in self._workers:
            worker.join(max(self._deadline - time.monotonic(), 0.0))
        watchdog.set_limit(self, None)
        if self._failure and sys.exception() is None:  # else it is raised, or a consequence
            _LOGGER.warning("a worker failed while it was closed", exc_info=self._failure)


def call(
    name: str,
    function: Callable[[Worker], Any],
    timeout: float | None,
    stop: Callable[[], bool] = lambda: False,
) -> Any:
    """Returns `function(worker)`, which runs in a supervised thread while this one waits.

    Raises:
      Cancelled: `stop()` was true before the result was there.
      WorkerError: `function` spent more than `timeout` seconds (None: no limit) in one activity.
      Exception: the exception of `function`.
    """
    supervisor = Supervisor(timeout)
    results = Queue(supervisor, 1)
    supervisor.start(name, lambda worker: results.put(function(worker)))
    try:
        with supervisor.wait_until(lambda: bool(results.items) or stop()):
            if not results.items:
                raise Cancelled
            return results.items[0]
    finally:
        supervisor.close()


class Queue:
    """A queue of at most `capacity` items between one worker and the consumer."""

    def __init__(self, supervisor: Supervisor, capacity: int):
        self._supervisor, self._capacity = supervisor, capacity
        self.items: deque[Any] = deque()  # the oldest first

    def put(self, item: Any) -> None:
        """Adds an item; waits while the queue is full."""
        with self._supervisor.wait_until(lambda: len(self.items) < self._capacity):
            self.items.append(item)

    def get(self) -> Any:
        """Returns the oldest item; waits while there is none."""
        with self._supervisor.wait_until(lambda: bool(self.items)):
            return self.items.popleft()


class Versions:
    """A value of which the consumer publishes versions in turn; the newest `count` are kept."""

    def __init__(self, supervisor: Supervisor, count: int):
        self._supervisor, self._count = supervisor, count
        self._values: dict[int, Any] = {}

    def publish(self, version: int, value: Any) -> None:
        """Publishes the next version, and deletes the oldest."""
        with self._supervisor.wait_until():
            self._values[version] = value
            self._values.pop(version - self._count, None)

    def get(self, least: int, exact: bool) -> tuple[int, Any]:
        """Waits for version `least`; returns it if `exact`, else the newest."""
        with self._supervisor.wait_until(lambda: any(v >= least for v in self._values)):
            version = least if exact else max(self._values)
            return version, self._values[version]
