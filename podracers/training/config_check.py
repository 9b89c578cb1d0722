"""Finds what gin lets pass: bindings that nothing uses, missing values, values of a wrong type."""

import collections.abc
import dataclasses
import graphlib
import inspect
import re
import types as python_types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import gin
from podracers import errors, runner
from podracers.training import config_errors

_MACRO, _CONSTANT = "gin.macro", "gin.constant"

# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[tuple[str, str], dict[str, Any]]


class Said(NamedTuple):
    """What a file and its includes say, by the names that they use: `sebulba.Sebulba`, `SEED`."""

    references: set[str]  # behind `@` and `%`
    subjects: set[str]  # of the parts whose parameters it binds


def take() -> Bindings:
    """Returns gin's bindings, and removes them from gin."""
    bound = gin.config._CONFIG  # gin has no public way to list them
    taken = {key: dict(parameters) for key, parameters in bound.items()}
    bound.clear()
    return taken


def put(*layers: Bindings) -> None:
    """Gives bindings to gin; later layers win."""
    for layer in layers:
        for key, parameters in layer.items():
            gin.config._CONFIG.setdefault(key, {}).update(parameters)


def overrides(sources: Sequence[str], layers: Sequence[Bindings], given: Bindings) -> list[str]:
    """Returns a line for each value in use that one source takes from another one before it.

    Args:
      sources: what to call the layers: the paths of files.
      layers: the bindings of each; later ones win.
      given: the bindings of the command line, which win over all of them.
    """
    lines = []
    for key, parameters in gin.config._CONFIG.items():
        for name in parameters:
            if name in given.get(key, {}):
                continue
            values = [
                (source, layer[key][name])
                for source, layer in zip(sources, layers)
                if name in layer.get(key, {})
            ]
            if len(values) > 1 and _is_replaced(values[-2][1], values[-1][1]):
                (earlier, old), (later, new) = values[-2:]
                shown = _shown(key, name)
                lines.append(f"{later} sets {shown} = {new!r} over {shown} = {old!r} of {earlier}")
    return lines


def _is_replaced(old: Any, new: Any) -> bool:
    """Returns whether a value gives way to another; to choose one of several offered is no such."""
    return new != old and not (isinstance(old, tuple) and new in old)


def _shown(key: tuple[str, str], parameter: str) -> str:
    """Returns a parameter or a macro as a .gin file names it, without modules."""
    scope, selector = key
    if selector == _MACRO:
        return scope
    return "/".join(filter(None, (scope, f"{_short(selector)}.{parameter}")))


def check(root: Callable[..., Any], given: Bindings, said: Sequence[Said]) -> None:
    """Refuses a configuration that cannot be meant, and drops what it has no use for.

    A later file may choose another runner, agent or environment: what earlier files said of the one
    that lost is no mistake, and is dropped. Nor is what a file says of other runners, if it names
    the one that runs, too: it is meant for all of them. What the command line says has to count.

    Args:
      root: the class whose parameters choose everything else.
      given: the bindings of the command line.
      said: what each file of the command line says, in order, used in the end or not.

    Raises:
      errors.UserError: see `config.parse`.
    """
    bound = gin.config._CONFIG
    _check_root(root, bound)
    used, references = _used(root, bound)
    for key in [key for key in bound if key not in used]:
        if key in given or not _is_superseded(key, used, said):
            parameter = next(reversed(given.get(key, bound[key])))  # of the last to say so
            raise errors.UserError(_unused(key, parameter, references))
        del bound[key]
    _check_macros(references, bound)
    _check_circles(bound)
    for scope, selector in bound:
        if selector != _MACRO:
            _check_values(scope, selector, bound)


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


def _references(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the references, `@...` and `%...`, in values of any nesting."""
    for value in gin.config._iterate_flattened_values(list(values)):
        if isinstance(value, gin.config.ConfigurableReference):
            yield value


def _used(root: Callable[..., Any], bound: Bindings) -> tuple[set[tuple[str, str]], list[Any]]:
    """Returns the keys that the root's values lead to, and the references on the way."""
    used = {key for key in bound if key[1] == f"{root.__module__}.{root.__qualname__}"}
    waiting = [r for key in used for r in _references(bound[key].values())]
    followed = []
    while waiting:
        reference = waiting.pop()
        followed.append(reference)
        for key in bound:
            if key not in used and _leads_to(reference, key):
                used.add(key)
                waiting.extend(_references(bound[key].values()))
    return used, followed


def _leads_to(reference: Any, key: tuple[str, str]) -> bool:
    scope, selector = key
    if reference.configurable.selector != selector:
        return False
    path = "/".join(reference.scopes)
    if selector == _MACRO:
        return path == scope
    return not scope or f"{path}/".startswith(f"{scope}/")


def _is_superseded(key: tuple[str, str], used: set[tuple[str, str]], said: Sequence[Said]) -> bool:
    """Returns whether an unused binding belongs to what another choice has replaced."""
    scope, selector = key
    if selector == _MACRO:
        return any(scope in each.references for each in said)
    if not _is_runner(selector):
        return any(_is_among(selector, each.references) for each in said)
    runs = [other for _, other in used if _is_runner(other)]
    is_chosen_later = False
    for each in reversed(said):
        is_chosen_later |= any(_is_among(other, each.references) for other in runs)
        is_beside = any(_is_among(other, each.subjects) for other in runs)
        if _is_among(selector, each.subjects) and not (is_chosen_later or is_beside):
            return False
    return True


def _is_runner(selector: str) -> bool:
    part = gin.config._REGISTRY[selector].wrapped
    wanted = (name for name, value in vars(runner.Runner).items() if inspect.isfunction(value))
    return all(hasattr(part, name) for name in wanted)


def _is_among(selector: str, names: Iterable[str]) -> bool:
    """Returns whether one of the names, with modules or without, means a part."""
    return any(f".{selector}".endswith(f".{name}") for name in names)


def _unused(key: tuple[str, str], parameter: str, references: Iterable[Any]) -> str:
    """Returns what to say of a binding that changes nothing."""
    configurables = {r.configurable.selector: r.configurable for r in references}
    parts = {_short(s): c for s, c in configurables.items() if s not in (_MACRO, _CONSTANT)}
    if key[1] == _MACRO:
        known = {"/".join(r.scopes) for r in references if r.configurable.selector == _MACRO}
        for name, configurable in parts.items():
            known |= {f"{name}.{p}" for p in config_errors.parameters(configurable)}
        return f"nothing uses the macro '{key[0]}'{errors.nearest(key[0], known)}"
    short = _short(key[1])
    name = f"{short}.{parameter}"
    if key[0]:
        return f"nothing uses '{key[0]}/{name}': there is no '@{key[0]}/{short}'"
    return (
        f"nothing uses '{name}': this experiment has no {short}; it has {', '.join(sorted(parts))}"
    )


def _short(selector: str) -> str:
    return selector.rpartition(".")[2]


def _check_macros(references: Iterable[Any], bound: Bindings) -> None:
    macros = {scope for scope, selector in bound if selector == _MACRO}
    for reference in references:
        name = "/".join(reference.scopes)
        if reference.configurable.selector == _MACRO and name not in macros:
            raise errors.UserError(f"the macro %{name} has no value{errors.nearest(name, macros)}")


def _check_circles(bound: Bindings) -> None:
    """Refuses values that need themselves, which gin would resolve for ever."""
    needs = {
        (*key, name): {
            needed
            for reference in _references([value])
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
    for scope, selector in sorted(bound, key=lambda key: len(key[0])):  # the innermost scope wins
        if _leads_to(reference, (scope, selector)):
            found |= {name: (scope, selector, name) for name in bound[scope, selector]}
    return found.values()


def _check_values(scope: str, selector: str, bound: Bindings) -> None:
    """Checks the values bound to one part: they are there, and of the annotated types."""
    hints = _hints(gin.config._REGISTRY[selector].wrapped)
    for name, value in bound[scope, selector].items():
        shown = f"{_short(selector)}.{name}"
        literal = _resolved(value, bound)
        if literal is gin.REQUIRED:
            raise errors.UserError(f"no value for {shown}, which is required: bind it")
        hint = hints.get(name, Any)
        if isinstance(literal, gin.config.ConfigurableReference):
            _check_reference(shown, literal, hint, bound)
        elif next(_references([literal]), None) is None and not _fits(literal, hint):
            beyond = ""
            if isinstance(literal, int) and abs(literal) > errors.INT32_MAX:
                beyond = ", beyond int32" + ": write a point" * (float in _options(hint))
            raise errors.UserError(f"{shown}: expected {_name(hint)}, got {literal!r}{beyond}")


def _check_reference(shown: str, reference: Any, hint: Any, bound: Bindings) -> None:
    """Refuses a part that is called where it must not be, or not called where it has to be."""
    part, written = reference.configurable.wrapped, repr(reference)
    uncalled = _fits(part, hint)
    called = any(_may_make(reference, option, bound) for option in _options(hint))
    if called if reference.evaluate else uncalled:
        return
    if called:
        raise errors.UserError(f"{shown}: write `{written}()`, with the parentheses")
    if uncalled:
        raise errors.UserError(
            f"{shown}: write `{written.removesuffix('()')}`, without the parentheses"
        )
    raise errors.UserError(f"{shown}: expected {_name(hint)}, got {written}")


def _may_make(reference: Any, hint: Any, bound: Bindings) -> bool:
    """Returns whether a call of a part may give what a hint wants; in doubt, it may."""
    part, expected = reference.configurable.wrapped, typing.get_origin(hint) or hint
    if expected is collections.abc.Callable and not isinstance(part, type):
        given = {name for _, _, name in _in_effect(reference, bound)}
        return all(
            name in given or parameter.default is not inspect.Parameter.empty
            for name, parameter in config_errors.parameters(reference.configurable).items()
        )
    if not _can_be_asked(expected) or not isinstance(part, type):
        return True
    return issubclass(part, expected)


def _resolved(value: Any, bound: Bindings) -> Any:
    """Returns what a macro or constant stands for, and any other value as it is."""
    while isinstance(value, gin.config.ConfigurableReference):
        name, selector = "/".join(value.scopes), value.configurable.selector
        if selector == _MACRO:
            value = bound[name, _MACRO]["value"]
        elif selector == _CONSTANT:
            return gin.query_parameter(f"%{name}") if name != "gin.REQUIRED" else gin.REQUIRED
        else:
            return value
    return value


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of a part's parameters; none where they cannot be resolved."""
    try:
        return typing.get_type_hints(part if dataclasses.is_dataclass(part) else _function(part))
    except (NameError, TypeError, AttributeError):
        return {}


def _function(part: Callable[..., Any]) -> Callable[..., Any]:
    return part.__init__ if isinstance(part, type) else part


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a literal may be passed where `hint` stands; in doubt, it may."""
    if len(options := _options(hint)) > 1:
        return any(_fits(value, option) for option in options)
    expected = typing.get_origin(hint) or hint
    if expected in (int, float):
        return _number_fits(value, expected)
    if expected in (tuple, list, collections.abc.Sequence):
        return isinstance(value, tuple | list) and _items_fit(value, hint)
    if getattr(expected, "_is_protocol", False):
        return not isinstance(value, type) or "__call__" in vars(expected)
    return not _can_be_asked(expected) or isinstance(value, expected)


def _can_be_asked(hint: Any) -> bool:
    """Returns whether `isinstance` and `issubclass` take a hint, and its answer counts."""
    if hint is Any or typing.is_typeddict(hint):  # which are classes
        return False
    return isinstance(hint, type) and not getattr(hint, "_is_protocol", False)


def _number_fits(value: Any, expected: type) -> bool:
    if isinstance(value, int):  # of which JAX makes an int32, for a float, too
        return not isinstance(value, bool) and abs(value) <= errors.INT32_MAX
    return expected is float and isinstance(value, float)


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the one hint."""
    is_union = typing.get_origin(hint) in (typing.Union, python_types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _items_fit(values: Sequence[Any], hint: Any) -> bool:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and options[1:] != (...,):
        return len(values) == len(options) and all(map(_fits, values, options))
    return not options or all(_fits(value, options[0]) for value in values)


def _name(hint: Any) -> str:
    """Returns an annotation as a user reads it."""
    if typing.get_origin(hint) is collections.abc.Callable:
        return "a class or a function, uncalled (`@module.Name`)"
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(\w+\.)+", "", str(hint))
