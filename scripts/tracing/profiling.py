"""Traces a few updates of a runner, beside some that are not traced."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from tracing import hlo, shares, traces

from podracers import runner

_REPEATS = 7  # of a dispatch that is not traced
_DISPATCHES = 3  # that are traced
_SHOWN = 3  # updates of Sebulba's timeline


def profile_program(of: runner.Runner, seed: int, warm_up: int, updates: int) -> dict[str, Any]:
    """Returns whose the time of Anakin's program is.

    Args:
      of: the runner.
      seed: the run's seed.
      warm_up: updates before anything is measured.
      updates: number of updates of each dispatch.
    """
    state, _ = _dispatch(of, of.init(seed), warm_up)
    untraced, traced = [], []
    for _ in range(_REPEATS):
        state, milliseconds = _dispatch(of, state, updates)
        untraced.append(milliseconds / updates)
    with tempfile.TemporaryDirectory() as folder:
        with _traced(folder):
            for _ in range(_DISPATCHES):
                state, milliseconds = _dispatch(of, state, updates)
                traced.append(milliseconds / updates)
        program = hlo.Program(of.trace(seed).lower().compile().as_text())
        trace = traces.read(pathlib.Path(folder), program)
    return {
        "updates": updates,
        "untraced_ms": untraced,
        "traced_ms": min(traced),
        "program": shares.of_programs(trace, program, updates),
    }


def profile_threads(
    of: runner.Runner, seed: int, warm_up: int, updates: int, lags: Sequence[int]
) -> dict[str, Any]:
    """Returns whose the time of Sebulba's threads is, for each lag; else as `profile_program`."""
    threads = {}
    for lag in lags:
        with contextlib.closing(dataclasses.replace(of, lag=lag)) as lagging:
            threads[lag] = _profile_lag(lagging, seed, warm_up, updates)
    return {"updates": updates, "threads": threads}


def _profile_lag(of: runner.Runner, seed: int, warm_up: int, updates: int) -> dict[str, Any]:
    steps = of.steps_per_update * updates
    state, _ = _dispatch(of, of.init(seed), warm_up)
    state, untraced = _dispatch(of, state, updates)
    with tempfile.TemporaryDirectory() as folder:
        with _traced(folder):
            # One more before and after: a span that has not begun and ended is not in the trace.
            state, _ = of.step(state, 1)
            of.diagnostics()
            traced = 0.0
            for _ in range(updates):
                state, milliseconds = _dispatch(of, state, 1)
                traced += milliseconds
            verdict = of.diagnostics().verdict
            of.step(state, 1)
        trace = traces.read(pathlib.Path(folder))
    return {
        "untraced_rate": 1e3 * steps / untraced,
        "traced_rate": 1e3 * steps / traced,
        "verdict": verdict,
        **shares.of_threads(trace, _SHOWN),
    }


def _dispatch(of: runner.Runner, state: Any, updates: int) -> tuple[Any, float]:
    """Takes updates as a run does, with metrics at the end; returns the state and milliseconds."""
    start = time.perf_counter()
    with jax.profiler.TraceAnnotation(traces.DISPATCH):
        state, report = of.step(state, updates)
        jax.device_get(report)
    return state, 1e3 * (time.perf_counter() - start)


@contextlib.contextmanager
def _traced(folder: str) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    # Instructions and our own spans are in it all the same; every call of Python's, and what XLA's
    # threads do between two instructions, would slow what is measured.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with jax.profiler.trace(folder, profiler_options=options):
        yield
