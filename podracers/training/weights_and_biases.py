"""Weights & Biases (https://docs.wandb.ai) as a logger: `Experiment.tracker = @WeightsAndBiases()`.

The package `wandb` is optional. Values are logged directly and not by `sync_tensorboard`, which
follows only event writers that wandb patches; a run writes its event files without them.
"""

import dataclasses
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from podracers import errors
from podracers.training import run_directory

_LOGGER = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled")


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
        if self.mode not in (None, *_MODES):
            raise errors.UserError(
                f"WeightsAndBiases.mode: expected one of {', '.join(_MODES)}, got {self.mode!r}"
                f"{errors.nearest(self.mode, _MODES)}"
            )

    def open(
        self,
        directory: run_directory.RunDirectory,
        resume: bool,
        print_line: Callable[[str], None],
    ) -> "WandbLogger":
        """Starts a W&B run, or continues the one whose id is stored in the run directory.

        Args:
          directory: the run directory, which stores the id and wandb's files.
          resume: whether to continue a run.
          print_line: called with a line that contains the address of the run's page.

        Raises:
          errors.UserError: wandb is not installed, or refuses the key or an option.
          errors.RunFailure: W&B cannot be reached.
        """
        id_file = directory.path / "wandb_id"
        if not (resume and id_file.is_file()):
            directory.write(id_file, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(8))
        options = dataclasses.asdict(self)
        options["name"] = self.name or os.environ.get("WANDB_NAME") or directory.path.resolve().name
        try:
            import wandb  # noqa: PLC0415 (optional)
            from wandb import errors as wandb_errors  # noqa: PLC0415
        except ImportError as error:  # also where a folder `wandb` imports as an empty package
            raise errors.UserError(
                "WeightsAndBiases needs the package wandb: pip install 'podracers[wandb]'"
            ) from error
        try:
            run = wandb.init(
                **options,
                id=id_file.read_text().strip(),
                dir=str(directory.path),
                resume="allow",
                reinit="create_new",  # leaves other runs of this process alone
                # The run owns the terminal; at the end wandb may upload for a minute.
                settings=wandb.Settings(console="off", silent=True, finish_timeout=60.0),
            )
        except Exception as error:
            is_mistake = isinstance(
                error, wandb_errors.UsageError | wandb_errors.AuthenticationError
            )
            raise (errors.UserError if is_mistake else errors.RunFailure)(
                f"Weights & Biases: {errors.first_line(error).rstrip('.')} "
                "(or set WeightsAndBiases.mode = 'offline')"
            ) from error
        if page := run.url or run.settings.sync_dir:  # offline, the folder for `wandb sync`
            print_line(f"Weights & Biases: {page}")
        return WandbLogger(run)


class WandbLogger:
    """Logs to a run of W&B, which discards steps that a resumed run repeats.

    At its first failure it logs a warning and does nothing from then on.

    Args:
      run: the result of `wandb.init`.
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
