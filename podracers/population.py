"""Members of a population that differ in numeric options of their agent, and their evolution.

`jax.vmap` maps the agent over an array of the values: one program trains all members. Only
options that the agent uses in arithmetic alone may differ.

In population based training (Jaderberg et al., "Population Based Training of Neural Networks",
2017, https://arxiv.org/abs/1711.09846) the options are state: members with low returns copy others
(`exploit`), and change the options that they copied (`explore`).

Axis legend: `P` members, `Q = P // 4` of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import errors, types

Policy = TypeVar("Policy", bound=agent_lib.Policy)
Values = Mapping[str, Sequence[float]]  # `P` values of each option
Ranges = Mapping[str, tuple[float, float]]  # lowest and highest value of each option
MIN_MEMBERS = 4  # fewest with a lowest and a highest quarter
_NAME = "Anakin.population_values"
_RANGES = "Anakin.pbt_ranges"
_FACTORS = 0.8, 1.25  # factors of a perturbed option; their product is 1
_RESAMPLED = 0.25  # probability that an option is drawn from its range, not perturbed
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Evolution(NamedTuple):
    """State of a population that evolves, besides the states of its members."""

    options: dict[str, jax.Array]  # [P] float32 each
    returns: types.Mean  # [P] of the episodes that ended since the last exploit step


class Acting(NamedTuple):
    """Acting parameters of a population that evolves, with the options that belong to them."""

    params: types.PyTree  # [P, ...]
    options: dict[str, jax.Array]  # [P] float32 each


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
    _require_mapping(_NAME, numbers, "(1e-4, 1e-3)")
    if numbers and population == 1:
        raise errors.UserError(f"{_NAME}: expected Anakin.population to be more than 1, got 1")
    values: dict[str, tuple[float, ...]] = {}
    for name, items in numbers.items():
        count = len(items) if isinstance(items, Sequence) else 0
        option = _option(agent, _NAME, name)
        if not count or population % count or not all(map(_is_number, items)):
            raise errors.UserError(
                f"{_NAME}['{name}']: expected a number for each of {population} members (fewer "
                f"are repeated in turn, if they divide it), got {items!r}"
            )
        values[option] = tuple(map(float, items)) * (population // count)
    for index in range(population if values else 0):
        member(agent, values, index)  # the agent checks its options
    return values


def ranges_by_option(agent: agent_lib.Agent, values: Values, pairs: Any) -> Ranges:
    """Checks the ranges in which options evolve, and returns one for each option of `values`.

    Args:
      agent: the agent, which must accept both ends of each range.
      values: the members' first values, by `by_option`.
      pairs: `(lowest, highest)` by option, with names as of `by_option`.

    Raises:
      errors.UserError: an option has no range or no values, or they do not fit.
    """
    _require_mapping(_RANGES, pairs, "(1e-5, 1e-2)")
    ranges = {_option(agent, _RANGES, name): pair for name, pair in pairs.items()}
    for option in {**values, **ranges}:
        if option not in ranges:
            raise errors.UserError(f"{_RANGES}: expected a range of '{option}', got {pairs!r}")
        errors.require_known(f"{_NAME} has no values of", option, values)
        pair = ranges[option]
        is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_number, pair))
        if not is_pair or not pair[0] <= min(values[option]) <= max(values[option]) <= pair[1]:
            raise errors.UserError(
                f"{_RANGES}['{option}']: expected the lowest and the highest value, around "
                f"{values[option]}, got {pair!r}"
            )
        for end in pair:
            with_options(agent, {option: float(end)})  # the agent checks its options
    return {option: (float(low), float(high)) for option, (low, high) in ranges.items()}


def member(agent: Policy, values: Values, index: int) -> Policy:
    """Returns the agent of one member, as it would be alone."""
    return with_options(agent, _of_member(values, index))


def with_options(agent: Policy, options: Mapping[str, Any]) -> Policy:
    """Returns the agent with other values of some options; agents do not check traced values."""
    return dataclasses.replace(agent, **options) if options else agent


def arrays(values: Values) -> dict[str, np.ndarray]:
    """Returns the values as float32 arrays `[P]`, to be mapped over."""
    return {name: np.asarray(numbers, np.float32) for name, numbers in values.items()}


def split(params: types.PyTree, values: Mapping[str, Any]) -> tuple[types.PyTree, Any]:
    """Returns acting parameters and the members' options: `values`, or those in `Acting`."""
    return params if isinstance(params, Acting) else (params, values)


def exploit(returns: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the members of the lowest quarter, `[Q]`, and the member that each of them copies.

    Each takes one of the highest quarter at random ("truncation selection"), or itself unless its
    return is lower. `returns` are `[P]`; of equal ones, members with smaller numbers are lower.
    """
    quarter = returns.shape[0] // 4
    order = jnp.argsort(returns)
    lowest, highest = order[:quarter], order[-quarter:]
    source = jax.random.choice(key, highest, (quarter,))
    return lowest, jnp.where(returns[source] > returns[lowest], source, lowest)


def explore(
    options: Mapping[str, jax.Array], ranges: Ranges, key: jax.Array
) -> dict[str, jax.Array]:
    """Returns other options: each is multiplied by 0.8 or 1.25, or drawn from its range.

    Products are clipped to the range. A draw, of probability 0.25, is log-uniform where the range
    is positive, else uniform. Each option may have any shape.
    """
    explored = {}
    for index, (name, values) in enumerate(sorted(options.items())):
        factor_key, kind_key, draw_key = jax.random.split(jax.random.fold_in(key, index), 3)
        low, high = ranges[name]
        up = jax.random.bernoulli(factor_key, shape=values.shape)
        perturbed = jnp.clip(values * jnp.where(up, _FACTORS[1], _FACTORS[0]), low, high)
        share = jax.random.uniform(draw_key, values.shape)
        drawn = low * (high / low) ** share if low > 0.0 else low + (high - low) * share
        is_drawn = jax.random.bernoulli(kind_key, _RESAMPLED, values.shape)
        explored[name] = jnp.where(is_drawn, drawn, perturbed)
    return explored


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
    return {name: float(numbers[index]) for name, numbers in values.items()}


def _require_mapping(name: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise errors.UserError(
            f"{name}: expected numbers by option, such as {{'learning_rate': {example}}}, got "
            f"{value!r}"
        )


def _option(agent: agent_lib.Agent, binding: str, name: Any) -> str:
    """Returns the agent's float option that a user's name, such as `PPO.gamma`, stands for."""
    # The name of a base class stands for it, as in gin.
    prefixes = {"", *(base.__name__ for base in type(agent).__mro__)}
    floats = {field.name for field in dataclasses.fields(agent) if "float" in str(field.type)}
    prefix, _, option = str(name).rpartition(".")
    if option not in floats or prefix.rpartition(".")[2] not in prefixes:
        raise errors.UserError(
            f"{binding}: {type(agent).__name__} has no option '{name}' that is a float"
            f"{errors.nearest(option, floats)}"
        )
    return option


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.floating | np.integer)
    return is_real and not isinstance(value, bool) and bool(abs(value) <= _FLOAT32_MAX)
