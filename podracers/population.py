"""Members of a population that differ in numeric options of their agent.

`jax.vmap` maps the agent over an array of the values: one program trains all members. Only
options that the agent uses in arithmetic alone may differ.

Axis legend: `P` members.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from podracers import agent as agent_lib
from podracers import errors

Policy = TypeVar("Policy", bound=agent_lib.Policy)
Values = Mapping[str, Sequence[float]]  # `P` values of each option
_NAME = "Anakin.population_values"
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def by_option(agent: agent_lib.Agent, population: int, numbers: Any) -> Values:
    """Checks the values that a user gave, and returns one value for each member.

    Args:
      agent: the agent, whose other options all members share.
      population: `P`.
      numbers: numbers by option, called `learning_rate`, `PPO.learning_rate` or
        `ppo.PPO.learning_rate`; fewer than `P` are repeated in turn, if they divide it.

    Raises:
      errors.UserError: there is no such option, it is no float, the agent refuses a value, or the
        numbers do not fit the population.
    """
    if not isinstance(numbers, Mapping):
        raise errors.UserError(
            f"{_NAME}: expected numbers by option, such as {{'learning_rate': (1e-4, 1e-3)}}, got "
            f"{numbers!r}"
        )
    if numbers and population == 1:
        raise errors.UserError(f"{_NAME}: expected Anakin.population to be more than 1, got 1")
    agent_name = type(agent).__name__
    # The name of a base class stands for it, as in gin.
    prefixes = {"", *(base.__name__ for base in type(agent).__mro__)}
    floats = {field.name for field in dataclasses.fields(agent) if "float" in str(field.type)}
    values: dict[str, tuple[float, ...]] = {}
    for name, items in numbers.items():
        prefix, _, option = str(name).rpartition(".")
        if option not in floats or prefix.rpartition(".")[2] not in prefixes:
            raise errors.UserError(
                f"{_NAME}: {agent_name} has no option '{name}' that is a float"
                f"{errors.nearest(option, floats)}"
            )
        count = len(items) if isinstance(items, Sequence) else 0
        if not count or population % count or not all(map(_is_number, items)):
            raise errors.UserError(
                f"{_NAME}['{name}']: expected a number for each of {population} members (fewer "
                f"are repeated in turn, if they divide it), got {items!r}"
            )
        values[option] = tuple(map(float, items)) * (population // count)
    for index in range(population if values else 0):
        member(agent, values, index)  # the agent checks its options
    return values


def member(agent: Policy, values: Values, index: int) -> Policy:
    """Returns the agent of one member, as it would be alone."""
    return with_options(agent, _of_member(values, index))


def with_options(agent: Policy, options: Mapping[str, Any]) -> Policy:
    """Returns the agent with other values of some options; agents do not check traced values."""
    return dataclasses.replace(agent, **options) if options else agent


def arrays(values: Values) -> dict[str, np.ndarray]:
    """Returns the values as float32 arrays `[P]`, to be mapped over."""
    return {name: np.asarray(numbers, np.float32) for name, numbers in values.items()}


def described(values: Values, index: int) -> str:
    """Returns a phrase for messages, ` (learning_rate = 0.001)`; empty without values."""
    options = ", ".join(f"{name} = {x:g}" for name, x in _of_member(values, index).items())
    return f" ({options})" if options else ""


def rows(
    values: Values, seeds: Sequence[int], columns: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Returns each member's row in a summary: its seed, its values and its results by column."""
    return [
        {"seed": seed, "values": _of_member(values, index)}
        | {name: float(column[index]) for name, column in columns.items()}
        for index, seed in enumerate(seeds)
    ]


def _of_member(values: Values, index: int) -> dict[str, float]:
    return {name: numbers[index] for name, numbers in values.items()}


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.floating | np.integer)
    return is_real and not isinstance(value, bool) and bool(abs(value) <= _FLOAT32_MAX)
