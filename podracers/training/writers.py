"""Who writes a checkpoint: one process, or all of them, each what lies on its own devices.

Orbax lets several processes write one checkpoint, and commits it once none of them writes any more.
Where it waits for the others in its background threads, they say more here than that they are done:
each says the checksums of what it has written, or why it could not, and process 0 whether it has
committed all of it. A barrier would wait for a process that has failed until its time is over.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp

from podracers import errors
from podracers.hosts import peers, processes
from podracers.training import manifest, orbax_support, storage

_TIMEOUT = 3600  # seconds that a save by several processes may take

_saves = itertools.count()  # the same number stands for the same save in every process


class Alone:
    """One process, which waits for no other one."""

    is_one = True

    def options(self) -> ocp.options.MultiprocessingOptions:
        """Returns which processes take part, for orbax."""
        return orbax_support.alone()

    def asynchronous(self) -> dict[str, Any]:
        """Returns further options of `ocp.AsyncOptions`."""
        return {}

    def attach(self, is_saving: Callable[[], bool]) -> None:
        """Is told how to ask whether a save is under way."""

    def begin(self, find: Callable[[], storage.Path]) -> None:
        """Is called before a save; `find()` is where it is being written."""

    def parts(self) -> dict[str, list[int]]:
        """Returns the checksums of files that other processes vouch for."""
        return {}

    def on_one(self, function: Callable[[], Any]) -> Any:
        """Returns what one process gets from `function`, which it alone calls."""
        return function()

    def agree(self, fault: errors.RunFailure | None) -> None:
        """Raises the fault of any of the processes in all of them."""
        if fault:
            raise fault

    def verify(self, folder: storage.Path, items: Sequence[str]) -> None:
        """Does what `manifest.verify` does; each process reads a part of the files."""
        manifest.verify(folder, items)


class Together:
    """All processes, which make the same calls in the same order; process 0 commits."""

    is_one = False

    def __init__(self):
        self._key = ""  # of the save under way
        self._find: Callable[[], storage.Path] | None = None
        self._has_said = self._has_committed = self._is_idle = False
        self._parts: dict[str, list[int]] | None = None  # of all processes, in process 0

    def options(self) -> ocp.options.MultiprocessingOptions:
        """Returns which processes take part, for orbax."""
        # Named, they meet in the key-value store; else in a collective, which background threads
        # may not enter.
        everybody = set(range(processes.count()))
        return ocp.options.MultiprocessingOptions(primary_host=0, active_processes=everybody)

    def asynchronous(self) -> dict[str, Any]:
        """Returns further options of `ocp.AsyncOptions`."""
        return {"barrier_sync_fn": self._meet, "timeout_secs": _TIMEOUT}

    def attach(self, is_saving: Callable[[], bool]) -> None:
        """Lets a process that another's failure ends write its part first, and process 0 commit."""
        peers.finish_first(lambda: is_saving() and not self._is_idle)

    def begin(self, find: Callable[[], storage.Path]) -> None:
        """Is called before a save; `find()` is where it is being written."""
        self._key, self._find = f"podracers/checkpoint/{next(_saves)}", find
        self._has_said = self._has_committed = False
        self._parts = None

    def parts(self) -> dict[str, list[int]]:
        """Returns the checksums of files that other processes vouch for.

        Raises:
          RuntimeError: not all of them have said that theirs are written.
        """
        if self._parts is None:
            raise RuntimeError("orbax would commit before all processes have written their part")
        return self._parts

    def on_one(self, function: Callable[[], Any]) -> Any:
        """Returns what process 0 gets from `function`, which it alone calls."""
        return processes.on_lead(function)

    def agree(self, fault: errors.RunFailure | None) -> None:
        """Raises the fault of any of the processes in all of them."""
        said = [text for text in processes.all_say(str(fault) if fault else None) if text]
        processes.on_lead(lambda: _fail(said))

    def verify(self, folder: storage.Path, items: Sequence[str]) -> None:
        """Does what `manifest.verify` does; each process reads a part of the files."""
        fault = failure = None
        try:
            manifest.verify(folder, items, processes.share())
        except manifest.DamagedError as error:
            fault = str(error)
        except errors.RunFailure as error:
            failure = error
        self.agree(failure)
        for said in processes.all_say(fault):
            if said:
                raise manifest.DamagedError(said)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Stands for orbax's barriers among its background threads, in which it names them."""
        del timeout_ms  # who is lost is noticed sooner, by `peers`
        if "async_write_complete" in key:
            self._say(manifest.part(self._find(), processes.index()))
            if processes.is_lead():
                self._hear_parts()
        elif "async_commit_complete" in key:
            if processes.is_lead():
                self._say_commit(None)
            else:
                self._hear_commit()
        elif threading.current_thread() is not threading.main_thread():
            # At the end of each save. One that failed has not come to the places above.
            if (error := sys.exception()) and not self._has_said:
                self._say(manifest.reason(error))
            if error and processes.is_lead() and not self._has_committed:
                self._say_commit(manifest.reason(error))

    def _say(self, part: dict[str, list[int]] | str) -> None:
        """Says the checksums of this process's part, or why there are none."""
        self._has_said = True
        processes.say(f"{self._key}/{processes.index()}", part)

    def _hear_parts(self) -> None:
        parts: dict[str, list[int]] = {}
        for index in range(processes.count()):
            part = processes.hear(key := f"{self._key}/{index}")
            processes.forget(key)  # there may be many files
            if isinstance(part, str):
                raise RuntimeError(f"process {index}: {part}" if index else part)
            parts |= part
        self._parts = parts

    def _say_commit(self, fault: str | None) -> None:
        self._has_committed = True
        processes.say(f"{self._key}/commit", fault)

    def _hear_commit(self) -> None:
        self._is_idle = True
        try:
            reason = processes.hear(f"{self._key}/commit")
        finally:
            self._is_idle = False
        if reason is not None:
            raise RuntimeError(reason)


def _fail(said: Sequence[str]) -> None:
    if said:
        raise errors.RunFailure(said[0])
