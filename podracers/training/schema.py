"""What a JSON file has to hold: a run may be resumed from files that were damaged meanwhile.

A schema is one of

- `Number`, or a type (`str`, `bool`), or None: such a value;
- `{"name": schema, ...}`: an object that has these fields (or may, with `Optional`), and others;
- `{..., str: schema}`: all other fields are such;
- `[schema]`: an array of such, and `[schema, schema, ...]`: one of this length;
- a tuple of schemas: one of them.
"""

import json
import sys
from typing import Any, NamedTuple

_LARGEST = {int: 2**63 - 1, float: sys.float_info.max}


class Number(NamedTuple):
    """A number that is neither NaN nor infinite, nor too large to reckon with.

    Attributes:
      kind: `int`, or `float`, which may be written as an integer.
      least: the smallest it may be.
    """

    kind: type
    least: float


class Optional(NamedTuple):
    """A field of an object that may be missing, and if it is there holds what `schema` says."""

    schema: Any


COUNT = Number(int, 0)
POSITIVE = Number(int, 1)
DURATION = Number(float, 0)  # seconds
REAL = Number(float, -sys.float_info.max)


def parse(text: str | bytes, schema: Any) -> Any:
    """Returns what a JSON text holds.

    Raises:
      ValueError: it is no JSON, or does not hold what `schema` says; in one line.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if said := fault(found, schema):
        raise ValueError(said)
    return found


def fault(found: Any, schema: Any, name: str = "") -> str | None:
    """Returns a phrase on the first part of `found` that is not as `schema` says, or None."""
    match schema:
        case Number():
            ok = _is_number(found, schema)
        case tuple():
            ok = not all(fault(found, each) for each in schema)
        case dict():
            if isinstance(found, dict):
                return _fault_of_object(found, schema, name)
            ok = False
        case list():
            if isinstance(found, list) and len(schema) in (1, len(found)):
                kinds = schema * len(found) if len(schema) == 1 else schema
                pairs = enumerate(zip(found, kinds))
                said = (fault(item, kind, f"{name}[{index}]") for index, (item, kind) in pairs)
                return next(filter(None, said), None)
            ok = False
        case None:
            ok = found is None
        case _:
            ok = isinstance(found, schema)
    return None if ok else f"{_subject(name)} is {_shown(found)}"


def _fault_of_object(found: dict[str, Any], schema: dict[Any, Any], name: str) -> str | None:
    if str in schema:
        schema = dict.fromkeys(found, schema[str]) | schema
        del schema[str]
    for field, kind in schema.items():
        optional = isinstance(kind, Optional)
        if field not in found:
            if optional:
                continue
            return f"{_subject(name)} has no '{field}'"
        path = f"{name}.{field}".lstrip(".")
        if said := fault(found[field], kind.schema if optional else kind, path):
            return said
    return None


def _subject(name: str) -> str:
    return f"'{name}'" if name else "it"


def _is_number(found: Any, schema: Number) -> bool:
    kinds = (int,) if schema.kind is int else (int, float)
    if not isinstance(found, kinds) or isinstance(found, bool):
        return False
    return schema.least <= found <= _LARGEST[schema.kind]


def _shown(found: Any) -> str:
    """Returns a value as JSON would have it, at no great length."""
    if isinstance(found, (dict, list)):
        return "an object" if isinstance(found, dict) else f"an array of {len(found)}"
    try:
        text = json.dumps(found)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of many digits"
    return text if len(text) <= 40 else f"{text[:37]}..."
