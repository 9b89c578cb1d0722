"""Seconds from the start of a command to the end of its first update, beside other codebases."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from podracers import errors
from podracers.scripts.benchmarks import measure, peers, records, start_program
from podracers.training import gin_names

_UPDATES = 8  # updates of a peer's one program; the time of the later ones is subtracted
_RUNS = {  # arguments of one update, by the name of the work in `peers`
    "cartpole": ("gin/experiments/cartpole_ppo.gin", ["TOTAL_STEPS = 8192"]),
    "pong": (
        "gin/experiments/pong_impala.gin",
        ["TOTAL_STEPS = 640", "IMPALA.num_minibatches = 4"],
    ),
}
_ONE_STEP = ("evaluation_max_steps = 1", "evaluation_episodes = 1", "log_period = 1")
_TOTAL = "start to first update"


def _ours(work: str, checkout: pathlib.Path, cache: str) -> dict[str, float]:
    """Starts a run of a checkout; returns the seconds of its pieces and in total."""
    file, bindings = _RUNS[work]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--gin_file", file, "--run_dir", f"{folder}/run", "--gin_bindings", *bindings]
        words += [f"Experiment.{binding}" for binding in _ONE_STEP]
        program, out = start_program.__file__, f"{folder}/seconds.json"
        run = subprocess.run(
            [sys.executable, program, out, str(time.time()), *words],
            env=os.environ | {"PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": cache},
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            last = run.stderr.splitlines() or ["no output"]
            raise errors.RunFailure(f"{checkout}: {last[-1]}")
        return json.loads(pathlib.Path(out).read_text())


def _peer(work: str, name: str, folder: pathlib.Path, cache: str) -> dict[str, float]:
    """Starts a peer; returns the seconds to the end of its first update."""
    peer = peers.Peer(name, work, folder, _UPDATES, {"JAX_COMPILATION_CACHE_DIR": cache})
    start = time.perf_counter()
    try:
        later = peer.steps / peer() * (1.0 - 1.0 / _UPDATES)
        return {_TOTAL: time.perf_counter() - start - later}
    finally:
        peer.close()


def benchmark(folder: pathlib.Path, repeats: int, checkout: pathlib.Path | None) -> records.Result:
    """Measures starts in turn, each with an empty compilation cache and then with the filled one.

    Args:
      folder: peers, which are left out where `scripts/prepare_peers.sh` has not made it.
      repeats: turns after the first, which is discarded: it reads files from the disk.
      checkout: another version of this project, or None.
    """
    folder, rows = folder.resolve(), []
    for work in _RUNS:
        task = peers.TASKS[work]
        starts: dict[str, Callable[[str], dict[str, float]]] = {
            "this project": functools.partial(_ours, work, gin_names.ROOT)
        }
        if checkout is not None:
            starts["before"] = functools.partial(_ours, work, checkout.resolve())
        for name in task.peers if folder.is_dir() else ():
            starts[name] = functools.partial(_peer, work, name, folder)
        turns: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(repeats + 1):
            for program, start in starts.items():
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("empty", "filled"):
                        turns.setdefault((program, state), []).append(start(cache))
        for (program, state), (_, *results) in turns.items():
            case = {"program": program, "work": task.name, "compilation cache": state}
            rows.append(records.row(_TOTAL, "s", [result[_TOTAL] for result in results], **case))
            others = {"piece": "", "work": task.name, "program": program, "cache": state}
            for piece in [piece for piece in results[0] if piece != _TOTAL]:
                values = [result.get(piece, 0.0) for result in results]
                rows.append(records.row("pieces", "s", values, **others | {"piece": piece}))
        for state in ("empty", "filled"):
            totals = {
                program: [result[_TOTAL] for result in turns[program, state][1:]]
                for program in starts
            }
            for other in [program for program in starts if program != "this project"]:
                case = {"work": task.name, "compilation cache": state}
                rows.append(measure.ratio(totals, "this project", other, **case))
    return records.Result(
        "Seconds from the start of a process to the end of its first update, alternately.",
        tuple(rows),
        (
            "This project's is that of `podracers-train`, with its checks, a run directory and "
            "checkpoints. Its pieces overlap: the update is compiled beside imports, and the "
            "evaluations beside the first update",
            *(peers.TASKS[work].about for work in _RUNS),
        ),
    )
