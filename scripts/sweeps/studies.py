"""Studies of Optuna: their storage, samplers and pruners, and trials of workers that died."""

import contextlib
import datetime
import importlib.util
import math
import os
import pathlib
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.storages import _heartbeat, journal

from podracers import errors
from podracers.scripts.sweeps import space as space_lib
from podracers.training import run_directory

PERCENT = 100  # the resource that pruners give to a whole run; reports count in it
PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=5, max_resource=PERCENT),
}
_SAMPLERS: dict[str, Any] = {
    "tpe": optuna.samplers.TPESampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "random": optuna.samplers.RandomSampler,
    "gp": optuna.samplers.GPSampler,
}
_NAMELESS = 60.0  # seconds in which a worker writes its name into a trial that it has taken
_WORKER, _FAILURE = "worker", "failure"  # attributes of a trial
_STATE = optuna.trial.TrialState

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
warnings.filterwarnings("ignore", "Heartbeat of storage is supposed")
# The trial of a worker that died is run again, three times at most: it may be the cause.
_retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=3)
_continue = optuna.storages.RetryHeartbeatStaleTrialCallback()


def sampler(name: str, space: space_lib.Space, seed: int | None) -> optuna.samplers.BaseSampler:
    """Returns a sampler; raises errors.UserError if it cannot draw from the space."""
    if name == "grid":
        return _Grid(space_lib.grid(space), seed)
    if name == "gp" and importlib.util.find_spec("torch") is None:
        raise errors.UserError("--sampler gp needs the package torch: pip install torch")
    return _SAMPLERS[name](seed=seed)


class _Grid(optuna.samplers.GridSampler):
    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        """Does not stop the study, which is not in `Study.optimize`: the worker counts trials."""


def storage(url: str | None, folder: pathlib.Path, heartbeat: int) -> optuna.storages.BaseStorage:
    """Returns a database's storage, or without a URL that of a journal in the study's folder.

    Raises:
      errors.UserError: the journal cannot be written, or the database cannot be opened.
    """
    if url is None:
        with errors.file_errors(f"write the study in '{folder}'"):
            folder.mkdir(parents=True, exist_ok=True)
            file = journal.JournalFileBackend(str(folder / "journal.log"))
            return optuna.storages.JournalStorage(file)
    life: dict[str, Any] = {"heartbeat_interval": heartbeat}
    life["heartbeat_stale_trial_callback"] = _retry
    attempts = 10
    while True:
        try:
            return optuna.storages.RDBStorage(url, **life)
        except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
            attempts -= 1  # all but one fail of workers that make the tables at once
            if not attempts or not isinstance(error, sqlalchemy.exc.DBAPIError):
                cause = errors.first_line(error)
                raise errors.UserError(f"--storage: cannot open the database: {cause}") from error
            time.sleep(0.3)


class Worker:
    """One of the processes that work on a study, with the trials that it has taken.

    While it has trials, a thread records heartbeats in a database. A journal has none: its workers
    hold locks in the study's folder, which the operating system frees when a process ends.
    """

    def __init__(self, study: optuna.Study, space: space_lib.Space, folder: pathlib.Path):
        self._study, self._space, self._folder = study, space, folder / "workers"
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        interval = getattr(study._storage, "get_heartbeat_interval", lambda: 0)()
        self._patience = 3.0 * interval  # seconds; two missing heartbeats, and a spare one
        with errors.file_errors(f"write the study in '{folder}'"):
            (self._folder / self._name).mkdir(parents=True)
        self.lock = run_directory.Lock(self._folder / self._name)
        self.lock.acquire()

    def num_left(self, count: int, stop: Callable[[], bool]) -> int:
        """Returns how many of `count` trials no worker has, with those of workers that died.

        Before it returns 0 while a worker has a trial, it waits until a missing heartbeat would
        have been noticed; `stop` ends the waiting.
        """
        start = time.monotonic()
        while True:
            self._recover()
            trials = self._study.get_trials(deepcopy=False)
            taken = {
                trial.system_attrs.get("failed_trial", trial.number)
                for trial in trials
                if trial.state not in (_STATE.WAITING, _STATE.FAIL) or failure(trial)
            }
            running = any(trial.state == _STATE.RUNNING for trial in trials)
            is_over = stop() or time.monotonic() - start > self._patience
            if (left := count - len(taken)) > 0 or not running or is_over:
                return max(left, 0)
            time.sleep(0.2)

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[optuna.Trial]]:
        """Draws trials, and keeps them alive."""
        with contextlib.ExitStack() as exits:
            trials = []
            for _ in range(count):
                trial = self._study.ask(dict(self._space))
                trial.set_user_attr(_WORKER, self._name)
                beat: Any = _heartbeat.get_heartbeat_thread(trial._trial_id, self._study._storage)
                exits.enter_context(beat)
                trials.append(trial)
            yield trials

    def tell(self, trial: optuna.Trial, value: float | None = None, reason: str = "") -> None:
        """Ends a trial, with a value, for a reason as failed for good, or else as pruned."""
        if value is not None and not math.isfinite(value):
            reason = "the objective was not logged, or is not finite"
        state = _STATE.PRUNED if value is None else _STATE.COMPLETE
        if reason:
            trial.set_user_attr(_FAILURE, reason)
            state = _STATE.FAIL
        value = value if state == _STATE.COMPLETE else None
        self._study.tell(trial, value, state=state, skip_if_finished=True)

    def leave(self, trials: Sequence[optuna.Trial]) -> None:
        """Leaves trials that a signal has stopped, to be continued."""
        for trial in trials:
            self._fail(self._study.trials[trial.number], _continue)

    def _recover(self) -> None:
        """Lets the trials of workers that died wait to be run again."""
        optuna.storages.fail_stale_trials(self._study)
        if isinstance(self._study._storage, optuna.storages.JournalStorage):
            for trial in self._study.get_trials(states=(_STATE.RUNNING,)):
                if self._is_gone(trial):
                    self._fail(trial, _retry)

    def _is_gone(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Returns whether the worker that took a trial has ended."""
        if (name := trial.user_attrs.get(_WORKER)) is None:
            age = datetime.datetime.now() - (trial.datetime_start or datetime.datetime.now())
            return age.total_seconds() > _NAMELESS
        lock = run_directory.Lock(self._folder / name)
        try:
            lock.acquire()
        except errors.UserError:  # its process has the lock
            return False
        lock.release()
        return True

    def _fail(self, trial: optuna.trial.FrozenTrial, retry: Any) -> None:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # another worker did
            self._study._storage.set_trial_state_values(trial._trial_id, _STATE.FAIL)
            trial.user_attrs.pop(_WORKER, None)
            retry(self._study, trial)


def failure(trial: optuna.trial.FrozenTrial) -> str:
    """Returns why a trial has failed for good; empty if it has not."""
    return trial.user_attrs.get(_FAILURE, "")
