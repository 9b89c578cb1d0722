"""Ends simulators; what goes wrong in that is a failure, and spoils nothing that was reached."""

import logging
import sys

from podracers import environment as environment_lib
from podracers import errors
from podracers.supervision import pipeline

_LOGGER = logging.getLogger(__name__)

_failures: list[str] = []


def close(host: environment_lib.HostEnvironment) -> None:
    """Closes environments, and raises nothing.

    Where another exception is on its way, that one stays the cause, and gets a note. Else the first
    failure of all is logged, and `failures` has all of them.
    """
    cause = sys.exception()
    try:
        host.close()
    except Exception as error:
        message = str(error) if isinstance(error, errors.RunFailure) else _describe(error)
        if cause is not None and not isinstance(cause, (pipeline.Cancelled, GeneratorExit)):
            cause.add_note(f"and {message}")
            return
        if not _failures:
            _LOGGER.warning("failed: %s", message)
        _failures.append(message)


def failures() -> list[str]:
    """Returns what went wrong so far: a process that ends has to say so by its exit code."""
    return list(_failures)


def _describe(error: Exception) -> str:
    first, *_ = [*str(error).splitlines(), ""]
    return f"closing an environment failed: {type(error).__name__}: {first}"
