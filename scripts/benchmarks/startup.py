"""How long a run takes from the start of its process to the end of its first update."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import records

from podracers import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
STARTUP = records.Kind("start-up", "s", records.LOWER, 2)
_CACHED = records.Kind("files added to the compilation cache", "files", None, 0)
_LOOK = 0.01  # seconds between two looks at the log
_PATIENCE = 600.0  # seconds


@contextlib.contextmanager
def training(
    arguments: Sequence[str], output: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen]:
    """Starts `scripts/train.py`; however the context is left, the process is gone.

    Args:
      arguments: of the script.
      output: the file that takes what it prints.
      environment: variables over those of this process.
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the simulators' processes
            process.wait()


def failure(output: pathlib.Path) -> errors.RunFailure:
    """Returns an error in the last words of a run."""
    lines = output.read_text(errors="replace").strip().splitlines()
    return errors.RunFailure(f"scripts/train.py failed: {lines[-1] if lines else 'in silence'}")


def first_update(arguments: Sequence[str], environment: Mapping[str, str]) -> float:
    """Returns the seconds from the start of a training process to its first line of metrics.

    Args:
      arguments: of `scripts/train.py`, without a run directory.
      environment: variables over those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir, output = pathlib.Path(folder) / "run", pathlib.Path(folder) / "output.txt"
        arguments = [
            *arguments,
            *("--gin_bindings", "Experiment.log_period = 1"),
            *("--run_dir", str(run_dir)),
        ]
        began = time.perf_counter()
        with training(arguments, output, environment) as process:
            while not _has_line(run_dir / "metrics.jsonl"):
                if process.poll() is not None:
                    raise failure(output)
                if time.perf_counter() - began > _PATIENCE:
                    raise errors.RunFailure(f"no update ended within {_PATIENCE:.0f} s")
                time.sleep(_LOOK)
            return time.perf_counter() - began


def _has_line(path: pathlib.Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def benchmark_startup(repeats: int) -> records.Result:
    """Times the start of training with an empty compilation cache, then with a full one."""
    arguments = ["--gin_file", "gin/experiments/cartpole_ppo.gin"]
    seconds = {"first": [], "second": []}
    added = {"first": [], "second": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for start, taken in seconds.items():
                files = len(os.listdir(cache))
                taken.append(first_update(arguments, {"JAX_COMPILATION_CACHE_DIR": cache}))
                added[start].append(len(os.listdir(cache)) - files)
    return records.Result(
        "From the start of scripts/train.py to the end of its first update, PPO on CartPole under "
        "Anakin: the first start compiles, the second finds what it compiled on disk.",
        (
            *(STARTUP.row(taken, start=start) for start, taken in seconds.items()),
            *(_CACHED.row(files, start=start) for start, files in added.items()),
        ),
    )
