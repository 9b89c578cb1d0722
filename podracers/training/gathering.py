"""Checkpoints of several processes that share no folder: process 0 gathers and writes them."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podracers import agent as agent_lib
from podracers import types
from podracers.hosts import global_arrays, peers, processes
from podracers.training import checkpoint, storage


class GatheringCheckpointer:
    """What `Checkpointer` is to one process; all processes make the same calls.

    Process 0 saves and reads what all of them hold. It writes what one process with as many devices
    would have written, so a run goes on with any number of processes, and a folder that process 0
    alone sees is enough. The arguments are those of `Checkpointer`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        keep_latest: int = 3,
        keep_best: int = 1,
        replay: bool = True,
    ):
        self._inner: checkpoint.Checkpointer | None = None
        self._read: types.PyTree = None
        self._replay = replay

        def make():
            self._inner = checkpoint.Checkpointer(directory, keep_latest, keep_best, replay=replay)

        processes.on_lead(make)
        # What fails elsewhere takes no checkpoint with it that is being written.
        peers.finish_first(lambda: bool(self._inner and self._inner.is_saving()))

    def save(
        self,
        step: int,
        state: types.PyTree,
        params: types.PyTree,
        metadata: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts to save a checkpoint, once process 0 has it."""
        if not self._replay:
            state = agent_lib.without_replay(state)
        state, params = global_arrays.to_host((state, params))
        if self._inner:
            self._inner.save(step, state, params, metadata, score)

    def restore(self, template: types.PyTree) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the newest whole checkpoint onto the devices of all processes."""
        shapes = jax.tree.map(_blank, global_arrays.plain(template))
        found = processes.on_lead(lambda: self._restore(shapes))
        if found is None:
            return None
        step, metadata, is_whole = found
        saved = template if is_whole else agent_lib.without_replay(template)
        state = global_arrays.to_devices(self._read, saved)
        self._read = None
        return step, agent_lib.with_replay(state, template), metadata

    def wait(self) -> None:
        """Blocks until the last save is committed."""
        processes.on_lead(lambda: self._inner and self._inner.wait())

    def latest_step(self) -> int | None:
        """Returns the newest step that was saved, or None."""
        return processes.on_lead(lambda: self._inner and self._inner.latest_step())

    def best_step(self) -> int | None:
        """Returns the step with the highest score, or None, in process 0; elsewhere None."""
        return self._inner.best_step() if self._inner else None

    def close(self) -> None:
        """Waits for the last save, and frees the background threads."""
        if self._inner:
            self._inner.close()

    def _restore(self, template: types.PyTree) -> tuple[int, dict[str, Any], bool] | None:
        step, self._read, metadata = self._inner.restore_saved(template) or (None, None, None)
        if step is None:
            return None
        return step, metadata, jax.tree.structure(self._read) == jax.tree.structure(template)


def open_checkpoints(
    default: storage.Path, shared: str | None, keep: tuple[int, int], replay: bool
) -> checkpoint.Checkpointer | GatheringCheckpointer:
    """Returns what saves and restores the checkpoints of a run; all processes call it.

    Args:
      default: the folder in the run directory, which process 0 alone may see.
      shared: another one, which all processes see, or None.
      keep: number of the newest to keep, and of those with the highest scores besides.
      replay: save replay.
    """
    is_group = processes.is_several()
    if shared is not None:
        return checkpoint.Checkpointer(shared, *keep, replay=replay, together=is_group)
    make = GatheringCheckpointer if is_group else checkpoint.Checkpointer
    return make(default, *keep, replay=replay)


def _blank(x: jax.Array) -> np.ndarray:
    """Returns zeros that take no memory, to say what is to be read."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
