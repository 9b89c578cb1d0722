"""What the TPU compiler estimates that a program costs, and which of it moves data alone.

The compiler writes the cycles of one pass into the instructions that it schedules
(`estimated_cycles`). Scalar operations, copies that run beside others (`copy-start`), and the sums
over devices have no estimate, and count nothing here.
"""

import collections
import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tracing import hlo

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_INDEX = re.compile(r"index=(\d+)")
_CONSTANT = re.compile(r"constant\((-?\d+)\)")
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_SHAPE = re.compile(r" = \(?(\w+\[[\d,]*\])")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# What copies all of its operands, and what a fusion of such may hold besides.
_COPYING = frozenset(("copy", "transpose", "reshape", "concatenate", "pad"))
_BESIDES = frozenset(
    (
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "convert"),
        *("slice", "dynamic-slice", "dynamic-update-slice"),
    )
)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_RUNNING = ("call", "async-start")  # other computations, once


class Cost(NamedTuple):
    """The cost of one instruction."""

    cycles: float  # of all passes
    passes: float
    instruction: str
    part: str  # of an update
    shape: str  # of its (first) result
    operation: str  # as JAX named it
    source: str  # the line of this project that it comes from


class Loop(NamedTuple):
    """A loop whose number of passes depends on data, and is not known."""

    cycles: float  # of one pass
    part: str
    operation: str


class Costs:
    """The costs of a program.

    Args:
      text: of the compiled program (`jax.stages.Compiled.as_text`).
      gradient_steps: passes of the loop over gradient steps where its bound is no constant, as in
        agents that learn from replay. Any other such loop counts as one pass.
      folder: with a slash at its end; lines of files in it are the sources of instructions.
    """

    def __init__(self, text: str, gradient_steps: float, folder: str):
        self._program = hlo.Program(text)
        self._lines = _lines(text, folder)
        self._gradient_steps = gradient_steps
        self._computations: dict[str, list[str]] = collections.defaultdict(list)
        for name, instruction in self._program.instructions.items():
            self._computations[instruction.computation].append(name)
        self._whiles = {
            _BODY.search(each.text)[1]: each
            for each in self._program.instructions.values()
            if each.opcode == "while"
        }
        self._users: dict[str, list[str]] = collections.defaultdict(list)
        for name, instruction in self._program.instructions.items():
            for operand in instruction.operands:
                self._users[operand].append(name)
        self.loops: list[Loop] = []  # those whose passes are not known
        self._cycles = functools.cache(self._cycles_of)
        entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)[1]
        self.costs = sorted(self._walk(entry, 1.0), key=lambda cost: -cost.cycles)

    @property
    def cycles(self) -> float:
        """The cycles of the program, each known loop with all its passes."""
        return sum(cost.cycles for cost in self.costs)

    def parts(self) -> dict[str, float]:
        """Returns the cycles of each part of an update."""
        found = collections.defaultdict(float)
        for cost in self.costs:
            found[cost.part] += cost.cycles
        return dict(found)

    def copies(self) -> list[Cost]:
        """Returns what only copies, in another layout or place, the most expensive first."""
        return [cost for cost in self.costs if self._copies(cost.instruction)]

    def _walk(self, computation: str, passes: float) -> Iterator[Cost]:
        """Yields the costs of a computation that runs so many times, and of what it runs."""
        for name in self._computations[computation]:
            instruction = self._program.instructions[name]
            if instruction.opcode == "while":
                again = passes * self._passes(name)
                for called in (_CONDITION, _BODY):
                    yield from self._walk(called.search(instruction.text)[1], again)
            elif instruction.opcode == "conditional":
                yield from self._walk(max(instruction.called, key=self._cycles), passes)
            elif instruction.opcode in _RUNNING:
                for called in instruction.called:
                    yield from self._walk(called, passes)
            elif cycles := _own_cycles(instruction):
                yield Cost(
                    cycles=cycles * passes,
                    passes=passes,
                    instruction=name,
                    part=self._program.part(name),
                    shape=shape[1] if (shape := _SHAPE.search(instruction.text)) else "",
                    operation=self._program.operation(name),
                    source=self._source(name),
                )

    def _cycles_of(self, computation: str) -> float:
        """Returns the cycles of one run of a computation, the costliest of its branches taken."""
        total = 0.0
        for name in self._computations[computation]:
            instruction = self._program.instructions[name]
            cycles = [self._cycles(each) for each in instruction.called]
            if instruction.opcode == "while":
                total += sum(cycles) * (self._trips(name) or 1)
            elif instruction.opcode == "conditional":
                total += max(cycles)
            elif instruction.opcode in _RUNNING:
                total += sum(cycles)
            else:
                total += _own_cycles(instruction)
        return total

    def _passes(self, name: str) -> float:
        """Returns the passes of a loop; those that are not known are noted."""
        trips = self._trips(name)
        if trips is not None:
            return trips
        part, body = self._program.part(name), _BODY.search(self._program.instructions[name].text)
        if part.startswith("learn") and "learn/gradient" in self._parts_within(body[1]):
            return self._gradient_steps
        if part != hlo.OTHER:  # the loop over updates is in no part
            self.loops.append(Loop(self._cycles(body[1]), part, self._program.operation(name)))
        return 1.0

    def _parts_within(self, computation: str) -> set[str]:
        parts = set()
        for name in self._computations[computation]:
            parts.add(self._program.part(name))
            if self._program.instructions[name].opcode in ("while", "conditional", *_RUNNING):
                for called in self._program.instructions[name].called:
                    parts |= self._parts_within(called)
        return parts

    def _trips(self, name: str) -> int | None:
        """Returns how many passes a loop takes that counts up to a constant."""
        loop = self._program.instructions[name]
        condition = self._computations[_CONDITION.search(loop.text)[1]]
        root = self._program.instructions[condition[-1]]
        if root.opcode != "compare" or "direction=LT" not in root.text:
            return None
        counter, limit = root.operands
        initial = self._initial(loop, self._program.instructions[counter])
        bound = self._constant(limit)
        if bound is None:  # carried by the loop
            bound = self._initial(loop, self._program.instructions[limit])
        if bound is None or self._is_changed(loop, self._program.instructions[limit]):
            return None
        return bound - (initial or 0)

    def _initial(self, loop: hlo.Instruction, element: hlo.Instruction) -> int | None:
        """Returns the constant that an element of a loop's state begins with, if it is one."""
        if element.opcode != "get-tuple-element":
            return None
        state = self._program.instructions[loop.operands[0]]
        index = int(_INDEX.search(element.text)[1])
        return self._constant(state.operands[index]) if state.opcode == "tuple" else None

    def _is_changed(self, loop: hlo.Instruction, element: hlo.Instruction) -> bool:
        """Returns whether the body gives an element of its state another value."""
        if element.opcode != "get-tuple-element":
            return False
        index = int(_INDEX.search(element.text)[1])
        root = self._computations[_BODY.search(loop.text)[1]][-1]
        return not self._is_element(self._program.instructions[root].operands[index], index)

    def _is_element(self, name: str, index: int) -> bool:
        found = self._program.instructions[name]
        if found.opcode in ("copy", "bitcast"):
            return self._is_element(found.operands[0], index)
        return found.opcode == "get-tuple-element" and f"index={index}" in found.text

    def _constant(self, name: str) -> int | None:
        """Returns the value of an integer, followed through copies and the state of loops."""
        found = self._program.instructions[name]
        if found.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            return self._constant(found.operands[0])
        if found.opcode == "get-tuple-element":
            state = self._program.instructions[found.operands[0]]
            loop = self._whiles.get(state.computation)
            if state.opcode != "parameter" or not loop or self._is_changed(loop, found):
                return None
            return self._initial(loop, found)
        match = _CONSTANT.search(found.text) if found.opcode == "constant" else None
        return int(match[1]) if match else None

    def _copies(self, name: str) -> bool:
        instruction = self._program.instructions[name]
        if instruction.opcode != "fusion":
            return instruction.opcode in _COPYING
        within = set(self._opcodes(instruction))
        return bool(within & _COPYING) and within <= _COPYING | _BESIDES

    def _opcodes(self, fusion: hlo.Instruction) -> Iterator[str]:
        """Yields what is computed in a fusion, and in those within it."""
        for name in (each for called in fusion.called for each in self._computations[called]):
            instruction = self._program.instructions[name]
            if instruction.opcode == "fusion":
                yield from self._opcodes(instruction)
            else:
                yield instruction.opcode

    def _source(self, name: str) -> str:
        """Returns the line that an instruction comes from.

        What XLA made by itself has none: it comes from where that does which it reads, which reads
        it, or which runs the computation that it stands in.
        """
        instruction = self._program.instructions[name]
        near = [name, *instruction.operands, *self._users[name]]
        callers = self._program.callers.get(instruction.computation, ())
        found = filter(None, map(self._line, near))
        return next(found, "") or next(filter(None, map(self._source, callers)), "")

    def _line(self, name: str) -> str:
        frame = _FRAME.search(self._program.instructions[name].text)
        return self._lines.get(frame[1], "") if frame else ""


def _own_cycles(instruction: hlo.Instruction) -> int:
    match = _CYCLES.search(instruction.text)
    return int(match[1]) if match else 0


def _lines(text: str, folder: str) -> dict[str, str]:
    """Returns the innermost line of the project's own files of each stack frame, as `file:line`."""
    tables: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    heading = ""
    for line in text.splitlines():
        if line in _TABLES:
            heading = line
        elif match := re.match(r"(\d+) (.*)$", line):
            fields = dict(re.findall(r"(\w+)=(\d+)", match[2]))
            tables[heading][match[1]] = fields or match[2].strip('"')
        elif line.startswith(("%", "ENTRY")):
            break
    return {frame: _own_line(tables, frame, folder) for frame in tables["StackFrames"]}


def _own_line(tables: dict[str, dict[str, Any]], frame: str, folder: str) -> str:
    own = tables["StackFrames"][frame]
    location = tables["FileLocations"][own["file_location_id"]]
    file = tables["FileNames"][location["file_name_id"]]
    if file.startswith(folder) and "site-packages" not in file:  # where .venv is
        return f"{file.removeprefix(folder)}:{location['line']}"
    caller = own.get("parent_frame_id", frame)
    return _own_line(tables, caller, folder) if caller != frame else ""
