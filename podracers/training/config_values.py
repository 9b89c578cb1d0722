"""Reads the text of a configuration as names and values, and imports nothing that it names.

A run's `config.gin` is read where its modules may be missing, and beside the files of other runs.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from gin import config_parser
from podracers.training import config_names


class Reference(NamedTuple):
    """A part that a value names: `@ppo.PPO`, or `@encoders.CNN()` where it is called."""

    name: str  # with its module and, before slashes, its scopes
    is_called: bool

    def __str__(self) -> str:
        return self.name.rpartition(".")[2] + "()" * self.is_called

    __repr__ = __str__  # within tuples


class Macro(NamedTuple):
    """A value that stands elsewhere: `%NUM_ENVS`."""

    name: str


class _Values(config_parser.ParserDelegate):
    def __init__(self):
        self.names = set()

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        self.names.add(scoped_configurable_name.rpartition("/")[2])
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        self.names.add(macro_name)
        return Macro(macro_name)


def read(text: str, source: str) -> dict[str, Any]:
    """Returns values by name, such as `ppo.PPO.gamma`, or `NUM_ENVS` of a macro; the last one wins.

    Args:
      text: a .gin file's text; what it includes is not read.
      source: its name in error messages.

    Raises:
      errors.UserError: it is no .gin file.
    """
    return _read(text, source, _Values())


def names(text: str) -> tuple[set[str], set[str]]:
    """Returns the parts and macros that values of a .gin file name, and the parts that it binds."""
    delegate = _Values()
    subjects = {name.rpartition("/")[2].rpartition(".")[0] for name in _read(text, "", delegate)}
    return delegate.names, subjects - {""}


def _read(text: str, source: str, delegate: _Values) -> dict[str, Any]:
    values = {}
    try:
        for statement in config_parser.ConfigParser(text, delegate):
            if isinstance(statement, config_parser.BindingStatement):
                scope, selector = statement.scope, statement.selector
                name = ".".join(part for part in (selector, statement.arg_name) if part)
                values[f"{scope}/{name}" if scope else name] = statement.value
    except Exception as error:
        raise config_names.explain(error, source) from error
    return values


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of parts, by name, with what their macros stand for."""
    macros = {name: value for name, value in values.items() if "." not in name}
    return {name: resolve(value, macros) for name, value in values.items() if name not in macros}


def hyperparameters(text: str) -> dict[str, bool | float | str]:
    """Returns parameters by class, such as `PPO.gamma`, for tables of runs; None is left out.

    Args:
      text: an operative configuration. What is neither a number nor a string becomes a string.
    """
    values = parameters(read(text, "the operative configuration"))
    short = {name: ".".join(name.split(".")[-2:]) for name in values}
    counts = collections.Counter(short.values())
    return {
        short[name] if counts[short[name]] == 1 else name: (
            value if isinstance(value, bool | int | float | str) else str(value)
        )
        for name, value in values.items()
        if value is not None
    }


def resolve(value: Any, macros: Mapping[str, Any]) -> Any:
    """Returns a value with what its macros stand for; one that is not there stays."""
    if isinstance(value, Macro) and value.name in macros:
        # Without the macro itself: one that stands for itself would not come to an end.
        others = {name: each for name, each in macros.items() if name != value.name}
        return resolve(macros[value.name], others)
    if isinstance(value, dict):
        return {resolve(k, macros): resolve(v, macros) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resolve(each, macros) for each in value)
    return value
