"""Weights & Biases beside a run's own logs: `Experiment.tracker = @WeightsAndBiases()`.

The package `wandb` is imported where it is needed, and is no requirement. Whatever W&B does once a
run has begun, the run goes on: what could not be sent stays in its directory, for `wandb sync`.
"""

import dataclasses
import logging
import math
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from podracers import errors

_LOGGER = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled")
_ID_FILE = "wandb_id"  # in the run directory
_FINISH_TIMEOUT = 60.0  # seconds for what is still to be sent when a run ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
    """Sends a run to Weights & Biases (https://docs.wandb.ai).

    What is None is taken from W&B's own environment variables and settings.

    Attributes:
      project: name of the project (`WANDB_PROJECT`).
      entity: user or team that the project belongs to (`WANDB_ENTITY`).
      group: group of the run (`WANDB_RUN_GROUP`).
      name: name of the run (`WANDB_NAME`), or else that of the run directory.
      mode: "online", "offline" (written to the run directory, for `wandb sync`) or "disabled"
        (`WANDB_MODE`).
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    mode: str | None = None

    def __post_init__(self):
        """Checks the options."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (not isinstance(value, str) or not value):
                raise errors.UserError(
                    f"WeightsAndBiases.{field.name}: expected a name or None, got {value!r}"
                )
        if self.mode not in (None, *_MODES):
            raise errors.UserError(
                f"WeightsAndBiases.mode: expected one of {', '.join(_MODES)}, got {self.mode!r}"
                f"{errors.nearest(self.mode, _MODES)}"
            )

    def require(self) -> None:
        """Raises `errors.UserError` unless the package is there, and logged in where it has to be.

        Nothing is sent. Where there is a terminal, W&B itself may ask for the key.
        """
        wandb = _package()
        if (self.mode or wandb.setup().settings.mode) != "online":
            return
        try:
            wandb.login(verify=False)
        except Exception as error:
            raise _not_usable(error) from error

    def open(
        self, directory: pathlib.Path, resume: bool, say: Callable[[str], None]
    ) -> "TrackedRun":
        """Begins a run, or goes on with the one that the run directory belongs to.

        Args:
          directory: the run directory, where its id and its files are kept.
          resume: whether what was begun here goes on.
          say: takes lines for the person who watches.

        Raises:
          errors.UserError: the package is missing, or W&B does not know who the user is.
        """
        wandb = _package()
        settings = {
            "project": self.project,
            "entity": self.entity,
            "group": self.group,
            "name": self.name or os.environ.get("WANDB_NAME") or directory.resolve().name,
            "id": _run_id(directory / _ID_FILE, resume),
            "dir": str(directory),
            "resume": "allow",
            "reinit": "create_new",  # other runs of this process stay what they are
            "settings": wandb.Settings(
                console="off",  # the terminal is the run's own
                silent=True,
                finish_timeout=_FINISH_TIMEOUT,
                finish_timeout_raises=True,
            ),
        }
        try:
            run = wandb.init(mode=self.mode, **settings)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise _not_usable(error) from error
        except Exception as error:
            _LOGGER.warning(
                "Weights & Biases cannot be reached (%s): logging offline", _reason(error)
            )
            run = _offline(wandb, settings)
        if run is not None and run.settings.mode == "offline":
            say(f"Weights & Biases: offline; to send it: wandb sync {run.settings.sync_dir}")
        elif run is not None and run.url:
            say(f"Weights & Biases: {run.url}")
        return TrackedRun(run)


class TrackedRun:
    """One run of Weights & Biases, as a logger; at its first failure it warns and falls silent.

    What was logged before a resumption stays: of the steps that are taken again, which log the same
    values, W&B drops the later ones.

    Args:
      run: what `wandb.init` returns; None for a run that could not begin.
    """

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve; steps are agent steps."""
        present = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        self._try(lambda run: run.log(present, step=int(step), commit=True))

    def write_configuration(self, values: Mapping[str, bool | float | str]) -> None:
        """Sets the run's configuration, by name; a resumed run may have another one."""
        self._try(lambda run: run.config.update(dict(values), allow_val_change=True))

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Sets values of the run's summary, beside the last values of its metrics."""
        self._try(lambda run: run.summary.update(dict(values)))

    def close(self) -> None:
        """Waits for what is still to be sent, no longer than a minute."""
        failed = sys.exception() is not None
        self._try(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _try(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # an outage of W&B ends no training
            folder, self._run = self._run.settings.sync_dir, None
            _LOGGER.warning(
                "Weights & Biases: %s; the run goes on without it; to send what it has: "
                "wandb sync %s",
                _reason(error),
                folder,
            )


def _package() -> ModuleType:
    """Returns the package `wandb`.

    Raises:
      errors.UserError: it is not installed.
    """
    try:
        import wandb  # noqa: PLC0415 (no requirement)

        _ = wandb.init  # a folder `wandb` of earlier runs is a package without anything in it
    except (ImportError, AttributeError) as error:
        raise errors.UserError(
            "WeightsAndBiases needs the package wandb: pip install 'podracers[wandb]'"
        ) from error
    return wandb


def _offline(wandb: ModuleType, settings: Mapping[str, Any]) -> Any | None:
    """Returns a run offline, after one of the same id has failed; None where that fails, too."""
    try:
        wandb.teardown()  # W&B's own process holds the id of a run that could not begin
        return wandb.init(mode="offline", **settings)
    except Exception as error:
        _LOGGER.warning("Weights & Biases: %s; the run goes on without it", _reason(error))
        return None


def _run_id(file: pathlib.Path, resume: bool) -> str:
    """Returns the id of a new run, which is written to `file`, or of the one to go on with."""
    if resume and file.is_file() and (kept := file.read_text().strip()):
        return kept
    run_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(8)
    try:
        file.write_text(run_id + "\n")
    except OSError as error:
        raise errors.RunFailure(f"could not write {file}: {error.strerror}") from error
    return run_id


def _not_usable(error: Exception) -> errors.UserError:
    return errors.UserError(
        f"Weights & Biases: {_reason(error)} (or WeightsAndBiases.mode = 'offline')"
    )


def _reason(error: Exception) -> str:
    return errors.first_line(error).rstrip(".")
