"""The space of a study: options of an experiment by their names in gin, in a TOML file.

A line is `NAME = {KIND = VALUES}`, such as `PPO.learning_rate = {log = [1e-5, 1e-2]}`. `log` and
`linear` are ranges of floats, `int` of ints, and `choice` lists values: numbers, booleans, strings
(`"None"`, `"@cnn.CNN"` and `"%MACRO"` are those of gin) and arrays, which are tuples in gin.
"""

import ast
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from podracers import errors
from podracers.training import config

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Space = Mapping[str, Distribution]
_KINDS = ("log", "linear", "int", "choice")


def read(path: pathlib.Path) -> Space:
    """Reads a file; raises errors.UserError if it cannot be read, or an option has no range."""
    with errors.file_errors(f"read '{path}'"):
        text = path.read_text("utf-8")
    try:
        space = {name: _distribution(name, x) for name, x in _options(tomllib.loads(text))}
        if not space:
            raise errors.UserError("expected a line such as PPO.learning_rate = {log = [1e-5, 1]}")
    except ValueError as error:
        raise errors.UserError(f"{path}: {errors.first_line(error)}") from error
    return space


def _options(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tables within which there are no others, by their dotted names."""
    for key, value in table.items():
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            yield from _options(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _distribution(name: str, entry: Any) -> Distribution:
    ((kind, values),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else [("", 0)]
    if not isinstance(values, list):
        kinds = ", ".join(_KINDS)
        raise errors.UserError(f"{name}: expected {{KIND = [...]}}, one of {kinds}, got {entry!r}")
    errors.require_known(f"{name}: there is no kind", kind, _KINDS)
    if kind == "choice":
        if not values:
            raise errors.UserError(f"{name}: expected choice = [VALUE, ...], got []")
        return CategoricalDistribution([*map(_choice, values)])
    types, expected = {*map(type, values)}, "whole numbers" if kind == "int" else "numbers"
    expected = f"positive {expected}" if kind == "log" else expected
    is_range = len(values) == 2 and types <= ({int} if kind == "int" else {int, float})
    if not is_range or values[0] >= values[1] or (kind == "log" and values[0] <= 0):
        raise errors.UserError(
            f"{name}: expected {kind} = [LOW, HIGH], two {expected}, got {values!r}"
        )
    low, high = values
    if kind == "int":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=kind == "log")


def _choice(value: Any) -> Any:
    """Returns a number, or else the text of a value in gin: databases store no other types."""
    if isinstance(value, bool | int | float) or value == "None" or str(value)[:1] in ("@", "%"):
        return value
    return repr(tuple(value) if isinstance(value, list) else value)


def bindings(params: Mapping[str, Any]) -> list[str]:
    """Returns the bindings of a trial."""
    return [f"{name} = {x if isinstance(x, str) else repr(x)}" for name, x in params.items()]


def ends(distribution: Distribution) -> Sequence[Any]:
    """Returns all choices, or the lowest and the highest value of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return distribution.low, distribution.high


def start(space: Space, texts: config.Texts) -> dict[str, Any]:
    """Returns the experiment's own values; nothing if one of them is not in the space."""
    known, values = config.read(texts.operative, "operative_config.gin").values, {}
    for name, distribution in space.items():
        value = known.get(".".join(name.split(".")[-2:]))
        if macro := re.search(rf"^{re.escape(name)} = ([^@%\n]+)$", texts.bindings, re.MULTILINE):
            value = ast.literal_eval(macro[1])
        if isinstance(distribution, CategoricalDistribution):
            value = _choice(value)
            is_in = value in distribution.choices
        else:
            is_in = (
                isinstance(value, int | float) and distribution.low <= value <= distribution.high
            )
        if not is_in:
            return {}
        values[name] = value
    return values


def grid(space: Space) -> dict[str, Sequence[Any]]:
    """Returns all values by option; raises errors.UserError for a range of floats."""
    for name, distribution in space.items():
        if isinstance(distribution, FloatDistribution):
            raise errors.UserError(f"--sampler grid: expected `choice` or `int` for {name}")
    return {
        name: [*range(x.low, x.high + 1)] if isinstance(x, IntDistribution) else ends(x)
        for name, x in space.items()
    }
