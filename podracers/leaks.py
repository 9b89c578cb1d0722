"""Arrays of a JAX trace that are kept after its end: no later trace can use them.

`jax.eval_shape` accepts such an array, so that the mistake shows in a later trace, or as a run that
is not reproducible.
"""

import contextlib
import functools
import gc
import re
import types
from collections.abc import Iterator
from typing import Any

import jax

from podracers import errors

_CURE = "make it with numpy, in __post_init__ or under jax.ensure_compile_time_eval()"


@contextlib.contextmanager
def refused(*parts: Any) -> Iterator[None]:
    """Raises an error if a part keeps an array of a trace at the end of this context.

    The error replaces an exception of the context, because the array is its cause.

    Raises:
      errors.UserError: one line with the class and the attribute.
    """
    try:
        yield
    finally:
        for part in parts:
            if place := _place(part):
                raise errors.UserError(f"{place} keeps an array of a JAX trace: {_CURE}")


def explained(error: jax.errors.UnexpectedTracerError) -> errors.UserError:
    """Returns the user's mistake, with the line that made the array."""
    line = re.search(r"created on line (.+?:\d+):\d+ \((.+?)\)", str(error))
    place = line.expand(r"\1 in \2") if line else "a function"
    return errors.UserError(f"{place} made an array in a JAX trace that was kept: {_CURE}")


def _place(part: Any) -> str | None:
    """Returns the path of attributes to an array of a trace."""
    queue: list[tuple[Any, tuple[str, ...]]] = [(part, ())]
    seen = set()
    for value, path in queue:  # the queue grows
        if isinstance(value, jax.core.Tracer):
            attribute, *outer = path
            return f"{attribute} (in {', '.join(outer)})" if outer else attribute
        if id(value) in seen or isinstance(value, type | types.ModuleType | jax.Array):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):  # its globals may hold anything
            queue += [(item, path) for item in gc.get_referents(*(value.__closure__ or ()))]
        elif isinstance(value, dict | tuple | list | functools.partial | types.MethodType):
            queue += [(item, path) for item in gc.get_referents(value)]
        else:
            for name, item in getattr(value, "__dict__", {}).items():
                queue.append((item, (f"{errors.path_of(type(value))}.{name}", *path)))
    return None
