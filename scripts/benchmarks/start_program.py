"""Trains for one update, and writes how long its start took: start_program.py FILE BEGAN ARGUMENTS.

ARGUMENTS are those of `podracers-train`, and BEGAN is the `time.time()` at the start of this
process. FILE becomes JSON: seconds by piece, and from BEGAN to the end of the first update.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from podracers import anakin, contract, sebulba
from podracers.commands import train
from podracers.training import experiment

_IMPORTED = time.time()
_PROGRAMS = {  # pieces by the name of the function that is compiled
    "_init_shard": "compilation of the initial state",
    **dict.fromkeys(("_step_shard", "_learn_shard"), "compilation of the update"),
    **dict.fromkeys(("_run_member", "run"), "compilation of evaluations"),
}


def _call_after(owner: Any, name: str, record: Callable[[float, Any], None]) -> None:
    """Replaces a function by one that calls `record(its start, its result)` at its end."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        start, result = time.time(), function(*arguments, **options)
        record(start, result)
        return result

    setattr(owner, name, call)


def _main(file: str, began: str, *arguments: str) -> None:
    seconds = {"imports": _IMPORTED - float(began)}
    compiled = 0.0  # the time when the update was compiled

    def add(piece: str, duration: float) -> None:
        seconds[piece] = seconds.get(piece, 0.0) + duration

    def listen(event: str, duration_secs: float, **of: Any) -> None:
        nonlocal compiled
        if event.endswith("backend_compile_duration"):
            program = of["fun_name"].removeprefix("jit(").removesuffix(")")
            piece = _PROGRAMS.get(program, "compilation of other programs")
            add(piece, duration_secs)
            compiled = time.time() if piece.endswith("update") else compiled

    def stepped(start: float, result: Any) -> None:
        jax.block_until_ready(result)
        seconds.setdefault("first run", time.time() - max(start, compiled))
        seconds.setdefault("start to first update", time.time() - float(began))

    jax.monitoring.register_event_duration_secs_listener(listen)
    for owner, name, piece in (
        (experiment, "load", "configuration and its imports"),
        (contract, "trace_faults", "check of the environment"),
        (anakin.Anakin, "trace", "trace of the update"),
        (sebulba.Sebulba, "trace", "trace of the update"),
    ):
        _call_after(owner, name, lambda start, _, piece=piece: add(piece, time.time() - start))
    for runner in (anakin.Anakin, sebulba.Sebulba):
        _call_after(runner, "step", stepped)
    sys.argv = ["podracers-train", *arguments]
    train.main()
    pathlib.Path(file).write_text(json.dumps(seconds))


if __name__ == "__main__":
    _main(*sys.argv[1:])
