"""gin files and bindings: parsing, precedence, unused names, and one-line messages for mistakes.

gin is applied at one root, `podracers.training.experiment.Experiment`; library code never calls it.
Files use Python's own names (`from agents import ppo`, then `ppo.PPO.gamma`), so anything that can
be imported can be configured. Bindings of the command line may leave the module out
(`PPO.gamma = 0.9`).

Precedence: later files win over earlier ones, and bindings win over files. Bindings that only a
replaced choice would use are dropped. Any other binding that nothing uses is an error. Types are
not checked here, but by the classes that take the options.
"""

import ast
import contextlib
import functools
import importlib.util  # gin's include statement needs it without importing it
import inspect
import io
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import gin
from gin import config_parser
from podracers import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "podracers"  # holds `gin`, in a checkout and where the project is installed
# Folders that are searched for gin files, in this order.
FOLDERS = ("", *map(str, (SHIPPED, SHIPPED / "gin", SHIPPED / "gin" / "experiments", ROOT)))
PACKAGES = ("agents", "environments", "podracers")
_MACRO, _CONSTANT = "gin.macro", "gin.constant"

Key = tuple[str, str]  # gin's: scope and selector
# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[Key, dict[str, Any]]


def parse(gin_files: Sequence[str], gin_bindings: Sequence[str], root: type) -> None:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    Args:
      gin_files: paths, relative to the working directory, or of shipped files: relative to the
        repository, to its `gin` or to `gin/experiments`.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      root: the class whose parameters choose the parts of the experiment.

    Raises:
      errors.UserError: a missing or malformed file, an unknown name, an unused binding, a macro
        without a value or that needs itself, or a parameter of the root without a value.
    """
    _install(State({}, {}, set()))
    gin.clear_config()
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


class State(NamedTuple):
    """gin's global state, for which gin has no public function."""

    bindings: Bindings
    used: Bindings  # the operative configuration
    imports: set[Any]


def snapshot() -> State:
    """Returns a copy of gin's state."""
    bindings, used = (
        {key: dict(parameters) for key, parameters in each.items()}
        for each in (gin.config._CONFIG, gin.config._OPERATIVE_CONFIG)
    )
    return State(bindings, used, set(gin.config._IMPORTS))


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

    Args:
      state: a snapshot; parameters that are used within the context are added to it.
    """
    earlier = _install(state)
    try:
        yield
    finally:
        _install(earlier)


text = gin.config_str  # the configuration as a .gin file that `parse` accepts
operative_text = gin.operative_config_str  # every parameter that was used, defaults included


def name_of(part: Callable[..., Any]) -> str | None:
    """Returns gin's selector of a class or a function; None if gin has not registered it."""
    key = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    for name, known in gin.config._REGISTRY.items():
        # Equal for a class and gin's subclass of it.
        if (known.wrapped.__module__, known.wrapped.__qualname__) == key:
            return name
    return None


def refuse_supplied() -> None:
    """Raises `errors.UserError` for a binding of an argument that every caller of its part passes.

    gin's operative configuration has the parameters of each called part, without those that its
    callers passed. Parts that have not been called yet are not checked.
    """
    for (scope, selector), values in gin.config._CONFIG.items():
        calls = [
            parameters
            for (called_in, called), parameters in gin.config._OPERATIVE_CONFIG.items()
            if called == selector and _is_within(called_in, scope)
        ]
        for name in values if calls else ():
            if not any(name in parameters for parameters in calls):
                part = "/".join(filter(None, (scope, _short(selector))))
                raise errors.UserError(
                    f"nothing uses '{part}.{name}': the caller of {selector} passes this argument"
                )


@contextlib.contextmanager
def user_errors(name: str) -> Iterator[None]:
    """Turns errors of a constructor that gin calls into `errors.UserError`, in one line.

    Args:
      name: name of the part that is built, for messages that do not name an option.
    """
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(errors.first_line(error)) from error  # gin appends lines
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"{name}: {errors.first_line(error)}"
        # gin appends the configurable that it called.
        if isinstance(error, TypeError) and " missing " in message and "\n" in str(error):
            message += "; bind it, or write the reference without parentheses (`@module.Name`)"
        raise errors.UserError(message) from error


def find(path: str) -> str:
    """Returns where a gin file is; raises `errors.UserError` with the nearest names."""
    for folder in FOLDERS:
        if os.path.isfile(found := os.path.join(folder, path)):
            return found
    # `name` and `experiments/name` are compared with the names that they could stand for.
    prefix = {0: "gin/experiments/", 1: "gin/"}.get(path.count("/"), "")
    files = (file.relative_to(SHIPPED).as_posix() for file in SHIPPED.glob("gin/**/*.gin"))
    near = errors.nearest(path, {file.removeprefix(prefix) for file in files})
    raise errors.UserError(f"there is no gin file '{path}'{near}")


def bound_names(paths: Iterable[str]) -> set[str]:
    """Returns the macros (`SEED`) and parameters (`PPO.gamma`) of .gin files and their includes."""
    names = set()
    for path in paths:
        text = pathlib.Path(find(path)).read_text("utf-8-sig", "replace")
        bound = re.findall(r"^([\w./]+) *=|%(\w+)", text, re.MULTILINE)
        names |= {".".join("".join(pair).split(".")[-2:]) for pair in bound}
        names |= bound_names(re.findall(r"^include ['\"](.+?)['\"]", text, re.MULTILINE))
    return names


def _parse_file(path: str, layers: list[Bindings]) -> None:
    """Parses a file, and appends the bindings before and after each of its includes."""
    open_files: list[str] = []

    @contextlib.contextmanager
    def read(path: str) -> Iterator[io.StringIO]:
        # gin leaves this context once the file and its includes are parsed.
        path = find(path)
        if any(os.path.samefile(path, other) for other in open_files):
            circle = " -> ".join([*open_files, path])
            raise errors.UserError(f"files include one another in a circle: {circle}")
        stream = io.StringIO(pathlib.Path(path).read_text(encoding="utf-8-sig"))
        stream.name = path
        open_files.append(path)
        layers.append(snapshot().bindings)
        yield stream
        layers.append(snapshot().bindings)
        open_files.pop()

    # Lists that gin keeps for the whole process.
    gin.config._LOCATION_PREFIXES[:] = [""]
    gin.config._FILE_READERS[:] = [(read, find)]
    path = find(path)
    try:
        gin.parse_config_file(path)
    except Exception as error:
        raise explained(error, path) from error


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
            for path, symbols in _parts().items()
            if symbol in symbols and (not module or f".{path}".endswith(f".{module}"))
        ]
        for package, _, own_module in own:
            lines.append(f"from {package} import {own_module}")
            lines.append(f"registered = @{own_module}.{symbol}")
        with contextlib.suppress(ImportError, ValueError):
            if module and not own and importlib.util.find_spec(module):
                lines += [f"import {module}", f"registered = @{name}"]
    with using(State({}, {}, gin.config._IMPORTS)):  # without the macro `registered`
        gin.parse_config("\n".join(lines))


def _drop_replaced(root: Key, layers: Sequence[Bindings], given: Bindings) -> None:
    """Drops bindings of replaced choices; refuses other unused ones, and macros without a value.

    A binding of a file is dropped if the experiment would use it with a value that another binding
    has replaced, or if it is an option of another runner. Bindings of the command line have to be
    used.
    """
    bound = gin.config._CONFIG
    used, references = _used(root, bound)
    every: dict[Key, dict[str, list[Any]]] = {}  # all values that a parameter was given
    for layer in layers:
        for key, values in layer.items():
            for name, value in values.items():
                every.setdefault(key, {}).setdefault(name, []).append(value)
    known, _ = _used(root, every, refuse_circles=False)
    for key in bound.keys() - used:
        scope, selector = key
        wrapped = gin.config._REGISTRY[selector].wrapped
        is_runner = not scope and hasattr(wrapped, "steps_per_update")
        if key in given or not (key in known or is_runner):
            parts = {s for _, s in references if s not in (_MACRO, _CONSTANT)}
            if selector == _MACRO:
                names = {name for name, s in references if s == _MACRO}
                names |= {f"{_short(p)}.{name}" for p in parts for name in _parameters(p)}
                near = errors.nearest(scope, names)
                raise errors.UserError(f"nothing uses the macro '{scope}'{near}")
            part = "/".join(filter(None, (scope, _short(selector))))
            latest = next(reversed(given.get(key, bound[key])))
            raise errors.UserError(
                f"nothing uses '{part}.{latest}': this experiment has no {part}; it has "
                + ", ".join(sorted(map(_short, parts)))
            )
        del bound[key]
    macros = {scope for scope, selector in bound if selector == _MACRO}
    for name, selector in references:
        if selector == _MACRO and name not in macros:
            raise errors.UserError(f"the macro %{name} has no value{errors.nearest(name, macros)}")


def _used(root: Key, bound: Bindings, refuse_circles: bool = True) -> tuple[set[Key], list[Key]]:
    """Returns the bindings that building the root reads, and the references that lead to them."""
    used, references = {root}, {}

    def follow(values: Any, calls: tuple[str, ...]) -> None:
        for reference in gin.config.iterate_references(values):
            scope, selector = reference.config_key
            shown = f"%{scope}" if selector == _MACRO else f"@{scope}/{_short(selector)}()"
            shown = shown.replace("@/", "@")
            if refuse_circles and reference.evaluate and shown in calls:
                circle = [*calls[calls.index(shown) :], shown]
                raise errors.UserError(f"{shown} needs itself: {' -> '.join(circle)}")
            node = (scope, selector), reference.evaluate
            if node in references:
                continue
            references[node] = None
            in_effect = {}
            for key in sorted(bound, key=lambda key: len(key[0])):  # the innermost scope wins
                is_within = selector != _MACRO and _is_within(scope, key[0])
                if selector == key[1] and (scope == key[0] or is_within):
                    used.add(key)
                    in_effect |= bound[key]
            follow(list(in_effect.values()), (*calls, shown) if reference.evaluate else ())

    follow(list(bound[root].values()), ())
    return used, [key for key, _ in references]


def _is_within(scope: str, outer: str) -> bool:
    """Returns whether bindings of the scope `outer` have an effect in a scope."""
    return f"{scope}/".startswith(f"{outer}/".lstrip("/"))


def _short(selector: str) -> str:
    """Returns the name of a part without its modules."""
    scope, slash, name = selector.rpartition("/")
    return scope + slash + name.rpartition(".")[2]


@functools.cache
def _parts() -> dict[str, list[str]]:
    """Returns the public classes and functions of every module of this project, by dotted name.

    Sources are parsed, not imported. A package stands for the modules whose names it re-exports.
    """
    found, within_packages = {}, set()
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        body = ast.parse(path.read_bytes()).body
        if path.stem != "__init__":
            parts = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
            names = [part.name for part in parts if not part.name.startswith("_")]
            found[f"{package}.{path.stem}"] = names
        elif exports := [
            node
            for node in body
            if isinstance(node, ast.ImportFrom) and node.module.startswith(f"{package}.")
        ]:
            found[package] = [alias.name for node in exports for alias in node.names]
            within_packages |= {node.module for node in exports}
    return {name: names for name, names in found.items() if name not in within_packages}


def _parameters(selector: str) -> list[str]:
    """Returns the names of the public parameters of a part (none of some built-in ones)."""
    part = gin.config._REGISTRY.get_match(selector).wrapped
    try:
        return [name for name in inspect.signature(part).parameters if not name.startswith("_")]
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


def _nearest_part(name: str) -> str:
    """Compares with `module.Name` where a module was written, else with `Name` alone."""
    modules = [(_short(path), names) for path, names in _parts().items()]
    known = {f"{module}.{part}" if "." in name else part for module, ps in modules for part in ps}
    if name in known:
        return "; expected `from __gin__ import dynamic_registration` and its import above"
    return errors.nearest(name, known)


def _nearest_module(name: str) -> str:
    place = " (is it in the working directory or on PYTHONPATH?)"
    return errors.nearest(name, _parts()) if _is_own(name) else place


# Patterns of gin's messages, up to the place for the names nearest to the one that is unknown.
_NEAREST = (
    (r"resolve selector ([\w.]+)", _nearest_part),
    (r"No configurable matching(?: reference)? '@?([\w.]+?)(?:\(\))?'", _nearest_part),
    (
        r"'([\w./]+)' doesn't have a parameter named '(\w+)'",
        lambda part, name: errors.nearest(name, _parameters(part)),
    ),
    (r"No module named '([\w.]+)'", _nearest_module),
)


class _Reference(str):
    """Name of a part: `PPO` for `@ppo.PPO`, `CNN()` for `@encoders.CNN()`."""

    __slots__ = ()
    __repr__ = str.__str__  # within tuples


class _Macro(NamedTuple):
    name: str


class _Values(config_parser.ParserDelegate):
    """Values of a text, of whose names nothing is imported; `names` are those of references."""

    def __init__(self):
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Reference:
        self.names.append(scoped_configurable_name.rpartition("/")[2])
        return _Reference(_short(scoped_configurable_name) + "()" * evaluate)

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


def read(text: str, source: str) -> dict[str, Any]:
    """Returns parameters by class, such as `PPO.gamma`, with the values of their macros.

    Nothing is imported, so the modules of a run may be missing here.

    Args:
      text: a .gin file's text; included files are not read.
      source: the file's name in error messages.

    Raises:
      errors.UserError: the text is no .gin file.
    """
    macros, values = {}, {}
    for statement in _statements(text, source, _Values()):
        if not isinstance(statement, config_parser.BindingStatement):
            continue
        name = "/".join(filter(None, (statement.scope, _short(statement.selector))))
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
            if not _is_own(statement.module):
                found.append(statement.module)
    for name in values.names:
        first, _, rest = name.partition(".")
        module, _, part = f"{bound.get(first, first)}.{rest}".rpartition(".")
        if _is_own(module) and part not in _parts().get(module, ()):
            found.append(f"@{name}")
    return found


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in (*PACKAGES, "__gin__")
