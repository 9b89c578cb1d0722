"""Programs in slices: a long one, cut between the passes of its loops over gradient steps.

A device runs what it is given in order. Where one device acts and learns, every action waits behind
a whole update, unless the update comes in pieces: then acting slips in between them. Nobody has to
mark anything: the loops to cut are those in which each pass sums over devices, as every gradient
step does (`parallel.gradient_step`).

Axis legend: `D` devices, `N` passes of a loop.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from podracers import sliced_loops as loops
from podracers import types


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
        builder = loops.Builder(self._mesh, self._seconds)
        self._block = _Block(builder, closed, specs, own, _broadcast(self._out_specs, shapes))
        self._results = jax.tree.structure(shapes)


def _broadcast(specs: Any, tree: types.PyTree) -> list[jax.sharding.PartitionSpec]:
    """Returns the spec of each leaf of a tree, of which `specs` is a prefix."""
    each = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree)
    return jax.tree.leaves(each)


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

    def __init__(self, builder, jaxpr, eqns, outputs, specs: loops.Specs, own: set, out_specs):
        made = {var for eqn in eqns for var in eqn.outvars}
        read = [*_reads(eqns), *(var for var in outputs if loops.is_variable(var))]
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

    def __call__(self, values: loops.Values, run: loops.Run) -> tuple:
        """Returns the results; `values` gets them."""
        results = run(self._run, *(values[var] for var in self.inputs))
        values.update((var, x) for var, x in zip(self.outputs, results) if loops.is_variable(var))
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
        lies = dict.fromkeys(jaxpr.constvars, loops.REPLICATED) | dict(zip(jaxpr.invars, specs))
        mine = {var for var, is_own in zip(jaxpr.invars, own) if is_own}
        results = {var for var in jaxpr.outvars if loops.is_variable(var)}
        groups = list(_groups(jaxpr.eqns))
        for index, eqns in enumerate(groups):
            later = [eqn for group in groups[index + 1 :] for eqn in group]
            needed = results.union(_reads(later))
            made = [var for eqn in eqns for var in eqn.outvars if var in needed]
            if loops.is_loop(eqns[0]):
                loop = loops.Scan if eqns[0].primitive.name == "scan" else loops.While
                self._parts.append((loop(builder, eqns[0], lies, mine - needed, _Block), needed))
            elif made:
                stacked = [loops.STACKED] * len(made)
                part = _Program(builder, jaxpr, eqns, made, lies, mine - needed, stacked)
                self._parts.append((part, needed))
            lies |= dict.fromkeys(made, loops.STACKED)
            mine |= set(made)
        owned = [var for var in jaxpr.outvars if loops.is_variable(var) and var in mine]
        # What lies where it should is a result as it is; the rest takes one more program.
        self._is_ready = [
            var in owned and lies[var] == spec and jaxpr.outvars.count(var) == 1
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

    def __call__(self, args: Sequence[Any], run: loops.Run) -> list[Any]:
        """Returns the results, as flat as the arguments."""
        values = dict(zip(self._jaxpr.constvars, self._consts))
        values |= dict(zip(self._jaxpr.invars, args))
        for part, needed in self._parts:
            part(values, run)
            values = {var: x for var, x in values.items() if var in needed}
        ready = [values.get(var) if loops.is_variable(var) else None for var in self._jaxpr.outvars]
        last = iter(self._last(values, run) if self._last else ())
        return [x if is_ready else next(last) for x, is_ready in zip(ready, self._is_ready)]


def _reads(eqns: Sequence[core.JaxprEqn]) -> list[Any]:
    return [var for eqn in eqns for var in eqn.invars if loops.is_variable(var)]


def _groups(eqns: Sequence[core.JaxprEqn]) -> Iterator[list[core.JaxprEqn]]:
    """Yields the equations in order: loops to cut by themselves, what is between them together."""
    group = []
    for eqn in eqns:
        if not loops.is_loop(eqn):
            group.append(eqn)
            continue
        if group:
            yield group
        yield [eqn]
        group = []
    if group:
        yield group
