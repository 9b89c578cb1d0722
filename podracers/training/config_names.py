"""Which gin files, modules and parts there are, and what to say of a name that is none.

Nothing is imported: the sources are read.
"""

import ast
import functools
import inspect
import pathlib
import re
from typing import Any

import gin
from podracers import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "podracers"  # holds `gin`, in a checkout as well as where it was installed
# Where gin files are looked for, in this order.
FOLDERS = ("", *map(str, (SHIPPED, SHIPPED / "gin", SHIPPED / "gin" / "experiments", ROOT)))
PACKAGES = ("agents", "environments", "podracers")
_NOT_PARTS = {"NamedTuple", "Protocol", "Exception", "RuntimeError", "ValueError"}


def require_file(path: str) -> None:
    """Raises `errors.UserError` unless there is such a gin file; it names the nearest one."""
    if any((pathlib.Path(folder) / path).is_file() for folder in FOLDERS):
        return
    files = [*SHIPPED.glob("gin/*.gin"), *SHIPPED.glob("gin/*/*.gin")]
    known = [file.relative_to(SHIPPED).as_posix() for file in files]
    # A name or `experiments/name` is compared with those that it could stand for.
    prefix = {0: "gin/experiments/", 1: "gin/"}.get(path.count("/"), "")
    near = [file.removeprefix(prefix) for file in known if file.startswith(prefix)]
    hint = errors.nearest(path, near)
    if "did you mean" not in hint:
        hint = errors.nearest(path, known)
    raise errors.UserError(f"there is no gin file '{path}'{hint}")


@functools.cache
def parts() -> dict[str, list[str]]:
    """Returns the public classes and functions of every module of this project, by dotted name.

    A package stands for the modules whose names it re-exports: there is one name for each part.
    """
    found, within_packages = {}, set()
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        body = ast.parse(path.read_text()).body
        if path.stem != "__init__":
            found[name] = [node.name for node in body if _is_part(node)]
            continue
        name = name.removesuffix(".__init__")
        exports = [node for node in body if isinstance(node, ast.ImportFrom)]
        exports = [node for node in exports if node.module.startswith(f"{name}.")]
        if exports:
            found[name] = sorted(alias.name for node in exports for alias in node.names)
            within_packages |= {node.module for node in exports}
    return {name: names for name, names in found.items() if name not in within_packages}


def _is_part(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
        return False
    bases = getattr(node, "bases", [])
    return not any(isinstance(base, ast.Name) and base.id in _NOT_PARTS for base in bases)


def parameters(configurable: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of one of gin's configurables that are for users, by name."""
    found = inspect.signature(configurable.wrapped).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    public = {name: found[name] for name in found if not name.startswith("_")}
    return {name: parameter for name, parameter in public.items() if parameter.kind not in kinds}


def explain(error: Exception, source: str) -> errors.UserError:
    """Returns what to raise for an exception of gin's parser: where, what, the nearest name.

    Args:
      error: the exception; gin appends to its text where it was raised, innermost file first.
      source: the file that was parsed, or a phrase for a binding.
    """
    message = str(error)
    what = _what(error, message).removeprefix(f"'{source}': ")
    return errors.UserError(f"{_where(error, message, source)}: {what}")


def _where(error: Exception, message: str, source: str) -> str:
    places = re.findall(r'In file "([^"]+)", line (\d+)\n\s*(.*)', message)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    end = re.match(r"\('[^']*', \((\d+), \d+\)\)", message)  # of a file that ends too early
    if end and not source.startswith("binding"):
        included = re.search(r"""include\s+['"](.*)['"]""", places[0][2]) if places else None
        return f"{included[1] if included else source}:{end[1]}"
    return f"{places[0][0]}:{places[0][1]}" if places else source


def _what(error: Exception, message: str) -> str:
    """Returns what is wrong; the first pattern that fits decides."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    for pattern, phrase in _PHRASES:
        if found := re.search(pattern, message):
            return phrase(*found.groups())
    return re.sub(r"\s*\([^()]*line \d+\)$", "", errors.first_line(error))


def _unknown(name: str) -> str:
    """Compares with `module.Name` where a module was written, else with `Name` alone."""
    modules = [(path.rpartition(".")[2], names) for path, names in parts().items()]
    known = {f"{module}.{part}" if "." in name else part for module, ps in modules for part in ps}
    return f"there is no '{name}'{errors.nearest(name, known)}"


def _unknown_module(name: str) -> str:
    own = name.partition(".")[0] in PACKAGES
    hint = errors.nearest(name, parts()) if own else ""
    return f"there is no module '{name}'{hint or ' (is it on PYTHONPATH?)'}"


def _unknown_parameter(selector: str, name: str) -> str:
    known = parameters(gin.config._REGISTRY.get_match(selector))
    return f"'{selector.rpartition('.')[2]}' has no parameter '{name}'{errors.nearest(name, known)}"


def _missing_file(path: str) -> str:
    try:
        require_file(path)
    except errors.UserError as error:
        return str(error)
    return f"'{path}' cannot be read"


def _bad_value(token: str) -> str:
    return (
        f"the value{token and f' {token!r}'} is neither a Python literal, nor @Reference, nor "
        "%MACRO (a string needs quotes)"
    )


_PHRASES = (
    (r"resolve selector ([\w.]+);", _unknown),
    (r"No configurable matching(?: reference)? '@?(?:\w+/)*([\w.]+?)(?:\(\))?'", _unknown),
    (
        r"'(\w+)' was not provided by an import statement",
        "'{}' is used but not imported in this file".format,
    ),
    (r"'([\w./]+)' doesn't have a parameter named '(\w+)'", _unknown_parameter),
    (r"Failed to parse token '(.*)'", _bad_value),
    (r"malformed node()", _bad_value),
    (r"No module named '([\w.]+)'", _unknown_module),
    (r"cannot import name '(\w+)' from '([\w.]+)'", lambda n, m: _unknown_module(f"{m}.{n}")),
    (r"Unable to open file: (.*)\. Searched", _missing_file),
    (r"\('(?:unexpected )?(EOF in [^']*)'", "{}: a bracket or a quote is not closed".format),
)
