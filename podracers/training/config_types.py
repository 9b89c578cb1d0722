"""Compares values with the annotations of the parameters that they are bound to.

In doubt a value fits: what JAX, Flax or the part itself refuses is said by them.
"""

import collections.abc
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from podracers import errors


def hints(part: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of a part's parameters; none where they cannot be resolved."""
    is_init = isinstance(part, type) and not dataclasses.is_dataclass(part)
    try:
        return typing.get_type_hints(part.__init__ if is_init else part)
    except (NameError, TypeError, AttributeError):
        return {}


def fault(value: Any, hint: Any) -> str | None:
    """Returns what is wrong with a literal where `hint` stands, or None."""
    if fits(value, hint):
        return None
    beyond = ""
    if isinstance(value, int) and abs(value) > errors.INT32_MAX:
        beyond = ", beyond int32" + ": write a point" * (float in _options(hint))
    return f"expected {name(hint)}, got {value!r}{beyond}"


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value may be passed where `hint` stands."""
    if len(options := _options(hint)) > 1:
        return any(fits(value, option) for option in options)
    kind, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (int, float):
        # Of an int JAX makes an int32, for a float, too.
        is_int32 = type(value) is int and abs(value) <= errors.INT32_MAX
        return is_int32 or (kind is float and isinstance(value, float))
    if kind in (tuple, list, collections.abc.Sequence):
        if kind is not tuple or items[1:] == (...,):  # any number of one kind
            items = items[:1] * len(value) if isinstance(value, tuple | list) else ()
        return isinstance(value, tuple | list) and (
            not typing.get_args(hint) or (len(value) == len(items) and all(map(fits, value, items)))
        )
    if getattr(kind, "_is_protocol", False):
        return not isinstance(value, type) or "__call__" in vars(kind)
    return not _is_class(kind) or isinstance(value, kind)


def may_make(part: Callable[..., Any], given: Iterable[str], hint: Any) -> bool:
    """Returns whether a call of a part with these arguments may give what `hint` wants."""
    kinds = [typing.get_origin(option) or option for option in _options(hint)]
    if isinstance(part, type):
        return any(not _is_class(kind) or issubclass(part, kind) for kind in kinds)
    lacks = any(
        parameter.default is parameter.empty and parameter.name not in given
        for parameter in inspect.signature(part).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    return any(kind is not collections.abc.Callable or not lacks for kind in kinds)


def name(hint: Any) -> str:
    """Returns an annotation as a user reads it."""
    if typing.get_origin(hint) is collections.abc.Callable:
        return "a class or a function, uncalled (`@module.Name`)"
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(\w+\.)+", "", str(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the one hint."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_class(kind: Any) -> bool:
    """Returns whether `isinstance` takes a hint, and its answer counts."""
    if kind is Any or typing.is_typeddict(kind):  # which are classes
        return False
    return isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
