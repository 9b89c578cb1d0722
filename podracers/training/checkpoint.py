"""Checkpoints of a whole run: saved in the background, verified before they are believed.

A checkpoint `directory/<step>` holds three items, written by orbax and committed by one rename:

- `state`: everything that the runner needs to go on;
- `params`: the acting parameters by themselves, so that an evaluation reads nothing else;
- `metadata`: JSON: how far the run is, the score, and the shape of every leaf;

and a manifest of checksums beside them (see `podracers.training.manifest`).
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from podracers import errors, types
from podracers.hosts import global_arrays, peers, processes
from podracers.training import manifest, orbax_support, presence, schema

_LOGGER = logging.getLogger(__name__)

_SCORE = "score.json"  # of an evaluation after the checkpoint was committed
_STRUCTURE = [[str, [schema.COUNT], str]]  # of each leaf: path, shape, dtype
_RECORD = {
    "user": {
        "update": schema.POSITIVE,
        "seed": schema.COUNT,
        "population": schema.POSITIVE,
        "clock": {
            "wall": schema.DURATION,
            "training": schema.DURATION,
            "steps": schema.COUNT,
            "first_dispatch": schema.DURATION,
        },
    },
    "score": (schema.REAL, None),
    "state": _STRUCTURE,
    "params": _STRUCTURE,
}


class Checkpointer:
    """Saves, keeps and restores the checkpoints of one run. Call it from the main thread only.

    One process uses it; where there are several, see `GroupCheckpointer`.

    Args:
      directory: folder of the checkpoints; made if need be.
      keep_latest: number of the newest to keep.
      keep_best: number of those with the highest scores to keep besides.
      read_only: never write, and leave alone what another process is writing: for evaluation.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep_latest: int = 3,
        keep_best: int = 1,
        read_only: bool = False,
    ):
        orbax_support.quieten()
        self._directory = pathlib.Path(directory).absolute()
        self._read_only = read_only
        self._keep = (keep_latest, keep_best)
        self._saving: int | None = None  # the step that a background thread is writing
        self._scores: dict[int, float] = {}
        self._descriptor: int | None = None  # of the directory: orbax would make another in silence
        if not read_only:
            self._descriptor = _make_directory(self._directory)
        self._manager = self._open()
        for step in self._manager.all_steps():
            self._note_score(step)

    def _open(self) -> ocp.CheckpointManager:
        policies = ocp.checkpoint_managers
        latest, best = self._keep
        alone = orbax_support.alone()
        options = ocp.CheckpointManagerOptions(
            create=False,
            read_only=self._read_only,
            # What a killed run left half-written.
            cleanup_tmp_directories=not self._read_only,
            # Steps are listed by name alone: one damaged file must not stop the others being read.
            lightweight_initialize=True,
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(latest), orbax_support.BestScores(self._scores, best)]
            ),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_manifest,
                # Where folders cannot be made, orbax's threads would wait for them for minutes, and
                # the end of the process for those threads.
                create_directories_asynchronously=False,
            ),
            multiprocessing_options=alone,
        )
        handlers = {
            "state": ocp.StandardCheckpointHandler(multiprocessing_options=alone),
            "params": ocp.StandardCheckpointHandler(multiprocessing_options=alone),
            "metadata": ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        }
        return ocp.CheckpointManager(
            self._directory, options=options, item_names=tuple(handlers), item_handlers=handlers
        )

    def _reopen(self) -> None:
        """Has orbax look anew; its `reload` reads files of every step, and one may be damaged."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._manager.close()
        self._manager = self._open()

    def save(
        self,
        step: int,
        state: types.PyTree,
        params: types.PyTree,
        metadata: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts to save a checkpoint, and returns once the arrays are copied from the devices.

        A step that was saved already is left as it is, but for its score if there is a new one.

        Args:
          step: the checkpoint's name; grows from one checkpoint to the next.
          state: arrays, typed keys and Python numbers.
          params: the parameters that `score` belongs to.
          metadata: the run's `update` (of which `step` is a multiple), `seed`, `population` and
            `clock`, as JSON can hold them.
          score: the higher, the better; None, or what is not finite, where there is none.

        Raises:
          errors.RunFailure: this checkpoint, or the one before it, could not be written; or the
            directory is not the one that it was.
        """
        self.wait()
        score = None if score is None or not math.isfinite(score) else float(score)
        if step in self._manager.all_steps():
            if score not in (None, self._scores.get(step)):
                self._rescore(step, score)
            return
        # Keys are saved as their data, for those of several processes come as such.
        state, params = global_arrays.plain((state, params))
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
        if score is not None:
            self._scores[step] = score  # before the save, which decides what to keep
        self._saving = step
        try:
            if not self._manager.save(step, args=items):  # orbax skips what is not the newest
                raise ValueError(f"step {self.latest_step()} was saved already")
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Blocks until the last save is committed.

        Raises:
          errors.RunFailure: it could not be written, or is not where it was written.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed_save(error) from error
        self._saving = None
        if self._descriptor is not None:
            presence.require(self._directory, self._descriptor)

    def is_saving(self) -> bool:
        """Returns whether a save is not committed yet; any thread may ask."""
        return self._manager.is_saving_in_progress()

    def latest_step(self) -> int | None:
        """Returns the newest step that was saved, or None."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Returns the step with the highest score, or None where nothing was scored."""
        scored = [step for step in self._manager.all_steps() if step in self._scores]
        return max(scored, key=lambda step: (self._scores[step], step), default=None)

    def restore(self, template: types.PyTree) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores the newest whole checkpoint, and sets damaged ones aside.

        Args:
          template: the state's structure: arrays, or `jax.ShapeDtypeStruct` with shardings.

        Returns:
          `(step, state, metadata)`, or None where there is no checkpoint at all. The state lies as
          the template's shardings say, whatever devices it was saved from.

        Raises:
          errors.UserError: the checkpoint belongs to another agent, network or environment.
          errors.RunFailure: every checkpoint is damaged.
        """
        self.wait()
        return self._restore_first("state", template, sorted(self._manager.all_steps())[::-1])

    def restore_params(
        self, template: types.PyTree, best: bool = False
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Does what `restore` does with the acting parameters alone.

        Args:
          template: the parameters' structure.
          best: take the highest score; the newest where nothing was scored.
        """
        self.wait()
        steps = sorted(self._manager.all_steps())[::-1]
        if best:
            steps.sort(key=lambda step: self._scores.get(step, -math.inf), reverse=True)
        return self._restore_first("params", template, steps)

    def close(self) -> None:
        """Waits for the last save, and frees the background threads.

        Raises:
          errors.RunFailure: the last save could not be written.
        """
        try:
            self.wait()
        except errors.RunFailure:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                self._manager.close()  # for which the same save fails once more
            raise
        else:
            self._manager.close()
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _restore_first(
        self, item: str, template: types.PyTree, steps: Sequence[int]
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Restores `item` of the first step that is whole."""
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
                self._set_aside(damaged)
            return step, tree, metadata
        if damaged:
            listed = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
            raise errors.RunFailure(f"every checkpoint in {self._directory} is damaged ({listed})")
        return None

    def _restore_item(
        self, item: str, template: types.PyTree, step: int
    ) -> tuple[types.PyTree, dict[str, Any]]:
        """Verifies and restores one item of one step, with the metadata."""
        folder = self._directory / str(step)
        manifest.verify(folder, (item, "metadata"))
        record = self._read_metadata(step)
        plain = global_arrays.plain(template)
        if difference := manifest.difference(record[item], manifest.structure(plain)):
            raise errors.UserError(f"checkpoint {folder} does not fit this run: {difference}")
        arguments = ocp.args.StandardRestore(jax.tree.map(_abstract, plain))
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**{item: arguments}))
        except Exception as error:  # orbax and tensorstore raise almost anything here
            raise manifest.unreadable("", error) from error
        return global_arrays.like(restored[item], template), record["user"]

    def _read_metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata item of a step; raises `manifest.DamagedError`."""
        arguments = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        try:
            record = self._manager.restore(step, args=arguments)["metadata"]
        except Exception as error:  # see _restore_item
            raise manifest.unreadable("metadata", error) from error
        if said := schema.fault(record, _RECORD):
            raise manifest.DamagedError(f"metadata: {said}")
        if step % record["user"]["update"]:
            raise manifest.DamagedError(
                f"metadata: {step} steps are no multiple of {record['user']['update']} updates"
            )
        return record

    def _rescore(self, step: int, score: float) -> None:
        """Keeps the score of a later evaluation of the same parameters beside a checkpoint."""
        path = self._directory / str(step) / _SCORE
        partial = path.with_name(f".{_SCORE}.partial")
        try:
            partial.write_text(json.dumps({"score": score}))
            partial.replace(path)
        except OSError as error:
            raise errors.RunFailure(f"could not write {path}: {manifest.reason(error)}") from error
        self._scores[step] = score

    def _note_score(self, step: int) -> None:
        try:
            score = self._read_metadata(step)["score"]
        except manifest.DamagedError:
            return  # `restore` says so, if it comes to that
        with contextlib.suppress(OSError, ValueError):  # few checkpoints have a later one
            path = self._directory / str(step) / _SCORE
            score = schema.parse(path.read_bytes(), {"score": schema.REAL})["score"]
        if score is not None:
            self._scores[step] = score

    def _set_aside(self, steps: Mapping[int, str]) -> None:
        """Renames damaged checkpoints, for their steps will be saved anew."""
        for step in steps:
            aside = self._directory / f"damaged-{step}"
            try:
                if aside.is_dir() and not aside.is_symlink():
                    shutil.rmtree(aside)
                else:
                    aside.unlink(missing_ok=True)
                (self._directory / str(step)).rename(aside)
            except OSError as error:
                message = f"could not set the damaged checkpoint {step} aside as {aside}"
                raise errors.RunFailure(f"{message}: {manifest.reason(error)}") from error
            self._scores.pop(step, None)
        if steps:
            self._reopen()

    def _write_manifest(self) -> None:
        """Runs in orbax's background thread: all is written, and not yet renamed."""
        (folder,) = self._partial_folders(self._saving)
        manifest.write(folder)

    def _partial_folders(self, step: int | None) -> list[pathlib.Path]:
        return sorted(self._directory.glob(f"{step}.orbax-checkpoint-tmp*"))

    def _failed_save(self, error: Exception) -> errors.RunFailure:
        """Cleans up after a save that failed, and returns what to raise."""
        step, self._saving = self._saving, None
        self._scores.pop(step, None)
        for partial in self._partial_folders(step):
            orbax_support.remove(partial)  # room for what comes after
        try:
            presence.require(self._directory, self._descriptor)
        except errors.RunFailure as cause:
            with contextlib.suppress(OSError):
                self._directory.rmdir()  # what orbax made anew, and only if it is empty
            return cause
        self._reopen()
        folder = self._directory / str(step)
        return errors.RunFailure(f"could not save checkpoint {folder}: {manifest.reason(error)}")


class GroupCheckpointer:
    """What `Checkpointer` is to one process; all processes make the same calls.

    Process 0 saves and reads what all of them hold. It writes what one process with as many devices
    would have written, so a run goes on with any number of processes, and a folder that process 0
    alone sees is enough. The arguments are those of `Checkpointer`.
    """

    def __init__(self, directory: str | pathlib.Path, keep_latest: int = 3, keep_best: int = 1):
        self._inner: Checkpointer | None = None
        self._read: types.PyTree = None
        processes.on_lead(lambda: self._make(directory, keep_latest, keep_best))
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

    def _make(self, *arguments: Any) -> None:
        self._inner = Checkpointer(*arguments)

    def _restore(self, template: types.PyTree) -> tuple[int, dict[str, Any]] | None:
        step, self._read, metadata = self._inner.restore(template) or (None, None, None)
        return None if step is None else (step, metadata)


def _make_directory(directory: pathlib.Path) -> int:
    """Makes a directory, and returns a descriptor of it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise errors.RunFailure(f"could not make {directory}: {manifest.reason(error)}") from error


def _abstract(leaf: Any) -> Any:
    """Returns what orbax wants as a template of one leaf."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _blank(x: jax.Array) -> np.ndarray:
    """Returns zeros that take no memory, to say what is to be read."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
