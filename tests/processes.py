"""A run that takes a second once it is compiled, and scripts as processes of their own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from podracers.checkpoints import checkpoint
from podracers.training import experiment
from tests import streams

ROOT = pathlib.Path(__file__).resolve().parents[1]

# 40 updates of 64 steps, and a checkpoint after every eight.
CONFIG = """
from __gin__ import dynamic_registration

from agents import ppo
from podracers.training import experiment

include 'gin/agents/ppo.gin'
include 'gin/environments/catch.gin'
include 'gin/runners.gin'

SEED = 3
TOTAL_STEPS = 2560  # agent steps
NUM_ENVS = 8
ROLLOUT_LENGTH = 8  # agent steps

experiment.Experiment.log_period = 1  # updates
experiment.Experiment.evaluation_period = 8  # updates
experiment.Experiment.evaluation_episodes = 8
experiment.Experiment.checkpoint_period = 8  # updates

# Compiling takes most of the time: loops are unrolled, and the program fits runs of any length.
ppo.PPO.anneal_steps = 2560  # agent steps
ppo.PPO.epochs = 1
ppo.PPO.num_minibatches = 1
"""
# An environment with metrics, in place of Catch.
REPORTING = """
from environments import probes
experiment.Experiment.environment = @probes.Reporting
"""
TIMES = ("wall_time", "steps_per_second", "memory/process")
# Seconds after which a process or a thread counts as hanging: a busy machine takes many times the
# time of a quiet one, and nothing else waits so long.
PATIENCE = 600.0


def config_file(folder: pathlib.Path, extra: str = "") -> pathlib.Path:
    """Writes the configuration, and returns its path."""
    path = folder / "tiny.gin"
    path.write_text(CONFIG + extra)
    return path


def spawn(
    command: Sequence[object], environment: Mapping[str, str] | None = None, **options
) -> subprocess.Popen:
    """Starts a command with captured output; the options are those of `subprocess.Popen`."""
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"cwd": ROOT, "env": {**os.environ, **(environment or {})}, **options},
    )


def start(script: str, *arguments: object, **options) -> subprocess.Popen:
    """Starts `scripts/<script>.py`; see `spawn`."""
    return spawn([sys.executable, ROOT / "scripts" / f"{script}.py", *arguments], **options)


def finish(
    process: subprocess.Popen, code: int | None = 0, timeout: float = PATIENCE
) -> subprocess.CompletedProcess:
    """Waits for a process and checks its exit code, unless it is None; kills a slow process."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code in (None, process.returncode), out + err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Waits until a condition is true; fails after so many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; one that has ended and is not reaped does not."""
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def run(script: str, *arguments: object, code: int = 0, **options) -> subprocess.CompletedProcess:
    """Runs `scripts/<script>.py` to its end, and checks its exit code."""
    return finish(start(script, *arguments, **options), code)


def interrupt(
    process: subprocess.Popen, number: signal.Signals, when: Callable[[], bool]
) -> subprocess.CompletedProcess:
    """Sends a signal once `when()` is true, and waits for the end, which is no failure."""
    wait_for(lambda: when() or process.poll() is not None)
    process.send_signal(number)
    return finish(process, -number if number == signal.SIGKILL else 0)


def log(run_dir: pathlib.Path) -> list[dict]:
    """Returns the lines of `metrics.jsonl`, without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def num_lines(run_dir: pathlib.Path) -> int:
    """Returns the number of log lines so far."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def final_state(run_dir: pathlib.Path) -> tuple[int, list]:
    """Returns the newest checkpoint's step, and the leaves of its state as NumPy arrays."""
    loaded = experiment.load([str(run_dir / "config.gin")], [])
    template = loaded.build().runner.init(loaded.seed)
    directory = loaded.checkpoint_directory or run_dir / "checkpoints"
    checkpointer = checkpoint.Checkpointer(directory, read_only=True)
    step, state, _ = checkpointer.restore(template)
    checkpointer.close()
    return step, jax.tree.leaves(streams.to_numpy(state))


def assert_same_end(one: pathlib.Path, other: pathlib.Path) -> None:
    """Checks that two runs logged the same, and ended with bit-identical states."""
    assert log(one) == log(other)
    (step, leaves), (other_step, other_leaves) = final_state(one), final_state(other)
    assert step == other_step
    assert [leaf.tobytes() for leaf in leaves] == [leaf.tobytes() for leaf in other_leaves]


def assert_mistake(result: subprocess.CompletedProcess, *phrases: str) -> None:
    """Checks that a process ended with one line and exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for phrase in phrases:
        assert phrase in result.stderr
