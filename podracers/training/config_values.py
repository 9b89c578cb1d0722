"""Names and values in the text of a configuration; nothing that it names is imported.

A run's `config.gin` can be read where its modules are missing, and beside the files of other runs.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from gin import config_parser
from podracers.training import config


class Reference(NamedTuple):
    """A part that a value names: `@ppo.PPO`, or `@encoders.CNN()` where it is called."""

    name: str  # with its module and, before slashes, its scopes
    is_called: bool

    def __str__(self) -> str:
        return self.name.rpartition(".")[2] + "()" * self.is_called

    __repr__ = __str__  # within tuples


class Macro(NamedTuple):
    """A reference to another value: `%NUM_ENVS`."""

    name: str


class _Values(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def read(text: str, source: str) -> dict[str, Any]:
    """Returns values by name, such as `ppo.PPO.gamma`, or `NUM_ENVS` of a macro; the last one wins.

    Args:
      text: a .gin file's text; included files are not read.
      source: the file's name in error messages.

    Raises:
      errors.UserError: the text is no .gin file.
    """
    values = {}
    try:
        for statement in config_parser.ConfigParser(text, _Values()):
            if isinstance(statement, config_parser.BindingStatement):
                scope, selector = statement.scope, statement.selector
                name = ".".join(part for part in (selector, statement.arg_name) if part)
                values[f"{scope}/{name}" if scope else name] = statement.value
    except Exception as error:
        raise config.explain(error, source) from error
    return values


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of parts, by name, with the values of their macros."""
    macros = {name: value for name, value in values.items() if "." not in name}
    return {name: resolve(value, macros) for name, value in values.items() if name not in macros}


def hyperparameters(text: str) -> dict[str, bool | float | str]:
    """Returns parameters by class, such as `PPO.gamma`, for tables of runs; None is left out.

    Args:
      text: an operative configuration; values other than numbers become strings.
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
    """Returns a value with its macros replaced; an unknown macro stays."""
    if isinstance(value, Macro) and value.name in macros:
        # Without the macro itself, so that circles end.
        others = {name: each for name, each in macros.items() if name != value.name}
        return resolve(macros[value.name], others)
    if isinstance(value, dict):
        return {resolve(k, macros): resolve(v, macros) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resolve(each, macros) for each in value)
    return value
