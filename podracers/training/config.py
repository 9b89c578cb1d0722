"""Reads .gin files and bindings, and says in one line what is wrong with them.

gin is applied at one root, `podracers.training.experiment.Experiment`; library code never asks it
for anything. Files name what they use by Python's own names (`from agents import ppo`, then
`ppo.PPO.gamma`), so anything that can be imported can be configured. Bindings of the command line
may leave the module out (`PPO.gamma = 0.9`).
"""

import contextlib
import importlib.util  # gin's own include statement needs it, and forgets to import it
import io
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
from gin import config_parser
from podracers import errors
from podracers.training import config_check, config_errors, config_names

Bindings = config_check.Bindings


def parse(
    gin_files: Sequence[str], gin_bindings: Sequence[str], root: Callable[..., Any]
) -> list[str]:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    Args:
      gin_files: paths, relative to the working directory or to the repository.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      root: the class whose parameters choose the parts of the experiment.

    Returns:
      A line for each value that one of the files takes from another one before it.

    Raises:
      errors.UserError: a file that is missing or does not parse, an unknown name, a binding that
        nothing uses, a macro or a parameter without a value, a value of the wrong type.
    """
    gin.clear_config()
    with _without_logging():
        said, layers = [], []
        for path in gin_files:
            said.append(_parse_file(path))
            layers.append(config_check.take())
        for binding in gin_bindings:
            _parse_binding(binding)
        given = config_check.take()
    config_check.put(*layers, given)
    config_check.check(root, given, said)
    return config_check.overrides(gin_files, layers, given)


@contextlib.contextmanager
def using(bindings: Bindings) -> Iterator[None]:
    """Puts gin in the state of an earlier `snapshot`, for as long as the context lasts.

    gin's configuration is one for the whole process, and what it makes reads it when called: an
    experiment that was loaded first would otherwise be built from what was loaded last.

    Args:
      bindings: a snapshot.
    """
    others = config_check.take()
    config_check.put(bindings)
    try:
        yield
    finally:
        config_check.take()
        config_check.put(others)


def snapshot() -> Bindings:
    """Returns gin's bindings as they are now."""
    bindings = config_check.take()
    config_check.put(bindings)
    return bindings


def text() -> str:
    """Returns the configuration as a .gin file that `parse` reads back."""
    return gin.config_str()


def operative_text() -> str:
    """Returns every parameter that was used, defaults included, as a .gin file."""
    return gin.operative_config_str()


def name_of(part: Callable[..., Any]) -> str:
    """Returns the name by which .gin files know a class or a function that they have named."""
    path = (part.__module__, part.__qualname__)  # of gin's subclass, too
    return next(
        selector
        for selector, known in gin.config._REGISTRY.items()
        if (known.wrapped.__module__, known.wrapped.__qualname__) == path
    )


def call(root: Callable[..., Any]) -> Any:
    """Returns `root()`, with its parameters from the configuration.

    Raises:
      errors.UserError: the root, or something that is made for it, refuses its parameters.
    """
    try:
        return gin.get_configurable(root)()
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.UserError(config_errors.first_line(error)) from error


def _parse_file(path: str) -> config_check.Said:
    """Parses a file, and returns what it and its includes say."""
    if config_names.find_file(path) is None:
        raise errors.UserError(config_errors.missing_file(path))
    read = _Reader()
    # Lists that gin keeps for the whole process, and never clears.
    gin.config._LOCATION_PREFIXES[:] = config_names.FOLDERS
    gin.config._FILE_READERS[:] = [(read, os.path.isfile)]
    try:
        gin.parse_config_file(path)
    except Exception as error:
        raise errors.UserError(config_errors.explain(error, path)) from error
    references, subjects = (set().union(*names) for names in zip(*map(_said, read.texts)))
    return config_check.Said(references, subjects)


class _Reader:
    """Opens files for gin: text in UTF-8, and no file from within itself.

    Attributes:
      texts: of the files that were read, includes among them.
    """

    def __init__(self):
        self.texts: list[str] = []
        self._open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, path: str) -> Iterator[io.StringIO]:
        """Opens a file; gin leaves the context once the file and its includes are parsed."""
        if any(os.path.samefile(path, other) for other in self._open):
            circle = " -> ".join([*self._open, path])
            raise errors.UserError(f"files include one another in a circle: {circle}")
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            byte = f"0x{error.object[error.start]:02x} at {error.start}"
            raise errors.UserError(
                f"'{path}': expected a text file in UTF-8, got the byte {byte}"
            ) from error
        except OSError as error:
            raise errors.UserError(f"'{path}': {error.strerror}") from error
        self.texts.append(text)
        self._open.append(path)
        try:
            stream = io.StringIO(text)
            stream.name = path
            yield stream
        finally:
            self._open.pop()


class _Names(config_parser.ParserDelegate):
    """Collects what stands behind every `@`, without scopes, and `%`; comments are not parsed."""

    def __init__(self):
        self.found = set()

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        self.found.add(scoped_configurable_name.rpartition("/")[2])

    def macro(self, macro_name: str) -> None:
        self.found.add(macro_name)


def _said(content: str) -> config_check.Said:
    names = _Names()
    statements = list(config_parser.ConfigParser(content, names))
    bindings = [each for each in statements if isinstance(each, config_parser.BindingStatement)]
    return config_check.Said(names.found, {each.selector for each in bindings})


def _parse_binding(binding: str) -> None:
    source = f"binding '{binding.strip()}'"
    if "=" not in binding:
        raise errors.UserError(f"{source}: expected 'name.parameter = value'")
    try:
        try:
            gin.parse_config(binding)
        except ValueError as error:
            if "No configurable matching" not in str(error):
                raise
            # It names a part that no file has named yet.
            _register(binding)
            gin.parse_config(binding)
    except Exception as error:
        raise errors.UserError(config_errors.explain(error, source)) from error


def _register(binding: str) -> None:
    """Makes gin know the parts that a binding names, with or without their modules."""
    lines = ["from __gin__ import dynamic_registration"]
    subject = binding.partition("=")[0].strip().rpartition(".")[0]
    for name in {subject, *re.findall(r"@([\w./]+)", binding)} - {""}:
        for package, module, symbol in _candidates(name.rpartition("/")[2]):
            lines.append(f"from {package} import {module}" if package else f"import {module}")
            reference = f"{module}.{symbol}" if package else name
            lines.append(f"registered = @{reference}")
    kept = config_check.take()
    gin.parse_config("\n".join(lines))
    config_check.take()  # what was only said to have names registered
    config_check.put(kept)


def _candidates(name: str) -> list[tuple[str, str, str]]:
    """Returns `(package, module, symbol)` of what a name may mean; no package for foreign code."""
    module, _, symbol = name.rpartition(".")
    own = [
        (package, own_module, own_symbol)
        for package, own_module, own_symbol in config_names.symbols()
        if own_symbol == symbol and f".{package}.{own_module}".endswith(f".{module}".rstrip("."))
    ]
    if own or not module:
        return own
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(module):
            return [("", module, symbol)]
    return []


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Keeps gin quiet, which logs every folder in which it does not find a file, as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
