"""Checkpoints of a whole run: saved in the background, verified before they are believed.

A checkpoint `directory/<step>` holds three items, written by orbax and committed by one rename:

- `state`: everything that the runner needs to go on;
- `params`: the acting parameters by themselves, so that an evaluation reads nothing else;
- `metadata`: JSON: how far the run is, the score, and the shape of every leaf;

and a manifest of checksums beside them (see `podracers.training.manifest`). In a bucket a file that
is written last stands for the rename. Replay may be left out of `state`.
"""

import contextlib
import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from podracers import agent as agent_lib
from podracers import errors, types
from podracers.hosts import global_arrays
from podracers.training import manifest, orbax_support, presence, schema, storage, writers

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
_COMMIT_BY_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


class Checkpointer:
    """Saves, keeps and restores the checkpoints of one run. Call it from the main thread only.

    One process uses it, or all of several that see one folder, which then make the same calls; for
    several that do not, see `gathering.GatheringCheckpointer`.

    Args:
      directory: folder of the checkpoints, of a disk or a bucket; made if need be.
      keep_latest: number of the newest to keep.
      keep_best: number of those with the highest scores to keep besides.
      read_only: never write, and leave alone what another process is writing: for evaluation.
      replay: save replay, and refuse to go on with a checkpoint that has none.
      together: all processes use it.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep_latest: int = 3,
        keep_best: int = 1,
        read_only: bool = False,
        replay: bool = True,
        together: bool = False,
    ):
        orbax_support.quieten()
        self._directory = storage.path(directory)
        self._read_only, self._replay = read_only, replay
        self._writers = writers.Together() if together else writers.Alone()
        self._keep = (keep_latest, keep_best)
        self._saving: int | None = None  # the step that a background thread is writing
        self._scores: dict[int, float] = {}
        self._descriptor: int | None = None  # of the directory: orbax would make another in silence
        if not read_only:
            self._descriptor = storage.make(self._directory)
            if storage.is_bucket(self._directory):
                self._writers.on_one(lambda: storage.remove_uncommitted(self._directory))
        self._manager = self._open()
        self._scores |= dict(self._writers.on_one(self._noted_scores))
        self._writers.attach(self.is_saving)

    def _open(self) -> ocp.CheckpointManager:
        policies = ocp.checkpoint_managers
        latest, best = self._keep
        who = self._writers.options()
        is_bucket = storage.is_bucket(self._directory)
        options = ocp.CheckpointManagerOptions(
            create=False,
            read_only=self._read_only,
            # What a killed run left half-written. In a bucket orbax would take for it whatever it
            # did not commit itself.
            cleanup_tmp_directories=not self._read_only and not is_bucket,
            atomicity_options=_COMMIT_BY_FILE if is_bucket else None,
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
                **self._writers.asynchronous(),
            ),
            multiprocessing_options=who,
        )
        handlers = orbax_support.handlers(who)
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
        if not self._replay:
            state = agent_lib.without_replay(state)
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
        self._writers.begin(self._partial_folder)
        try:
            if not self._manager.save(step, args=items):  # orbax skips what is not the newest
                raise ValueError(f"step {self.latest_step()} was saved already")
        except Exception as error:  # see `_finish`
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Blocks until the last save is committed.

        Raises:
          errors.RunFailure: it could not be written, or is not where it was written.
        """
        self._writers.agree(self._finish())

    def _finish(self) -> errors.RunFailure | None:
        """Waits for the last save, and returns what went wrong."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # clients of buckets raise almost anything
            return self._failed_save(error)
        self._saving = None
        try:
            self._require_there()
        except errors.RunFailure as error:
            return error
        return None

    def _require_there(self) -> None:
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
          errors.UserError: the checkpoint belongs to another agent, network or environment, or has
            no replay.
          errors.RunFailure: every checkpoint is damaged.
        """
        restored = self.restore_saved(template)
        if restored is None:
            return None
        step, state, metadata = restored
        return step, agent_lib.with_replay(state, template), metadata

    def restore_saved(
        self, template: types.PyTree
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Does what `restore` does; a state that was saved without replay comes back so."""
        self.wait()
        return self._restore_first("state", template, sorted(self._all_steps())[::-1])

    def restore_params(
        self, template: types.PyTree, best: bool = False
    ) -> tuple[int, types.PyTree, dict[str, Any]] | None:
        """Does what `restore` does with the acting parameters alone.

        Args:
          template: the parameters' structure.
          best: take the highest score; the newest where nothing was scored.
        """
        self.wait()
        steps = sorted(self._all_steps())[::-1]
        if best:
            steps.sort(key=lambda step: self._scores.get(step, -math.inf), reverse=True)
        return self._restore_first("params", template, steps)

    def close(self) -> None:
        """Waits for the last save, and frees the background threads.

        Raises:
          errors.RunFailure: the last save could not be written.
        """
        try:
            if fault := self._finish():
                with contextlib.suppress(Exception):  # for which the same save fails once more
                    self._manager.close()
                raise fault
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
        self._writers.verify(folder, (item, "metadata"))
        record = self._read_metadata(step)
        plain = global_arrays.plain(template)
        difference = manifest.difference(record[item], manifest.structure(plain))
        if difference and item == "state":
            bare = agent_lib.without_replay(template)
            if not manifest.difference(record[item], manifest.structure(global_arrays.plain(bare))):
                self._writers.on_one(lambda: self._require_replay(folder))
                template, plain, difference = bare, global_arrays.plain(bare), None
        self._writers.on_one(lambda: _require_fitting(folder, difference))
        arguments = ocp.args.StandardRestore(orbax_support.abstract(plain))
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**{item: arguments}))
        except Exception as error:  # orbax and tensorstore raise almost anything here
            raise self._unreadable(error) from error
        return global_arrays.like(restored[item], template), record["user"]

    def _require_replay(self, folder: storage.Path) -> None:
        if self._replay:
            raise errors.UserError(
                f"checkpoint {folder} has no replay: bind Experiment.checkpoint_replay = False, as "
                "it was when it was saved, to go on with an empty one"
            )

    def _unreadable(self, error: Exception) -> manifest.DamagedError | errors.RunFailure:
        """Returns what to raise where the files are what was written, and yet cannot be restored.

        Of several processes others may have restored them, so none takes another checkpoint.
        """
        found = manifest.unreadable("", error)
        if self._writers.is_one or isinstance(found, errors.RunFailure):
            return found
        return errors.RunFailure(f"could not read a checkpoint: {found}")

    def _read_metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata item of a step; raises `manifest.DamagedError`."""
        try:
            record = json.loads((self._directory / str(step) / "metadata/metadata").read_bytes())
        except Exception as error:  # see `_finish`
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

        def write():
            try:
                storage.write(path, json.dumps({"score": score}))
            except Exception as error:  # see `_finish`
                message = f"could not write {path}: {manifest.reason(error)}"
                raise errors.RunFailure(message) from error

        self._writers.on_one(write)
        self._scores[step] = score

    def _noted_scores(self) -> list[tuple[int, float]]:
        """Returns the steps that have scores, with them."""
        scores = ((step, self._noted_score(step)) for step in self._manager.all_steps())
        return [(step, score) for step, score in scores if score is not None]

    def _noted_score(self, step: int) -> float | None:
        try:
            score = self._read_metadata(step)["score"]
        except manifest.DamagedError:
            return None  # `restore` says so, if it comes to that
        with contextlib.suppress(OSError, ValueError):  # few checkpoints have a later one
            path = self._directory / str(step) / _SCORE
            score = schema.parse(path.read_bytes(), {"score": schema.REAL})["score"]
        return score

    def _set_aside(self, steps: Mapping[int, str]) -> None:
        """Renames damaged checkpoints, for their steps will be saved anew."""

        def rename():
            for step in steps:
                aside = self._directory / f"damaged-{step}"
                try:
                    storage.rename(self._directory / str(step), aside)
                except Exception as error:  # see `_finish`
                    message = f"could not set the damaged checkpoint {step} aside as {aside}"
                    raise errors.RunFailure(f"{message}: {manifest.reason(error)}") from error

        self._writers.on_one(rename)
        for step in steps:
            self._scores.pop(step, None)
        if steps:
            self._reopen()

    def _all_steps(self) -> list[int]:
        """Returns the steps that process 0 knows of."""
        return self._writers.on_one(lambda: list(self._manager.all_steps()))

    def _write_manifest(self) -> None:
        """Runs in orbax's background thread: all is written, and not yet committed."""
        manifest.write(self._partial_folder(), self._writers.parts())

    def _partial_folder(self) -> storage.Path:
        """Returns where the save under way is being written."""
        (folder,) = self._partial_folders(self._saving)
        return folder

    def _partial_folders(self, step: int | None) -> list[storage.Path]:
        if storage.is_bucket(self._directory):
            return [self._directory / str(step)]
        return sorted(self._directory.glob(f"{step}.orbax-checkpoint-tmp*"))

    def _failed_save(self, error: Exception) -> errors.RunFailure:
        """Cleans up after a save that failed, and returns what to raise."""
        step, self._saving = self._saving, None
        self._scores.pop(step, None)
        if self._writers.is_one and step is not None:  # others may still be writing
            for partial in self._partial_folders(step):
                orbax_support.remove(partial)  # room for what comes after
        try:
            self._require_there()
        except errors.RunFailure as cause:
            with contextlib.suppress(OSError):
                self._directory.rmdir()  # what orbax made anew, and only if it is empty
            return cause
        if self._writers.is_one:
            self._reopen()
        folder = self._directory / str(step)
        return errors.RunFailure(f"could not save checkpoint {folder}: {manifest.reason(error)}")


def _require_fitting(folder: storage.Path, difference: str | None) -> None:
    if difference:
        raise errors.UserError(f"checkpoint {folder} does not fit this run: {difference}")
