"""gin files and bindings: parsing, precedence, unused names, and one-line messages for mistakes.

gin is applied at one root, `podracers.training.experiment.Experiment`; library code never calls it.
Files use Python's own names (`from agents import ppo`, then `ppo.PPO.gamma`), so anything that can
be imported can be configured. Bindings of the command line may leave the module out
(`PPO.gamma = 0.9`).

gin only parses. Each part becomes a `functools.partial` of its options, so nothing depends on gin's
global state once a configuration is read. Precedence and unused bindings: docs/architecture.md,
"gin". Types are not checked here, but by the classes that take the options.
"""

import contextlib
import copy
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
from collections.abc import Iterator, Sequence
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
    "from agents import policy": "from agents.parts import actor_critic as policy",
    "from agents import exploration": "from agents.parts import exploration",
    "from agents import options": "from agents.parts import options",
    "from agents import replay": "from agents.replay import replay",
    "from agents import planning": "from agents.search import planning",
    "from agents import tree_search": "from agents.search import tree_search",
}
_MACRO, _CONSTANT = "gin.macro", "gin.constant"
LOCK = threading.RLock()  # guards gin's state, which all threads share

Key = tuple[str, str]  # gin's: scope and selector
# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[Key, dict[str, Any]]


class Texts(NamedTuple):
    """A configuration as .gin files that `Configuration` accepts."""

    bindings: str = ""  # bindings that are used
    operative: str = ""  # every parameter of a configured part, defaults included


class Configuration:
    """The bindings of files, in order, and then those of a command line. The caller holds `LOCK`.

    Files are found by `gin_names.find`. Bindings are `"name.parameter = value"` or
    `"MACRO = value"`. The parameters of the class `root` choose the parts of the experiment.

    Raises:
      errors.UserError: a missing or malformed file, or an unknown name.
    """

    def __init__(self, gin_files: Sequence[str], gin_bindings: Sequence[str], root: type):
        gin.clear_config()
        gin.enter_interactive_mode()  # it accepts another class of the same name
        self._root = "", f"{root.__module__}.{root.__qualname__}"
        # Parts and macros to which files refer, also in values that others replace.
        self._mentioned: set[str] = set()
        for path in gin_files:
            self._parse_file(path)
        self._bound: Bindings = gin.config._CONFIG
        self._overrides: Bindings = {}  # the command line binds them
        gin.config._CONFIG = self._overrides
        for binding in gin_bindings:
            _parse_binding(binding)
        gin.config._CONFIG = self._bound
        for key, values in self._overrides.items():
            self._bound.setdefault(key, {}).update(values)
        if self._root not in self._bound:
            name = root.__name__
            raise errors.UserError(
                f"nothing binds {name}: name a file such as those in gin/experiments"
            )

    def make(self) -> Any:
        """Returns the root.

        Raises:
          errors.UserError: a macro without a value, a part that needs itself, or a part whose
            constructor fails.
        """
        self._used: dict[Key, set[str]] = {}
        self._operative: Bindings = {}
        with user_errors(_short(self._root[1])):
            return self._part(self._root[1], (), ())()

    def choose(self, parameter: str, index: int) -> None:
        """Binds a parameter of the root to one of the values of its tuple."""
        bound, name = self._bound[self._root], parameter
        while isinstance(reference := bound[name], gin.config.ConfigurableReference):
            bound, name = self._bound[reference.config_key], "value"  # a macro
        bound[name] = bound[name][index]

    def texts(self) -> Texts:
        """Returns the configuration of the root that `make` has made.

        A binding that nothing uses is dropped if it is one of a file, and files refer to its part
        or macro: another choice has replaced it.

        Raises:
          errors.UserError: another binding that nothing uses.
        """
        for key in sorted(self._bound):
            scope, selector = key
            name = scope if selector == _MACRO else _scoped(scope, selector)
            unused = self._bound[key].keys() - self._used.get(key, ())
            refused = (
                unused if name not in self._mentioned else unused & {*self._overrides.get(key, ())}
            )
            if refused:
                parts = {selector for _, selector in self._operative} - {_MACRO}
                if selector == _MACRO:
                    names = {scope for scope, selector in self._operative if selector == _MACRO}
                    names |= {f"{_short(p)}.{name}" for p in parts for name in _parameters(p)}
                    near = errors.nearest(scope, names)
                    raise errors.UserError(f"nothing uses the macro '{scope}'{near}")
                raise errors.UserError(
                    f"nothing uses '{name}.{min(refused)}': this experiment has no {name}; it has "
                    + ", ".join(sorted(map(_short, parts)))
                )
            for parameter in unused:
                del self._bound[key][parameter]
            if not self._bound[key]:
                del self._bound[key]
        gin.config._OPERATIVE_CONFIG = self._operative
        return Texts(gin.config_str(), gin.operative_config_str())

    def _value(self, value: Any, scope: tuple[str, ...], calls: tuple[str, ...]) -> Any:
        """Returns a bound value in which references are replaced by their parts.

        References without a scope of their own are read in `scope`; the references `calls` lead
        here.
        """
        if isinstance(value, dict):
            items = value.items()
            return {self._value(k, scope, calls): self._value(v, scope, calls) for k, v in items}
        if isinstance(value, list | tuple):
            return type(value)(self._value(item, scope, calls) for item in value)
        if not isinstance(value, gin.config.ConfigurableReference):
            return value
        return self._referred(value, scope, calls)

    def _referred(self, reference: Any, scope: tuple[str, ...], calls: tuple[str, ...]) -> Any:
        """Returns the value of a macro, or a part, which is called if the reference has `()`."""
        name, selector = reference.config_key
        if selector == _CONSTANT:
            return copy.deepcopy(reference)
        shown = f"%{name}" if selector == _MACRO else f"@{_scoped(name, selector)}()"
        if shown in calls:
            circle = " -> ".join([*calls[calls.index(shown) :], shown])
            raise errors.UserError(f"{shown} needs itself: {circle}")
        calls = *calls, shown
        if selector == _MACRO:
            if reference.config_key not in self._bound:
                macros = {name for name, selector in self._bound if selector == _MACRO}
                raise errors.UserError(
                    f"the macro %{name} has no value{errors.nearest(name, macros)}"
                )
            self._used[reference.config_key] = {"value"}
            self._operative[reference.config_key] = self._bound[reference.config_key]
            return self._value(self._bound[reference.config_key]["value"], scope, calls)
        part = self._part(selector, tuple(name.split("/")) if name else scope, calls)
        if not reference.evaluate:
            return part
        with user_errors(shown, f"; bind it, or write `{shown[:-2]}`, without parentheses"):
            return part()

    def _part(
        self, selector: str, scope: tuple[str, ...], calls: tuple[str, ...]
    ) -> functools.partial[Any]:
        """Returns a class or a function with its options, those of its base classes included."""
        function: Any = gin.config._REGISTRY[selector].wrapped
        scopes = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        keys = [(outer, base) for outer in scopes for base in _lineage(function, selector)]
        keys = [key for key in keys if key in self._bound]
        takes = functools.partial(gin.config._might_have_parameter, function)
        # The last one wins.
        read = {name: key for key in keys for name in filter(takes, self._bound[key])}
        for key in keys:
            of_part = key[1] == selector
            names = {name for name in self._bound[key] if of_part or read.get(name) == key}
            self._used.setdefault(key, set()).update(names)
        bound = {name: self._bound[key][name] for name, key in read.items()}
        defaults = gin.config._get_default_configurable_parameter_values(function, None, None)
        self._operative[scopes[-1], selector] = defaults | bound
        options = {name: self._value(value, scope, calls) for name, value in bound.items()}
        part = functools.partial(function, **options)
        functools.update_wrapper(part, function, updated=())
        return part

    def _parse_file(self, path: str) -> None:
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
            references = re.findall(r"[@%]([\w./]+)", re.sub("#.*", "", text))
            self._mentioned.update(_short(name) for name in references)
            stream = io.StringIO(text)
            stream.name = path
            open_files.append(path)
            yield stream
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


def _lineage(function: Any, selector: str) -> list[str]:
    """Returns the selectors of a part's base classes, the farthest first, and its own."""
    names = {}
    for name, known in gin.config._REGISTRY.items():
        names.setdefault((known.wrapped.__module__, known.wrapped.__qualname__), []).append(name)
    bases = getattr(function, "__mro__", ())[:0:-1]
    selectors = (names.get((base.__module__, base.__qualname__), ()) for base in bases)
    return [*itertools.chain(*selectors), selector]


@contextlib.contextmanager
def user_errors(name: str, hint: str = "") -> Iterator[None]:
    """Turns errors of the constructor of `name` into one-line `UserError`s.

    `hint` ends the message on missing arguments.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, errors.UserError):
            raise
        message = f"{name}: {errors.first_line(error)}"
        if isinstance(error, TypeError) and " missing " in message:
            message += hint
        raise errors.UserError(message) from error


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
        known = [
            path.rpartition(".")
            for path, symbols in gin_names.parts().items()
            if symbol in symbols and (not module or f".{path}".endswith(f".{module}"))
        ]
        for package, _, name_of_module in known:
            lines.append(f"from {package} import {name_of_module}")
            lines.append(f"registered = @{name_of_module}.{symbol}")
        with contextlib.suppress(ImportError, ValueError):
            if module and not known and (module in sys.modules or importlib.util.find_spec(module)):
                lines += [f"import {module}", f"registered = @{name}"]
    gin.parse_config("\n".join(lines))
    gin.config._CONFIG.pop(("registered", _MACRO), None)


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
        if match := re.search(pattern, cause):
            cause = cause[: match.end()] + nearest(*match.groups())
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


class _Names(config_parser.ParserDelegate):
    """Keeps the names in values, of which nothing is imported."""

    def __init__(self):
        self.parts: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        self.parts.append(scoped_configurable_name.rpartition("/")[2])
        return _Reference(_short(scoped_configurable_name) + "()" * evaluate)

    def macro(self, macro_name: str) -> Any:
        return _Macro(macro_name)


class Contents(NamedTuple):
    """Contents of one .gin file, without those of the files that it includes."""

    values: dict[str, Any]  # keys are parameters, such as `PPO.gamma`; macros are resolved
    # Imports, includes, and references such as `@run_directory.os.remove()`, that lead out of the
    # public parts of this project.
    other_code: list[str]


def read(text: str, source: str) -> Contents:
    """Reads a .gin file; nothing is imported, so the modules of a run may be missing here.

    Raises:
      errors.UserError: the text is no .gin file; the message names it `source`.
    """
    names, bound, modules, others = _Names(), {}, {}, []
    try:
        statements = list(config_parser.ConfigParser(text, names))
    except Exception as error:
        raise explained(error, source) from error
    for statement in statements:
        if isinstance(statement, config_parser.BindingStatement):
            name = _scoped(statement.scope, statement.selector)
            bound[f"{name}.{statement.arg_name}".rstrip(".")] = statement.value
        elif isinstance(statement, config_parser.IncludeStatement):
            others.append(statement.filename)
        elif isinstance(statement, config_parser.ImportStatement):
            if statement.is_from or statement.alias:
                modules[statement.bound_name()] = statement.module
            if not gin_names.is_own(statement.module):
                others.append(statement.module)
    for name in names.parts:
        first, _, rest = name.partition(".")
        module, _, part = f"{modules.get(first, first)}.{rest}".rpartition(".")
        if gin_names.is_own(module) and part not in gin_names.parts().get(module, ()):
            others.append(f"@{name}")

    def resolve(value: Any) -> Any:
        if isinstance(value, _Macro):
            return resolve(bound[value.name]) if value.name in bound else value
        if isinstance(value, dict):
            return {resolve(key): resolve(item) for key, item in value.items()}
        return type(value)(map(resolve, value)) if type(value) in (list, tuple) else value

    values = {name: resolve(value) for name, value in bound.items() if "." in name}
    return Contents(values, others)
