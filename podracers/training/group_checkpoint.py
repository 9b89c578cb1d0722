"""Checkpoints of a run of several processes: process 0 saves and reads what all of them hold.

What it writes is what one process with as many devices would have written, so a run goes on with
any number of processes; and a folder that process 0 alone sees is enough.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podracers import types
from podracers.hosts import global_arrays, peers, processes
from podracers.training import checkpoint


class GroupCheckpointer:
    """What `checkpoint.Checkpointer` is to one process; all processes make the same calls.

    Args:
      directory: where checkpoints live, for process 0.
      keep_latest: how many of the newest to keep.
      keep_best: how many of those with the highest scores to keep besides.
    """

    def __init__(self, directory: str | pathlib.Path, keep_latest: int = 3, keep_best: int = 1):
        self._inner: checkpoint.Checkpointer | None = None
        self._read: types.PyTree = None
        self._arguments = (directory, keep_latest, keep_best)
        processes.on_lead(self._make)
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
        state, params = global_arrays.to_host((state, params))
        if self._inner:
            self._inner.save(step, state, params, metadata, score)

    def restore(self, template: types.PyTree) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the newest whole checkpoint onto the devices of all processes."""
        shapes = jax.tree.map(_blank, global_arrays.plain(template))
        found = processes.on_lead(lambda: self._restore(shapes))
        if found is None:
            return None
        step, metadata = found
        state = global_arrays.to_devices(self._read, template)
        self._read = None
        return step, state, metadata

    def wait(self) -> None:
        """Blocks until the last save is committed."""
        processes.on_lead(self._wait)

    def latest_step(self) -> int | None:
        """Returns the newest step that was saved, or None."""
        return processes.on_lead(self._latest_step)

    def best_step(self) -> int | None:
        """Returns the step with the highest score, or None, in process 0; elsewhere None."""
        return self._inner.best_step() if self._inner else None

    def close(self) -> None:
        """Waits for the last save, and frees the background threads."""
        if self._inner:
            self._inner.close()

    def _wait(self) -> None:
        self._inner.wait()

    def _latest_step(self) -> int | None:
        return self._inner.latest_step()

    def _make(self) -> None:
        self._inner = checkpoint.Checkpointer(*self._arguments)

    def _restore(self, template: types.PyTree) -> tuple[int, dict[str, Any]] | None:
        restored = self._inner.restore(template)
        if restored is None:
            return None
        step, self._read, metadata = restored
        return step, metadata


def _blank(x: jax.Array) -> np.ndarray:
    """Returns zeros that take no memory, to say what is to be read."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
