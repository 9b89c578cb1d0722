"""How much a JAX function computes, counted from its jaxpr.

XLA's own analysis (`jax.stages.Lowered.cost_analysis`) takes a loop for one pass of it, and counts
what random numbers cost only where the platform has no loop for them. This is rough, and the same
on every platform: elements that are computed, those of a loop as often as it runs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

_RANDOM = 100.0  # operations for a random number: threefry has twenty rounds for two of them
_PASSES = 16.0  # of a loop whose number of passes depends on data


def count(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns how many elements a function computes.

    Args:
      function: a function of arrays.
      *arguments: arrays, or their shapes and dtypes.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn) -> float:
    name = equation.primitive.name
    inner = [each for value in equation.params.values() for each in _jaxprs(value)]
    if inner:
        passes = {"scan": equation.params.get("length"), "while": _PASSES}.get(name, 1.0)
        return passes * sum(map(_count, inner))  # under `vmap`, every branch is computed
    size = float(sum(variable.aval.size for variable in equation.outvars))
    if name.startswith(("random_", "threefry")):
        return size * _RANDOM
    if name == "sort":
        axis = equation.invars[0].aval.shape[equation.params["dimension"]]
        return size * math.log2(max(axis, 2)) ** 2
    if name == "dot_general":
        (axes, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return size * math.prod(shape[axis] for axis in axes)
    return size


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    """Returns the jaxprs in a parameter of an equation."""
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    if isinstance(value, (tuple, list)):
        return [each for item in value for each in _jaxprs(item)]
    return []
