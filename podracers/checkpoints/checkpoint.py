"""Checkpoints of a run: saved in the background, verified before they are restored.

A checkpoint `directory/<step>` has three items, written by orbax and committed by one rename:

- `state`: the complete state of the runner, with or without replay;
- `params`: the acting parameters alone, so that an evaluation reads nothing else;
- `metadata`: JSON: the step, the progress of the run, the score, and the path, shape and dtype of
  every leaf;

and beside them the checksums of their files (`checkpoints.integrity`). In a bucket, the file
that is written last replaces the rename. Each of several processes writes the arrays of its own
devices, into a folder that all processes see; process 0 commits and removes.
"""

import contextlib
import functools
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from podracers import agent as agent_lib
from podracers import errors, trees, types
from podracers.checkpoints import integrity, storage
from podracers.hosts import peers, processes

_LOGGER = logging.getLogger(__name__)

_TIMEOUT = 3600  # seconds in which all processes have to write their part
_METADATA = "metadata/metadata"
_SCORE = "score.json"  # written by an evaluation after the commit


class Checkpointer:
    """Saves, keeps and restores the checkpoints of one run.

    Only the main thread calls it. Several processes make the same calls in the same order, and all
    see `directory`, which is on a disk or in a bucket, and is made if it does not exist.
    `keep_best` counts checkpoints with the highest scores, in addition to the latest. With
    `read_only`, for evaluation, nothing is written, and partial checkpoints of other processes are
    kept. Without `replay` it is not saved; with it, checkpoints without replay are refused.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        keep_latest: int = 3,
        keep_best: int = 1,
        read_only: bool = False,
        replay: bool = True,
    ):
        self._directory = storage.path(directory)
        self._keep_latest, self._keep_best = keep_latest, keep_best
        self._read_only, self._replay = read_only, replay
        self._saving: int | None = None  # step that the background thread writes
        self._is_proven = False  # true once a save of this object was opened again
        self._descriptor: int | None = None  # descriptor of a folder on a disk
        if not read_only:
            with storage.failures(f"make {self._directory}"):
                storage.make(self._directory)
                if not storage.is_bucket(self._directory):
                    self._descriptor = os.open(self._directory, os.O_RDONLY)
            processes.on_lead(self._remove_partial)
        self._newest: int | None = max(processes.on_lead(self._listed), default=None)
        # With these options processes meet in the key-value store of JAX: background threads cannot
        # enter a collective.
        self._processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(processes.count()))
        )
        self._arrays = ocp.StandardCheckpointHandler(multiprocessing_options=self._processes)
        # Unlike the handler for standard trees it accepts placeholders.
        self._reader = ocp.PyTreeCheckpointHandler(multiprocessing_options=self._processes)
        _silence_orbax()
        if not read_only:
            commit_file = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
            self._writer = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=self._arrays,
                    params=ocp.StandardCheckpointHandler(multiprocessing_options=self._processes),
                    metadata=ocp.JsonCheckpointHandler(multiprocessing_options=self._processes),
                ),
                async_options=ocp.AsyncOptions(
                    timeout_secs=_TIMEOUT,
                    barrier_sync_fn=self._barrier,
                    # In the background thread of process 0, before the commit.
                    post_finalization_callback=lambda: integrity.write(self._partial_folder()),
                    # If folders cannot be made, orbax's threads would wait for minutes.
                    create_directories_asynchronously=False,
                ),
                multiprocessing_options=self._processes,
                atomicity_options=commit_file if storage.is_bucket(self._directory) else None,
            )
            peers.finish_first(self._is_saving)

    def save(
        self,
        step: int,
        state: types.PyTree,
        params: types.PyTree,
        metadata: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts to save a checkpoint, and returns once the arrays are copied from the devices.

        The first one is committed on return, and was opened again: a checkpoint that orbax has
        written without an error may still lack its arrays. The step that was saved or restored last
        is not saved again; a new score of it is saved.

        `state` has arrays, typed keys and Python numbers; `params` are those that `score` belongs
        to, where higher is better. `metadata` has the run's `update` (of which `step` is a
        multiple), `clock` and fixed settings, as JSON can hold them.

        Raises:
          errors.RunFailure: this or the previous checkpoint could not be written, the first
            checkpoint cannot be opened, or the directory was moved, removed or replaced.
        """
        self.wait()
        score = None if score is None or not math.isfinite(score) else float(score)
        if step == self._newest:
            path = self._directory / str(step) / _SCORE
            if score is not None and processes.is_lead():
                storage.write(path, json.dumps({"score": score}))
                self._remove_old()
            return
        if not self._replay:
            state = agent_lib.without_replay(state)
        record = {
            "user": dict(metadata),
            "step": step,
            "score": score,
            "state": trees.structure(state),
            "params": trees.structure(params),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_with_elements(state)),
            params=ocp.args.StandardSave(_with_elements(params)),
            metadata=ocp.args.JsonSave(record),
        )
        self._saving = step
        with self._save_failures():
            self._writer.save(self._directory / str(step), args=items)
        if not self._is_proven:
            self.wait()

    def wait(self) -> None:
        """Blocks until the last save is committed, and removes checkpoints not to be kept.

        Raises:
          errors.RunFailure: it could not be written, or the directory is not the same any more.
        """
        if self._saving is not None:  # else orbax raises an earlier failure again
            with self._save_failures():
                self._writer.wait_until_finished()
        self._require_directory()
        if self._saving is None:
            return
        newest, self._saving = self._saving, None
        self._newest = newest
        if not self._is_proven:
            processes.on_lead(lambda: self._open(newest))
            self._is_proven = True
        if processes.is_lead():
            self._remove_old()

    def _open(self, step: int) -> None:
        """Opens every array of the newest checkpoint; sets it aside if one is missing."""
        folder = self._directory / str(step)
        with storage.failures(f"open checkpoint {folder}, which was saved just now"):
            try:
                integrity.load(folder / _METADATA)
                for item in ("state", "params"):
                    self._arrays.metadata(folder / item)
            except Exception:
                self._set_aside([step])
                raise

    def _require_directory(self) -> None:
        if self._descriptor is not None:
            storage.require_same(self._directory, self._descriptor)

    def _remove_old(self) -> None:
        with contextlib.suppress(Exception):  # the next save tries again
            best = [*self._scores()][: self._keep_best]
            for step in {*self._listed()[: -self._keep_latest]}.difference(best):
                (self._directory / str(step)).rmtree(missing_ok=True)

    def _listed(self) -> list[int]:
        with storage.failures(f"list {self._directory}"):
            return storage.steps(self._directory)

    def _scores(self) -> dict[int, float]:
        """Returns the scores by step, the best first; of equal ones the newest comes first."""
        scores = {}
        for step in self._listed():
            for name in (_METADATA, _SCORE):
                with contextlib.suppress(integrity.DamagedError):  # `restore` reports it
                    score = integrity.load(self._directory / str(step) / name).get("score")
                    if isinstance(score, float):
                        scores[step] = score
        return dict(sorted(scores.items(), key=lambda item: item[::-1], reverse=True))

    def _is_saving(self) -> bool:
        """Returns whether a save is not committed yet; other threads call it, too."""
        saving = self._saving
        return saving is not None and saving not in self._listed()

    def latest_step(self) -> int | None:
        """Returns the newest step that was saved or is being saved, or None."""
        return self._newest if self._saving is None else self._saving

    def best_step(self) -> int | None:
        """Returns the step with the highest score, or None where nothing was scored."""
        return next(iter(self._scores()), None)

    def restore(
        self,
        template: types.PyTree | None,
        item: str = "state",
        best: bool = False,
        check: Callable[[int, Mapping[str, Any]], None] = lambda step, metadata: None,
        selects: Callable[[str], bool] = lambda name: True,
        only: int | None = None,
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the newest checkpoint that is not damaged, and renames damaged ones.

        Args:
          template: the structure of the item: arrays, or `jax.ShapeDtypeStruct` with shardings.
            Its own replay is returned where the checkpoint has none. None for nested dicts of NumPy
            arrays.
          item: `"state"`, or `"params"` for the acting parameters alone.
          best: take the highest score instead of the newest; the newest if there is no score.
          check: called with step and metadata before the arrays are compared and read.
          selects: whether a leaf, by its name, is read where `template` is None; else it is `...`.
          only: take the checkpoint of this step, not the newest.

        Returns:
          `(step, item, metadata)`, or None if there is no checkpoint. The item has the
          template's shardings, on whatever devices it was saved.

        Raises:
          errors.UserError: the checkpoint belongs to another agent, network or environment, or has
            no replay.
          errors.RunFailure: every checkpoint is damaged.
        """
        self.wait()
        ranked = processes.on_lead(lambda: [*self._scores()]) if best else []
        damaged: dict[int, str] = {}
        steps = processes.on_lead(self._listed)[::-1]
        if only is not None and only not in steps:
            raise errors.UserError(f"there is no checkpoint of step {only}, only of {steps[::-1]}")
        for step in dict.fromkeys([*ranked, *steps]) if only is None else (only,):
            try:
                tree, metadata = self._restore_item(item, template, step, check, selects)
            except integrity.DamagedError as error:
                damaged[step] = str(error)
                continue
            for other, fault in damaged.items():
                _LOGGER.warning("checkpoint %d is damaged (%s); using %d", other, fault, step)
            if item == "state" and not self._read_only:
                processes.on_lead(lambda: self._set_aside(damaged))
                self._newest = step
            return step, tree, metadata
        if damaged:
            listed = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
            raise errors.RunFailure(f"every checkpoint in {self._directory} is damaged ({listed})")
        return None

    def close(self) -> None:
        """Waits for the last save, and stops the background threads.

        Raises:
          errors.RunFailure: the last save could not be written.
        """
        try:
            self.wait()
        finally:
            if not self._read_only:
                with contextlib.suppress(Exception):  # `wait` has raised it
                    self._writer.close()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _restore_item(
        self,
        item: str,
        template: types.PyTree | None,
        step: int,
        check: Callable[..., None],
        selects: Callable[[str], bool],
    ) -> tuple[types.PyTree, dict[str, Any]]:
        """Verifies and restores one item of one step, with the metadata."""
        folder, fault = self._directory / str(step), None
        try:
            share = processes.index(), processes.count()
            integrity.verify(folder, (item, "metadata"), share)
        except integrity.DamagedError as error:
            fault = str(error)
        if fault := next(filter(None, processes.all_gather(fault)), None):
            raise integrity.DamagedError(fault)
        record = integrity.load(folder / _METADATA)
        if (saved := record.get("step", step)) != step:
            raise integrity.DamagedError(f"it was saved as checkpoint {saved}")
        check(step, record["user"])
        saved_leaves, bare = record[item], agent_lib.without_replay(template)
        if item == "params":  # earlier versions saved counts, which are ignored
            known = {path for path, _, _ in trees.structure(template)}
            saved_leaves = [x for x in saved_leaves if x[0] in known or x[2] != "int32"]

        def is_bare() -> bool:
            faults, bare_faults = (
                trees.differences(saved_leaves, trees.structure(tree)) for tree in (template, bare)
            )
            if faults and bare_faults:
                raise errors.UserError(f"checkpoint {folder} does not fit this run: {faults[0]}")
            if faults and self._replay:
                raise errors.UserError(
                    f"checkpoint {folder} has no replay: bind Experiment.checkpoint_replay = "
                    "False, as it was when it was saved, to go on with an empty one"
                )
            return bool(faults)

        with storage.failures(f"read checkpoint {folder}"):  # the files are as written: no damage
            saved = self._arrays.metadata(folder / item).tree
            if template is None:
                leaves = {
                    path: np.empty(shape, dtype) if selects(path) else ocp.PLACEHOLDER
                    for path, shape, dtype in record[item]
                }
                expected = template = trees.arranged(leaves, saved)
            else:
                expected = bare if processes.on_lead(is_bare) else template
            # In the containers on the disk, because an earlier version may lack empty ones.
            arrays = trees.arranged(_with_elements(expected), saved)
            options = ocp.checkpoint_utils.construct_restore_args(arrays)
            arrays = self._reader.restore(
                folder / item, args=ocp.args.PyTreeRestore(arrays, options)
            )
            tree = trees.arranged(arrays, expected)
        tree = jax.tree.map(lambda x, like: x if np.size(like) else _empty(like), tree, expected)
        return agent_lib.with_replay(tree, template), record["user"]

    def _set_aside(self, steps: Collection[int]) -> None:
        """Renames damaged checkpoints, whose steps will be saved again, in process 0."""
        for step in steps:
            target = self._directory / f"damaged-{step}"
            with storage.failures(f"rename the damaged checkpoint {step} to {target}"):
                target.rmtree(missing_ok=True)
                (self._directory / str(step)).rename(target)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes, in the background thread of each."""
        if "async_write_complete" in key:
            integrity.write_part(self._partial_folder(), processes.index())
        ocp.multihost.get_barrier_sync_fn(processes=self._processes.active_processes)(
            key=key, timeout_ms=timeout_ms
        )

    def _partial_folder(self) -> storage.Path:
        folders = storage.partial(self._directory)  # also folders that could not be removed
        return next(path for path in folders if path.name.partition(".")[0] == str(self._saving))

    def _remove_partial(self) -> None:
        for folder in storage.partial(self._directory):
            with contextlib.suppress(Exception):  # the next start tries again
                folder.rmtree(missing_ok=True)

    @contextlib.contextmanager
    def _save_failures(self) -> Iterator[None]:
        """Raises the cause of a save that failed, and removes the files that it has written."""
        try:
            yield
        except Exception:  # see `storage.failures`
            step, self._saving = self._saving, None
            self._require_directory()
            if not processes.is_several():  # others may still be writing
                self._remove_partial()
            with storage.failures(f"save checkpoint {self._directory / str(step)}"):
                raise


def _with_elements(tree: types.PyTree) -> types.PyTree:
    """Returns a tree with a number for each array without elements, which orbax does not save."""
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else np.zeros((), np.int8), tree)


def _empty(like: Any) -> jax.Array | np.ndarray:
    """Returns an array without elements, of a template."""
    is_host = isinstance(like, np.ndarray)
    return like if is_host else jnp.zeros(like.shape, like.dtype, device=like.sharding)


@functools.cache
def _silence_orbax() -> None:
    """Drops the output of orbax's threads; `Checkpointer` raises their first error."""
    logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
    # Only orbax uses asyncio here. After the first write that fails, the errors of the other writes
    # are not retrieved, and the other writes find no event loop.
    logging.getLogger("asyncio").addFilter(lambda record: False)
    warnings.filterwarnings("ignore", "coroutine .*was never awaited", RuntimeWarning)
    hook = sys.unraisablehook

    def report(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = report
    # Each save reads these counters several times, and each call leaks them (tensorstore 0.1.86).
    tensorstore.experimental_collect_matching_metrics = lambda *_, **__: []
