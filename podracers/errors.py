"""The two ways in which a run ends early, the exit code of each, and what messages share."""

import difflib
from collections.abc import Iterable
from typing import Any

INT32_MAX = 2**31 - 1  # the largest number that shapes, indices and counters on a device can hold


class UserError(ValueError):
    """A user's mistake: one line that says what was expected and what came. Exit code 2."""

    exit_code = 2


class RunFailure(RuntimeError):
    """A run that cannot go on through no mistake in its configuration. Exit code 1."""

    exit_code = 1


def require_count(part: Any, name: str, least: int = 1) -> None:
    """Raises a `UserError` unless the attribute `name` is an int from `least` to `INT32_MAX`.

    Args:
      part: an agent, a runner or another part, whose attribute it is.
      name: the attribute's name.
      least: the lowest value that is allowed.
    """
    value = getattr(part, name)
    expected = "a positive int" if least == 1 else f"an int of at least {least}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        if value <= INT32_MAX:
            return
        expected = f"at most {INT32_MAX}"
    raise UserError(f"{type(part).__name__}.{name}: expected {expected}, got {value!r}")


def first_line(error: BaseException) -> str:
    """Returns the first line of a message, or the name of an exception without one."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def one_line(error: BaseException) -> str:
    """Returns an exception in one line, as Python prints it."""
    name, first = type(error).__name__, first_line(error)
    return name if first == name else f"{name}: {first}"


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """Returns a phrase that names the known names nearest to `name`, for the end of a message.

    Args:
      name: the name that the user wrote.
      known: every valid name.
      most: the most names in the phrase.

    Returns:
      `"; did you mean 'a' or 'b'?"`, or `"; known: a, b, c"` where none is near and few are known,
      or an empty string.
    """
    known = sorted(set(known))
    lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lower, n=most, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(f"'{lower[match]}'" for match in close) + "?"
    if known and len(known) <= 30:
        return "; known: " + ", ".join(known)
    return ""
