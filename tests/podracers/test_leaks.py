"""Arrays of a trace that a part keeps are found, wherever they lie."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from podracers import errors, leaks


def _array():
    return jnp.arange(4.0) * 2


@dataclasses.dataclass(frozen=True)
class Part:
    """Keeps the result of `make` from its first use on."""

    make: Callable[[], Any] = _array

    @functools.cached_property
    def table(self):
        return self.make()

    def use(self):
        return self.table


class Assigned:
    def use(self):
        self.seen = {"first": [_array()]}


class Net(nn.Module):
    part: Part

    def __call__(self):
        return self.part.table


def _outer():
    part = Part()
    return types.SimpleNamespace(inner=part, use=lambda: part.table)


def _network():
    net = Net(Part())
    return types.SimpleNamespace(net=net, use=lambda: net.apply({}))


def _compile_time():
    with jax.ensure_compile_time_eval():
        return _array()


def _trace(part):
    with leaks.refused(part):
        jax.eval_shape(lambda: (part.use(), None)[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Part, "Part.table"),
        (Assigned, "Assigned.seen"),
        (lambda: Part(lambda: optax.sgd(_array()[0])), "Part.table"),  # which its functions hold
        (lambda: Part(lambda: functools.partial(jnp.add, _array())), "Part.table"),
        (lambda: Part(lambda: Part(functools.partial(jnp.add, _array())).use), "Part.make (in "),
        (_outer, "Part.table (in types.SimpleNamespace.inner)"),
        (_network, f"Part.table (in {__name__}.Net.part, types.SimpleNamespace.net)"),
    ],
)
def test_a_kept_array_is_named_by_class_and_attribute(make, words):
    with pytest.raises(errors.UserError) as caught:
        _trace(make())
    assert f"{__name__}.{words}" in str(caught.value)


@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1), _compile_time, lambda: [jax, Part]])
def test_other_values_may_be_kept(make):
    part = Part(make)
    _trace(part)
    assert "table" in vars(part)  # it was made, and kept


def test_the_cause_replaces_the_error_that_it_led_to():
    part = Part()
    with pytest.raises(errors.UserError, match=r"Part\.table keeps"), leaks.refused(part):
        jax.eval_shape(part.use)
        jax.jit(lambda: part.table + 1)()


def test_an_array_of_a_module_is_named_by_its_line():
    table = functools.cache(_array)
    jax.eval_shape(table)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jax.jit(lambda: table() + 1)()
    line = _array.__code__.co_firstlineno + 1
    assert f"test_leaks.py:{line} in _array made" in str(leaks.explained(caught.value))


class Wrapping:
    """Like the classes of decorators in C, has `__wrapped__` as a descriptor."""

    __slots__ = ("__dict__", "__wrapped__")


def test_a_part_may_keep_objects_that_wrap_a_function():
    part = Wrapping()
    part.array = 1
    assert leaks._place(types.SimpleNamespace(run=part)) is None
