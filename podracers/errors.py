"""Exceptions of a run that ends early, checks of options, and parts of messages."""

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import re
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import TypeIs

INT32_MAX = 2**31 - 1  # the largest number that shapes, indices and counters on a device can hold
# Types of literals, and of classes and functions that are not called.
_LITERALS = int | float | str | bytes | tuple | list | dict | type | types.FunctionType | None
# Where Python's own files are; generated code, such as a dataclass's constructor, has no file.
_PYTHON = ("<", *map(sysconfig.get_path, ("stdlib", "scripts")))


class UserError(ValueError):
    """A user's mistake: one line with the expected and the given value. Exit code 2."""

    exit_code = 2


class RunFailure(RuntimeError):
    """A failure of a run whose configuration is valid. Exit code 1."""

    exit_code = 1


@contextlib.contextmanager
def file_errors(action: str) -> Iterator[None]:
    """Raises a `UserError`, "cannot `action`" with the cause, where a file of the user fails."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"cannot {action}: {cause}") from error


def require_count(part: Any, *names: str, least: int = 1, most: int = INT32_MAX) -> None:
    """Raises a `UserError` unless the attributes `names` are ints from `least` to `most`.

    None is accepted where a dataclass annotates it.
    """
    fields = getattr(part, "__dataclass_fields__", {})
    for name in names:
        value: Any = getattr(part, name)
        if value is None and name in fields and "None" in str(fields[name].type):
            continue
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_int or not least <= int(value) <= most:
            expected = "a positive int" if least == 1 else f"an int of at least {least}"
            raise UserError(
                f"{type(part).__name__}.{name}: expected {expected} (up to {most}), got {value!r}"
            )


def require_int32(number: int, name: str) -> None:
    """Raises a `UserError` if a number, which is called `name`, does not fit into int32."""
    if number > INT32_MAX:
        raise UserError(f"{name}: expected at most {INT32_MAX}, got {number}")


def require_known(what: str, name: Any, known: Iterable[Any]) -> None:
    """Raises a `UserError`, which begins with `what`, unless `name` is one of the `known` names."""
    if name not in known:
        raise UserError(f"{what} '{name}'{nearest(str(name), filter(None, known))}")


def require_types(part: Any, arguments: Mapping[str, Any] | None = None) -> None:
    """Raises a `UserError` for an option whose value is not of the annotated type.

    Numbers, strings, None, tuples, lists, dicts, classes and functions are checked; other objects
    fit any annotation except Python's own types. Dataclasses among the values are checked, too.
    `part` is a dataclass; or a function with its `arguments`, `locals()` where it begins.
    """
    part_type = type(part) if arguments is None else part
    try:
        hints = typing.get_type_hints(part_type if arguments else part_type.__init__)
    except (NameError, TypeError):  # a user's annotation is wrong
        return
    for name, parameter in inspect.signature(part_type).parameters.items():
        value = arguments[name] if arguments else getattr(part, name, parameter.default)
        value = _unwrapped(value)
        hint = hints.get(name, Any)
        hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
        if value is not parameter.default and not _fits(value, hint):
            kind = hint.__name__ if isinstance(hint, type) else re.sub(r"\b(\w+\.)+", "", str(hint))
            got = repr(value)
            if len(got) > 80 or "\n" in got:
                got = f"an instance of {path_of(value)}"
            if isinstance(value, int) and abs(value) > INT32_MAX:
                got += ", beyond int32; write a float with a decimal point"
            elif isinstance(value, type | types.FunctionType):
                of = "class" if isinstance(value, type) else "function"
                got = f"the {of} {path_of(value)}"
                options = typing.get_args(hint) or (hint,)
                if any(getattr(item, "__module__", "builtins") != "builtins" for item in options):
                    got += f"; write `@{value.__name__}()`, with parentheses"
            elif kind.startswith("Callable") and not isinstance(value, _LITERALS):
                part_name = type(value).__name__
                got = f"an instance of {path_of(value)}; write `@{part_name}`, without parentheses"
            raise UserError(f"{part_type.__name__}.{name}: expected {kind}, got {got}")
        for item in value if isinstance(value, tuple | list) else (value,):
            if dataclasses.is_dataclass(item) and not isinstance(item, type):
                require_types(item)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a literal or a class may stand where `hint` does."""
    value = _unwrapped(value)
    kind, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in items)
    if kind is collections.abc.Callable:
        return is_function(value)
    if isinstance(value, bool | int) and kind in (int, float):
        # JAX converts an int to int32, also where a float is expected.
        return not isinstance(value, bool) and abs(value) <= INT32_MAX
    if isinstance(value, tuple | list) and kind in (tuple, list, collections.abc.Sequence):
        if kind is not tuple or items[1:] == (...,):
            items = items[:1] * len(value)
        return not typing.get_args(hint) or (
            len(items) == len(value) and all(map(_fits, value, items))
        )
    if isinstance(value, dict) and kind in (dict, collections.abc.Mapping) and items:
        return all(_fits(key, items[0]) and _fits(item, items[1]) for key, item in value.items())
    is_class = isinstance(kind, type) and kind is not Any and not typing.is_typeddict(kind)
    # Arrays may stand for numbers, and paths for strings.
    is_similar = hasattr(value, "dtype") or isinstance(value, os.PathLike)
    is_checked = isinstance(value, _LITERALS) or (
        is_class and kind.__module__ in ("builtins", "numbers") and not is_similar
    )
    fits = is_class and not getattr(kind, "_is_protocol", False) and isinstance(value, kind)
    return fits or not (is_class and is_checked)


def _unwrapped(value: Any) -> Any:
    """Returns the class or the function of a configured part, a `functools.partial` of it."""
    return inspect.unwrap(value) if isinstance(value, functools.partial) else value


def refuse_bound(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Raises a `UserError` for an option of a configured part that its caller passes itself.

    Options of a `functools.partial` are bound; the call would have the other arguments given here.
    """
    if isinstance(function, functools.partial) and function.keywords:
        passed = inspect.signature(function.func).bind_partial(*arguments, **named).arguments
        if names := passed.keys() & function.keywords.keys():
            path = path_of(function)
            raise UserError(
                f"nothing uses '{path.rpartition('.')[2]}.{min(names)}': the caller of {path} "
                "passes this argument"
            )


def is_function(value: object) -> TypeIs[Callable[..., Any]]:
    """Returns whether a value is a class or a function, and no instance, such as a Flax module."""
    return callable(value) and (hasattr(value, "__name__") or isinstance(value, functools.partial))


def path_of(part: Any) -> str:
    """Returns the dotted path of a class or of a function, or of the class of an object."""
    part = part.func if isinstance(part, functools.partial) else part
    if not isinstance(part, type):  # a type's `__wrapped__` may be that of its objects
        part = inspect.unwrap(part)  # gin wraps functions
    part = part if hasattr(part, "__qualname__") else type(part)
    return f"{part.__module__}.{part.__qualname__}".removeprefix("builtins.")


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its name if it has no message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def one_line(error: BaseException) -> str:
    """Returns an exception's name and the first line of its message, as Python prints them."""
    name, first = type(error).__name__, first_line(error)
    return name if first == name else f"{name}: {first}"


def located(error: BaseException) -> str:
    """Returns `one_line(error)` after the file, line and function of `innermost_frame`."""
    if isinstance(error.__cause__, StopIteration):  # a generator replaces it
        error = error.__cause__
    frame = innermost_frame(error)
    place = f"{frame.filename}:{frame.lineno} in {frame.name}: " if frame else ""
    return place + one_line(error)


def innermost_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost line outside of libraries that an exception passed; None without."""
    for frame in traceback.extract_tb(error.__traceback__)[::-1]:
        if not is_library(frame.filename):
            return frame
    return None


def is_library(file: str) -> bool:
    """Returns whether a file belongs to Python or to an installed package."""
    return file.startswith(_PYTHON) or "-packages" in file


def nearest_multiples(number: int, unit: int) -> str:
    """Returns the positive multiples of `unit` next to a number, as `"4 or 8"`."""
    lower = number // unit * unit
    return " or ".join(str(multiple) for multiple in (lower, lower + unit) if multiple)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message, with the `known` names nearest to the name that the user wrote.

    Returns:
      `"; did you mean 'a' or 'b'?"`; or `"; known: a, b, c"` where none is near and few are known.
      Of many, names that contain `name` count as near.
    """
    name, lower = name.lower(), {candidate.lower(): candidate for candidate in sorted(known)}
    without_prefix = [candidate for candidate in lower if candidate.endswith(f"/{name}")]
    close = [*dict.fromkeys([*without_prefix, *difflib.get_close_matches(name, lower)])][:3]
    if not close and len(lower) <= 30:
        return "; known: " + ", ".join(lower.values()) if lower else ""
    close = close or [candidate for candidate in lower if name in candidate][:3]
    names = " or ".join(f"'{lower[candidate]}'" for candidate in close)
    return f"; did you mean {names}?" if names else ""
