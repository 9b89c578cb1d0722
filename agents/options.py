"""Checks of the options of agents: what cannot be is refused before anything is traced."""

import math
import sys
from collections.abc import Iterable
from typing import Any

from podracers import errors


def expect(agent: Any, name: str, holds: bool, expected: str) -> None:
    """Raises a `UserError` that names the option `name` of an agent, unless `holds`."""
    if not holds:
        option = f"{type(agent).__name__}.{name}"
        raise errors.UserError(f"{option}: expected {expected}, got {getattr(agent, name)!r}")


def check(
    agent: Any,
    counts: Iterable[str] = (),
    portions: Iterable[str] = (),
    positive: Iterable[str] = (),
) -> None:
    """Checks options by kind.

    Args:
      agent: whose attributes they are.
      counts: names of positive ints, up to int32.
      portions: names of numbers in `[0, 1]`.
      positive: names of positive numbers; None is allowed.

    Raises:
      errors.UserError: for the first that is not what it should be.
    """
    for name in counts:
        errors.require_count(agent, name)
    for name in portions:
        expect(agent, name, 0.0 <= getattr(agent, name) <= 1.0, "a number in [0, 1]")
    for name in positive:
        value = getattr(agent, name)
        is_positive = value is None or 0.0 < value <= sys.float_info.max or value == math.inf
        expect(agent, name, is_positive, "a positive number")
