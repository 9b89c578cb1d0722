"""Finds what gin lets pass: bindings that nothing uses, missing values, values of a wrong type.

gin's operative configuration knows what was used, but only once an update was traced; this module
checks before anything is built. Of types gin knows nothing. In doubt a value fits: JAX, Flax or the
part itself then refuse it.
"""

import collections.abc
import dataclasses
import graphlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gin
from podracers import errors, runner
from podracers.training import config_names

MACRO = "gin.macro"
_CONSTANT = "gin.constant"

Key = tuple[str, str]  # of gin's: scope and selector
# `{(scope, selector): {parameter: value}}`; a macro is `{(name, "gin.macro"): {"value": value}}`.
Bindings = dict[Key, dict[str, Any]]
# What a file and its includes say: the names behind `@` and `%`, and the parts that they bind.
ParsedFile = tuple[set[str], set[str]]


def check(
    root: Callable[..., Any], bound: Bindings, given: Bindings, parsed: Sequence[ParsedFile]
) -> None:
    """Refuses a configuration that cannot be meant, and drops what it has no use for.

    A later file may choose another runner, agent or environment: what earlier files said of the one
    that lost is no mistake, and is dropped. Nor is what a file says of other runners, if it names
    the one that runs, too: it is meant for all of them. What the command line says has to count.

    Args:
      root: the class whose parameters choose everything else.
      bound: gin's own bindings, of files and the command line.
      given: those of the command line.
      parsed: the names in each file of the command line, in order, used in the end or not.

    Raises:
      errors.UserError: see `config.parse`.
    """
    _check_root(root, bound)
    _check_use(root, bound, given, parsed)
    _check_circles(bound)
    for (_, selector), values in bound.items():
        if selector != MACRO:
            _check_values(selector, values, bound)


def short(selector: str) -> str:
    """Returns the name of a part without its modules."""
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
    root: Callable[..., Any], bound: Bindings, given: Bindings, parsed: Sequence[ParsedFile]
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
        if key in given or not _is_superseded(key, used, parsed):
            parameter = next(reversed(given.get(key, bound[key])))  # of the last to say so
            raise errors.UserError(_unused(key, parameter, references))
        del bound[key]
    macros = {scope for scope, selector in bound if selector == MACRO}
    for reference in references:
        name, selector = reference.config_key
        if selector == MACRO and name not in macros:
            raise errors.UserError(f"the macro %{name} has no value{errors.nearest(name, macros)}")


def _leads_to(reference: gin.config.ConfigurableReference, key: Key) -> bool:
    """Returns whether a call of a reference reads the bindings of a key."""
    path, selector = reference.config_key
    if selector != key[1]:
        return False
    return path == key[0] or (selector != MACRO and f"{path}/".startswith(f"{key[0]}/".lstrip("/")))


def _is_superseded(key: Key, used: set[Key], parsed: Sequence[ParsedFile]) -> bool:
    """Returns whether an unused binding belongs to what another choice has replaced."""
    scope, selector = key
    if selector == MACRO:
        return any(scope in references for references, _ in parsed)
    if not _is_runner(selector):
        return any(_is_among(selector, references) for references, _ in parsed)
    runs = [other for _, other in used if _is_runner(other)]
    is_chosen_later = False
    for references, subjects in reversed(parsed):
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


def _unused(key: Key, parameter: str, references: Iterable[Any]) -> str:
    """Returns what to say of a binding that changes nothing."""
    scope, selector = key
    configurables = {r.configurable.selector: r.configurable for r in references}
    parts = {short(s): c for s, c in configurables.items() if s not in (MACRO, _CONSTANT)}
    if selector == MACRO:
        known = {"/".join(r.scopes) for r in references if r.configurable.selector == MACRO}
        for name, configurable in parts.items():
            known |= {f"{name}.{each}" for each in config_names.parameters(configurable)}
        return f"nothing uses the macro '{scope}'{errors.nearest(scope, known)}"
    part = short(selector)
    name = f"{part}.{parameter}"
    if scope:
        return f"nothing uses '{scope}/{name}': there is no '@{scope}/{part}'"
    return (
        f"nothing uses '{name}': this experiment has no {part}; it has {', '.join(sorted(parts))}"
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
            f"%{scope}" if selector == MACRO else f"{short(selector)}.{name}"
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
    hints = _hints(gin.config._REGISTRY[selector].wrapped)
    for name, value in values.items():
        shown, hint = f"{short(selector)}.{name}", hints.get(name, Any)
        literal = _resolved(value, bound)
        if literal is gin.REQUIRED:
            raise errors.UserError(f"no value for {shown}, which is required: bind it")
        if isinstance(literal, gin.config.ConfigurableReference):
            _check_reference(shown, literal, hint, bound)
        elif any(gin.config.iterate_references([literal])):
            continue  # what it becomes is not known yet
        elif fault := _fault(literal, hint):
            raise errors.UserError(f"{shown}: {fault}")


def _check_reference(shown: str, reference: Any, hint: Any, bound: Bindings) -> None:
    """Refuses a part that is called where it must not be, or not called where it has to be."""
    part, written = reference.configurable.wrapped, repr(reference)
    given = {name for _, _, name in _in_effect(reference, bound)}
    uncalled, called = _fits(part, hint), _may_make(part, given, hint)
    if called if reference.evaluate else uncalled:
        return
    if called:
        raise errors.UserError(f"{shown}: write `{written}()`, with the parentheses")
    if uncalled:
        raise errors.UserError(
            f"{shown}: write `{written.removesuffix('()')}`, without the parentheses"
        )
    raise errors.UserError(f"{shown}: expected {_name(hint)}, got {written}")


def _resolved(value: Any, bound: Bindings) -> Any:
    """Returns what a macro or constant stands for, and any other value as it is."""
    while isinstance(value, gin.config.ConfigurableReference):
        name, selector = value.config_key
        if selector not in (MACRO, _CONSTANT):
            return value
        value = gin.query_parameter(name) if selector == _CONSTANT else bound[name, MACRO]["value"]
    return value


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of a part's parameters; none where they cannot be resolved."""
    is_init = isinstance(part, type) and not dataclasses.is_dataclass(part)
    try:
        found = typing.get_type_hints(part.__init__ if is_init else part)
    except (NameError, TypeError, AttributeError):
        return {}
    return {
        name: hint.type if isinstance(hint, dataclasses.InitVar) else hint
        for name, hint in found.items()
    }


def _fault(value: Any, hint: Any) -> str | None:
    """Returns what is wrong with a literal where `hint` stands, or None."""
    if _fits(value, hint):
        return None
    if not isinstance(value, int) or abs(value) <= errors.INT32_MAX:
        return f"expected {_name(hint)}, got {value!r}"
    got = repr(value) if value.bit_length() < 10_000 else "a number of many digits"
    point = ": write a point" * (float in _options(hint))
    return f"expected {_name(hint)}, got {got}, beyond int32{point}"


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value may be passed where `hint` stands."""
    if len(options := _options(hint)) > 1:
        return any(_fits(value, option) for option in options)
    kind, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (int, float):
        # Of an int JAX makes an int32, for a float, too.
        is_int32 = type(value) is int and abs(value) <= errors.INT32_MAX
        return is_int32 or (kind is float and isinstance(value, float))
    if kind in (tuple, list, collections.abc.Sequence):
        if kind is not tuple or items[1:] == (...,):  # any number of one kind
            items = items[:1] * len(value) if isinstance(value, tuple | list) else ()
        return isinstance(value, tuple | list) and (
            not typing.get_args(hint)
            or (len(value) == len(items) and all(map(_fits, value, items)))
        )
    if getattr(kind, "_is_protocol", False):
        return not isinstance(value, type) or "__call__" in vars(kind)
    return not _is_class(kind) or isinstance(value, kind)


def _may_make(part: Callable[..., Any], given: Iterable[str], hint: Any) -> bool:
    """Returns whether a call of a part with these arguments may give what `hint` wants."""
    kinds = [typing.get_origin(option) or option for option in _options(hint)]
    if isinstance(part, type):
        return any(not _is_class(kind) or issubclass(part, kind) for kind in kinds)
    lacks = any(
        parameter.default is parameter.empty and parameter.name not in given
        for parameter in inspect.signature(part).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    return any(kind is not collections.abc.Callable or not lacks for kind in kinds)


def _name(hint: Any) -> str:
    """Returns an annotation as a user reads it."""
    if typing.get_origin(hint) is collections.abc.Callable:
        return "a class or a function, uncalled (`@module.Name`)"
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(\w+\.)+", "", str(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the one hint."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_class(kind: Any) -> bool:
    """Returns whether `isinstance` takes a hint, and its answer counts."""
    if kind is Any or typing.is_typeddict(kind):  # which are classes
        return False
    return isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
