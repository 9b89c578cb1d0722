"""Reads .gin files and bindings, and says in one line what is wrong with them.

gin is applied at one root, `podracers.training.experiment.Experiment`; library code never asks it
for anything. Files name what they use by Python's own names (`from agents import ppo`, then
`ppo.PPO.gamma`), so anything that can be imported can be configured. Bindings of the command line
may leave the module out (`PPO.gamma = 0.9`).

gin itself passes bindings that nothing uses, and values of any type. Its operative configuration
knows what was used once an update was traced; here it is said before anything is built.
"""

import contextlib
import graphlib
import importlib.util  # gin's own include statement needs it, and forgets to import it
import inspect
import io
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gin
from podracers import errors, runner
from podracers.training import config_names, config_types, config_values

_MACRO, _CONSTANT = "gin.macro", "gin.constant"

_Key = tuple[str, str]  # of gin's: scope and selector
# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[_Key, dict[str, Any]]
# What a file and its includes say: the names behind `@` and `%`, and the parts that they bind.
_Said = tuple[set[str], set[str]]


def parse(
    gin_files: Sequence[str], gin_bindings: Sequence[str], root: Callable[..., Any]
) -> list[str]:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    A later file may choose another runner, agent or environment: what earlier files said of the one
    that lost is no mistake, and is dropped. Nor is what a file says of other runners, if it names
    the one that runs, too: it is meant for all of them. What the command line says has to count.

    Args:
      gin_files: paths, relative to the working directory, or of shipped files: relative to the
        repository, to `gin` or to `gin/experiments`.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      root: the class whose parameters choose the parts of the experiment.

    Returns:
      A line for each value that one of the files takes from another one before it.

    Raises:
      errors.UserError: a file that is missing or does not parse, an unknown name, a binding that
        nothing uses, a macro or a parameter without a value, a value of the wrong type.
    """
    gin.clear_config()
    said, layers = [], []
    with _without_logging():
        for path in gin_files:
            said.append(_parse_file(path))
            layers.append(_take())
        for binding in gin_bindings:
            _parse_binding(binding)
    given = _take()
    _put(*layers, given)
    bound = gin.config._CONFIG
    _check_root(root, bound)
    _check_use(root, bound, given, said)
    _check_circles(bound)
    for (_, selector), values in bound.items():
        if selector != _MACRO:
            _check_values(selector, values, bound)
    return _overrides(gin_files, layers, given)


@contextlib.contextmanager
def using(bindings: Bindings) -> Iterator[None]:
    """Puts gin in the state of an earlier `snapshot`, for as long as the context lasts.

    gin's configuration is one for the whole process, and what it makes reads it when called: an
    experiment that was loaded first would otherwise be built from what was loaded last.

    Args:
      bindings: a snapshot.
    """
    others = _take()
    _put(bindings)
    try:
        yield
    finally:
        _take()
        _put(others)


def snapshot() -> Bindings:
    """Returns gin's bindings as they are now."""
    return {key: dict(parameters) for key, parameters in gin.config._CONFIG.items()}


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


def _take() -> Bindings:
    """Returns gin's bindings, and removes them; gin has no public way to do either."""
    taken = snapshot()
    gin.config._CONFIG.clear()
    return taken


def _put(*layers: Bindings) -> None:
    """Gives bindings to gin; later layers win."""
    for layer in layers:
        for key, parameters in layer.items():
            gin.config._CONFIG.setdefault(key, {}).update(parameters)


def _parse_file(path: str) -> _Said:
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
    _take()  # what was only said to have names registered
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
            if selector != _MACRO:
                shown = "/".join(filter(None, (scope, f"{_short(selector)}.{name}")))
            lines.append(f"{later} sets {shown} = {new!r} over {shown} = {old!r} of {earlier}")
    return lines


def _short(selector: str) -> str:
    return selector.rpartition(".")[2]


def _check_root(root: Callable[..., Any], bound: Bindings) -> None:
    values = bound.get(("", f"{root.__module__}.{root.__qualname__}"), {})
    missing = [
        f"{root.__name__}.{name}"
        for name, parameter in inspect.signature(root).parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in values
    ]
    if missing:
        raise errors.UserError(
            f"no value for {', '.join(missing)}: bind it in a .gin file or a binding"
        )


def _check_use(
    root: Callable[..., Any], bound: Bindings, given: Bindings, said: Sequence[_Said]
) -> None:
    """Refuses bindings that nothing uses and macros without a value; drops what was superseded."""
    used = {key for key in bound if key[1] == f"{root.__module__}.{root.__qualname__}"}
    waiting = [r for key in used for r in gin.config.iterate_references(bound[key])]
    references = []
    while waiting:
        references.append(waiting.pop())
        for key in {key for key in bound if _leads_to(references[-1], key)} - used:
            used.add(key)
            waiting.extend(gin.config.iterate_references(bound[key]))
    for key in [key for key in bound if key not in used]:
        if key in given or not _is_superseded(key, used, said):
            parameter = next(reversed(given.get(key, bound[key])))  # of the last to say so
            raise errors.UserError(_unused(key, parameter, references))
        del bound[key]
    macros = {scope for scope, selector in bound if selector == _MACRO}
    for reference in references:
        name, selector = reference.config_key
        if selector == _MACRO and name not in macros:
            raise errors.UserError(f"the macro %{name} has no value{errors.nearest(name, macros)}")


def _leads_to(reference: gin.config.ConfigurableReference, key: _Key) -> bool:
    """Returns whether a call of a reference reads the bindings of a key."""
    path, selector = reference.config_key
    if selector != key[1]:
        return False
    return path == key[0] or (
        selector != _MACRO and f"{path}/".startswith(f"{key[0]}/".lstrip("/"))
    )


def _is_superseded(key: _Key, used: set[_Key], said: Sequence[_Said]) -> bool:
    """Returns whether an unused binding belongs to what another choice has replaced."""
    scope, selector = key
    if selector == _MACRO:
        return any(scope in references for references, _ in said)
    if not _is_runner(selector):
        return any(_is_among(selector, references) for references, _ in said)
    runs = [other for _, other in used if _is_runner(other)]
    is_chosen_later = False
    for references, subjects in reversed(said):
        is_chosen_later |= any(_is_among(other, references) for other in runs)
        is_beside = any(_is_among(other, subjects) for other in runs)
        if _is_among(selector, subjects) and not (is_chosen_later or is_beside):
            return False
    return True


def _is_runner(selector: str) -> bool:
    part = gin.config._REGISTRY[selector].wrapped
    wanted = (name for name, value in vars(runner.Runner).items() if inspect.isfunction(value))
    return all(hasattr(part, name) for name in wanted)


def _is_among(selector: str, names: Iterable[str]) -> bool:
    """Returns whether one of the names, with modules or without, means a part."""
    return any(f".{selector}".endswith(f".{name}") for name in names)


def _unused(key: _Key, parameter: str, references: Iterable[Any]) -> str:
    """Returns what to say of a binding that changes nothing."""
    scope, selector = key
    configurables = {r.configurable.selector: r.configurable for r in references}
    parts = {_short(s): c for s, c in configurables.items() if s not in (_MACRO, _CONSTANT)}
    if selector == _MACRO:
        known = {"/".join(r.scopes) for r in references if r.configurable.selector == _MACRO}
        for name, configurable in parts.items():
            known |= {f"{name}.{each}" for each in config_names.parameters(configurable)}
        return f"nothing uses the macro '{scope}'{errors.nearest(scope, known)}"
    short = _short(selector)
    name = f"{short}.{parameter}"
    if scope:
        return f"nothing uses '{scope}/{name}': there is no '@{scope}/{short}'"
    return (
        f"nothing uses '{name}': this experiment has no {short}; it has {', '.join(sorted(parts))}"
    )


def _check_circles(bound: Bindings) -> None:
    """Refuses values that need themselves, which gin would resolve for ever."""
    needs = {
        (*key, name): {
            needed
            for reference in gin.config.iterate_references([value])
            if reference.evaluate
            for needed in _in_effect(reference, bound)
        }
        for key, parameters in bound.items()
        for name, value in parameters.items()
    }
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        circle = [
            f"%{scope}" if selector == _MACRO else f"{_short(selector)}.{name}"
            for scope, selector, name in reversed(error.args[1])
        ]
        raise errors.UserError(f"{circle[0]} needs itself: {' -> '.join(circle)}") from error


def _in_effect(reference: Any, bound: Bindings) -> Iterable[tuple[str, str, str]]:
    """Returns the bindings, `(scope, selector, parameter)`, that a call of a reference reads."""
    found = {}
    for key in sorted(bound, key=lambda key: len(key[0])):  # the innermost scope wins
        if _leads_to(reference, key):
            found |= {name: (*key, name) for name in bound[key]}
    return found.values()


def _check_values(selector: str, values: dict[str, Any], bound: Bindings) -> None:
    """Checks the values bound to one part: they are there, and of the annotated types."""
    hints = config_types.hints(gin.config._REGISTRY[selector].wrapped)
    for name, value in values.items():
        shown, hint = f"{_short(selector)}.{name}", hints.get(name, Any)
        literal = _resolved(value, bound)
        if literal is gin.REQUIRED:
            raise errors.UserError(f"no value for {shown}, which is required: bind it")
        if isinstance(literal, gin.config.ConfigurableReference):
            _check_reference(shown, literal, hint, bound)
        elif any(gin.config.iterate_references([literal])):
            continue  # what it becomes is not known yet
        elif fault := config_types.fault(literal, hint):
            raise errors.UserError(f"{shown}: {fault}")


def _check_reference(shown: str, reference: Any, hint: Any, bound: Bindings) -> None:
    """Refuses a part that is called where it must not be, or not called where it has to be."""
    part, written = reference.configurable.wrapped, repr(reference)
    given = {name for _, _, name in _in_effect(reference, bound)}
    uncalled, called = config_types.fits(part, hint), config_types.may_make(part, given, hint)
    if called if reference.evaluate else uncalled:
        return
    if called:
        raise errors.UserError(f"{shown}: write `{written}()`, with the parentheses")
    if uncalled:
        raise errors.UserError(
            f"{shown}: write `{written.removesuffix('()')}`, without the parentheses"
        )
    raise errors.UserError(f"{shown}: expected {config_types.name(hint)}, got {written}")


def _resolved(value: Any, bound: Bindings) -> Any:
    """Returns what a macro or constant stands for, and any other value as it is."""
    while isinstance(value, gin.config.ConfigurableReference):
        name, selector = value.config_key
        if selector not in (_MACRO, _CONSTANT):
            return value
        value = gin.query_parameter(name) if selector == _CONSTANT else bound[name, _MACRO]["value"]
    return value
