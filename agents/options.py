"""Bounds of the options of agents: what cannot be is refused before anything is traced.

The bound of an option stands where the option stands, in a dataclass field:

    gamma: float = options.fraction(0.99)

and `check`, called from `__post_init__`, raises an error that names the option.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

from dm_env import specs

from podracers import errors

_CHECK = "check"  # key in the metadata of a field: a function of the agent and the field's name


def count(default: int) -> Any:
    """Returns a dataclass field for a positive int, up to int32."""
    return _field(default, errors.require_count)


def fraction(default: float) -> Any:
    """Returns a dataclass field for a number in `[0, 1]`."""
    return _field(default, _require_fraction)


def positive(default: float | None) -> Any:
    """Returns a dataclass field for a positive number; None is allowed."""
    return _field(default, _require_positive)


def check(agent: Any) -> None:
    """Raises a `UserError` for the first option of a dataclass that is out of its bounds."""
    for field in dataclasses.fields(agent):
        if _CHECK in field.metadata:
            field.metadata[_CHECK](agent, field.name)


def expect(agent: Any, name: str, holds: bool, expected: str) -> None:
    """Raises a `UserError` that names the option `name` of an agent, unless `holds`."""
    if not holds:
        option = f"{type(agent).__name__}.{name}"
        raise errors.UserError(f"{option}: expected {expected}, got {getattr(agent, name)!r}")


def require_discrete(agent: Any) -> None:
    """Raises a `UserError` unless the environment of an agent takes one discrete action."""
    spec = agent.spec
    if not isinstance(spec.action, specs.DiscreteArray):
        raise errors.UserError(
            f"{type(agent).__name__} needs discrete actions, and those of {spec.name} are "
            f"{spec.action!r}: use SAC or PPO"
        )


def _field(default: Any, require: Callable[[Any, str], None]) -> Any:
    return dataclasses.field(default=default, metadata={_CHECK: require})


def _require_fraction(agent: Any, name: str) -> None:
    expect(agent, name, 0.0 <= getattr(agent, name) <= 1.0, "a number in [0, 1]")


def _require_positive(agent: Any, name: str) -> None:
    value = getattr(agent, name)
    is_positive = value is None or 0.0 < value <= sys.float_info.max or value == math.inf
    expect(agent, name, is_positive, "a positive number")
