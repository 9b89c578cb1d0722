"""A run that takes a second once it is compiled, and scripts as processes of their own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from podracers.training import checkpoint, experiment

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

# Loops that are unrolled: what takes the time here is compiling.
ppo.PPO.epochs = 1
ppo.PPO.num_minibatches = 1
"""
TIMES = ("wall_time", "steps_per_second")


def config_file(folder: pathlib.Path, extra: str = "") -> pathlib.Path:
    """Writes the configuration, and returns its path."""
    path = folder / "tiny.gin"
    path.write_text(CONFIG + extra)
    return path


def start(
    script: str, *arguments: object, environment: Mapping[str, str] | None = None, **options
) -> subprocess.Popen:
    """Starts `scripts/<script>.py`; the options are those of `subprocess.Popen`."""
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=options.pop("cwd", ROOT),
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen, timeout: float = 240.0) -> subprocess.CompletedProcess:
    """Waits for a process, and kills it if it takes longer than so many seconds."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Runs `scripts/<script>.py` to its end."""
    return finish(start(script, *arguments, **options))


def interrupt(
    process: subprocess.Popen, number: signal.Signals, when: Callable[[], bool]
) -> subprocess.CompletedProcess:
    """Sends a signal once `when()` is true, and waits for the end."""
    limit = time.monotonic() + 240
    while not when() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(number)
    return finish(process)


def log(run_dir: pathlib.Path) -> list[dict]:
    """Returns the lines of `metrics.jsonl`, without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def num_lines(run_dir: pathlib.Path) -> int:
    """Returns how many log lines there are so far."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def final_state(run_dir: pathlib.Path) -> tuple[int, list[np.ndarray]]:
    """Returns the newest checkpoint's step, and the leaves of its state, keys as numbers."""
    loaded = experiment.load([str(run_dir / "config.gin")], [])
    template = loaded.build().runner.init(loaded.seed)
    directory = loaded.checkpoint_directory or run_dir / "checkpoints"
    checkpointer = checkpoint.Checkpointer(directory, read_only=True)
    step, state, _ = checkpointer.restore(template)
    checkpointer.close()
    return step, [_numbers(leaf) for leaf in jax.tree.leaves(state)]


def _numbers(leaf: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_end(one: pathlib.Path, other: pathlib.Path) -> None:
    """Checks that two runs logged the same, and ended with bit-identical states."""
    assert log(one) == log(other)
    (step, leaves), (other_step, other_leaves) = final_state(one), final_state(other)
    assert step == other_step
    assert len(leaves) == len(other_leaves)
    for leaf, other_leaf in zip(leaves, other_leaves):
        assert leaf.tobytes() == other_leaf.tobytes()


def assert_mistake(result: subprocess.CompletedProcess, *phrases: str) -> None:
    """Checks that a process ended as it does for a mistake: one line, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for phrase in phrases:
        assert phrase in result.stderr
