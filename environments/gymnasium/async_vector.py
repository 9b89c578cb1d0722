"""Gymnasium environments in worker processes, with several environments per process.

Workers are child processes with a new interpreter: a fork of a process that runs JAX may deadlock,
and `multiprocessing`'s spawn imports the main script again. They end with their parent, and ignore
signals, because Ctrl-C reaches every process of a terminal and the parent handles it.

`gymnasium.vector.AsyncVectorEnv` (1.3) is not used: it starts one process per environment (a sixth
of the steps per second: CartPole, 64 environments, two cores), and its workers outlive a parent
that is killed during a long step.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without it.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import cloudpickle
import numpy as np

from environments.gymnasium import sync_vector
from podracers import errors
from podracers.supervision import watchdog

# Seconds for workers to close their environments: a machine may be busy, and `supervision.pipeline`
# waits less for a thread that hangs.
_CLOSING = 60.0
_HANGING = 2.0  # the same, where a step hangs
# Workers share the cores, so libraries must not start a thread per core in each worker.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class AsyncVector:
    """`B` environments, split over processes, with the methods of `sync_vector.SyncVector`.

    At most `num_workers` processes are started, and at most `B`.

    Raises:
      errors.UserError: an environment cannot be made, or the system starts no more processes.
    """

    def __init__(
        self,
        factory: sync_vector.EnvFactory,
        seeds: Sequence[int],
        numbers: Sequence[int],
        num_workers: int,
    ):
        self._name = factory.spec.id
        self._receiving = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[connection.Connection] = []
        parts = np.array_split(range(len(seeds)), min(len(seeds), max(1, num_workers)))
        self._slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
        try:
            for worker, rows in enumerate(self._slices):
                try:
                    self._start()
                except OSError as error:
                    raise errors.UserError(
                        f"{self._name}: cannot start worker process {worker + 1} of {len(parts)}: "
                        f"{error.strerror} (see ulimit -a, or lower Sebulba.num_threads)"
                    ) from error
                # Classes of a notebook or a script are not importable: they are pickled by value.
                arguments = cloudpickle.dumps((factory, list(seeds[rows]), list(numbers[rows])))
                self._request(worker, arguments)
            for worker in range(len(self._pipes)):
                self._receive(worker)
        except BaseException:
            with contextlib.suppress(errors.RunFailure):  # the first error is the cause
                self.close()
            raise

    def reset(self) -> sync_vector.VectorStep:
        """Starts the first episode of each."""
        for worker in range(len(self._pipes)):
            self._request(worker, None)
        return self.recv()

    def send(self, action: np.ndarray) -> None:
        """Begins a step of every environment."""
        for worker, rows in enumerate(self._slices):
            self._request(worker, action[rows])

    def recv(self) -> sync_vector.VectorStep:
        """Waits for the step to end."""
        import jax  # noqa: PLC0415  (worker processes do not import it)

        steps = [self._receive(worker) for worker in range(len(self._pipes))]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *steps)

    def close(self) -> None:
        """Ends the processes: first by a request, then by force, even during a step.

        A thread that waits in `recv` raises `errors.RunFailure`.

        Raises:
          errors.RunFailure: an environment could not be closed; its process has ended nevertheless.
        """
        failures = []
        # Without the lock another thread waits for a step that hangs, which is the first cause.
        is_idle = self._receiving.acquire(blocking=False)
        deadline = time.monotonic() + (_CLOSING if is_idle else _HANGING)
        if is_idle:
            for pipe in self._pipes:
                _shut_down(pipe, socket.SHUT_WR)
            for pipe in self._pipes:
                with contextlib.suppress(EOFError, OSError):
                    while pipe.poll(max(0.0, deadline - time.monotonic())):
                        answer = pipe.recv()  # also results of a step that was not received
                        failures += [answer] if isinstance(answer, errors.RunFailure) else []
            self._receiving.release()
        for pipe in self._pipes:
            _shut_down(pipe, socket.SHUT_RDWR)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if failures:
            raise failures[0]

    def _start(self) -> None:
        ours, theirs = connection.Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from environments.gymnasium import async_vector\n"
            f"async_vector.work({theirs.fileno()}, {os.getpid()})"
        )
        self._pipes.append(ours)
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C must not reach it, even during its start
                    env={**_ONE_THREAD, **os.environ},
                )
            )

    def _request(self, worker: int, request: Any) -> None:
        try:
            self._pipes[worker].send(request)
        except OSError as error:
            raise self._died(worker) from error

    def _receive(self, worker: int) -> Any:
        try:
            with self._receiving:
                answer = self._pipes[worker].recv()
        except (EOFError, OSError) as error:
            raise self._died(worker) from error
        if isinstance(answer, errors.UserError):
            raise answer
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self._name} failed in a worker process: {answer}") from answer
        return answer

    def _died(self, worker: int) -> errors.RunFailure:
        try:
            code = self._processes[worker].wait(_CLOSING)
        except (IndexError, subprocess.TimeoutExpired):  # closed by another thread; still ending
            code = None
        cause = ""
        if code is not None:
            cause = f" by signal {-code}" if code < 0 else f" with exit code {code}"
        return errors.RunFailure(f"{self._name}: worker process {worker} ended{cause}")


def work(descriptor: int, parent: int) -> None:
    """Answers requests until the parent closes the pipe or ends: the main function of a worker."""
    for number in watchdog.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    vector = answer = None
    # The parent may close the pipe at any time, even while the last answers are sent.
    with connection.Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        try:
            while not isinstance(answer, Exception):
                vector, answer = _serve(vector, pipe.recv())
                pipe.send(answer)
        finally:
            try:
                if vector is not None:
                    vector.close()
            except errors.RunFailure as error:
                pipe.send(error)


def _serve(
    vector: sync_vector.SyncVector | None, request: Any
) -> tuple[sync_vector.SyncVector | None, Any]:
    """Returns the environments and the answer to a request, an exception if it failed.

    The first request has the arguments of the environments; then None resets them, and actions
    step them.
    """
    try:
        if vector is None:
            return sync_vector.SyncVector(*pickle.loads(request)), None
        if request is None:
            return vector, vector.reset()
        vector.send(request)
        return vector, vector.recv()
    except errors.UserError as error:
        return vector, errors.UserError(str(error))  # some subclasses cannot be pickled
    except (Exception, SystemExit) as error:  # some cannot be pickled either
        failure = RuntimeError(errors.located(error))
        failure.add_note(traceback.format_exc())
        return vector, failure


def _shut_down(pipe: connection.Connection, how: int) -> None:
    """Shuts down a direction of a pipe; unlike `close`, this wakes readers at both ends."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(how)


def _exit_after(parent: int) -> None:
    """Ends this process within a second of its parent, even during a long step."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
