"""Loggers of a run's metrics: JSON lines, Weights & Biases; `training.displays` has the others.

Steps are agent steps over all environments. On resumption every log drops the values after the
checkpoint, so that an interrupted run leaves the same log as an uninterrupted one.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from podracers import errors
from podracers.checkpoints import storage
from podracers.training import run_directory

_LOGGER = logging.getLogger(__name__)

_WANDB_MODES = ("online", "offline", "disabled")

Options = Mapping[str, bool | float | str]  # hyperparameters by name


class Logger:
    """Receives the metrics of each log period, the configuration and the summary of a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs named numbers, measured up to `step`, which never decreases.

        Names are such as `loss/total`; NaN stands for "nothing was measured".
        """
        raise NotImplementedError

    def write_configuration(self, step: int, texts: Mapping[str, str], values: Options) -> None:
        """Logs the files of the configuration and the hyperparameters, at each start of a run.

        There are no `texts` if an earlier start has logged the same ones.
        """

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Logs the summary of a run that has ended."""

    def close(self) -> None:
        """Flushes and frees; nothing may be written afterwards."""


class JsonlLogger(Logger):
    """One JSON object a line: `{"step": 1024, "loss/total": 0.5}`; null stands for NaN.

    On resumption, rows up to `resume_step` are kept; None starts a new file.
    """

    def __init__(self, path: str | pathlib.Path, resume_step: int | None = None):
        self._path = pathlib.Path(path)
        kept = []
        if resume_step is not None and self._path.exists():
            kept = [row for row in read_rows(self._path) if (row["step"] or 0) <= resume_step]
        storage.write(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        with storage.failures(f"write {self._path}"):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinities.
        finite = {name: float(x) if math.isfinite(x) else None for name, x in values.items()}
        with storage.failures(f"write {self._path}"):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()

    def close(self) -> None:
        with storage.failures(f"write {self._path}"):
            self._file.close()


def read_rows(path: str | pathlib.Path) -> list[dict[str, float | None]]:
    """Returns the lines that `JsonlLogger` wrote.

    Half a line at the end, which a running or killed run leaves, is left out with a warning.

    Raises:
      errors.RunFailure: the file cannot be read, or a line before the last one is damaged.
    """
    path = pathlib.Path(path)
    with storage.failures(f"read {path}"):
        lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                expected = f"expected an object with a 'step', got {line[:40]!r}"
                raise errors.RunFailure(f"{path}, line {number}: {expected}") from error
            _LOGGER.warning("%s: left out the damaged last line (line %d)", path, number)
    return rows


def require_wandb() -> Any:
    """Returns the package `wandb`; raises `errors.UserError` if it is not installed."""
    try:
        import wandb.errors  # noqa: PLC0415 (optional; a folder `wandb` has no `wandb.errors`)
    except ImportError as error:
        message = "WeightsAndBiases needs the package wandb: pip install wandb"
        raise errors.UserError(message) from error
    return wandb


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
    """Weights & Biases (https://docs.wandb.ai): `Experiment.tracker = @WeightsAndBiases()`.

    These are options of `wandb.init`; None follows wandb's environment and settings.
    The package `wandb` is optional.
    """

    project: str | None = None  # `WANDB_PROJECT`
    entity: str | None = None  # user or team that owns the project, `WANDB_ENTITY`
    group: str | None = None  # `WANDB_RUN_GROUP`
    name: str | None = None  # name of the run, `WANDB_NAME`; by default the run directory's
    # "online", "offline" (written to the run directory, for `wandb sync`) or "disabled".
    mode: str | None = None  # `WANDB_MODE`

    def __post_init__(self):
        errors.require_known("WeightsAndBiases.mode: got", self.mode, (None, *_WANDB_MODES))

    def open(self, directory: run_directory.RunDirectory, resume: bool) -> "WandbLogger":
        """Starts a W&B run, or continues the one whose id is stored in the run directory.

        Raises:
          errors.UserError: wandb is not installed, or refuses the key or an option.
          errors.RunFailure: W&B cannot be reached.
        """
        wandb, id_file = require_wandb(), directory.path / "wandb_id"
        options = dataclasses.asdict(self)
        options["name"] = self.name or os.environ.get("WANDB_NAME") or directory.path.resolve().name
        if resume and id_file.is_file():
            options["id"] = id_file.read_text("utf-8").strip()
        try:
            run = wandb.init(
                **options,
                dir=str(directory.path),
                resume="allow",
                reinit="create_new",  # leaves other runs of this process alone
                settings=wandb.Settings(console="off", finish_timeout=60.0),
            )
        except Exception as error:
            mistakes = wandb.errors.UsageError | wandb.errors.AuthenticationError
            kind = errors.UserError if isinstance(error, mistakes) else errors.RunFailure
            message = errors.first_line(error).rstrip(".")
            raise kind(
                f"Weights & Biases: {message} (or set WeightsAndBiases.mode = 'offline')"
            ) from error
        storage.write(id_file, run.id)
        return WandbLogger(run)


class WandbLogger(Logger):
    """Logs to a run of W&B, which discards steps that a resumed run repeats.

    Metrics are sent by `run.log`: `sync_tensorboard` follows only event writers that wandb patches,
    and a run writes its event files without them. At its first failure it logs a warning and does
    nothing from then on.
    """

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        present = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        self._try(lambda run: run.log(present, step=step, commit=True))

    def write_configuration(self, step: int, texts: Mapping[str, str], values: Options) -> None:
        """Sets the run's configuration, by name; a resumed run may have another one."""
        self._try(lambda run: run.config.update(dict(values), allow_val_change=True))

    def write_summary(self, values: Mapping[str, Any]) -> None:
        self._try(lambda run: run.summary.update(dict(values)))

    def close(self) -> None:
        """Uploads the rest, for a minute at most."""
        exit_code = int(sys.exception() is not None)
        self._try(lambda run: run.finish(exit_code=exit_code))
        self._run = None

    def _try(self, action: Callable[[Any], None]) -> None:
        try:
            if self._run is not None:
                action(self._run)
        except Exception as error:  # a failure of W&B ends no training
            self._run = None
            message = "Weights & Biases: %s; the run continues without it"
            _LOGGER.warning(message, errors.first_line(error))
