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
from typing import Any, NamedTuple

import gin
from podracers import errors
from podracers.training import config_check, config_names, config_values

Bindings = config_check.Bindings


def parse(
    gin_files: Sequence[str], gin_bindings: Sequence[str], root: Callable[..., Any]
) -> list[str]:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    Args:
      gin_files: paths, relative to the working directory, or of shipped files: relative to the
        repository, to its `gin` or to `gin/experiments`.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      root: the class whose parameters choose the parts of the experiment.

    Returns:
      A line for each value that one of the files takes from another one before it.

    Raises:
      errors.UserError: a file that is missing or does not parse, an unknown name, a binding that
        nothing uses, a macro or a parameter without a value, a value of the wrong type.
    """
    gin.clear_config()
    parsed, layers = [], []
    with _without_logging():
        for path in gin_files:
            parsed.append(_parse_file(path))
            layers.append(_take())
        for binding in gin_bindings:
            _parse_binding(binding)
    given = _take()
    _put(*layers, given)
    config_check.check(root, gin.config._CONFIG, given, parsed)
    return _overrides(gin_files, layers, given)


class State(NamedTuple):
    """What gin holds: it has no public way to set that aside."""

    bindings: Bindings
    used: Bindings  # the operative configuration
    imports: set[Any]


def snapshot() -> State:
    """Returns gin's state as it is now."""
    held = gin.config
    return State(_copy(held._CONFIG), _copy(held._OPERATIVE_CONFIG), set(held._IMPORTS))


@contextlib.contextmanager
def using(state: State) -> Iterator[None]:
    """Puts gin in an earlier state, for as long as the context lasts.

    gin's configuration is one for the whole process, and what it makes reads it when called: an
    experiment that was loaded first would otherwise be built from what was loaded last.

    Args:
      state: a snapshot; what is used meanwhile is added to it.
    """
    others = snapshot()
    _restore(state)
    try:
        yield
    finally:
        for key, parameters in gin.config._OPERATIVE_CONFIG.items():
            state.used.setdefault(key, {}).update(parameters)
        _restore(others)


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
        raise errors.UserError(errors.first_line(error)) from error


def _copy(bindings: Bindings) -> Bindings:
    return {key: dict(parameters) for key, parameters in bindings.items()}


def _restore(state: State) -> None:
    """Puts gin in a state; what stays the same is there for other threads all the time."""
    for held, wanted in (
        (gin.config._CONFIG, state.bindings),
        (gin.config._OPERATIVE_CONFIG, state.used),
    ):
        held.update(_copy(wanted))
        for key in held.keys() - wanted.keys():
            del held[key]
    gin.config._IMPORTS.update(state.imports)
    gin.config._IMPORTS.intersection_update(state.imports)


def _take() -> Bindings:
    """Returns gin's bindings, and removes them."""
    taken = _copy(gin.config._CONFIG)
    gin.config._CONFIG.clear()
    return taken


def _put(*layers: Bindings) -> None:
    """Gives bindings to gin; later layers win."""
    for layer in layers:
        for key, parameters in layer.items():
            gin.config._CONFIG.setdefault(key, {}).update(parameters)


def _parse_file(path: str) -> config_check.ParsedFile:
    """Parses a file, and returns what it and its includes say."""
    config_names.require_file(path)
    read = _Reader()
    # Lists that gin keeps for the whole process, and never clears.
    gin.config._LOCATION_PREFIXES[:] = config_names.FOLDERS
    gin.config._FILE_READERS[:] = [(read, os.path.isfile)]
    try:
        gin.parse_config_file(path)
    except Exception as error:
        raise config_names.explain(error, path) from error
    references, subjects = zip(*map(config_values.names, read.texts))
    return set().union(*references), set().union(*subjects)


class _Reader:
    """Opens files for gin: text in UTF-8, and no file from within itself.

    Attributes:
      texts: contents of the files that were read, includes among them.
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
            content = pathlib.Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            byte = f"0x{error.object[error.start]:02x} at {error.start}"
            raise errors.UserError(
                f"'{path}': expected a text file in UTF-8, got the byte {byte}"
            ) from error
        except OSError as error:
            raise errors.UserError(f"'{path}': {error.strerror}") from error
        self.texts.append(content)
        self._open.append(path)
        try:
            stream = io.StringIO(content)
            stream.name = path
            yield stream
        finally:
            self._open.pop()


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
            _register(binding)  # it names a part that no file has named yet
            gin.parse_config(binding)
    except Exception as error:
        raise config_names.explain(error, source) from error


def _register(binding: str) -> None:
    """Makes gin know the parts that a binding names, with or without their modules."""
    lines = ["from __gin__ import dynamic_registration"]
    subject = binding.partition("=")[0].strip().rpartition(".")[0]
    for scoped_name in {subject, *re.findall(r"@([\w./]+)", binding)} - {""}:
        name = scoped_name.rpartition("/")[2]
        module, _, symbol = name.rpartition(".")
        own = [
            (*path.rpartition("."), symbol)
            for path, symbols in config_names.parts().items()
            if symbol in symbols and (not module or f".{path}".endswith(f".{module}"))
        ]
        for package, _, own_module, _ in own:
            lines.append(f"from {package} import {own_module}")
            lines.append(f"registered = @{own_module}.{symbol}")
        with contextlib.suppress(ImportError, ValueError):
            if module and not own and importlib.util.find_spec(module):
                lines += [f"import {module}", f"registered = @{name}"]
    kept = _take()
    gin.parse_config("\n".join(lines))
    _take()  # what was only there to have names registered
    _put(kept)


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Keeps gin quiet, which logs every folder in which it does not find a file, as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _overrides(sources: Sequence[str], layers: Sequence[Bindings], given: Bindings) -> list[str]:
    """Returns a line for each value in use that one file takes from another one before it."""
    lines = []
    for key, name in [(key, name) for key, values in gin.config._CONFIG.items() for name in values]:
        found = [
            (s, layer[key][name]) for s, layer in zip(sources, layers) if name in layer.get(key, {})
        ]
        if len(found) < 2 or name in given.get(key, {}):
            continue
        (earlier, old), (later, new) = found[-2:]
        # To choose one of several that were offered replaces nothing.
        if new != old and not (isinstance(old, tuple) and new in old):
            scope, selector = key
            shown = scope
            if selector != config_check.MACRO:
                shown = "/".join(filter(None, (scope, f"{config_check.short(selector)}.{name}")))
            lines.append(f"{later} sets {shown} = {new!r} over {shown} = {old!r} of {earlier}")
    return lines
