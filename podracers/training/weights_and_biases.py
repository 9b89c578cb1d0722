"""Weights & Biases (https://docs.wandb.ai) as a logger: `Experiment.tracker = @WeightsAndBiases()`.

The package `wandb` is optional. Metrics are sent by `run.log`: `sync_tensorboard` follows only
event writers that wandb patches, and a run writes its event files without them.
"""

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from podracers import errors
from podracers.training import run_directory, storage

_LOGGER = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled")


def require() -> Any:
    """Returns the package `wandb`; raises `errors.UserError` if it is not installed."""
    try:
        import wandb.errors  # noqa: PLC0415 (optional; a folder `wandb` has no `wandb.errors`)
    except ImportError as error:
        message = "WeightsAndBiases needs the package wandb: pip install 'podracers[wandb]'"
        raise errors.UserError(message) from error
    return wandb


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
    """Options of `wandb.init`; those that are None follow wandb's environment and settings.

    Attributes:
      project: name of the project (`WANDB_PROJECT`).
      entity: user or team that owns the project (`WANDB_ENTITY`).
      group: group of the run (`WANDB_RUN_GROUP`).
      name: name of the run (`WANDB_NAME`); by default that of the run directory.
      mode: "online", "offline" (written to the run directory, for `wandb sync`) or "disabled"
        (`WANDB_MODE`).
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    mode: str | None = None

    def __post_init__(self):
        errors.require_known("WeightsAndBiases.mode: got", self.mode, (None, *_MODES))

    def open(self, directory: run_directory.RunDirectory, resume: bool) -> "WandbLogger":
        """Starts a W&B run, or continues the one whose id is stored in the run directory.

        Raises:
          errors.UserError: wandb is not installed, or refuses the key or an option.
          errors.RunFailure: W&B cannot be reached.
        """
        wandb, id_file = require(), directory.path / "wandb_id"
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


class WandbLogger:
    """Logs to a run of W&B, which discards steps that a resumed run repeats.

    At its first failure it logs a warning and does nothing from then on.
    """

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve; NaN values are left out."""
        present = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        self._try(lambda run: run.log(present, step=int(step), commit=True))

    def write_configuration(self, values: Mapping[str, bool | float | str]) -> None:
        """Sets the run's configuration, by name; a resumed run may have another one."""
        self._try(lambda run: run.config.update(dict(values), allow_val_change=True))

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Sets values of the run's summary."""
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
