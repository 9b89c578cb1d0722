"""gin files and bindings: parsing, precedence, unused names, and one-line messages for mistakes.

gin is applied at one root, `podracers.training.experiment.Experiment`; library code never calls it.
Files use Python's own names (`from agents import ppo`, then `ppo.PPO.gamma`), so anything that can
be imported can be configured. Bindings of the command line may leave the module out
(`PPO.gamma = 0.9`).

Precedence and unused bindings: docs/architecture.md, "gin". Types are not checked here, but by the
classes that take the options.
"""

import contextlib
import dataclasses
import functools
import importlib.util  # gin's include statement needs it without importing it
import inspect
import io
import itertools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gin
from gin import config_parser
from podracers import errors
from podracers.training import gin_names

# Text of earlier configurations, in this order, and its form today.
_MOVED = {
    "training import weights_and_biases as ": "training import loggers as ",
    "training import weights_and_biases": "training import loggers as weights_and_biases",
    "@cores.FeedForward()": "None",
}
_MACRO, _CONSTANT = "gin.macro", "gin.constant"
_LOCK = threading.RLock()  # guards gin's state, which all threads share
_PATIENCE = 10.0  # seconds in which another thread loads an experiment

Key = tuple[str, str]  # gin's: scope and selector
# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[Key, dict[str, Any]]


def parse(gin_files: Sequence[str], gin_bindings: Sequence[str], root: type) -> None:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    Args:
      gin_files: paths, relative to the working directory, or of shipped files: relative to the
        repository, to its `gin` or to `gin/experiments`.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they override the files.
      root: the class whose parameters choose the parts of the experiment.

    Raises:
      errors.UserError: a missing or malformed file, an unknown name, an unused binding, a macro
        without a value or that needs itself, or a parameter of the root without a value.
    """
    _install(State(_Config(), {}, set()))
    gin.clear_config()
    gin.enter_interactive_mode()  # it accepts another class of the same name
    layers: list[Bindings] = []
    given: Bindings = {}
    for path in gin_files:
        _parse_file(path, layers)
    with using(State(given, {}, gin.config._IMPORTS)):
        for binding in gin_bindings:
            _parse_binding(binding)
    for key, values in given.items():
        gin.config._CONFIG.setdefault(key, {}).update(values)
    key = "", f"{root.__module__}.{root.__qualname__}"
    if key not in gin.config._CONFIG:
        name = root.__name__
        raise errors.UserError(
            f"nothing binds {name}: name a file such as those in gin/experiments"
        )
    _drop_replaced(key, [*layers, given], given)


class _Config(dict[Key, dict[str, Any]]):
    """gin's bindings; each class also gets those of its base classes."""

    def get(self, key: Key, default: Any = None) -> Any:
        """Returns the values that gin passes to a part of a scope."""
        values = {}
        for selector in _lineage(key[1]):
            bound = super().get((key[0], selector), {})
            values |= {name: bound[name] for name in bound if _takes(key[1], name)}
        return values or default


def _lineage(selector: str) -> list[str]:
    """Returns the selectors of a part's base classes, the farthest first, and its own."""
    bases = getattr(gin.config._REGISTRY[selector].wrapped, "__mro__", ())[:0:-1]
    return [*(name for base in bases for name in names_of(base)), selector]


def _takes(selector: str, name: str) -> bool:
    return gin.config._might_have_parameter(gin.config._REGISTRY[selector].wrapped, name)


class State(NamedTuple):
    """gin's global state, for which gin has no public function."""

    bindings: Bindings
    used: Bindings  # the operative configuration
    imports: set[Any]


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Reserves gin's state for this thread, and for those that it starts, within the context.

    Raises:
      errors.UserError: another thread has it for longer than it takes to load an experiment.
    """
    if not _LOCK.acquire(timeout=_PATIENCE):
        raise errors.UserError(
            "another thread of this process trains or builds an experiment: gin has one "
            "configuration for all threads, so wait for its end, or use a process of its own"
        )
    try:
        yield
    finally:
        _LOCK.release()


def snapshot() -> State:
    """Returns a copy of gin's state."""
    with exclusive():
        bindings, used = (
            {key: dict(parameters) for key, parameters in each.items()}
            for each in (gin.config._CONFIG, gin.config._OPERATIVE_CONFIG)
        )
        return State(_Config(bindings), used, set(gin.config._IMPORTS))


def _install(state: State) -> State:
    """Replaces gin's state, and returns the earlier one."""
    earlier = State(gin.config._CONFIG, gin.config._OPERATIVE_CONFIG, gin.config._IMPORTS)
    gin.config._CONFIG, gin.config._OPERATIVE_CONFIG, gin.config._IMPORTS = state
    return earlier


@contextlib.contextmanager
def using(state: State) -> Iterator[None]:
    """Puts gin into an earlier state within the context.

    gin's configuration is global, and gin's classes read it when they are called: without this, an
    experiment that was loaded first would be built from the configuration that was loaded last.
    Parameters that are used within the context are added to the state.
    """
    with exclusive():
        earlier = _install(state)
        try:
            yield
        finally:
            _install(earlier)


def fixed(part: Any, state: State) -> Any:
    """Returns a dataclass whose options call gin's functions with the bindings of a state.

    So an agent may make its network at any time, and again for each member of a population.
    """

    def fix(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            # The threads of a run find its state in place: another thread holds the lock for them.
            is_installed = gin.config._CONFIG is state.bindings
            with contextlib.nullcontext() if is_installed else using(state):
                return function(*arguments, **named)

        return call

    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    options = {field.name: getattr(part, field.name) for field in fields}
    fixes = {name: fix(x) for name, x in options.items() if errors.is_function(x) and names_of(x)}
    return dataclasses.replace(part, **fixes) if fixes else part


configurable = gin.get_configurable  # a class as gin calls it: with the bindings in effect
text = gin.config_str  # the configuration as a .gin file that `parse` accepts
operative_text = gin.operative_config_str  # every parameter that was used, defaults included


def names_of(part: Callable[..., Any]) -> list[str]:
    """Returns gin's selectors of a class or a function; none if gin has not registered it."""
    key = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    # Equal for a class and gin's subclass of it.
    return [
        name
        for name, known in gin.config._REGISTRY.items()
        if (known.wrapped.__module__, known.wrapped.__qualname__) == key
    ]


def refuse_supplied() -> None:
    """Raises `errors.UserError` for a binding of an argument that every caller of its part passes.

    gin's operative configuration has the parameters of each called part, without those that its
    callers passed. Parts that have not been called yet are not checked.
    """
    for (scope, selector), values in gin.config._CONFIG.items():
        calls = [
            parameters
            for (called_in, called), parameters in gin.config._OPERATIVE_CONFIG.items()
            # Bindings of a scope have an effect in the scopes within it.
            if selector in _lineage(called) and f"{called_in}/".startswith(f"{scope}/".lstrip("/"))
        ]
        for name in values if calls else ():
            if not any(name in parameters for parameters in calls):
                raise errors.UserError(
                    f"nothing uses '{_scoped(scope, selector)}.{name}': the caller of {selector} "
                    "passes this argument"
                )


@contextlib.contextmanager
def user_errors(name: str) -> Iterator[None]:
    """Turns errors of the constructor of `name`, which gin calls, into one-line `UserError`s."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(errors.first_line(error)) from error  # gin appends lines
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"{name}: {errors.first_line(error)}"
        # gin appends the configurable that it called.
        if isinstance(error, TypeError) and " missing " in message and "\n" in str(error):
            message += "; bind it, or write `@module.Name`, without parentheses"
        raise errors.UserError(message) from error


def _parse_file(path: str, layers: list[Bindings]) -> None:
    """Parses a file, and appends the bindings before and after each of its includes."""
    open_files: list[str] = []

    @contextlib.contextmanager
    def read(path: str) -> Iterator[io.StringIO]:
        # gin leaves this context once the file and its includes are parsed.
        path = gin_names.find(path)
        if any(os.path.samefile(path, other) for other in open_files):
            circle = " -> ".join([*open_files, path])
            raise errors.UserError(f"files include one another in a circle: {circle}")
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
        for earlier, now in _MOVED.items():
            text = text.replace(earlier, now)
        stream = io.StringIO(text)
        stream.name = path
        open_files.append(path)
        layers.append(snapshot().bindings)
        yield stream
        layers.append(snapshot().bindings)
        open_files.pop()

    # Lists that gin keeps for the whole process.
    gin.config._LOCATION_PREFIXES[:] = [""]
    readers: list[Any] = gin.config._FILE_READERS
    readers[:] = [(read, gin_names.find)]
    path = gin_names.find(path)
    try:
        gin.parse_config_file(path)
    except Exception as error:
        raise explained(error, path) from error


def _parse_binding(binding: str) -> None:
    source = f"binding '{binding.strip()}'"
    if "=" not in binding:
        raise errors.UserError(f"{source}: expected 'name.parameter = value', in quotes")
    try:
        if "__main__." in binding:
            _register(binding)  # again: a cell of a notebook may have defined the class anew
        try:
            gin.parse_config(binding)
        except ValueError as error:
            if "No configurable matching" not in str(error):
                raise
            _register(binding)  # the binding names a part that no file has named
            gin.parse_config(binding)
    except Exception as error:
        raise explained(error, source) from error


def _register(binding: str) -> None:
    """Registers the parts that a binding names, with or without their modules."""
    lines = ["from __gin__ import dynamic_registration"]
    subject = binding.partition("=")[0].strip().rpartition(".")[0]
    for scoped_name in {subject, *re.findall(r"@([\w./]+)", binding)} - {""}:
        name = scoped_name.rpartition("/")[2]
        module, _, symbol = name.rpartition(".")
        own = [
            path.rpartition(".")
            for path, symbols in gin_names.parts().items()
            if symbol in symbols and (not module or f".{path}".endswith(f".{module}"))
        ]
        for package, _, own_module in own:
            lines.append(f"from {package} import {own_module}")
            lines.append(f"registered = @{own_module}.{symbol}")
        with contextlib.suppress(ImportError, ValueError):
            if module and not own and (module in sys.modules or importlib.util.find_spec(module)):
                lines += [f"import {module}", f"registered = @{name}"]
    with using(State({}, {}, gin.config._IMPORTS)):  # a state without the macro `registered`
        gin.parse_config("\n".join(lines))


def _drop_replaced(root: Key, layers: Sequence[Bindings], given: Bindings) -> None:
    """Drops bindings of replaced choices, see `parse`; refuses others that nothing uses.

    A binding of a file is dropped if the experiment would use it with a value that another binding
    has replaced, or if it is an option of another runner. Bindings of the command line have to be
    used, and macros need a value.
    """
    bound = gin.config._CONFIG
    used, references = _used(root, bound)
    every: Bindings = {}  # all values that a parameter was given
    for layer in layers:
        for key, values in layer.items():
            for name, value in values.items():
                every.setdefault(key, {}).setdefault(name, []).append(value)
    known, _ = _used(root, every, is_final=False)

    def is_runner(key: Key) -> bool:
        return not key[0] and hasattr(gin.config._REGISTRY[key[1]].wrapped, "steps_per_update")

    for key in sorted(bound):
        scope, selector = key
        unused = [name for name in bound[key] if name not in used.get(key, ())]
        part = _scoped(scope, selector)
        refused = given.get(key, {}) if key in known or is_runner(key) else unused
        if refused := [name for name in refused if name in unused]:
            parts = {s for _, s in references if s not in (_MACRO, _CONSTANT)}
            if selector == _MACRO:
                names = {name for name, s in references if s == _MACRO}
                names |= {f"{_short(p)}.{name}" for p in parts for name in _parameters(p)}
                near = errors.nearest(scope, names)
                raise errors.UserError(f"nothing uses the macro '{scope}'{near}")
            raise errors.UserError(
                f"nothing uses '{part}.{refused[-1]}': this experiment has no {part}; it has "
                + ", ".join(sorted(map(_short, parts)))
            )
        for name in unused:
            del bound[key][name]
        if not bound[key]:
            del bound[key]
    macros = {scope for scope, selector in bound if selector == _MACRO}
    for name, selector in references:
        if selector == _MACRO and name not in macros:
            raise errors.UserError(f"the macro %{name} has no value{errors.nearest(name, macros)}")


def _used(
    root: Key, bound: Bindings, is_final: bool = True
) -> tuple[dict[Key, set[str]], list[Key]]:
    """Returns the parameters that building the root reads, by key, and references that lead there.

    Args:
      root: the class that is built.
      bound: values by key and parameter.
      is_final: they are those in effect, and a circle is refused; False: they are lists of all
        values that a parameter was given.
    """
    used, references = {root: set(bound[root])}, {}

    def follow(values: Any, calls: tuple[str, ...]) -> None:
        for reference in gin.config.iterate_references(values):
            scope, selector = reference.config_key
            shown = f"%{scope}" if selector == _MACRO else f"@{_scoped(scope, selector)}()"
            if is_final and reference.evaluate and shown in calls:
                circle = [*calls[calls.index(shown) :], shown]
                raise errors.UserError(f"{shown} needs itself: {' -> '.join(circle)}")
            node = (scope, selector), reference.evaluate
            if node in references:
                continue
            references[node] = None
            outer = itertools.accumulate(scope.split("/"), "{}/{}".format)
            scopes = [scope] if selector == _MACRO else dict.fromkeys(["", *outer])
            keys = [key for key in itertools.product(scopes, _lineage(selector)) if key in bound]
            # The last one wins.
            read = {name: key for key in keys for name in bound[key] if _takes(selector, name)}
            for key in keys:
                names = {name for name in bound[key] if selector == key[1] or read.get(name) == key}
                used.setdefault(key, set()).update(names)
            values = [bound[key][name] for name, key in read.items()]
            follow(
                values if is_final else [bound[key] for key in keys],
                (*calls, shown) if reference.evaluate else (),
            )

    follow(list(bound[root].values()), ())
    return used, [key for key, _ in references]


def _short(selector: str) -> str:
    """Returns the name of a part without its modules."""
    scope, slash, name = selector.rpartition("/")
    return scope + slash + name.rpartition(".")[2]


def _scoped(scope: str, selector: str) -> str:
    return _short(f"{scope}/{selector}").lstrip("/")


def _parameters(selector: str) -> list[str]:
    """Returns the names of the public parameters of a part (none of some built-in ones)."""
    known: Any = gin.config._REGISTRY.get_match(selector)
    try:
        names = inspect.signature(known.wrapped).parameters
        return [name for name in names if not name.startswith("_")]
    except ValueError:
        return []


def explained(error: Exception, source: str) -> errors.UserError:
    """Returns a `UserError` with the place, the cause and the nearest names of a parser's error."""
    # gin appends places to the text, innermost file first.
    place = re.search(r'In file "([^"]+)", line (\d+)', str(error))
    where = f"{place[1]}:{place[2]}" if place else source
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    cause = re.sub(r"\s*\([^()]*line \d+\)$", "", errors.first_line(error)).rstrip(".")
    if token := re.search(r"Failed to parse token '.*'", str(error)):
        cause = f"{token[0]} (a string needs quotes)"
    for pattern, nearest in _NEAREST:
        if found := re.search(pattern, cause):
            cause = cause[: found.end()] + nearest(*found.groups())
            break
    return errors.UserError(f"{where}: {cause}")


# Patterns of gin's messages, up to the place for the names nearest to the one that is unknown.
_NEAREST = (
    (r"resolve selector ([\w.]+)", gin_names.nearest_part),
    (r"No configurable matching(?: reference)? '@?([\w.]+?)(?:\(\))?'", gin_names.nearest_part),
    (
        r"'([\w./]+)' doesn't have a parameter named '(\w+)'",
        lambda part, name: errors.nearest(name, _parameters(part)),
    ),
    (r"No module named '([\w.]+)'", gin_names.nearest_module),
    (r"cannot import name .*", gin_names.hiding),
)


class _Reference(str):
    """Name of a part: `PPO` for `@ppo.PPO`, `CNN()` for `@encoders.CNN()`."""

    __slots__ = ()
    __repr__ = str.__str__  # used inside the repr of tuples


class _Macro(NamedTuple):
    name: str


class _Values(config_parser.ParserDelegate):
    """Values of a text, of whose names nothing is imported; `names` are those of references."""

    def __init__(self):
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        self.names.append(scoped_configurable_name.rpartition("/")[2])
        return _Reference(_short(scoped_configurable_name) + "()" * evaluate)

    def macro(self, macro_name: str) -> Any:
        return _Macro(macro_name)


def read(text: str, source: str) -> dict[str, Any]:
    """Returns parameters by class, such as `PPO.gamma`, with the values of their macros.

    Nothing is imported, so the modules of a run may be missing here. Included files are not read.

    Raises:
      errors.UserError: the text is no .gin file; the message names it `source`.
    """
    macros, values = {}, {}
    for statement in _statements(text, source, _Values()):
        if not isinstance(statement, config_parser.BindingStatement):
            continue
        name = _scoped(statement.scope, statement.selector)
        if statement.arg_name:
            values[f"{name}.{statement.arg_name}"] = statement.value
        else:
            macros[name] = statement.value

    def resolve(value: Any) -> Any:
        if isinstance(value, _Macro):
            return resolve(macros[value.name]) if value.name in macros else value
        if isinstance(value, dict):
            return {resolve(key): resolve(each) for key, each in value.items()}
        return type(value)(map(resolve, value)) if type(value) in (list, tuple) else value

    return {name: resolve(value) for name, value in values.items()}


def _statements(text: str, source: str, values: _Values) -> list[Any]:
    try:
        return list(config_parser.ConfigParser(text, values))
    except Exception as error:
        raise explained(error, source) from error


def other_code(text: str, source: str) -> list[str]:
    """Returns what a .gin file names beyond the public parts of this project, as `read`.

    These are imports, includes, and references such as `@run_directory.os.remove()`.
    """
    values, found, bound = _Values(), [], {}
    for statement in _statements(text, source, values):
        if isinstance(statement, config_parser.IncludeStatement):
            found.append(statement.filename)
        elif isinstance(statement, config_parser.ImportStatement):
            if statement.is_from or statement.alias:
                bound[statement.bound_name()] = statement.module
            if not gin_names.is_own(statement.module):
                found.append(statement.module)
    for name in values.names:
        first, _, rest = name.partition(".")
        module, _, part = f"{bound.get(first, first)}.{rest}".rpartition(".")
        if gin_names.is_own(module) and part not in gin_names.parts().get(module, ()):
            found.append(f"@{name}")
    return found
