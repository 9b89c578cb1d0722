"""Checkpoints of a run: saved in the background, verified before they are restored.

A checkpoint `directory/<step>` has three items, written by orbax and committed by one rename:

- `state`: the complete state of the runner, with or without replay;
- `params`: the acting parameters alone, so that an evaluation reads nothing else;
- `metadata`: JSON: the progress of the run, the score, and the path, shape and dtype of every leaf;

and beside them the checksums of their files (`podracers.training.manifest`). In a bucket, the file
that is written last replaces the rename. Each of several processes writes the arrays of its own
devices, into a folder that all processes see; process 0 commits and removes.
"""

import contextlib
import functools
import json
import logging
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from podracers import agent as agent_lib
from podracers import errors, types
from podracers.hosts import peers, processes
from podracers.training import manifest, storage

_LOGGER = logging.getLogger(__name__)

_TIMEOUT = 3600  # seconds in which all processes have to write their part
_METADATA = "metadata/metadata"
_SCORE = "score.json"  # of an evaluation after the commit


class Checkpointer:
    """Saves, keeps and restores the checkpoints of one run.

    Only the main thread calls it. Several processes make the same calls in the same order.

    Args:
      directory: folder of the checkpoints, on a disk or in a bucket, that all processes see; it is
        made if it does not exist.
      keep_latest: number of the newest checkpoints to keep.
      keep_best: number of checkpoints with the highest scores to keep in addition.
      read_only: write nothing, and keep partial checkpoints of other processes: for evaluation.
      replay: save replay, and refuse checkpoints without it.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep_latest: int = 3,
        keep_best: int = 1,
        read_only: bool = False,
        replay: bool = True,
    ):
        self._directory = storage.path(directory)
        self._keep_latest, self._keep_best = keep_latest, keep_best
        self._read_only, self._replay = read_only, replay
        self._saving: tuple[int, float | None] | None = None  # step and score, in the background
        self._descriptor: int | None = None  # of a folder on a disk
        if not read_only:
            self._descriptor = storage.make(self._directory)
            processes.on_lead(self._remove_partial)
        self._steps: list[int] = processes.on_lead(lambda: storage.steps(self._directory))
        self._scores: dict[int, float] = dict(processes.on_lead(self._read_scores))
        # With these options processes meet in the key-value store of JAX: background threads cannot
        # enter a collective.
        self._processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(processes.count()))
        )
        self._writer: ocp.AsyncCheckpointer | None = None
        _silence_orbax()
        if not read_only:
            commit_file = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
            self._writer = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=self._array_handler(),
                    params=self._array_handler(),
                    metadata=ocp.JsonCheckpointHandler(multiprocessing_options=self._processes),
                ),
                async_options=ocp.AsyncOptions(
                    timeout_secs=_TIMEOUT,
                    barrier_sync_fn=self._barrier,
                    post_finalization_callback=self._write_manifest,
                    # If folders cannot be made, orbax's threads would wait for minutes.
                    create_directories_asynchronously=False,
                ),
                multiprocessing_options=self._processes,
                atomicity_options=commit_file if storage.is_bucket(self._directory) else None,
            )
            peers.finish_first(self._is_saving)

    def _array_handler(self) -> ocp.StandardCheckpointHandler:
        return ocp.StandardCheckpointHandler(multiprocessing_options=self._processes)

    def save(
        self,
        step: int,
        state: types.PyTree,
        params: types.PyTree,
        metadata: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts to save a checkpoint, and returns once the arrays are copied from the devices.

        A step that was saved already is not saved again; a new score of it is saved.

        Args:
          step: the name of the checkpoint.
          state: arrays, typed keys and Python numbers.
          params: the parameters that `score` belongs to.
          metadata: the run's `update` (of which `step` is a multiple), `seed`, `population` and
            `clock`, as JSON can hold them.
          score: higher is better; None or not finite if there is none.

        Raises:
          errors.RunFailure: this checkpoint or the one before it could not be written, or the
            directory was moved, removed or replaced.
        """
        self.wait()
        score = None if score is None or not math.isfinite(score) else float(score)
        if step in self._steps:
            if score not in (None, self._scores.get(step)):
                processes.on_lead(lambda: self._write_score(step, score))
                self._scores[step] = score
            return
        if not self._replay:
            state = agent_lib.without_replay(state)
        state, params = _key_data((state, params))
        record = {
            "user": dict(metadata),
            "score": score,
            "state": manifest.structure(state),
            "params": manifest.structure(params),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            params=ocp.args.StandardSave(params),
            metadata=ocp.args.JsonSave(record),
        )
        self._saving = step, score
        try:
            self._writer.save(self._directory / str(step), args=items)
        except Exception as error:  # clients of buckets raise almost anything
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Blocks until the last save is committed, and removes checkpoints not to be kept.

        Raises:
          errors.RunFailure: it could not be written, or the directory is not the same any more.
        """
        if self._writer is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:  # see `save`
            raise self._failed_save(error) from error
        if self._descriptor is not None:
            storage.require_same(self._directory, self._descriptor)
        if self._saving is None:
            return
        step, score = self._saving
        self._saving = None
        self._steps = sorted({*self._steps, step})
        if score is not None:
            self._scores[step] = score
        scored = sorted((step for step in self._steps if step in self._scores), key=self._rank)
        best = scored[::-1][: self._keep_best]
        removed = {*self._steps[: -self._keep_latest]}.difference(best)
        self._steps = [step for step in self._steps if step not in removed]
        for step in removed if processes.is_lead() else ():
            with contextlib.suppress(Exception):  # see `save`; the next start lists it again
                storage.remove(self._directory / str(step))

    def _rank(self, step: int) -> tuple[float, int]:
        return self._scores.get(step, -math.inf), step

    def _is_saving(self) -> bool:
        """Returns whether a save is not committed yet; any thread may ask."""
        saving = self._saving
        return saving is not None and saving[0] not in storage.steps(self._directory)

    def latest_step(self) -> int | None:
        """Returns the newest step that was saved or is being saved, or None."""
        return self._saving[0] if self._saving else max(self._steps, default=None)

    def best_step(self) -> int | None:
        """Returns the step with the highest score, or None where nothing was scored."""
        scored = (step for step in self._steps if step in self._scores)
        return max(scored, key=self._rank, default=None)

    def restore(self, template: types.PyTree) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the newest checkpoint that is not damaged, and renames damaged ones.

        Args:
          template: the structure of the state: arrays, or `jax.ShapeDtypeStruct` with shardings.
            Its own replay is returned where the checkpoint has none.

        Returns:
          `(step, state, metadata)`, or None if there is no checkpoint. The shardings of the state
          are those of the template, whatever devices it was saved from.

        Raises:
          errors.UserError: the checkpoint belongs to another agent, network or environment, or has
            no replay.
          errors.RunFailure: every checkpoint is damaged.
        """
        self.wait()
        restored = self._restore_first("state", template, self._steps[::-1])
        if restored is None:
            return None
        step, state, metadata = restored
        return step, agent_lib.with_replay(state, template), metadata

    def restore_params(
        self, template: types.PyTree, best: bool = False
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the acting parameters alone; see `restore`.

        Args:
          template: the structure of the parameters.
          best: take the highest score instead of the newest; the newest if there is no score.
        """
        self.wait()
        steps = sorted(self._steps, key=self._rank if best else None)[::-1]
        return self._restore_first("params", template, steps)

    def close(self) -> None:
        """Waits for the last save, and stops the background threads.

        Raises:
          errors.RunFailure: the last save could not be written.
        """
        try:
            self.wait()
        finally:
            if self._writer is not None:
                with contextlib.suppress(Exception):  # `wait` has raised it
                    self._writer.close()
                if self._descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = None

    def _restore_first(
        self, item: str, template: types.PyTree, steps: Sequence[int]
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores `item` of the first step that is not damaged."""
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                tree, metadata = self._restore_item(item, template, step)
            except manifest.DamagedError as error:
                damaged[step] = str(error)
                continue
            verb = "resuming from" if item == "state" else "using"
            for other, reason in damaged.items():
                _LOGGER.warning("checkpoint %d is damaged (%s); %s %d", other, reason, verb, step)
            if item == "state" and not self._read_only:
                processes.on_lead(lambda: self._set_aside(damaged))
                self._steps = [step for step in self._steps if step not in damaged]
                for other in damaged:
                    self._scores.pop(other, None)
            return step, tree, metadata
        if damaged:
            listed = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
            raise errors.RunFailure(f"every checkpoint in {self._directory} is damaged ({listed})")
        return None

    def _restore_item(
        self, item: str, template: types.PyTree, step: int
    ) -> tuple[types.PyTree, dict[str, Any]]:
        """Verifies and restores one item of one step, with the metadata."""
        folder, fault = self._directory / str(step), None
        try:
            manifest.verify(folder, (item, "metadata"), processes.share())
        except manifest.DamagedError as error:
            fault = str(error)
        if fault := next(filter(None, processes.all_gather(fault)), None):
            raise manifest.DamagedError(fault)
        record = manifest.load(folder / _METADATA)

        def misfit(template: types.PyTree) -> str | None:
            return manifest.difference(record[item], manifest.structure(_key_data(template)))

        message = misfit(template)
        bare = agent_lib.without_replay(template)
        if message and misfit(bare):
            message = f"does not fit this run: {message}"
        elif message and self._replay:
            message = (
                "has no replay: bind Experiment.checkpoint_replay = False, as it was when it "
                "was saved, to go on with an empty one"
            )
        elif message:
            template, message = bare, None
        if message:

            def refuse():
                raise errors.UserError(f"checkpoint {folder} {message}")

            processes.on_lead(refuse)
        arguments = ocp.args.StandardRestore(_key_data(template))
        try:
            tree = self._array_handler().restore(folder / item, args=arguments)
        except Exception as error:  # the files are as they were written: no damage
            message = f"could not read checkpoint {folder}: {manifest.reason(error)}"
            raise errors.RunFailure(message) from error
        return jax.tree.map(_with_key, tree, template), record["user"]

    def _read_scores(self) -> list[tuple[int, float]]:
        """Returns `(step, score)` of the checkpoints that have one; in process 0."""
        scores = {}
        for step in self._steps:
            for name in (_METADATA, _SCORE):
                with contextlib.suppress(manifest.DamagedError):  # `restore` reports it
                    score = manifest.load(self._directory / str(step) / name).get("score")
                    if manifest.is_number(score):
                        scores[step] = score
        return list(scores.items())

    def _write_score(self, step: int, score: float) -> None:
        """Writes the score of a later evaluation beside a checkpoint, in process 0."""
        path = self._directory / str(step) / _SCORE
        try:
            storage.write(path, json.dumps({"score": score}))
        except Exception as error:  # see `save`
            raise errors.RunFailure(f"could not write {path}: {manifest.reason(error)}") from error

    def _set_aside(self, steps: Mapping[int, str]) -> None:
        """Renames damaged checkpoints, whose steps will be saved again, in process 0."""
        for step in steps:
            target = self._directory / f"damaged-{step}"
            try:
                storage.rename(self._directory / str(step), target)
            except Exception as error:  # see `save`
                raise errors.RunFailure(
                    f"could not rename the damaged checkpoint {step} to {target}: "
                    f"{manifest.reason(error)}"
                ) from error

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes, in the background thread of each."""
        if "async_write_complete" in key:
            manifest.write_part(self._partial_folder(), processes.index())
        ocp.multihost.get_barrier_sync_fn(processes=self._processes.active_processes)(
            key=key, timeout_ms=timeout_ms
        )

    def _write_manifest(self) -> None:
        """Writes the checksums, in the background thread of process 0, before the commit."""
        parts = processes.count() if processes.is_several() else 0
        manifest.write(self._partial_folder(), parts)

    def _partial_folder(self) -> storage.Path:
        (folder,) = storage.partial(self._directory, self._saving[0])
        return folder

    def _remove_partial(self, step: int | None = None) -> None:
        for folder in storage.partial(self._directory, step):
            with contextlib.suppress(Exception):  # see `save`; the next start tries again
                storage.remove(folder)

    def _failed_save(self, error: Exception) -> errors.RunFailure:
        """Returns the error to raise for a save that failed, and removes what it has written."""
        step, self._saving = self._saving and self._saving[0], None
        if self._descriptor is not None:
            try:
                storage.require_same(self._directory, self._descriptor)
            except errors.RunFailure as cause:
                with contextlib.suppress(OSError):
                    self._directory.rmdir()  # orbax has made it anew; only if it is empty
                return cause
        if not processes.is_several():  # others may still be writing
            self._remove_partial(step)
        folder = self._directory / str(step)
        return errors.RunFailure(f"could not save checkpoint {folder}: {manifest.reason(error)}")


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


_data_of_key = jax.jit(jax.random.key_data)  # jitted, it takes keys of several processes


def _key_data(tree: types.PyTree) -> types.PyTree:
    """Returns the tree with the data of typed keys in their place, of arrays or of their shapes."""

    def data(x):
        if not _is_key(x):
            return x
        if isinstance(x, jax.Array):
            return _data_of_key(x)
        shape = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=x.sharding)

    return jax.tree.map(data, tree)


def _with_key(data: Any, template: Any) -> Any:
    """Returns typed keys with this data where the template has typed keys, else the data."""
    if not _is_key(template):
        return data
    impls: list[Any] = []  # `key_impl` does not take abstract keys
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), template)
    wrap = functools.partial(jax.random.wrap_key_data, impl=impls[0])
    return jax.jit(wrap, out_shardings=template.sharding)(data)


@functools.cache
def _silence_orbax() -> None:
    """Keeps tracebacks of orbax's threads off the terminal; their first error is raised here."""
    logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
    # Only orbax uses asyncio here. After the first write that fails, the errors of the other writes
    # are not retrieved, and the other writes find no event loop.
    logging.getLogger("asyncio").addFilter(
        lambda record: "never retrieved" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", "coroutine .*was never awaited", RuntimeWarning)
    hook = sys.unraisablehook

    def report(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = report
