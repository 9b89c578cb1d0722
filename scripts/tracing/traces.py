"""Reads what the JAX profiler captured: instructions of a device, activities of threads.

`N` events, `K` edges of bins. Times are in nanoseconds, as the profiler counts them.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from tracing import hlo

DISPATCH = "dispatch"  # the spans that `scripts/profiles.py` puts around what it measures
BETWEEN = "between instructions"  # the program runs, and none of its instructions does
HOST = "host"  # the program does not run: the host launches it, or reads metrics


class Span(NamedTuple):
    """What one thread was at for a while."""

    thread: str
    activity: str
    start: float
    end: float


class Instructions(NamedTuple):
    """When instructions of one program ran; those that only run others are left out."""

    name: np.ndarray  # [N] int, an index into `names`
    start: np.ndarray  # [N]
    end: np.ndarray  # [N]
    names: list[str]


class Trace(NamedTuple):
    """What is read from a trace."""

    instructions: Instructions
    spans: list[Span]  # of threads that time their activities (`pipeline.Timer`)
    dispatches: list[tuple[float, float]]  # start and end


def read(folder: pathlib.Path, program: hlo.Program | None = None) -> Trace:
    """Reads the one trace that is in a folder.

    Args:
      folder: the one that `jax.profiler.trace` was given.
      program: the program whose instructions are looked for; None for none.
    """
    (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
    rows: list[tuple[int, float, float]] = []
    numbers: dict[str, int] = {}
    spans, dispatches = [], []
    for event in _events(path):
        stats = dict(event.stats)
        if "thread" in stats:
            spans.append(Span(stats["thread"], event.name, event.start_ns, event.end_ns))
        elif event.name == DISPATCH:
            dispatches.append((event.start_ns, event.end_ns))
        elif program and program.computes(name := stats.get("hlo_op", "")):
            number = numbers.setdefault(name, len(numbers))
            rows.append((number, event.start_ns, event.end_ns))
    table = np.array(rows, float).reshape(-1, 3)
    instructions = Instructions(table[:, 0].astype(int), table[:, 1], table[:, 2], list(numbers))
    return Trace(instructions, sorted(spans, key=lambda span: span.start), sorted(dispatches))


def _events(path: pathlib.Path) -> Iterator:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            yield from line.events


class Occupation:
    """Whose the time is: each instant is divided equally among the instructions that run at it.

    Several threads, or streams, of a device then share what one alone would have to itself, and the
    parts add up to the time in which any instruction ran.

    Args:
      instructions: one device's instructions.
      part: `[N]` int, of each instruction.
      parts: the names of the parts.
    """

    def __init__(self, instructions: Instructions, part: np.ndarray, parts: Sequence[str]):
        starts, ends = instructions.start, instructions.end
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order]
        running = np.cumsum(change)[:-1]  # between one time and the next
        lasting = np.diff(self._times)
        each = np.divide(lasting, running, out=np.zeros_like(lasting), where=running > 0)
        self._each = np.concatenate([[0.0], np.cumsum(each)])
        owner = np.concatenate([part, part])[order]
        self._parts = {}
        for index, name in enumerate(parts):
            own = np.cumsum(np.where(owner == index, change, 0.0))[:-1]
            self._parts[name] = np.concatenate([[0.0], np.cumsum(each * own)])

    def by_instruction(self, instructions: Instructions) -> np.ndarray:
        """Returns `[N]`, how much of the time is each instruction's."""
        at = [np.interp(t, self._times, self._each) for t in (instructions.start, instructions.end)]
        return at[1] - at[0]

    def within(self, edges: np.ndarray) -> dict[str, np.ndarray]:
        """Returns for each part how much of each bin is its own, `[K - 1]`."""
        return {
            name: np.diff(np.interp(edges, self._times, total))
            for name, total in self._parts.items()
        }


def clip(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Returns what of the spans lies between two times."""
    return [
        span._replace(start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    ]
