"""Bounds of the options of agents: what cannot be is refused before anything is traced.

The bound of an option stands where the option stands, in a dataclass field:

    gamma: float = options.fraction(0.99)

and `check`, called from `__post_init__`, raises an error that names the option.
"""

import dataclasses
import numbers
import sys
from collections.abc import Callable
from typing import Any

import jax
from dm_env import specs

from podracers import errors

_CHECK = "check"  # key in the metadata of a field: a function of the agent and the field's name


def count(default: int) -> Any:
    """Returns a dataclass field for a positive int, up to int32."""
    return _field(default, errors.require_count)


def number(default: float) -> Any:
    """Returns a dataclass field for a finite number."""
    return _number_field(default, _is_finite, "a finite number")


def fraction(default: float) -> Any:
    """Returns a dataclass field for a number in `[0, 1]`."""
    return _number_field(default, lambda x: 0.0 <= x <= 1.0, "a number in [0, 1]")


def positive(default: float) -> Any:
    """Returns a dataclass field for a finite positive number."""
    return _number_field(default, lambda x: x > 0.0 and _is_finite(x), "a positive number")


def non_negative(default: float) -> Any:
    """Returns a dataclass field for a finite number that is not negative."""
    return _number_field(default, lambda x: x >= 0.0 and _is_finite(x), "0 or more")


def optional_positive(default: float | None) -> Any:
    """Returns a dataclass field for a finite positive number or None."""
    return _number_field(
        default, lambda x: x > 0.0 and _is_finite(x), "a positive number or None", optional=True
    )


def optional_non_negative(default: float | None) -> Any:
    """Returns a dataclass field for a finite number that is not negative, or None."""
    return _number_field(
        default, lambda x: x >= 0.0 and _is_finite(x), "0 or more, or None", optional=True
    )


def check(agent: Any) -> None:
    """Raises a `UserError` for the first option of a dataclass that is out of its bounds."""
    for field in dataclasses.fields(agent):
        if _CHECK in field.metadata:
            field.metadata[_CHECK](agent, field.name)


def expect(agent: Any, name: str, holds: bool, expected: str) -> None:
    """Raises a `UserError` that names the option `name` of an agent, unless `holds`.

    A traced value, of one member of a population, is not checked: the runner has checked it.
    """
    if not isinstance(getattr(agent, name), jax.core.Tracer) and not holds:
        option = f"{type(agent).__name__}.{name}"
        raise errors.UserError(f"{option}: expected {expected}, got {getattr(agent, name)!r}")


def require_schedule(agent: Any, *names: str) -> None:
    """Raises a `UserError` if options `names` say where a schedule ends, and nothing says when."""
    for name in names:
        is_bound = getattr(agent, name) is None or agent.anneal_steps is not None
        expect(agent, name, is_bound, "None where there are no anneal_steps")


def require_feedforward(agent: Any, network: Any) -> None:
    """Raises a `UserError` if a network that an agent unrolls from any time step is recurrent."""
    if network.memory_length is None:
        name = type(agent).__name__
        raise errors.UserError(
            f"{name} learns no recurrent network: expected one without a core (where memory is "
            f"needed, use R2D2 or PQN)"
        )


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


def _number_field(
    default: Any, holds: Callable[[Any], bool], expected: str, optional: bool = False
) -> Any:
    def require(agent: Any, name: str) -> None:
        value = getattr(agent, name)
        if value is None and optional:
            return
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        expect(agent, name, is_number and holds(value), expected)

    return _field(default, require)


def _is_finite(x: Any) -> bool:
    return abs(x) <= sys.float_info.max  # an int may be larger, and NaN is not
