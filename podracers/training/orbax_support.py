"""What orbax needs from outside: a policy of its own, quiet, and tidying after a failed save."""

import contextlib
import dataclasses
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from podracers import types
from podracers.training import storage


@dataclasses.dataclass
class BestScores(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the `n` checkpoints with the highest scores.

    Orbax's own policy reads scores from files that it parses on start: a damaged one is fatal.
    """

    scores: Mapping[int, float]
    n: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns which of `checkpoints` to keep."""
        scored = [info.step for info in checkpoints if info.step in self.scores]
        best = sorted(scored, key=lambda step: (self.scores[step], step))[::-1][: self.n]
        return [info.step in best for info in checkpoints]


def alone() -> ocp.options.MultiprocessingOptions:
    """Returns options by which this process waits for no other one."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"alone_{index}"
    )


def handlers(who: ocp.options.MultiprocessingOptions) -> dict[str, ocp.CheckpointHandler]:
    """Returns what writes and reads the items of a checkpoint, by their names."""
    return {
        "state": ocp.StandardCheckpointHandler(multiprocessing_options=who),
        "params": ocp.StandardCheckpointHandler(multiprocessing_options=who),
        "metadata": ocp.JsonCheckpointHandler(multiprocessing_options=who),
    }


def abstract(tree: types.PyTree) -> types.PyTree:
    """Returns what orbax wants as a template of arrays."""

    def one(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(one, tree)


def remove(folder: storage.Path, seconds: float = 2.0) -> None:
    """Removes a folder into which writes of a failed save may still be trickling."""
    if storage.is_bucket(folder):
        with contextlib.suppress(Exception):  # what stays is removed at the next start
            storage.remove(folder)
        return
    deadline = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def quieten() -> None:
    """Keeps orbax's own tracebacks off the terminal: the errors themselves are raised here."""
    logger = logging.getLogger("absl")
    if _not_from_orbax in logger.filters:
        return
    logger.addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_a_failed_write)
    warnings.filterwarnings("ignore", "coroutine .*was never awaited", RuntimeWarning)
    hook = sys.unraisablehook

    def report(unraisable):
        # A failed save leaves at the first write that fails; the others then find no event loop.
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = report


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname


def _not_of_a_failed_write(record: logging.LogRecord) -> bool:
    """Drops what asyncio says of the writes that failed after the first, whose error is raised.

    Nothing but orbax uses asyncio here, and the record does not always name it.
    """
    return "never retrieved" not in record.getMessage()
