"""Cycles of a program that was compiled for TPUs, and kernels of any program, read from its text.

The TPU compiler writes the cycles of one execution into the instructions that it schedules
(`estimated_cycles`). Scalar operations, copies that run beside others (`copy-start`) and sums over
devices have no estimate, and count as zero.

A kernel is an instruction that a GPU would launch: one that computes or copies, outside of fusions.

The runners name the parts of an update (`jax.named_scope`), and XLA keeps the names in the metadata
of its instructions. An instruction that XLA adds, such as a copy, has no name: it belongs to the
part whose results it reads, or to the part that calls its computation.
"""

import collections
import functools
import re
from typing import NamedTuple

# Scopes that the runners open, and those inside them.
_PARTS = {
    "environment": ("reset",),
    "act": (),
    "rollout": (),  # contains the first two; the steps that it stores, and their statistics
    "learn": ("returns", "shuffle", "gradient", "optimizer"),
}
_GRADIENT = "learn/gradient"
_OTHER = "other"  # instructions outside all scopes
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z0-9\-]*)\(([^)]*)")
_OP_NAME = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_INDEX = re.compile(r"index=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"constant\((-?\d+)\)")
# JAX writes transformations around a scope's name; a jitted function's name is no scope.
_TRANSFORMED = re.compile(r"^(?:(?:vmap|jvp|transpose|checkpoint|remat)\()*(\w+)\)*$")
_RUNNING = ("call", "async-start")  # these run other computations once
_ALIASES = ("copy", "bitcast", "copy-done", "copy-start")
# These launch no kernel of their own.
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all")
_FREE += ("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain")


class _Instruction(NamedTuple):
    name: str
    opcode: str
    op_name: str  # JAX's name; "" for instructions that XLA added
    operands: tuple[str, ...]  # names of instructions
    computation: str  # the computation that contains it
    called: tuple[str, ...]  # computations that it runs
    text: str


class Loop(NamedTuple):
    """A loop whose number of passes depends on data; it counts as one pass."""

    cycles: float  # cycles, or kernels, a pass
    operation: str


class Costs:
    """Costs of a program, from its text (`jax.stages.Compiled.as_text`).

    The loop over gradient steps has `gradient_steps` passes if its bound is not constant, as in
    agents that learn from replay.

    Attributes:
      loops: loops with unknown numbers of passes.
      parts: cycles by part of an update, with all passes of each known loop.
      cycles: of all parts.
    """

    def __init__(self, text: str, gradient_steps: float):
        self._instructions: dict[str, _Instruction] = {}
        self._computations = collections.defaultdict(list)  # names in the order of the text
        self._callers = collections.defaultdict(list)
        self._loops: dict[str, _Instruction] = {}  # keys are names of conditions and bodies
        self._parse(text)
        self._gradient_steps = gradient_steps
        self._part = functools.cache(self._part_of)
        self._count = functools.cache(self._total_of)
        self.loops: list[Loop] = []
        self.parts = dict(self._count(_ENTRY.findall(text)[0]))
        self.cycles = sum(self.parts.values())

    def _parse(self, text: str) -> None:
        computation = ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                computation = match[1]
            elif match := _INSTRUCTION.match(line):
                name, opcode, operands = match.groups()
                op_name = _OP_NAME.search(line)
                instruction = _Instruction(
                    name,
                    opcode,
                    op_name[1] if op_name else "",
                    tuple(re.findall(r"%([\w.\-]+)", operands)),
                    computation,
                    tuple(re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line)))),
                    line.strip(),
                )
                self._instructions[name] = instruction
                self._computations[computation].append(name)
                for called in instruction.called:
                    self._callers[called].append(name)
                if opcode == "while":
                    self._loops |= dict.fromkeys(_LOOP.findall(line)[0], instruction)

    def _cost(self, instruction: _Instruction) -> float:
        """Returns the cost of an instruction that runs no others."""
        match = _CYCLES.search(instruction.text)
        return float(match[1]) if match else 0.0

    def _total_of(self, computation: str) -> dict[str, float]:
        """Returns the costs of a computation by part; of branches, the costliest one's."""
        totals = collections.defaultdict(float)
        for name in self._computations[computation]:
            instruction, passes, runs = self._instructions[name], 1.0, []
            if instruction.opcode == "while":
                passes, runs = self._passes(name), list(map(self._count, instruction.called))
            elif instruction.opcode == "conditional":
                branches = map(self._count, instruction.called)
                runs = [max(branches, key=lambda branch: sum(branch.values()))]
            elif instruction.opcode in _RUNNING:
                runs = map(self._count, instruction.called)
            else:
                cost = self._cost(instruction)
                runs = [{self._part(name): cost}] if cost else []
            for part, value in (pair for run in runs for pair in run.items()):
                totals[part] += passes * value
        return totals

    def _passes(self, name: str) -> float:
        """Returns the passes of a loop; adds a loop with an unknown number to `loops`."""
        instruction = self._instructions[name]
        if trips := _TRIPS.search(instruction.text):
            return float(trips[1])
        condition, body = _LOOP.findall(instruction.text)[0]
        compare = self._instructions[self._computations[condition][-1]]
        if compare.opcode == "compare" and "direction=LT" in compare.text:
            counter, limit = compare.operands
            if (bound := self._constant(limit)) is not None:
                return bound - (self._initial(counter) or 0)
        part = self._part(name)
        if part.startswith("learn") and _GRADIENT in self._count(body):
            return self._gradient_steps
        if part != _OTHER:  # not the loop over updates
            self.loops.append(Loop(sum(self._count(body).values()), _operation(instruction)))
        return 1.0

    def _constant(self, name: str) -> int | None:
        """Returns the value of an integer, followed through copies and the state of loops."""
        instruction = self._instructions[name]
        if instruction.opcode in _ALIASES:
            return self._constant(instruction.operands[0])
        if instruction.opcode == "constant":
            match = _CONSTANT.search(instruction.text)
            return int(match[1]) if match else None
        if instruction.opcode != "get-tuple-element" or not (loop := self._loop_of(instruction)):
            return None
        # The body must return the element unchanged.
        body = _LOOP.findall(loop.text)[0][1]
        index = int(_INDEX.findall(instruction.text)[0])
        returned = self._instructions[self._computations[body][-1]].operands[index]
        while self._instructions[returned].opcode in _ALIASES:
            returned = self._instructions[returned].operands[0]
        returned = self._instructions[returned]
        unchanged = returned.opcode == "get-tuple-element" and f"index={index}" in returned.text
        return self._initial(name) if unchanged else None

    def _initial(self, name: str) -> int | None:
        """Returns the constant that an element of a loop's state starts with, if it is one."""
        element = self._instructions[name]
        loop = self._loop_of(element) if element.opcode == "get-tuple-element" else None
        state = self._instructions[loop.operands[0]] if loop else None
        if not state or state.opcode != "tuple":
            return None
        return self._constant(state.operands[int(_INDEX.findall(element.text)[0])])

    def _loop_of(self, element: _Instruction) -> _Instruction | None:
        """Returns the loop whose state contains an element."""
        state = self._instructions[element.operands[0]]
        return self._loops.get(state.computation) if state.opcode == "parameter" else None

    def _part_of(self, name: str) -> str:
        instruction = self._instructions[name]
        if part := _scope(instruction.op_name):
            return part
        if "/" not in instruction.op_name:  # added by XLA
            read = [operand for operand in instruction.operands if operand in self._instructions]
            inputs = ("constant", "parameter")
            parts = {self._part(x) for x in read if self._instructions[x].opcode not in inputs}
            if len(parts) == 1 and _OTHER not in parts:
                return parts.pop()
        parts = {self._part(caller) for caller in self._callers[instruction.computation]}
        return parts.pop() if len(parts) == 1 else _OTHER


class Kernels(Costs):
    """Kernels of a program; attributes are those of `Costs`, with kernels in place of cycles."""

    def _cost(self, instruction: _Instruction) -> float:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0.0
        loop = self._loops.get(instruction.computation)
        is_condition = loop and _LOOP.findall(loop.text)[0][0] == instruction.computation
        return 0.0 if loop and is_condition and _TRIPS.search(loop.text) else 1.0


def _operation(instruction: _Instruction) -> str:
    """Returns the layer and the operation in JAX's name, or XLA's opcode."""
    pieces = [piece for piece in instruction.op_name.split("/") if "(" not in piece]
    backward = " (backward)" if "transpose(" in instruction.op_name else ""
    return ("/".join(pieces[-2:]) or instruction.opcode) + backward


def _scope(op_name: str) -> str:
    """Returns one of `_PARTS` from an instruction's name, with its innermost scope; "" if none."""
    matches = map(_TRANSFORMED.match, op_name.split("/"))
    names = [match[1] for match in matches if match]
    parts = [name for name in names if name in _PARTS]
    part = parts[:2][-1] if parts[:1] == ["rollout"] else next(iter(parts), "")
    inner = [name for name in names if name in _PARTS.get(part, ())]
    return f"{part}/{inner[-1]}" if inner else part
