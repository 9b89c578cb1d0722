"""Reads .gin files and bindings, and turns gin's errors into one line each.

gin is applied at one root, `podracers.experiment.train`; library code never asks it for anything.
Files name what they use by Python's own names (`from agents import ppo`, then `ppo.PPO.gamma`), so
anything that can be imported can be configured. Bindings of the command line may leave the module
out (`PPO.gamma = 0.9`) wherever a file has named it.
"""

import ast
import importlib.util  # noqa: F401  gin's own include statement needs it, and forgets to import it
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gin

import agents
import environments
import podracers
from podracers import errors

_PACKAGES = {"agents": agents, "environments": environments, "podracers": podracers}
_ROOT = pathlib.Path(__file__).resolve().parent.parent
_MACRO = "gin.macro"


def parse(gin_files: Sequence[str], gin_bindings: Sequence[str], root: Callable[..., Any]) -> None:
    """Replaces gin's configuration by these files, in order, and then these bindings.

    Args:
      gin_files: paths, relative to the working directory or to the repository.
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      root: the configurable whose parameters choose the parts of the experiment.

    Raises:
      errors.UserError: a file that is missing or does not parse, an unknown name, a binding that
        nothing uses, a macro without a value.
    """
    gin.clear_config()
    for prefix in ("", str(_ROOT)):
        gin.add_config_file_search_path(prefix)
    superseded = set()
    for path in gin_files:
        before = _references(root)
        _parse_file(path)
        superseded |= before
    for binding in gin_bindings:
        before = _references(root)
        _parse_binding(binding)
        superseded |= before
    _check_macros()
    _check_used(root, superseded, gin_bindings)


def text() -> str:
    """Returns the configuration as a .gin file that `parse` reads back."""
    return gin.config_str()


def operative_text() -> str:
    """Returns every parameter that was used, defaults included, as a .gin file."""
    return gin.operative_config_str()


def bindings(root: Callable[..., Any]) -> dict[str, Any]:
    """Returns the parameters of `root`, with every reference and macro resolved."""
    try:
        # gin resolves references in a deep copy, whose errors carry gin's own suffix.
        return gin.get_bindings(root)
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.UserError(first_line(error)) from error


def call(root: Callable[..., Any]) -> Any:
    """Returns `root()`, with its parameters from the configuration.

    Raises:
      errors.UserError: a required parameter has no value, or the root refuses one.
    """
    try:
        return gin.get_configurable(root)()
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.UserError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Returns the part of a message that says what is wrong, without gin's account of where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _parse_file(path: str) -> None:
    if not any((prefix / path).is_file() for prefix in (pathlib.Path(), _ROOT)):
        known = [str(p.relative_to(_ROOT)) for p in _ROOT.glob("gin/**/*.gin")]
        hint = errors.nearest(path, known)
        raise errors.UserError(f"there is no gin file '{path}'{hint}")
    try:
        gin.parse_config_file(path)
    except Exception as error:
        raise errors.UserError(_explain(error, path)) from error


def _parse_binding(binding: str) -> None:
    if "=" not in binding:
        raise errors.UserError(f"binding '{binding}': expected 'name.parameter = value'")
    try:
        gin.parse_config(binding)
        return
    except ValueError as error:
        imports = _imports_for(binding)
        if "No configurable matching" not in str(error) or not imports:
            raise errors.UserError(_explain(error, f"binding '{binding}'")) from error
    except Exception as error:
        raise errors.UserError(_explain(error, f"binding '{binding}'")) from error
    # It names a part by its module, as files do, and no file has named that part yet.
    try:
        gin.parse_config("\n".join(["from __gin__ import dynamic_registration", *imports, binding]))
    except Exception as error:
        raise errors.UserError(_explain(error, f"binding '{binding}'")) from error


def _imports_for(binding: str) -> list[str]:
    """Returns the imports of this project's modules that a binding names."""
    names = set(re.findall(r"(?:^|@)(?:\w+/)*(\w+)\.\w", binding))
    return [
        f"from {package} import {module}"
        for package, module in sorted(_modules())
        if module in names
    ]


def _modules() -> set[tuple[str, str]]:
    return {
        (name, module.name)
        for name, package in _PACKAGES.items()
        for module in pkgutil.iter_modules(package.__path__)
    }


def _public_names() -> set[str]:
    """Returns `module.Name` of every public class and function, without importing anything."""
    names = set()
    for package, module in _modules():
        tree = ast.parse((_ROOT / package / f"{module}.py").read_text())
        names |= {
            f"{module}.{node.name}"
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        }
    return names


def _explain(error: Exception, source: str) -> str:
    """Returns one line: where, what, and the nearest valid name."""
    message = str(error)
    found = re.search(r'In file "(?P<file>[^"]+)", line (?P<line>\d+)', message)
    if found:
        where = f"{found['file']}:{found['line']}"
    elif isinstance(error, SyntaxError) and error.lineno and not source.startswith("binding"):
        where = f"{error.filename or source}:{error.lineno}"
    else:
        where = source
    return f"{where}: {_what(error, message)}"


def _what(error: Exception, message: str) -> str:
    unresolved = re.search(r"resolve selector ([\w.]+);", message)
    unknown = re.search(r"No configurable matching(?: reference)? '@?([\w./]+?)(?:\(\))?'", message)
    not_imported = re.search(r"'(\w+)' was not provided by an import statement", message)
    parameter = re.search(r"'([\w./]+)' doesn't have a parameter named '(\w+)'", message)
    if unresolved or unknown:
        name = (unresolved or unknown)[1]
        return f"there is no '{name}'{_nearest_name(name)}"
    if not_imported:
        return f"'{not_imported[1]}' is used but not imported in this file"
    if parameter:
        known = _parameters(parameter[1])
        return (
            f"'{parameter[1].split('.')[-1]}' has no parameter '{parameter[2]}'"
            f"{errors.nearest(parameter[2], known)}"
        )
    if "malformed node" in message:
        token = re.search(r"Failed to parse token '(.*)'", message)
        value = f" '{token[1]}'" if token else ""
        return (
            f"the value{value} is neither a Python literal, nor @Reference, nor %MACRO "
            "(a string needs quotes)"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"{first_line(error)}{errors.nearest(error.name or '', _known_modules())}"
    if isinstance(error, OSError):
        return f"cannot read the included file: {first_line(error)}"
    return re.sub(r"\s*\([^()]*line \d+\)$", "", first_line(error))


def _known_modules() -> Iterable[str]:
    return [f"{package}.{module}" for package, module in _modules()]


def _nearest_name(name: str) -> str:
    """Compares with `module.Name` where a module was written, else with `Name` alone."""
    names = _public_names()
    if "." not in name:
        names = {candidate.rpartition(".")[2] for candidate in names}
    return errors.nearest(name, names)


def _parameters(selector: str) -> list[str]:
    """Returns the parameters that a registered configurable takes."""
    signature = inspect.signature(gin.get_configurable(selector))
    return [name for name in signature.parameters if name != "self"]


def _is_reference(value: Any) -> bool:
    return isinstance(value, gin.config.ConfigurableReference)


def _selector(reference: Any) -> str:
    """Returns the full name of what is referred to; that of a macro begins with its own."""
    selector = reference.configurable.selector  # `reference.selector` is as the file wrote it
    return "/".join([*reference.scopes, selector]) if selector == _MACRO else selector


def _is_macro(reference: Any) -> bool:
    return reference.configurable.selector == _MACRO


def _bound() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns gin's bindings: `{(scope, selector): {parameter: value}}`."""
    return gin.config._CONFIG  # gin has no public way to list them


def _used_by(values: Iterable[Any]) -> set[str]:
    """Returns the selectors that values refer to, and that their bindings refer to, and so on."""
    used, waiting = set(), [r for r in gin.config._iterate_flattened_values(list(values))]
    while waiting:
        reference = waiting.pop()
        if not _is_reference(reference) or _selector(reference) in used:
            continue
        used.add(_selector(reference))
        for (scope, selector), parameters in _bound().items():
            name = f"{scope}/{selector}" if selector == _MACRO else selector
            if name == _selector(reference):
                waiting.extend(gin.config._iterate_flattened_values(list(parameters.values())))
    return used


def _references(root: Callable[..., Any]) -> set[str]:
    """Returns all that the root uses, as configured so far."""
    values = []
    for (_, selector), parameters in _bound().items():
        if selector.rpartition(".")[2] == root.__name__:
            values.extend(parameters.values())
    return _used_by(values)


def _check_macros() -> None:
    macros = {scope for scope, selector in _bound() if selector == _MACRO}
    values = [value for parameters in _bound().values() for value in parameters.values()]
    for reference in gin.config._iterate_flattened_values(values):
        if _is_reference(reference) and _is_macro(reference):
            name = "/".join(reference.scopes)
            if name not in macros:
                hint = errors.nearest(name, macros)
                raise errors.UserError(f"the macro %{name} has no value{hint}")


def _check_used(
    root: Callable[..., Any], superseded: set[str], gin_bindings: Sequence[str]
) -> None:
    """Refuses bindings that change nothing.

    A later file may choose another runner, agent or environment: what the earlier files said of the
    one that lost stays unused, and that is no mistake. What the command line says must count.
    """
    used = _references(root)
    given = {re.split(r"[=\s]", binding.strip())[0] for binding in gin_bindings}
    for (scope, selector), parameters in _bound().items():
        if selector.rpartition(".")[2] == root.__name__:
            continue
        name = f"{scope}/{selector}" if selector == _MACRO else selector
        shown = scope if selector == _MACRO else selector
        asked = any(
            g == scope or selector == g.rpartition(".")[0] or
            selector.endswith("." + g.rpartition(".")[0])
            for g in given
        )
        if name in used or (name in superseded and not asked):
            continue
        if selector == _MACRO:
            macros = [n.rpartition("/")[0] for n in used if n.endswith(_MACRO)]
            raise errors.UserError(
                f"nothing uses the macro '{shown}'{errors.nearest(shown, macros)}"
            )
        short = selector.rpartition(".")[2]
        raise errors.UserError(
            f"nothing uses '{short}.{next(iter(parameters))}': this experiment has no {short}; "
            f"it has {', '.join(sorted(n.rpartition('.')[2] for n in used if _MACRO not in n))}"
        )
