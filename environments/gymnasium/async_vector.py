"""Gymnasium environments in processes of their own, each of which steps a few.

Workers are plain child processes that start from nothing. A fork of a process that runs JAX may
deadlock on the locks of threads which the copy does not have, and what `multiprocessing` spawns
imports the main script once more, which has to be written for it.

A worker ends when its parent does, however that ends; signals are left to the parent, for Ctrl-C
reaches every process of a terminal.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without.
"""

import contextlib
import itertools
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

_START, _RESET, _STEP = range(3)  # what a worker is asked for
_DONE, _MISTAKE, _FAILED, _UNCLOSED = range(4)  # how it went
_GRACE = 2.0  # seconds for workers to close their environments
# Workers share the cores: none of them should start a thread on each.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class AsyncVector:
    """`B` environments, split over processes; has the methods of `sync_vector.SyncVector`.

    Args:
      recipe: of each environment.
      seeds: `B`, one for each.
      numbers: `B`, of the streams, for error messages.
      num_workers: how many processes; at most `B` are started.

    Raises:
      errors.UserError: an environment cannot be made for a reason that the user can mend.
    """

    def __init__(
        self,
        recipe: sync_vector.EnvFactory,
        seeds: Sequence[int],
        numbers: Sequence[int],
        num_workers: int,
    ):
        self._name = recipe.spec.id
        self._receiving = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[connection.Connection] = []
        self._slices = _slices(len(seeds), num_workers)
        try:
            for rows in self._slices:
                self._start()
                # The environment of a notebook or a script is not importable: it goes by value.
                start = cloudpickle.dumps((recipe, list(seeds[rows]), list(numbers[rows])))
                self._ask(len(self._pipes) - 1, _START, start)
            for worker in range(len(self._pipes)):
                self._answer(worker)
        except BaseException:
            self.close()
            raise

    def reset(self) -> sync_vector.VectorStep:
        """Starts the first episode of each."""
        for worker in range(len(self._pipes)):
            self._ask(worker, _RESET, None)
        return self.recv()

    def send(self, action: np.ndarray) -> None:
        """Begins a step of every environment."""
        for worker, rows in enumerate(self._slices):
            self._ask(worker, _STEP, action[rows])

    def recv(self) -> sync_vector.VectorStep:
        """Waits for the step to end."""
        return _concatenate([self._answer(worker) for worker in range(len(self._pipes))])

    def close(self) -> None:
        """Ends the processes: politely at first, then by force, even in the middle of a step.

        Another thread that waits in `recv` gets an `errors.RunFailure`.

        Raises:
          errors.RunFailure: an environment could not be closed; its process has ended nevertheless.
        """
        deadline = time.monotonic() + _GRACE
        failures = []
        if self._receiving.acquire(blocking=False):  # else a step hangs, and there is another cause
            for pipe in self._pipes:
                _shut_down(pipe, socket.SHUT_WR)
            failures = [each for pipe in self._pipes for each in _last_words(pipe, deadline)]
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
            raise errors.RunFailure(failures[0])

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
                    process_group=0,  # a Ctrl-C must not reach it, not even while it starts
                    env={**_ONE_THREAD, **os.environ},
                )
            )

    def _ask(self, worker: int, request: int, payload: Any) -> None:
        try:
            self._pipes[worker].send((request, payload))
        except OSError as error:
            raise self._died(worker) from error

    def _answer(self, worker: int) -> Any:
        try:
            with self._receiving:
                outcome, payload = self._pipes[worker].recv()
        except (EOFError, OSError) as error:
            raise self._died(worker) from error
        if outcome == _MISTAKE:
            raise errors.UserError(payload)
        if outcome == _FAILED:
            raise RuntimeError(f"{self._name} failed in a worker process:\n{payload}")
        return payload

    def _died(self, worker: int) -> errors.RunFailure:
        try:
            code = self._processes[worker].wait(_GRACE)
        except (IndexError, subprocess.TimeoutExpired):  # another thread closes, or it is dying yet
            code = None
        how = f" by signal {-code}" if code is not None and code < 0 else f" with exit code {code}"
        return errors.RunFailure(f"{self._name}: worker process {worker} ended{how}")


def work(descriptor: int, parent: int) -> None:
    """Serves one parent until it hangs up, or is no more: the main function of a worker.

    Args:
      descriptor: of this end of the pipe.
      parent: its process id.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    rows = None
    with connection.Connection(descriptor) as pipe:
        try:
            while True:
                request, payload = pipe.recv()
                if request == _START:
                    rows, answer = sync_vector.SyncVector(*pickle.loads(payload)), None
                elif request == _RESET:
                    answer = rows.reset()
                else:
                    rows.send(payload)
                    answer = rows.recv()
                pipe.send((_DONE, answer))
        except (EOFError, ConnectionError):
            pass  # the parent hung up
        except errors.UserError as error:
            pipe.send((_MISTAKE, str(error)))
        except Exception:
            pipe.send((_FAILED, traceback.format_exc()))
        finally:
            with contextlib.suppress(OSError):  # the parent may be gone
                _close(rows, pipe)


def _close(rows: sync_vector.SyncVector | None, pipe: connection.Connection) -> None:
    """Closes the environments, and tells the parent what went wrong."""
    try:
        if rows is not None:
            rows.close()
    except errors.RunFailure as error:
        pipe.send((_UNCLOSED, str(error)))


def _last_words(pipe: connection.Connection, deadline: float) -> list[str]:
    """Returns what a worker says of closing, and leaves out answers that nobody waits for."""
    said = []
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            outcome, payload = pipe.recv()
            if outcome == _UNCLOSED:
                said.append(payload)
    return said


def _shut_down(pipe: connection.Connection, how: int) -> None:
    """Ends a direction of a pipe; unlike closing, this wakes whoever reads at either end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(how)


def _watch(parent: int) -> None:
    """Ends this process soon after its parent, though an environment may be in a long step."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _slices(count: int, num_workers: int) -> list[slice]:
    """Returns contiguous slices of nearly equal length."""
    edges = np.linspace(0, count, min(count, max(1, num_workers)) + 1).astype(int).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def _concatenate(parts: list[Any]) -> Any:
    """Returns what all workers answered as one; what arrived through a pipe is fresh already."""
    if isinstance(parts[0], sync_vector.VectorStep):
        return sync_vector.VectorStep(*(_concatenate(list(leaves)) for leaves in zip(*parts)))
    if isinstance(parts[0], dict):
        return {key: _concatenate([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)
