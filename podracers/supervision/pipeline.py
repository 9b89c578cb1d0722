"""Supervised threads, bounded queues and versioned values: the only threading code.

One consumer (the learner, in the thread that made the `Supervisor`) works with several workers (the
actors, a thread each). Three rules keep a run from hanging:

- What a worker raises is kept, and the consumer raises it at its next call.
- While the consumer waits for something, no worker may spend longer than `timeout` in any one
  activity, and they may not all wait for longer: a simulator that hangs and a deadlock are found.
  One worker may wait for as long as another one works.
- Closing wakes everybody who waits. A thread that does not come back even then is abandoned, and
  `abandoned` says so: a process that wants to end has to end without it.
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
from typing import Any, NamedTuple

import jax

from podracers import errors
from podracers.supervision import watchdog

_LOGGER = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0  # a step of a simulator that is slow, but not stuck, ends within it
_RELEASE_SECONDS = 5.0  # what a thread that is stuck gets to be freed from outside
_SLICE_SECONDS = 1.0  # how often a wait looks at the clock; being notified does not wait for it

# Activities that have a name here. Compiling alone has no limit.
COMPILING, STARTING = "compiling", "starting"

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # every one that was ever started


class Cancelled(Exception):
    """The consumer is closing: a worker that meets this leaves."""


class WorkerError(RuntimeError):
    """A worker failed; the cause is chained to it."""


def abandoned() -> list[str]:
    """Returns the names of the threads that are alive; to be asked once everything is closed."""
    return sorted(thread.name for thread in _threads if thread.is_alive())


class Timer:
    """Adds up the seconds that one thread spends on each of its activities.

    While the profiler captures a trace, the activities are spans in it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._activity = ""
        self._since = time.perf_counter()
        self._shown: jax.profiler.TraceAnnotation | None = None

    @contextlib.contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Counts what happens inside as `activity`; activities do not nest."""
        self.switch(activity)
        try:
            yield
        finally:
            self.switch("")

    def switch(self, activity: str) -> None:
        """Counts what follows as `activity`."""
        with self._lock:
            self._account(time.perf_counter())
            self._activity = activity
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None
        if activity and jax.profiler.TraceAnnotation.is_enabled():
            self._shown = _annotation(activity)

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


def _annotation(activity: str) -> jax.profiler.TraceAnnotation:
    """Returns a span of the profiler's trace, begun, with the name of its thread."""
    thread = threading.current_thread().name
    return jax.profiler.TraceAnnotation(activity, thread=thread).__enter__()


class _Activity(NamedTuple):
    name: str
    since: float  # by `time.monotonic`


class Worker:
    """One supervised thread.

    Attributes:
      name: the thread's name.
      timer: seconds by activity.
      activity: the current activity. Replaced as a whole, for the consumer may look at any moment.
      release: function that frees what the thread holds, called from another one; None without.
      thread: the thread itself, once it is started.
    """

    def __init__(
        self, name: str, supervisor: "Supervisor", release: Callable[[], None] | None = None
    ):
        self.name, self.release = name, release
        self.timer = Timer()
        self._supervisor = supervisor
        self.activity = _Activity("", time.monotonic())
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Says, and times, what this thread is at; leaves with `Cancelled` if it is to end."""
        self._supervisor.raise_if_ended()
        self.activity = _Activity(activity, time.monotonic())
        try:
            with self.timer(activity):
                yield
        finally:
            self.activity = _Activity("", time.monotonic())


class Supervisor:
    """Starts workers, and fails with the first of them that does.

    Attributes:
      timeout: seconds that one activity of a worker may last while the consumer waits.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._changed = threading.Condition()
        self._failure: tuple[str, BaseException] | None = None
        self._told = False  # whether the consumer knows of it
        self._closing = False
        self._workers: list[Worker] = []
        self._waiting: set[threading.Thread] = set()
        self._hanging: set[threading.Thread] = set()
        self._consumer = threading.current_thread()
        self._watch = watchdog.Watch(timeout)  # for a worker may keep the consumer from running

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
          release: called from another thread if `target` does not come back, to free what it holds.
        """
        worker = Worker(name, self, release)

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
        worker.thread = threading.Thread(target=run, name=name, daemon=True)
        _threads.add(worker.thread)
        self._workers.append(worker)
        worker.thread.start()
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
        thread = threading.current_thread()
        slice_seconds = min(_SLICE_SECONDS, self.timeout)
        began = now = time.monotonic()
        with self._changed:
            self._waiting.add(thread)
            try:
                while True:
                    self.raise_if_ended()
                    if ready():
                        return
                    self._changed.wait(slice_seconds)
                    before, now = now, time.monotonic()
                    if now - before > slice_seconds + self.timeout / 2:
                        began = now  # the whole process was stopped: it has to wake up first
                    if thread is self._consumer:
                        self._require_progress(began, now)
                    elif not self._consumer.is_alive():
                        raise Cancelled
            finally:
                self._waiting.discard(thread)

    def raise_if_ended(self) -> None:
        """Raises what the calling thread has to know: see `wait_until`.

        Raises:
          errors.UserError: that of a worker, as it is: a mistake is no failure.
        """
        if threading.current_thread() is not self._consumer:
            if self._closing or self._failure:
                raise Cancelled
        elif self._failure:
            self._told = True
            name, error = self._failure
            if isinstance(error, errors.UserError):
                raise error
            raise WorkerError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _require_progress(self, began: float, now: float) -> None:
        """Raises if a worker is at one thing for too long, or nobody at anything."""
        if self._failure:
            return  # which says more
        at_work = [worker for worker in self._workers if worker.thread not in self._waiting]
        for worker in at_work:
            name, since = worker.activity
            seconds, limit = now - max(since, began), self.timeout
            if seconds > limit and name != COMPILING:
                self._told = True  # whatever it raises once it is released
                self._hanging.add(worker.thread)
                raise WorkerError(
                    f"{worker.name} hangs: {seconds:.0f} s of '{name or 'host work'}', and the "
                    f"limit is {limit:g} s. It is here:\n{_stack(worker.thread)}"
                )
        latest = max([began, *(worker.activity.since for worker in self._workers)])
        if not at_work and now - latest > self.timeout:
            each = ", ".join(f"{w.name} at '{w.activity.name}'" for w in self._workers)
            raise WorkerError(
                f"deadlock: for {now - latest:.0f} s everybody has waited for somebody else, and "
                f"the limit is {self.timeout:g} s ({each or 'there are no workers'})"
            )

    def close(self) -> None:
        """Ends every worker. Those that do not come back are released, and else abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        workers, self._workers = self._workers, []
        moving = [each.thread for each in workers if each.thread not in self._hanging]
        # Who interrupts does not want to wait.
        hasty = isinstance(sys.exception(), KeyboardInterrupt)
        _join(moving, min(self.timeout, 1.0 if hasty else _JOIN_SECONDS))
        stuck = [each for each in workers if each.thread.is_alive() and each.release]
        releases = [
            # A thread, for it may hang as well.
            threading.Thread(target=each.release, name=f"release {each.name}", daemon=True)
            for each in stuck
        ]
        for thread in releases:
            _threads.add(thread)
            thread.start()
        _join([*releases, *(each.thread for each in stuck)], min(self.timeout, _RELEASE_SECONDS))
        self._watch.end()
        if self._failure and not self._told:
            name, error = self._failure
            _LOGGER.warning("%s failed while it was closed", name, exc_info=error)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(limit - time.monotonic(), 0.0))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else ""


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
      stop: function that returns true once nobody wants the result any more.

    Raises:
      Cancelled: `stop()` was true before the result was there.
      WorkerError: it hangs.
      Exception: whatever `target` raised, as it is.
    """
    supervisor = Supervisor(timeout)
    results = []

    def work(worker: Worker) -> None:
        result = target(worker)
        with supervisor.changing():
            results.append(result)
        supervisor.wait_until(lambda: False)

    supervisor.start(name, work)
    try:
        supervisor.wait_until(lambda: bool(results) or stop())
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
      supervisor: the supervisor of the consumer and the workers.
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
