"""Members of a population that differ in numeric options of their agent.

An option becomes an array with one value for each member, and a member is the agent with its entry,
which is traced. So one program serves all members, and no agent is written for it: what an agent
uses in arithmetic alone may differ; what decides how its program is made may not.

Axis legend: `P` members.
"""

import copy
import dataclasses
import functools
import numbers
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podracers import agent as agent_lib
from podracers import errors

Values = Mapping[str, tuple[float, ...]]  # by option, `P` each
_NAME = "Anakin.population_values"


def by_option(agent: agent_lib.Agent, population: int, given: Any) -> Values:
    """Returns the values of each member by option, as a user gave them, and checks them.

    Args:
      agent: the agent, whose other options are everybody's.
      population: `P`.
      given: numbers by option, called `learning_rate`, `PPO.learning_rate` or
        `ppo.PPO.learning_rate`; fewer than `P` are repeated in turn, if they divide it.

    Raises:
      errors.UserError: there is no such option, it is no float, a member's agent refuses its value,
        or the numbers do not fit the population.
    """
    if not isinstance(given, Mapping):
        raise errors.UserError(
            f"{_NAME}: expected numbers by option, such as {{'learning_rate': (1e-4, 1e-3)}}, got "
            f"{given!r}"
        )
    if given and population == 1:
        raise errors.UserError(f"{_NAME}: expected Anakin.population to be more than 1, got 1")
    if given:
        _require_no_copies(agent)
    values: dict[str, tuple[float, ...]] = {}
    for name, numbers_ in given.items():
        option = _option(agent, name)
        if option in values:
            raise errors.UserError(f"{_NAME}: '{option}' is there twice")
        values[option] = _per_member(name, population, numbers_)
    for distinct in dict.fromkeys(zip(*values.values())):
        dataclasses.replace(agent, **dict(zip(values, distinct)))  # which checks its options
    return values


def member(agent: agent_lib.Agent, values: Values, index: int) -> agent_lib.Agent:
    """Returns the agent of one member, as it would be alone."""
    if not values:
        return agent
    return dataclasses.replace(agent, **{name: each[index] for name, each in values.items()})


def arrays(values: Values) -> dict[str, np.ndarray]:
    """Returns the values as float32 arrays `[P]`, to be mapped over."""
    return {name: np.asarray(each, np.float32) for name, each in values.items()}


def with_options(agent: agent_lib.Agent, values: Mapping[str, jax.Array]) -> agent_lib.Agent:
    """Returns the agent with other values of some options, which may be traced, and are unchecked.

    What the agent has made of its options (`functools.cached_property`) is made anew.
    """
    if not values:
        return agent
    other = copy.copy(agent)
    for name in list(vars(other)):
        if _is_cached(agent, name):
            del vars(other)[name]
    vars(other).update(values)
    return other


def described(values: Values, index: int) -> str:
    """Returns a phrase for messages, ` (learning_rate = 0.001)`; empty without values."""
    own = ", ".join(f"{name} = {each[index]:g}" for name, each in values.items())
    return f" ({own})" if own else ""


def rows(
    values: Values, seeds: Sequence[int], columns: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Returns what a summary says of each member: its seed, its values, and what it reached.

    Args:
      values: of all members.
      seeds: `P`.
      columns: what they reached, `[P]` each, by name.
    """
    return [
        {
            "seed": seed,
            "values": {name: each[index] for name, each in values.items()},
            **{name: float(column[index]) for name, column in columns.items()},
        }
        for index, seed in enumerate(seeds)
    ]


def refusal(option: str, agent: agent_lib.Agent) -> errors.UserError:
    """Returns what to raise for an option that decides how a program is made."""
    name = f"{type(agent).__name__}.{option}"
    return errors.UserError(
        f"{_NAME}: {name} cannot differ between members: it decides what is compiled, beyond "
        "arithmetic"
    )


def _is_cached(agent: agent_lib.Agent, name: str) -> bool:
    return isinstance(getattr(type(agent), name, None), functools.cached_property)


def _require_no_copies(agent: agent_lib.Agent) -> None:
    """Refuses an agent with attributes that may follow from options, and would not be made anew."""
    is_dataclass = dataclasses.is_dataclass(agent)
    options = {each.name for each in dataclasses.fields(agent) if each.init} if is_dataclass else ()
    for name in vars(agent):
        if name not in options and not _is_cached(agent, name):
            raise errors.UserError(
                f"{_NAME}: {type(agent).__name__}.{name} may follow from options that differ: make "
                "it a functools.cached_property"
            )


def _option(agent: agent_lib.Agent, name: Any) -> str:
    """Returns the option that a name means."""
    kind = type(agent).__name__
    prefix, _, option = str(name).rpartition(".")
    if prefix and prefix.rpartition(".")[2] != kind:
        raise errors.UserError(f"{_NAME}: '{name}' is no option of this experiment's agent, {kind}")
    is_dataclass = dataclasses.is_dataclass(agent)
    fields = {each.name: each for each in dataclasses.fields(agent)} if is_dataclass else {}
    floats = {each for each in fields if fields[each].init and _is_float(fields[each].type)}
    if option not in fields:
        raise errors.UserError(
            f"{_NAME}: {kind} has no option '{option}'{errors.nearest(option, floats)}"
        )
    if option not in floats:
        raise errors.UserError(f"{_NAME}: {kind}.{option} is no float: expected one that is")
    return option


def _is_float(hint: Any) -> bool:
    """Returns whether an annotation allows a float, as itself or as text."""
    if isinstance(hint, str):
        return "float" in (each.strip() for each in hint.split("|"))
    return float in (hint, *typing.get_args(hint))


def _per_member(name: str, population: int, given: Any) -> tuple[float, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(_is_number, given)):
        raise errors.UserError(f"{_NAME}['{name}']: expected a tuple of numbers, got {given!r}")
    if not given or population % len(given):
        raise errors.UserError(
            f"{_NAME}['{name}']: expected a number for each of {population} members (fewer are "
            f"repeated in turn, if they divide it), got {len(given)}"
        )
    return tuple(map(float, given)) * (population // len(given))


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and abs(value) <= float(np.finfo(np.float32).max)
