"""Profiles an experiment: python scripts/profiles.py --gin_file PATH --out DIR.

A few updates are traced by the JAX profiler. Under Anakin, the time of the one program is divided
among acting, environments and learning; under Sebulba, that of each thread among its activities.
Both are printed, drawn as DIR/NAME.png, and written as DIR/NAME.json.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import sys
import tempfile
import time
from typing import Any

import jax
from results import plotting
from tracing import hlo, pages, pictures, shares, traces

from podracers import anakin, command_line, errors, runner
from podracers.training import experiment, run_directory

_REPEATS = 7  # of a dispatch that is not traced
_SHOWN = 3  # updates of Sebulba's timeline


def main() -> None:
    """Parses the command line, measures, prints, draws and writes."""
    options = _parse()
    command_line.use_compilation_cache()
    # The names of the parts are metadata: a program from before they were given has others.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    settings = experiment.load(command_line.gin_files(options), options.gin_bindings, print)
    runner_name = settings.runner.__name__.lower()
    options.name = options.name or f"{pathlib.Path(options.gin_file[0]).stem}_{runner_name}"
    if options.page:
        pages.split(pathlib.Path(options.page), options.name)  # before it is measured
    parts = settings.build()
    is_anakin = isinstance(parts.runner, anakin.Anakin)
    if is_anakin and options.lag:
        raise errors.UserError("--lag is of Sebulba, and this experiment runs under Anakin")
    experiment.check(parts, settings.seed)
    out = pathlib.Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"cannot make '{out}': {error.strerror}") from error
    record = {
        "command": shlex.join(["python", "scripts/profiles.py", *sys.argv[1:]]),
        "load": os.getloadavg()[0],
        "agent_steps": parts.runner.steps_per_update,
        **run_directory.provenance(),
    }
    measure = _profile_program if is_anakin else _profile_threads
    record |= measure(parts.runner, settings.seed, options)
    _write(record, out, options)


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_experiment(required=True)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--name", help="of the files; default: <experiment>_<runner>")
    parser.add_argument("--page", metavar="FILE.md", help="put the tables between its marks there")
    parser.add_argument(
        "--warm_up", type=int, default=20, metavar="N", help="updates before anything is measured"
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="of each dispatch under Anakin (default: 2), in all under Sebulba (default: 4)",
    )
    parser.add_argument(
        "--dispatches", type=int, default=3, metavar="N", help="that Anakin's trace is made of"
    )
    parser.add_argument(
        "--lag",
        type=int,
        nargs="+",
        metavar="L",
        help="of Sebulba, one after the other (default: the experiment's)",
    )
    options = parser.parse_args()
    for name in ("warm_up", "updates", "dispatches"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise errors.UserError(f"--{name}: expected at least 1, got {value}")
    return options


def _write(record: dict[str, Any], out: pathlib.Path, options: argparse.Namespace) -> None:
    text = pages.text(record)
    print(text, end="")
    (out / f"{options.name}.json").write_text(json.dumps(record) + "\n")
    if "program" in record:
        figure = pictures.draw_program(record["program"], options.name)
    else:
        figure = pictures.draw_threads(record["threads"], options.name)
    plotting.save(figure, out / f"{options.name}.png")
    if options.page:
        pages.replace(pathlib.Path(options.page), options.name, text)


def _profile_program(of: runner.Runner, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns whose the time of Anakin's program is."""
    updates = options.updates or 2
    state, _ = _dispatch(of, of.init(seed), options.warm_up)
    untraced, traced = [], []
    for _ in range(_REPEATS):
        state, milliseconds = _dispatch(of, state, updates)
        untraced.append(milliseconds / updates)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=_options()):
            for _ in range(options.dispatches):
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


def _profile_threads(of: runner.Runner, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns whose the time of Sebulba's threads is, for each lag."""
    updates = options.updates or 4
    threads = {}
    for lag in options.lag or [of.lag]:
        with contextlib.closing(dataclasses.replace(of, lag=lag)) as lagging:
            threads[lag] = _profile_lag(lagging, seed, options.warm_up, updates)
    return {"updates": updates, "threads": threads}


def _profile_lag(of: runner.Runner, seed: int, warm_up: int, updates: int) -> dict[str, Any]:
    steps = of.steps_per_update * updates
    state, _ = _dispatch(of, of.init(seed), warm_up)
    state, untraced = _dispatch(of, state, updates)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=_options()):
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


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    # Instructions and our own spans are in it all the same; every call of Python's, and what XLA's
    # threads do between two instructions, would slow what is measured.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    return options


if __name__ == "__main__":
    command_line.run(main)
