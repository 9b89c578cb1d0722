"""Loops that run some passes at a time, and the programs that they are made of; see `slicing`.

Axis legend: `D` devices, `N` passes of a loop.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from podracers import parallel

REPLICATED = jax.sharding.PartitionSpec()
STACKED = jax.sharding.PartitionSpec(parallel.AXIS)  # each device's own, side by side
_MOST = 2**30  # passes: an int32 has room for twice as many
_DOUBT = 1.25  # a pass is taken to be at most so much longer than it was thought to be

Run = Callable[..., Any]  # `(program, *arguments) -> results`
Values = dict[Any, Any]  # arrays by variable
Specs = Mapping[Any, jax.sharding.PartitionSpec]


class Builder:
    """Makes the programs.

    Args:
      mesh: the devices that run them.
      seconds: how long a slice may take.
    """

    def __init__(self, mesh: jax.sharding.Mesh, seconds: float):
        self.mesh, self.seconds = mesh, seconds

    def program(self, function, avals, specs, out_specs, donated=()) -> Callable:
        """Returns a program of flat arguments and results.

        Args:
          function: of one device's values; returns a sequence.
          avals: the types of its arguments.
          specs: how they lie. What is stacked has a first axis, and a scalar gets one for it.
          out_specs: how the results are to lie.
          donated: indices of the arguments that are donated.
        """

        def on_device(*shards):
            values = [
                x.reshape(()) if spec == STACKED and not aval.shape else x
                for x, aval, spec in zip(shards, avals, specs)
            ]
            results = [jnp.asarray(x) for x in function(*values)]
            return tuple(
                x.reshape((1,)) if spec == STACKED and not x.shape else x
                for x, spec in zip(results, out_specs)
            )

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=tuple(out_specs),
            check_vma=False,  # as the whole program has it
        )
        return jax.jit(mapped, donate_argnums=tuple(donated))


class _Loop:
    """A loop, some passes of which are a slice.

    Args:
      builder: makes the programs.
      eqn: its equation.
      specs: how all variables before it lie.
      own: the variables that nobody needs after it.
      block: makes a body of several programs, `slicing.Block`.
    """

    num_loops = 1

    def __init__(self, builder, eqn: core.JaxprEqn, specs: Specs, own: set, block: Callable):
        self._eqn, self._own, self._block = eqn, own, block
        self._avals = [var.aval for var in eqn.invars]
        self._specs = [specs[v] if is_variable(v) else REPLICATED for v in eqn.invars]
        self._limit, self._pass_seconds = builder.seconds, np.inf

    def _arguments(self, values: Values) -> list[Any]:
        return [
            values[var] if is_variable(var) else np.asarray(var.val, var.aval.dtype)
            for var in self._eqn.invars
        ]

    def _enter(self, builder, start: int, stop: int, more: Callable[..., list]) -> Callable:
        """Returns a program of all arguments that stacks those from `start` to `stop`.

        Args:
          builder: makes it.
          start: the first that the loop carries.
          stop: the first that it does not.
          more: function of all arguments that returns what else the loop carries.
        """
        variables = self._eqn.invars
        donated = [
            index
            for index in range(start, stop)
            if is_variable(variables[index])
            and variables[index] in self._own
            and self._specs[index] == STACKED
            and variables.count(variables[index]) == 1
        ]
        extra = len(jax.eval_shape(lambda: more(*map(_zeros, self._avals))))
        out_specs = [STACKED] * (stop - start + extra)

        def enter(*args):
            return [*args[start:stop], *more(*args)]

        return builder.program(enter, self._avals, self._specs, out_specs, donated)

    def _num_passes(self) -> int:
        """Returns how many passes fit into a slice, as far as is known."""
        if jax.process_count() > 1 or not self._pass_seconds < self._limit:
            return 1
        return int(min(self._limit / self._pass_seconds, _MOST))

    def _note(self, began: float, passes: int) -> None:
        """Notes how long passes took that began at a time, of `time.perf_counter`."""
        seconds = (time.perf_counter() - began) / max(passes, 1)
        # What is compiled, or waits for others, seems long: the estimate rises slowly.
        self._pass_seconds = min(seconds, _DOUBT * self._pass_seconds)


class Scan(_Loop):
    """`jax.lax.scan`."""

    def __init__(self, builder, eqn, specs, own, block):
        super().__init__(builder, eqn, specs, own, block)
        body, self._length = eqn.params["jaxpr"], eqn.params["length"]
        self._reverse = eqn.params["reverse"]
        self._start = eqn.params["num_consts"]
        self._stop = self._start + eqn.params["num_carry"]
        carried = self._stop - self._start
        shapes = [var.aval for var in eqn.outvars[carried:]]
        zeros = functools.partial(map, _zeros, shapes)
        self._first = self._enter(builder, self._start, self._stop, lambda *_: [*zeros()])
        of_carry = [STACKED] * (carried + len(shapes))
        rest = self._avals[: self._start] + self._avals[self._stop :]  # constants and items
        self._rest_specs = self._specs[: self._start] + self._specs[self._stop :]
        avals = [var.aval for var in eqn.outvars]
        self._body = None
        if any(map(is_loop, body.jaxpr.eqns)):
            self._nest(builder, body, avals, rest, carried)
            return
        function = functools.partial(self._passes, core.jaxpr_as_fun(body), len(rest), carried)
        index = jax.ShapeDtypeStruct((), np.int32)
        self._program = builder.program(
            function,
            [*rest, *avals, index, index],
            [*self._rest_specs, *of_carry, REPLICATED, REPLICATED],
            of_carry,
            range(len(rest), len(rest) + len(of_carry)),
        )

    def _nest(self, builder, body, avals, rest, carried) -> None:
        """Prepares for passes that are cut themselves."""
        consts = self._start
        items = len(rest) - consts
        stacked = [STACKED] * items
        index = jax.ShapeDtypeStruct((), np.int32)
        self._take = builder.program(
            lambda *args: [x[args[-1]] for x in args[:-1]],
            [*rest[consts:], index],
            [*self._rest_specs[consts:], REPLICATED],
            stacked,
        )
        outputs = len(avals)
        own = [False] * consts + [True] * (carried + items)
        specs = [*self._rest_specs[:consts], *[STACKED] * carried, *stacked]
        self._body = self._block(builder, body, specs, own, [STACKED] * outputs)
        self.num_loops = 1 + self._body.num_loops
        results = [var.aval for var in body.jaxpr.outvars[carried:]]
        self._write = builder.program(
            lambda *args: [
                whole.at[args[-1]].set(x)
                for whole, x in zip(args[: len(results)], args[len(results) : -1])
            ],
            [*avals[carried:], *results, index],
            [*[STACKED] * (2 * len(results)), REPLICATED],
            [STACKED] * len(results),
            range(len(results)),
        )

    def _passes(self, body, num_rest, num_carried, *args):
        *args, start, count = args
        rest, state = args[:num_rest], args[num_rest:]
        consts, items = rest[: self._start], rest[self._start :]

        def step(index, state):
            carry, whole = state[:num_carried], state[num_carried:]
            index = self._length - 1 - index if self._reverse else index
            results = body(*consts, *carry, *(x[index] for x in items))
            carry, parts = results[:num_carried], results[num_carried:]
            return [*carry, *(x.at[index].set(part) for x, part in zip(whole, parts))]

        return jax.lax.fori_loop(start, start + count, step, list(state))

    def __call__(self, values: Values, run: Run) -> None:
        args = self._arguments(values)
        state = run(self._first, *args)
        rest = args[: self._start] + args[self._stop :]
        taken = 0
        while taken < self._length:
            if self._body:
                index = self._length - 1 - taken if self._reverse else taken
                state, count = self._one(run, rest, state, np.int32(index)), 1
            else:
                began = time.perf_counter()
                count = min(self._num_passes(), self._length - taken)
                state = run(self._program, *rest, *state, np.int32(taken), np.int32(count))
                self._note(began, count)
            taken += count
        values.update(zip(self._eqn.outvars, state))

    def _one(self, run: Run, rest: list, state: Sequence[Any], index: np.int32) -> list[Any]:
        carried = self._stop - self._start
        items = run(self._take, *rest[self._start :], index)
        results = self._body([*rest[: self._start], *state[:carried], *items], run)
        carry, parts = results[:carried], results[carried:]
        return [*carry, *run(self._write, *state[carried:], *parts, index)]


class While(_Loop):
    """`jax.lax.while_loop`, or a `fori_loop` of a traced number of passes; never cut within one."""

    def __init__(self, builder, eqn, specs, own, block):
        super().__init__(builder, eqn, specs, own, block)
        self._split = eqn.params["cond_nconsts"]
        self._start = self._split + eqn.params["body_nconsts"]
        self._body = core.jaxpr_as_fun(eqn.params["body_jaxpr"])
        self._condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
        self._first = self._enter(builder, self._start, len(self._avals), self._goes_on)
        carry = self._avals[self._start :]
        stacked = [STACKED] * len(carry)
        count = jax.ShapeDtypeStruct((), np.int32)
        self._program = builder.program(
            self._passes,
            [*self._avals, count],
            [*self._specs[: self._start], *stacked, REPLICATED],
            [*stacked, STACKED, STACKED],
            range(self._start, self._start + len(carry)),
        )

    def _goes_on(self, *args) -> list[jax.Array]:
        return self._condition(*args[: self._split], *args[self._start :])

    def _passes(self, *args):
        *args, count = args
        consts, carry = args[: self._start], args[self._start :]

        def goes_on(state):
            return (state[0] < count) & self._goes_on(*consts, *state[1:])[0]

        def step(state):
            return [state[0] + 1, *self._body(*consts[self._split :], *state[1:])]

        passes, *carry = jax.lax.while_loop(goes_on, step, [jnp.int32(0), *carry])
        return [*carry, *self._goes_on(*consts, *carry), passes]

    def __call__(self, values: Values, run: Run) -> None:
        args = self._arguments(values)
        *carry, more = run(self._first, *args)
        while _number(more):
            began, count = time.perf_counter(), np.int32(self._num_passes())
            *carry, more, passes = run(self._program, *args[: self._start], *carry, count)
            self._note(began, _number(passes))
        values.update(zip(self._eqn.outvars, carry))


def _number(x: jax.Array) -> int:
    """Returns what is equal on all devices."""
    return int(np.asarray(x.addressable_data(0)).item())


def _zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def is_variable(var: Any) -> bool:
    """Returns whether it is no literal, which has no place among the values."""
    return not isinstance(var, core.Literal)


def is_loop(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a loop whose passes sum over devices."""
    return eqn.primitive.name in ("scan", "while") and _sums_over_devices(eqn)


def _sums_over_devices(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation, or one within it, sums over devices."""
    if eqn.primitive.name.startswith("psum"):
        return True
    return any(
        _sums_over_devices(inner)
        for inside in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
        if _is_jaxpr(inside)
        for inner in getattr(inside, "jaxpr", inside).eqns
    )


def _is_jaxpr(node: Any) -> bool:
    return isinstance(node, core.Jaxpr | core.ClosedJaxpr)
