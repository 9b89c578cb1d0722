"""Seconds from the start of a command to the end of its first update, beside other codebases."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from podracers import errors
from podracers.scripts.benchmarks import measure, peers, records
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
_POLL = 0.01  # seconds


def _ours(work: str, checkout: pathlib.Path, cache: str) -> float:
    """Starts a run of a checkout; returns the seconds until it has logged its first update."""
    file, bindings = _RUNS[work]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--gin_file", file, "--run_dir", folder, "--gin_bindings", *bindings]
        words += [f"Experiment.{binding}" for binding in _ONE_STEP]
        log, first, start = pathlib.Path(folder, "metrics.jsonl"), None, time.perf_counter()
        run = subprocess.Popen(
            [sys.executable, "scripts/train.py", *words],
            env=os.environ | {"PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": cache},
            cwd=checkout,
            stdout=subprocess.DEVNULL,
        )
        try:
            while run.poll() is None:
                if first is None and log.exists() and log.stat().st_size:
                    first = time.perf_counter() - start
                time.sleep(_POLL)
        finally:
            run.kill()
            run.wait()
        if run.returncode or first is None:
            raise errors.RunFailure(f"scripts/train.py {' '.join(words)} failed in {checkout}")
        return first


def _peer(work: str, name: str, folder: pathlib.Path, cache: str) -> float:
    """Starts a peer; returns the seconds to the end of its first update."""
    peer = peers.start(name, work, folder, _UPDATES, JAX_COMPILATION_CACHE_DIR=cache)
    start = time.perf_counter()
    with contextlib.closing(peer):
        later = (_UPDATES - 1) * peers.TASKS[work].steps / peer()
        return time.perf_counter() - start - later


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
        starts: dict[str, Callable[[str], float]] = {
            "this project": functools.partial(_ours, work, gin_names.ROOT)
        }
        if checkout is not None:
            starts["before"] = functools.partial(_ours, work, checkout.resolve())
        for name in task.peers if folder.is_dir() else ():
            starts[name] = functools.partial(_peer, work, name, folder)
        turns: dict[tuple[str, str], list[float]] = {}
        for _ in range(repeats + 1):
            for program, start in starts.items():
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("empty", "filled"):
                        turns.setdefault((program, state), []).append(start(cache))
        for (program, state), (_, *seconds) in turns.items():
            case = {"program": program, "work": task.name, "compilation cache": state}
            rows.append(records.row(_TOTAL, "s", seconds, **case))
        for state in ("empty", "filled"):
            totals = {program: turns[program, state][1:] for program in starts}
            for other in [program for program in starts if program != "this project"]:
                case = {"work": task.name, "compilation cache": state}
                rows.append(measure.ratio(totals, "this project", other, **case))
    return records.Result(
        "Seconds from the start of a process to the end of its first update, alternately.",
        tuple(rows),
        (
            "This project's is that of `podracers-train`, with its checks, a run directory and "
            "checkpoints, to the first line of its log",
            *(peers.TASKS[work].about for work in _RUNS),
        ),
    )
