"""Which part of an update an instruction of a compiled program belongs to.

The runners name the parts of their programs (`jax.named_scope`), and XLA keeps the names in the
metadata of its instructions. What XLA adds by itself, such as copies, often has no name: it belongs
to the part that calls the computation it stands in.
"""

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

# The scopes that the runners open, and those that open within them.
SCOPES = {"environment": ("reset",), "act": (), "learn": ("gradient", "replay")}
OTHER = "other"  # of an update: whatever is in no scope
# Instructions that only run others, whose time is the time of those.
_CONTAINERS = ("while", "call", "conditional")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
# JAX writes what transforms a scope around its name; a jitted function's name is no scope.
_TRANSFORMED = re.compile(r"^(?:(?:vmap|jvp|transpose|checkpoint|remat)\()*(\w+)\)*$")


class _Instruction(NamedTuple):
    opcode: str
    op_name: str  # as JAX named it; "" where XLA made it
    computation: str  # that it stands in


class Program:
    """The instructions of a compiled program, by name.

    Args:
      text: of the compiled program (`jax.stages.Compiled.as_text`).
    """

    def __init__(self, text: str):
        self._instructions, self._callers = _parse(text)
        self._inside: dict[str, list[str]] = {}
        for name, instruction in self._instructions.items():
            self._inside.setdefault(instruction.computation, []).append(name)
        self._part = functools.cache(self._find_part)

    def __contains__(self, name: str) -> bool:
        return name in self._instructions

    def runs_others(self, name: str) -> bool:
        """Returns whether an instruction only runs other ones: a loop, a call, a condition."""
        return self._instructions[name].opcode in _CONTAINERS

    def part(self, name: str) -> str:
        """Returns the part of an update that an instruction belongs to, such as `learn/gradient`."""
        return self._part(name)

    def operation(self, name: str) -> str:
        """Returns what an instruction computes, as JAX calls it, or else XLA."""
        instruction = self._instructions[name]
        return instruction.op_name.rpartition("/")[2] or instruction.opcode

    def parts(self) -> set[str]:
        """Returns the parts that the program's own instructions belong to."""
        return {self.part(name) for name in self._instructions}

    def _find_part(self, name: str) -> str:
        instruction = self._instructions[name]
        if part := scope(instruction.op_name):
            return part
        callers = self._callers.get(instruction.computation, ())
        parts = {self.part(caller) for caller in callers}
        return parts.pop() if len(parts) == 1 else OTHER


def scope(op_name: str) -> str:
    """Returns the scopes in an instruction's name, such as `learn/gradient`; "" for none."""
    found: list[str] = []
    known: Mapping[str, tuple[str, ...]] | tuple[str, ...] = SCOPES
    for piece in op_name.split("/"):
        match = _TRANSFORMED.match(piece)
        if match and match[1] in known:
            found.append(match[1])
            known = SCOPES.get(match[1], ())
    return "/".join(found)


def _parse(text: str) -> tuple[dict[str, _Instruction], dict[str, list[str]]]:
    """Returns the instructions, and for each computation those that call it."""
    instructions, callers, computation = {}, {}, ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            op_name = _NAME.search(line)
            instructions[match[1]] = _Instruction(
                match[2], op_name[1] if op_name else "", computation
            )
            for called in _CALLED.findall(line):
                for each in re.findall(r"[\w.\-]+", called):
                    callers.setdefault(each, []).append(match[1])
    return instructions, callers
