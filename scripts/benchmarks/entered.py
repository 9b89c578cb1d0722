"""Project code that loading, building and tracing an experiment enters: files, functions, calls.

A reader of an update opens these files. Counts do not depend on the machine.
"""

import collections
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from podracers.scripts.benchmarks import measure, records
from podracers.training import experiment, gin_names

_FOLDERS = tuple(f"{gin_names.ROOT / package}/" for package in gin_names.PACKAGES)
_CASES = (("snake_ppo", "Anakin"), ("pong_impala", "Sebulba"))


def entered(function: Callable[[], Any]) -> collections.Counter[tuple[str, str]]:
    """Returns the calls of each file and function of this project while `function` runs."""
    calls = collections.Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_named = code.co_name[0] != "<"  # neither a comprehension nor a lambda
        if event == "call" and is_named and code.co_filename.startswith(_FOLDERS):
            calls[code.co_filename, code.co_qualname] += 1

    earlier = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(earlier)
    return calls


def benchmark() -> records.Result:
    """Counts the code of a load, and of an update with acting, under both runners."""
    rows = []
    for name, runner in _CASES:
        files = measure.files(name, runner)
        loaded = entered(lambda files=files: experiment.load(files, ()))
        parts = experiment.load(files, ()).build()
        programs = ("trace", "trace_acting") if runner == "Sebulba" else ("trace",)
        traces = [getattr(parts.runner, program) for program in programs]
        updated = entered(lambda traces=traces: [trace(0) for trace in traces])
        for part, calls in (("load", loaded), ("update", updated)):
            case = {"experiment": name, "runner": runner, "part": part}
            rows.append(records.row("entered", "files", len({file for file, _ in calls}), **case))
            rows.append(records.row("entered", "functions", len(calls), **case))
            rows.append(records.row("entered", "calls", calls.total(), **case))
            config = sum(n for (file, _), n in calls.items() if pathlib.Path(file).stem == "config")
            if part == "load":
                rows.append(records.row("entered", "calls of config.py", config, **case))
    return records.Result(
        "Files, functions and calls of this project in loading a configuration, and in tracing an "
        "update with acting.",
        tuple(rows),
    )
