"""What a trace says, as numbers that a file of JSON can hold: shares of time, and a timeline.

Under Anakin, shares are of the quickest dispatch that was traced, from its launch to its metrics:
what else the machine does lengthens the others.
"""

import collections
import itertools
from typing import Any

import numpy as np
from tracing import hlo, traces

from podracers import errors
from podracers.sebulba import timing
from podracers.supervision import pipeline

_BINS = 240  # of the timeline: more than a picture shows
_TOP = 10  # operations that are named
_PYTHON = "Python"  # what is in no activity

# What is shown of the activities of Sebulba's threads.
ACTIVITIES = {
    timing.ENVIRONMENT: "environment",
    timing.INFERENCE: "inference",
    timing.TRANSFER: "transfer",
    timing.SENDING: "transfer",
    timing.FOR_PARAMETERS: "waiting",
    timing.FOR_SPACE: "waiting",
    timing.FOR_ROLLOUTS: "waiting",
    timing.LEARNING: "learning",
    timing.PUBLISHING: "publishing",
    timing.ELSEWHERE: _PYTHON,
    pipeline.COMPILING: "compiling",
    pipeline.STARTING: "environment",
}


def of_programs(trace: traces.Trace, program: hlo.Program, updates: int) -> dict[str, Any]:
    """Returns whose the time of a compiled program is.

    Args:
      trace: with its instructions, and the dispatches that ran it.
      program: the same.
      updates: number of updates in each dispatch.

    Raises:
      errors.RunFailure: the trace has no instruction of the program.
    """
    instructions = trace.instructions
    if not instructions.start.size:
        raise errors.RunFailure("the trace shows no instruction of the update's program")
    part_of = [program.part(name) for name in instructions.names]
    parts = sorted(set(part_of))
    part = np.array([parts.index(name) for name in part_of])[instructions.name]
    occupation = traces.Occupation(instructions, part, parts)

    runs = [_run(instructions, *dispatch) for dispatch in trace.dispatches]
    gaps = [(after[0] - before[1]) / 1e6 for before, after in itertools.pairwise(runs)]
    quickest = min(trace.dispatches, key=lambda dispatch: dispatch[1] - dispatch[0])
    run = runs[trace.dispatches.index(quickest)]
    start, end = quickest
    nanoseconds = {k: float(v[0]) for k, v in occupation.within(np.array([start, end])).items()}
    nanoseconds[traces.BETWEEN] = run[1] - run[0] - sum(nanoseconds.values())
    nanoseconds[traces.HOST] = end - start - (run[1] - run[0])

    inside = (instructions.start >= start) & (instructions.end <= end)
    ran = instructions._replace(
        **{name: getattr(instructions, name)[inside] for name in ("name", "start", "end")}
    )
    count = collections.Counter(np.array(part_of)[ran.name].tolist())
    return {
        "shares": {name: value / (end - start) for name, value in nanoseconds.items()},
        "milliseconds": {name: value / updates / 1e6 for name, value in nanoseconds.items()},
        "instructions": {name: count[name] / updates for name in nanoseconds if name in count},
        "operations": _operations(ran, occupation, program, end - start, updates),
        "gaps_ms": gaps,
        "timeline": _timeline(occupation, start, end, run),
    }


def _run(instructions: traces.Instructions, start: float, end: float) -> tuple[float, float]:
    """Returns when a dispatch's first instruction began, and its last one ended.

    One that the trace has running across an end of the dispatch counts up to that end, as it does
    in the parts' shares.
    """
    inside = (instructions.start < end) & (instructions.end > start)
    if not inside.any():
        raise errors.RunFailure("a dispatch in the trace ran no instruction")
    first, last = instructions.start[inside].min(), instructions.end[inside].max()
    return max(float(first), start), min(float(last), end)


def _operations(instructions, occupation, program, whole: float, updates: int):
    """Returns the instructions that take most of the time, the first one most."""
    own = np.bincount(instructions.name, occupation.by_instruction(instructions))
    count = np.bincount(instructions.name)
    return [
        {
            "instruction": (name := instructions.names[index]),
            "operation": program.operation(name),
            "part": program.part(name),
            "share": own[index] / whole,
            "each_update": count[index] / updates,
        }
        for index in np.argsort(-own)[:_TOP]
    ]


def _timeline(occupation, start: float, end: float, run: tuple[float, float]) -> dict[str, Any]:
    """Returns the parts' shares of each bin of one dispatch."""
    edges = np.linspace(start, end, _BINS + 1)
    width = edges[1] - edges[0]
    parts = {k: np.clip(v / width, 0, 1) for k, v in occupation.within(edges).items()}
    ran = np.clip(np.minimum(edges[1:], run[1]) - np.maximum(edges[:-1], run[0]), 0, None) / width
    parts[traces.BETWEEN] = np.clip(ran - sum(parts.values()), 0, 1)
    return {
        "milliseconds": (end - start) / 1e6,
        "parts": {name: np.round(share, 4).tolist() for name, share in parts.items()},
    }


def of_threads(trace: traces.Trace, shown: int) -> dict[str, Any]:
    """Returns whose the time of Sebulba's threads is.

    Args:
      trace: with the activities of its threads, and a dispatch for each update.
      shown: number of updates to keep the timeline of.

    Raises:
      errors.RunFailure: the trace shows no activity of a thread.
    """
    start, end = trace.dispatches[0][0], trace.dispatches[-1][1]
    spans = traces.clip(trace.spans, start, end)
    if not spans:
        raise errors.RunFailure("the trace shows no activity of the runner's threads")
    threads = {}
    for span in spans:
        shares = threads.setdefault(_called(span), collections.Counter())
        shares[ACTIVITIES.get(span.activity, span.activity)] += (span.end - span.start) / (
            end - start
        )
    for shares in threads.values():
        shares[_PYTHON] += max(1.0 - sum(shares.values()), 0.0)
    shown = min(shown, len(trace.dispatches))
    last = trace.dispatches[shown - 1][1]
    return {
        "shares": {name: dict(threads[name]) for name in sorted(threads, key=_order)},
        "updates_ms": [(each[0] - start) / 1e6 for each in trace.dispatches[:shown]],
        "milliseconds": (last - start) / 1e6,
        "spans": [
            [
                _called(span),
                ACTIVITIES.get(span.activity, span.activity),
                round((span.start - start) / 1e6, 3),
                round((span.end - span.start) / 1e6, 3),
            ]
            for span in traces.clip(spans, start, last)
        ],
    }


def _called(span: traces.Span) -> str:
    """Returns what to call a span's thread: the learner's is the one that runs everything else."""
    return span.thread if span.thread.startswith("actor") else "learner"


def _order(thread: str) -> tuple[bool, str]:
    return thread != "learner", thread
