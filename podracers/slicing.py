"""Programs in slices: a long one, cut between the passes of its loops over gradient steps.

A device runs what it is given in order. Where one device acts and learns, every action waits behind
a whole update, unless the update comes in pieces: then acting slips in between them. Nobody has to
mark anything: the loops to cut are those in which each pass sums over devices, as every gradient
step does (`parallel.gradient_step`).

Axis legend: `D` devices, `N` passes of a loop.
"""

import collections
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from podracers import parallel, types

_REPLICATED = jax.sharding.PartitionSpec()
_STACKED = jax.sharding.PartitionSpec(parallel.AXIS)  # each device's own, side by side
_DOUBT = 1.25  # a pass is taken to be at most so much longer than it was thought to be

Run = Callable[..., Any]  # `(program, *arguments) -> results`
_Values = dict[Any, Any]  # arrays by variable
_Specs = dict[Any, jax.sharding.PartitionSpec]


class Sliced:
    """A function over the devices of a mesh that runs as several programs.

    The results are those of the whole program, but for the rounding of programs that are compiled
    apart; how long slices are changes nothing.

    Loops are found where they stand in the function itself or in another such loop, and not in a
    function of `jax.jit` or in a branch. What stands outside of them, and each pass of the
    innermost of them, is never cut.

    Args:
      function: pure; runs under the mapped axis, as in `jax.shard_map`.
      mesh: its devices run it.
      in_specs: prefixes of the arguments, of `PartitionSpec`.
      out_specs: a prefix of the results; what is replicated is taken to be equal on all devices.
      seconds: how long a slice may take, as far as whole passes allow. Of several processes, which
        have to agree and measure apart, each pass is a slice.
    """

    def __init__(self, function, mesh, in_specs, out_specs, seconds: float):
        self._function, self._mesh, self._seconds = function, mesh, seconds
        self._in_specs, self._out_specs = in_specs, out_specs
        self._block: _Block | None = None
        self._results: Any = None

    def __call__(self, *args: Any) -> Any:
        """Runs it, and waits for each slice; donates the first argument."""
        if self._block is None:
            self._cut(args)
        results = self._block(jax.tree.leaves(args), self.run)
        return jax.tree.unflatten(self._results, results)

    def run(self, program: Callable, *args: Any) -> Any:
        """Runs a slice, and waits for it: the device has nothing else of this function's to do."""
        return jax.block_until_ready(program(*args))

    @property
    def num_loops(self) -> int:
        """How many loops are cut, one within another counted apart; known once it ran."""
        return self._block.num_loops if self._block else 0

    def _cut(self, args: Sequence[Any]) -> None:
        found = []

        def look(*shards):
            found.append(jax.make_jaxpr(self._function, return_shape=True)(*shards))
            return ()

        mapped = functools.partial(jax.shard_map, mesh=self._mesh, check_vma=False)
        jax.eval_shape(mapped(look, in_specs=self._in_specs, out_specs=()), *args)
        ((closed, shapes),) = found
        specs = _broadcast(self._in_specs, tuple(args))
        own = [True] * len(jax.tree.leaves(args[0]))
        own += [False] * (len(specs) - len(own))
        builder = _Builder(self._mesh, self._seconds)
        self._block = _Block(builder, closed, specs, own, _broadcast(self._out_specs, shapes))
        self._results = jax.tree.structure(shapes)


def _broadcast(specs: Any, tree: types.PyTree) -> list[jax.sharding.PartitionSpec]:
    """Returns the spec of each leaf of a tree, of which `specs` is a prefix."""
    each = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree)
    return jax.tree.leaves(each)


class _Builder:
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
                x.reshape(()) if spec == _STACKED and not aval.shape else x
                for x, aval, spec in zip(shards, avals, specs)
            ]
            results = [jnp.asarray(x) for x in function(*values)]
            return tuple(
                x.reshape((1,)) if spec == _STACKED and not x.shape else x
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


class _Program:
    """Equations between two cuts, or none: one dispatch.

    Args:
      builder: makes the program.
      jaxpr: that which the equations are part of.
      eqns: they.
      outputs: variables, or literals, that it returns.
      specs: how all variables before it lie.
      own: the variables that nobody needs after it.
      out_specs: how its results are to lie.
    """

    num_loops = 0

    def __init__(self, builder, jaxpr, eqns, outputs, specs: _Specs, own: set, out_specs):
        made = {var for eqn in eqns for var in eqn.outvars}
        read = [*_reads(eqns), *(var for var in outputs if _is_variable(var))]
        self.inputs = [var for var in dict.fromkeys(read) if var not in made]
        self.outputs = outputs
        part = jaxpr.replace(
            constvars=[],
            invars=self.inputs,
            outvars=outputs,
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        function = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))
        in_specs = [specs[var] for var in self.inputs]
        wanted = collections.Counter(
            (var.aval.shape, var.aval.dtype, spec) for var, spec in zip(outputs, out_specs)
        )
        donated = []  # of its own, what lies as a result will
        for index, (var, spec) in enumerate(zip(self.inputs, in_specs)):
            kind = var.aval.shape, var.aval.dtype, spec
            if var in own and wanted[kind]:
                wanted[kind] -= 1
                donated.append(index)
        avals = [var.aval for var in self.inputs]
        self._run = builder.program(function, avals, in_specs, out_specs, donated)

    def __call__(self, values: _Values, run: Run) -> tuple:
        """Returns the results; `values` gets them."""
        results = run(self._run, *(values[var] for var in self.inputs))
        values.update((var, x) for var, x in zip(self.outputs, results) if _is_variable(var))
        return results


class _Block:
    """A jaxpr, cut at its loops.

    Args:
      builder: makes the programs.
      closed: the jaxpr.
      specs: how its arguments lie.
      own: which arguments are donated.
      out_specs: how its results are to lie.
    """

    def __init__(self, builder, closed: core.ClosedJaxpr, specs, own, out_specs):
        jaxpr = self._jaxpr = closed.jaxpr
        self._consts = closed.consts
        self._parts = []  # each with the variables that are needed after it
        lies = dict.fromkeys(jaxpr.constvars, _REPLICATED) | dict(zip(jaxpr.invars, specs))
        mine = {var for var, is_own in zip(jaxpr.invars, own) if is_own}
        results = {var for var in jaxpr.outvars if _is_variable(var)}
        groups = list(_groups(jaxpr.eqns))
        for index, eqns in enumerate(groups):
            later = [eqn for group in groups[index + 1 :] for eqn in group]
            needed = results.union(_reads(later))
            made = [var for eqn in eqns for var in eqn.outvars if var in needed]
            if _is_loop(eqns[0]):
                loop = _Scan if eqns[0].primitive.name == "scan" else _While
                self._parts.append((loop(builder, eqns[0], lies, mine - needed), needed))
            elif made:
                stacked = [_STACKED] * len(made)
                part = _Program(builder, jaxpr, eqns, made, lies, mine - needed, stacked)
                self._parts.append((part, needed))
            lies |= dict.fromkeys(made, _STACKED)
            mine |= set(made)
        # What lies where it should is a result as it is; the rest takes one more program.
        self._is_ready = [
            _is_variable(var) and lies[var] == spec and jaxpr.outvars.count(var) == 1
            for var, spec in zip(jaxpr.outvars, out_specs)
        ]
        rest = [
            (var, spec)
            for var, spec, is_ready in zip(jaxpr.outvars, out_specs, self._is_ready)
            if not is_ready
        ]
        ready = {v for v, is_ready in zip(jaxpr.outvars, self._is_ready) if is_ready}
        outputs, specs = [var for var, _ in rest], [spec for _, spec in rest]
        self._last = None
        if rest:
            self._last = _Program(builder, jaxpr, [], outputs, lies, mine - ready, specs)

    @property
    def num_loops(self) -> int:
        """How many loops are cut."""
        return sum(part.num_loops for part, _ in self._parts)

    def __call__(self, args: Sequence[Any], run: Run) -> list[Any]:
        """Returns the results, as flat as the arguments."""
        values = dict(zip(self._jaxpr.constvars, self._consts))
        values |= dict(zip(self._jaxpr.invars, args))
        for part, needed in self._parts:
            part(values, run)
            values = {var: x for var, x in values.items() if var in needed}
        ready = [values.get(var) if _is_variable(var) else None for var in self._jaxpr.outvars]
        last = iter(self._last(values, run) if self._last else ())
        return [x if is_ready else next(last) for x, is_ready in zip(ready, self._is_ready)]


class _Loop:
    """A loop, some passes of which are a slice.

    Args:
      builder: makes the programs.
      eqn: its equation.
      specs: how all variables before it lie.
      own: the variables that nobody needs after it.
    """

    num_loops = 1

    def __init__(self, builder, eqn: core.JaxprEqn, specs: _Specs, own: set):
        self._eqn, self._own = eqn, own
        self._avals = [var.aval for var in eqn.invars]
        self._specs = [specs[v] if _is_variable(v) else _REPLICATED for v in eqn.invars]
        self._limit, self._pass_seconds = builder.seconds, np.inf

    def _arguments(self, values: _Values) -> list[Any]:
        return [
            values[var] if _is_variable(var) else np.asarray(var.val, var.aval.dtype)
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
            if _is_variable(variables[index])
            and variables[index] in self._own
            and self._specs[index] == _STACKED
            and variables.count(variables[index]) == 1
        ]
        extra = len(jax.eval_shape(lambda: more(*map(_zeros, self._avals))))
        out_specs = [_STACKED] * (stop - start + extra)

        def enter(*args):
            return [*args[start:stop], *more(*args)]

        return builder.program(enter, self._avals, self._specs, out_specs, donated)

    def _slice(self, run: Run, program: Callable, *args: Any) -> tuple[tuple, int]:
        """Takes some passes, as many as fit; `program` takes `args` and how many."""
        count = 1
        if jax.process_count() == 1 and self._pass_seconds < self._limit:
            count = int(self._limit / self._pass_seconds)
        began = time.perf_counter()
        results = run(program, *args, np.int32(count))
        seconds = (time.perf_counter() - began) / count
        # What is compiled, or waits for others, seems long: the estimate rises slowly.
        self._pass_seconds = min(seconds, _DOUBT * self._pass_seconds)
        return results, count


class _Scan(_Loop):
    """`jax.lax.scan`."""

    def __init__(self, builder, eqn, specs, own):
        super().__init__(builder, eqn, specs, own)
        body, self._length = eqn.params["jaxpr"], eqn.params["length"]
        self._reverse = eqn.params["reverse"]
        self._start = eqn.params["num_consts"]
        self._stop = self._start + eqn.params["num_carry"]
        carried = self._stop - self._start
        shapes = [var.aval for var in eqn.outvars[carried:]]
        zeros = functools.partial(map, _zeros, shapes)
        self._first = self._enter(builder, self._start, self._stop, lambda *_: [*zeros()])
        of_carry = [_STACKED] * (carried + len(shapes))
        rest = self._avals[: self._start] + self._avals[self._stop :]  # constants and items
        self._rest_specs = self._specs[: self._start] + self._specs[self._stop :]
        avals = [var.aval for var in eqn.outvars]
        self._body = None
        if any(map(_is_loop, body.jaxpr.eqns)):
            self._nest(builder, body, avals, rest, carried)
            return
        function = functools.partial(self._passes, core.jaxpr_as_fun(body), len(rest), carried)
        index = jax.ShapeDtypeStruct((), np.int32)
        self._program = builder.program(
            function,
            [*rest, *avals, index, index],
            [*self._rest_specs, *of_carry, _REPLICATED, _REPLICATED],
            of_carry,
            range(len(rest), len(rest) + len(of_carry)),
        )

    def _nest(self, builder, body, avals, rest, carried) -> None:
        """Prepares for passes that are cut themselves."""
        consts = self._start
        items = len(rest) - consts
        stacked = [_STACKED] * items
        index = jax.ShapeDtypeStruct((), np.int32)
        self._take = builder.program(
            lambda *args: [x[args[-1]] for x in args[:-1]],
            [*rest[consts:], index],
            [*self._rest_specs[consts:], _REPLICATED],
            stacked,
        )
        outputs = len(avals)
        own = [False] * consts + [True] * (carried + items)
        specs = [*self._rest_specs[:consts], *[_STACKED] * carried, *stacked]
        self._body = _Block(builder, body, specs, own, [_STACKED] * outputs)
        self.num_loops = 1 + self._body.num_loops
        results = [var.aval for var in body.jaxpr.outvars[carried:]]
        self._write = builder.program(
            lambda *args: [
                whole.at[args[-1]].set(x)
                for whole, x in zip(args[: len(results)], args[len(results) : -1])
            ],
            [*avals[carried:], *results, index],
            [*[_STACKED] * (2 * len(results)), _REPLICATED],
            [_STACKED] * len(results),
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

        stop = jnp.minimum(start + count, self._length)
        return jax.lax.fori_loop(start, stop, step, list(state))

    def __call__(self, values: _Values, run: Run) -> None:
        args = self._arguments(values)
        state = run(self._first, *args)
        rest = args[: self._start] + args[self._stop :]
        taken = 0
        while taken < self._length:
            if self._body:
                index = self._length - 1 - taken if self._reverse else taken
                state, count = self._one(run, rest, state, np.int32(index)), 1
            else:
                state, count = self._slice(run, self._program, *rest, *state, np.int32(taken))
            taken += count
        values.update(zip(self._eqn.outvars, state))

    def _one(self, run: Run, rest: list, state: Sequence[Any], index: np.int32) -> list[Any]:
        carried = self._stop - self._start
        items = run(self._take, *rest[self._start :], index)
        results = self._body([*rest[: self._start], *state[:carried], *items], run)
        carry, parts = results[:carried], results[carried:]
        return [*carry, *run(self._write, *state[carried:], *parts, index)]


class _While(_Loop):
    """`jax.lax.while_loop`, or a `fori_loop` of a traced number of passes; never cut within one."""

    def __init__(self, builder, eqn, specs, own):
        super().__init__(builder, eqn, specs, own)
        self._split = eqn.params["cond_nconsts"]
        self._start = self._split + eqn.params["body_nconsts"]
        self._body = core.jaxpr_as_fun(eqn.params["body_jaxpr"])
        self._condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
        self._first = self._enter(builder, self._start, len(self._avals), self._goes_on)
        carry = self._avals[self._start :]
        stacked = [_STACKED] * len(carry)
        count = jax.ShapeDtypeStruct((), np.int32)
        self._program = builder.program(
            self._passes,
            [*self._avals, count],
            [*self._specs[: self._start], *stacked, _REPLICATED],
            [*stacked, _STACKED],
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

        _, *carry = jax.lax.while_loop(goes_on, step, [jnp.int32(0), *carry])
        return [*carry, *self._goes_on(*consts, *carry)]

    def __call__(self, values: _Values, run: Run) -> None:
        args = self._arguments(values)
        *carry, more = run(self._first, *args)
        while np.asarray(more.addressable_data(0)).item():  # equal on all devices
            (*carry, more), _ = self._slice(run, self._program, *args[: self._start], *carry)
        values.update(zip(self._eqn.outvars, carry))


def _zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def _is_variable(var: Any) -> bool:
    return not isinstance(var, core.Literal)


def _reads(eqns: Sequence[core.JaxprEqn]) -> list[Any]:
    return [var for eqn in eqns for var in eqn.invars if _is_variable(var)]


def _groups(eqns: Sequence[core.JaxprEqn]) -> Iterator[list[core.JaxprEqn]]:
    """Yields the equations in order: loops to cut by themselves, what is between them together."""
    group = []
    for eqn in eqns:
        if not _is_loop(eqn):
            group.append(eqn)
            continue
        if group:
            yield group
        yield [eqn]
        group = []
    if group:
        yield group


def _is_loop(eqn: core.JaxprEqn) -> bool:
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
