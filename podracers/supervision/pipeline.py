"""Supervised threads, bounded queues and versioned values: the only threading code.

One consumer (the learner, in the thread that made the `Supervisor`) works with several workers (the
actors, one thread each). Three rules keep a run from hanging:

- An exception in a worker is kept, and the consumer raises it at its next call.
- While the consumer waits, no worker may spend longer than `timeout` in any one activity, and not
  all workers may wait for longer: this finds simulators that hang, and deadlocks. A worker may wait
  for as long as another one works.
- Closing wakes every thread that waits. A thread that does not return even then is abandoned:
  `abandoned` names it, and the process has to exit without it.
"""

import contextlib
import logging
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from podracers import environment as environment_lib
from podracers import errors
from podracers.supervision import watchdog

_LOGGER = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0  # for a step of a simulator that is slow, but not stuck
_RELEASE_SECONDS = 5.0  # for a thread that is stuck to be freed from outside
_POLL_SECONDS = 1.0  # between two checks of the clock; a notification is not delayed

# Activities with a special meaning. Compiling alone has no limit.
COMPILING, STARTING = "compiling", "starting"

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # all threads ever started
_close_failures: list[str] = []


class Cancelled(Exception):
    """The consumer is closing: a worker that gets this exception ends."""


class WorkerError(RuntimeError):
    """A worker failed; the cause is chained to it."""


def abandoned() -> list[str]:
    """Returns the names of the threads that are alive; call it once everything is closed."""
    return sorted(thread.name for thread in _threads if thread.is_alive())


def close_environments(host: environment_lib.HostEnvironment) -> None:
    """Closes simulators without raising: a failure here must not replace a result or a cause.

    The failure becomes a note of the exception in flight, if there is one. Else it is kept for
    `close_failures`, and the first one is logged.
    """
    cause = sys.exception()
    try:
        host.close()
    except Exception as error:
        message = f"closing an environment failed: {errors.one_line(error)}"
        if isinstance(error, errors.RunFailure):
            message = str(error)
        if cause is not None and not isinstance(cause, (Cancelled, GeneratorExit)):
            cause.add_note(f"and {message}")
            return
        if not _close_failures:
            _LOGGER.warning("failed: %s", message)
        _close_failures.append(message)


def close_failures() -> list[str]:
    """Returns the failures to close simulators so far; the exit code has to report them."""
    return list(_close_failures)


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
        self._span: jax.profiler.TraceAnnotation | None = None

    @contextlib.contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Counts the time of the context as `activity`; activities do not nest."""
        self.switch(activity)
        try:
            yield
        finally:
            self.switch("")

    def switch(self, activity: str) -> None:
        """Counts the time from now on as `activity`."""
        with self._lock:
            self._add_time()
            self.activity = activity, self._since
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        if activity and jax.profiler.TraceAnnotation.is_enabled():
            thread = threading.current_thread().name
            self._span = jax.profiler.TraceAnnotation(activity, thread=thread).__enter__()

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


class Worker:
    """One supervised thread, made by `Supervisor.start`, whose arguments it has.

    Attributes:
      timer: seconds by activity.
      thread: the thread, which calls `run(worker)`.
    """

    def __init__(
        self, name: str, run: Callable, release: Callable | None, supervisor: "Supervisor"
    ):
        self.name, self.release, self._supervisor = name, release, supervisor
        self.timer = Timer()
        # A daemon: a simulator that never returns must not keep the interpreter alive.
        self.thread = threading.Thread(target=run, args=[self], name=name, daemon=True)
        _threads.add(self.thread)

    def doing(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Times an activity; raises `Cancelled` if the thread is to end."""
        self._supervisor.raise_if_ended()
        return self.timer(activity)


class Supervisor:
    """Starts workers, and fails with the first of them that fails.

    Attributes:
      timeout: seconds that one activity of a worker may last while the consumer waits.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._changed = threading.Condition()
        self._failure: tuple[str, BaseException] | None = None
        self._raised = False  # whether the consumer has raised it
        self._closing = False
        self._workers: list[Worker] = []
        self._waiting: set[threading.Thread] = set()
        self._hanging: Worker | None = None
        self._consumer = threading.current_thread()
        watchdog.set_limit(self, timeout)  # native code may keep the consumer from running

    def start(
        self,
        name: str,
        target: Callable[[Worker], None],
        release: Callable[[], None] | None = None,
    ) -> Worker:
        """Starts a worker.

        Args:
          name: the thread's name.
          target: called as `target(worker)` in a thread of its own, where it should return only
            when cancelled.
          release: called from another thread if `target` does not return, to free what it holds.
        """

        def run(worker: Worker) -> None:
            try:
                target(worker)
                raise RuntimeError(f"{name} ended without being cancelled")
            except Cancelled:
                pass
            except BaseException as error:  # a thread would only print it
                with self._changed:
                    self._failure = self._failure or (name, error)
                    self._changed.notify_all()

        worker = Worker(name, run, release, self)
        self._workers.append(worker)
        worker.thread.start()
        return worker

    @contextlib.contextmanager
    def wait_until(self, ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Waits until `ready()`; holds the lock of all shared state within the context.

        The end of the context wakes the threads that wait for a change.

        Raises:
          Cancelled: the pipeline is closing (in a worker).
          WorkerError: a worker failed, or made no progress in time (in the consumer).
        """
        thread, began = threading.current_thread(), time.monotonic()
        period = min(_POLL_SECONDS, self.timeout)
        with self._changed:
            self._waiting.add(thread)
            try:
                while True:
                    self.raise_if_ended()
                    if ready():
                        break
                    if thread is self._consumer:
                        self._require_progress(began)
                    elif not self._consumer.is_alive():
                        raise Cancelled
                    before = time.monotonic()
                    self._changed.wait(period)
                    if time.monotonic() - before > period + self.timeout / 2:
                        began = time.monotonic()  # the process was suspended, and its threads too
            finally:
                self._waiting.discard(thread)
            yield
            self._changed.notify_all()

    def raise_if_ended(self) -> None:
        """Raises, in a worker, `Cancelled` if it is to end; in the consumer, a worker's failure.

        Raises:
          errors.UserError: that of a worker, unchanged: a user's mistake is no failure.
        """
        if threading.current_thread() is not self._consumer:
            if self._closing or self._failure:
                raise Cancelled
        elif self._failure:
            self._raised = True
            name, error = self._failure
            if isinstance(error, errors.UserError):
                raise error
            raise WorkerError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _require_progress(self, began: float) -> None:
        """Raises if one activity lasts too long, or if all threads wait for too long."""
        now, limit = time.monotonic(), self.timeout
        working = [worker for worker in self._workers if worker.thread not in self._waiting]
        for worker in working:
            activity, since = worker.timer.activity
            seconds = now - max(since, began)
            if seconds > limit and activity != COMPILING:
                self._raised = True  # a later error of this worker is a consequence
                self._hanging = worker
                frame = sys._current_frames().get(worker.thread.ident)
                raise WorkerError(
                    f"{worker.name} hangs: {seconds:.0f} s of '{activity or 'host work'}', and the "
                    f"limit is {limit:g} s. Its stack:\n"
                    + "".join(traceback.format_stack(frame) if frame else ())
                )
        seconds = now - max([began, *(worker.timer.activity[1] for worker in self._workers)])
        if not working and seconds > limit:
            activities = ", ".join(f"{w.name} in '{w.timer.activity[0]}'" for w in self._workers)
            raise WorkerError(
                f"deadlock: for {seconds:.0f} s all threads have waited for one another, and the "
                f"limit is {limit:g} s ({activities or 'there are no workers'})"
            )

    def close(self) -> None:
        """Ends every worker. A thread that does not return is released, and else abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        workers, self._workers = self._workers, []
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        _join(
            [worker.thread for worker in workers if worker is not self._hanging],
            min(self.timeout, 1.0 if interrupted else _JOIN_SECONDS),
        )
        stuck = [worker for worker in workers if worker.thread.is_alive() and worker.release]
        # In threads, for releasing may hang as well.
        releases = [
            threading.Thread(target=worker.release, name=f"release {worker.name}", daemon=True)
            for worker in stuck
        ]
        for thread in releases:
            _threads.add(thread)
            thread.start()
        _join(
            [*releases, *(worker.thread for worker in stuck)], min(self.timeout, _RELEASE_SECONDS)
        )
        watchdog.remove_limit(self)
        if self._failure and not self._raised:
            name, error = self._failure
            _LOGGER.warning("%s failed while it was closed", name, exc_info=error)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def call(
    name: str,
    target: Callable[[Worker], Any],
    timeout: float,
    stop: Callable[[], bool] = lambda: False,
) -> Any:
    """Returns `target(worker)`, which runs in a supervised thread while this one waits.

    Args:
      name: the thread's name.
      target: function of the worker, called in the thread.
      timeout: that of `Supervisor`, in seconds.
      stop: function that returns true once the result is not needed any more.

    Raises:
      Cancelled: `stop()` was true before the result was there.
      WorkerError: `target` hangs.
      Exception: the exception of `target`, unchanged.
    """
    supervisor = Supervisor(timeout)
    results = []

    def work(worker: Worker) -> None:
        result = target(worker)
        with supervisor.wait_until():
            results.append(result)
        raise Cancelled  # ends the thread in order

    supervisor.start(name, work)
    try:
        with supervisor.wait_until(lambda: bool(results) or stop()):
            if not results:
                raise Cancelled
            return results[0]
    except WorkerError as error:
        raise error.__cause__ or error  # noqa: B904  (the first cause, by itself)
    finally:
        supervisor.close()


class Queue:
    """A queue of bounded length between one worker and the consumer.

    Args:
      supervisor: the supervisor of both.
      capacity: number of items that may wait.
    """

    def __init__(self, supervisor: Supervisor, capacity: int):
        self._supervisor, self._capacity = supervisor, capacity
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Adds an item; waits while the queue is full."""
        with self._supervisor.wait_until(lambda: len(self._items) < self._capacity):
            self._items.append(item)

    def get(self) -> Any:
        """Returns the oldest item; waits while there is none."""
        with self._supervisor.wait_until(lambda: bool(self._items)):
            return self._items.popleft()


class Versions:
    """A value of which the consumer publishes one version after another.

    Args:
      supervisor: the supervisor of the consumer and the workers.
    """

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._values: dict[int, Any] = {}

    def publish(self, version: int, value: Any, oldest: int) -> None:
        """Publishes a version, and deletes those before `oldest`."""
        with self._supervisor.wait_until():
            self._values[version] = value
            for old in [known for known in self._values if known < oldest]:
                del self._values[old]

    def get(self, least: int, exact: bool) -> tuple[int, Any]:
        """Waits for version `least`; returns it if `exact`, else the newest."""
        with self._supervisor.wait_until(lambda: any(v >= least for v in self._values)):
            version = least if exact else max(self._values)
            return version, self._values[version]
