"""Turns what gin raises into one line: where, what, and the nearest valid name."""

import inspect
import re
from typing import Any

import gin
from podracers import errors
from podracers.training import config_names


def first_line(error: BaseException) -> str:
    """Returns the part of a message that says what is wrong, without gin's account of where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def missing_file(path: str) -> str:
    """Returns what to say of a gin file that is not there."""
    files = config_names.files()
    for folder in ("gin/experiments/", "gin/"):
        if path.count("/") == 2 - folder.count("/"):  # as it would be found there
            known = [file.removeprefix(folder) for file in files if file.startswith(folder)]
            if "did you mean" in (hint := errors.nearest(path, known)):
                return f"there is no gin file '{path}'{hint}"
    return f"there is no gin file '{path}'{errors.nearest(path, files)}"


def explain(error: Exception, source: str) -> str:
    """Returns one line on an exception of gin's parser.

    Args:
      error: the exception; gin appends to its text where it was raised, innermost file first.
      source: the file that was parsed, or a phrase for a binding.
    """
    message = str(error)
    what = _what(error, message).removeprefix(f"'{source}': ")
    return f"{_where(error, message, source)}: {what}"


def parameters(configurable: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of one of gin's configurables, by name."""
    found = inspect.signature(configurable.wrapped).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in found.items() if parameter.kind not in kinds}


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
    return re.sub(r"\s*\([^()]*line \d+\)$", "", first_line(error))


def _unknown(name: str) -> str:
    """Compares with `module.Name` where a module was written, else with `Name` alone."""
    known = {
        f"{module}.{symbol}" if "." in name else symbol
        for _, module, symbol in config_names.symbols()
    }
    return f"there is no '{name}'{errors.nearest(name, known)}"


def _unknown_module(name: str) -> str:
    own = name.partition(".")[0] in config_names.PACKAGES
    hint = errors.nearest(name, config_names.modules()) if own else ""
    return f"there is no module '{name}'{hint or ' (is it on PYTHONPATH?)'}"


def _unknown_parameter(selector: str, name: str) -> str:
    matches = gin.config._REGISTRY.matching_selectors(selector)
    known = parameters(gin.config._REGISTRY[matches[0]]) if matches else ()
    return f"'{selector.rpartition('.')[2]}' has no parameter '{name}'{errors.nearest(name, known)}"


def _bad_value(token: str | None) -> str:
    shown = f" '{token}'" if token else ""
    return (
        f"the value{shown} is neither a Python literal, nor @Reference, nor %MACRO "
        "(a string needs quotes)"
    )


_PHRASES = (
    (r"resolve selector ([\w.]+);", _unknown),
    (r"No configurable matching(?: reference)? '@?(?:\w+/)*([\w.]+?)(?:\(\))?'", _unknown),
    (
        r"'(\w+)' was not provided by an import statement",
        lambda name: f"'{name}' is used but not imported in this file",
    ),
    (r"'([\w./]+)' doesn't have a parameter named '(\w+)'", _unknown_parameter),
    (r"Failed to parse token '(.*)'", _bad_value),
    (r"(malformed node)", lambda _: _bad_value(None)),
    (r"No module named '([\w.]+)'", _unknown_module),
    (r"cannot import name '(\w+)' from '([\w.]+)'", lambda n, m: _unknown_module(f"{m}.{n}")),
    (r"Unable to open file: (.*)\. Searched", missing_file),
    (
        r"\('(?:unexpected )?(EOF in [^']*)'",
        lambda phrase: f"{phrase}: a bracket or a quote is not closed",
    ),
)
