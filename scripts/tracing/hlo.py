"""Which part of an update an instruction of a compiled program belongs to.

The runners name the parts of their programs (`jax.named_scope`), and XLA keeps the names in the
metadata of its instructions. What XLA makes by itself, such as copies, has no name: it belongs to
the part whose results it reads, or else to the one that calls the computation it stands in.
"""

import functools
import re
from typing import NamedTuple

# The scopes that the runners open, and those that they and the agents open within them.
SCOPES = {
    "": ("environment", "act", "learn"),
    "environment": ("reset",),
    "act": ("agent_update",),
    "learn": ("gradient", "replay"),
    "gradient": ("agent_update",),
    "agent_update": ("rule",),
}
OTHER = "other"  # of an update: whatever is in no scope
# Instructions that only run others, whose time is the time of those.
_CONTAINERS = ("while", "call", "conditional")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z0-9\-]*)\(([^)]*)")
_NAME = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_NAMES = re.compile(r"[\w.\-]+")
# JAX writes what transforms a scope around its name; a jitted function's name is no scope.
_TRANSFORMED = re.compile(r"^(?:(?:vmap|jvp|transpose|checkpoint|remat)\()*(\w+)\)*$")


class Instruction(NamedTuple):
    """An instruction of a compiled program."""

    opcode: str
    op_name: str  # as JAX named it; "" where XLA made it
    operands: tuple[str, ...]  # the instructions whose results it reads
    computation: str  # that it stands in
    called: tuple[str, ...]  # the computations that it runs
    text: str  # all of it


class Program:
    """The instructions of a compiled program, by name.

    Args:
      text: the compiled program's text (`jax.stages.Compiled.as_text`).
    """

    def __init__(self, text: str):
        self.instructions = _parse(text)  # in the order of the text
        self.callers: dict[str, list[str]] = {}  # the instructions that run a computation
        for name, instruction in self.instructions.items():
            for computation in instruction.called:
                self.callers.setdefault(computation, []).append(name)
        self._part = functools.cache(self._find_part)

    def computes(self, name: str) -> bool:
        """Returns whether there is such an instruction, and it does more than run others."""
        found = self.instructions.get(name)
        return found is not None and found.opcode not in _CONTAINERS

    def part(self, name: str) -> str:
        """Returns the part of an update that an instruction is of, such as `learn/gradient`."""
        return self._part(name)

    def operation(self, name: str) -> str:
        """Returns what an instruction computes, and in which layer; or what XLA calls it."""
        instruction = self.instructions[name]
        pieces = [piece for piece in instruction.op_name.split("/") if "(" not in piece]
        backward = " (backward)" if "transpose(" in instruction.op_name else ""
        return ("/".join(pieces[-2:]) or instruction.opcode) + backward

    def parts(self) -> set[str]:
        """Returns the parts that the program's own instructions belong to."""
        return {self.part(name) for name in self.instructions}

    def _find_part(self, name: str) -> str:
        instruction = self.instructions[name]
        if part := scope(instruction.op_name):
            return part
        if "/" not in instruction.op_name:  # XLA's own, and not of one place in the program
            parts = {self.part(each) for each in instruction.operands if self._is_made(each)}
            if len(parts) == 1 and OTHER not in parts:
                return parts.pop()
        parts = {self.part(caller) for caller in self.callers.get(instruction.computation, ())}
        return parts.pop() if len(parts) == 1 else OTHER

    def _is_made(self, name: str) -> bool:
        found = self.instructions.get(name)
        return found is not None and found.opcode not in ("constant", "parameter")


def scope(op_name: str) -> str:
    """Returns the scopes in an instruction's name, such as `learn/gradient`; "" for none."""
    found: list[str] = []
    known = SCOPES[""]
    for piece in op_name.split("/"):
        match = _TRANSFORMED.match(piece)
        if match and match[1] in known:
            found.append(match[1])
            known = SCOPES.get(match[1], ())
    return "/".join(found)


def _parse(text: str) -> dict[str, Instruction]:
    instructions, computation = {}, ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            op_name = _NAME.search(line)
            operands = tuple(re.findall(r"%([\w.\-]+)", match[3]))
            called = [each for group in _CALLED.findall(line) for each in _NAMES.findall(group)]
            instructions[match[1]] = Instruction(
                *(match[2], op_name[1] if op_name else "", operands, computation),
                *(tuple(called), line.strip()),
            )
    return instructions
