"""How long a run takes from the start of its process to the end of its first update."""

import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence

from benchmarks import records
from results import training_process

from podracers import errors

STARTUP = records.Kind("start-up", "s", records.LOWER, 2)
COLD = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
_CACHED = records.Kind("files added to the compilation cache", "files", None, 0)
_POLL_PERIOD = 0.01  # seconds
_UPDATE_TIMEOUT = 600.0  # seconds


def first_update(arguments: Sequence[str], environment: Mapping[str, str] = COLD) -> float:
    """Returns the seconds from the start of a training process to its first line of metrics.

    Args:
      arguments: those of `scripts/train.py`, without a run directory.
      environment: variables over those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = pathlib.Path(folder) / "run", pathlib.Path(folder) / "log"
        metrics = run_dir / "metrics.jsonl"
        every = training_process.flags([], ["Experiment.log_period = 1"])
        began = time.perf_counter()
        with training_process.started(
            [*arguments, *every, "--run_dir", str(run_dir)], log, environment
        ) as process:
            while not (metrics.exists() and b"\n" in metrics.read_bytes()):
                if process.poll() is not None:
                    raise training_process.failure(process.returncode, log)
                if time.perf_counter() - began > _UPDATE_TIMEOUT:
                    raise errors.RunFailure(f"no update ended within {_UPDATE_TIMEOUT:.0f} s")
                time.sleep(_POLL_PERIOD)
            return time.perf_counter() - began


def benchmark_startup(repeats: int) -> records.Result:
    """Times the start of training with an empty compilation cache, then with a full one."""
    arguments = training_process.flags(["gin/experiments/cartpole_ppo.gin"], [])
    seconds, added = {"first": [], "second": []}, {"first": [], "second": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            variables = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_ENABLE_COMPILATION_CACHE": "true"}
            for start, taken in seconds.items():
                files = len(os.listdir(cache))
                taken.append(first_update(arguments, variables))
                added[start].append(len(os.listdir(cache)) - files)
    return records.Result(
        "From the start of scripts/train.py to the end of its first update, PPO on CartPole under "
        "Anakin: the first start compiles, the second finds what it compiled on disk.",
        (
            *(STARTUP.row(taken, start=start) for start, taken in seconds.items()),
            *(_CACHED.row(files, start=start) for start, files in added.items()),
        ),
    )
