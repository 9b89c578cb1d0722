"""One amount of work over more and more fake devices, and over more and more processes."""

import contextlib
import json
import pathlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence

from benchmarks import agent_speed, contender, measure, records
from results import training_process

from podracers import errors
from podracers.training import experiment

_EXPERIMENT = "catch_ppo"
# 192 divide over any split of 1, 2, 4 or 8 devices that Sebulba chooses, one actor to three
# learners included.
_WORK = ("NUM_ENVS = 192",)
_SPEEDUP = records.Kind("speed, turn by turn, over that of the first", "ratio", records.HIGHER, 3)
_PROCESS_STEPS = 1_000_000  # agent steps of each run
_RUN_TIMEOUT = 600.0  # seconds
_POLL_PERIOD = 0.1  # seconds


def _rows(rates: dict[int, list[float]], runner: str, what: str) -> list[records.Row]:
    first = next(iter(rates.values()))
    rows = []
    for count, own in rates.items():
        case = {"runner": runner, what: count}
        rows += [measure.SPEED.row(own, **case)]
        rows += [_SPEEDUP.row(measure.ratios(own, first), **case)]
    return rows


def benchmark_devices(
    repeats: int, devices: Sequence[int], bindings: Sequence[str] = ()
) -> records.Result:
    """Measures both runners on several numbers of fake devices, each in a process of its own."""
    bindings = (*_WORK, *bindings)
    rows = []
    for runner in agent_speed.RUNNERS:
        named = agent_speed.files(_EXPERIMENT, runner)
        experiment.load(named, bindings)  # a mistake is met before anything starts
        makers = dict.fromkeys(devices, measure.Training)
        environments = {count: contender.fake_devices(count) for count in devices}
        with contender.together(makers, (named, bindings), environments) as contenders:
            rows += _rows(measure.take_turns(contenders, repeats), runner, "devices")
    return records.Result(
        "PPO on Catch, the same work over more and more devices: 192 environments, 32 steps, else "
        f"as shipped in gin/experiments/{_EXPERIMENT}.gin.",
        tuple(rows),
        (contender.FAKE,),
    )


def benchmark_processes(
    repeats: int, processes: Sequence[int], bindings: Sequence[str] = ()
) -> records.Result:
    """Measures Anakin over several processes on this machine, one fake device each."""
    bindings = (*_WORK, f"TOTAL_STEPS = {_PROCESS_STEPS}", *bindings)
    rates = {count: [] for count in processes}
    # Turn by turn, for machines drift; processes start anew, so there is nothing to warm up.
    for _ in range(repeats):
        for count, own in rates.items():
            own.append(distributed_speed(count, bindings))
    return records.Result(
        "PPO on Catch under Anakin, the same work over more and more processes of this machine, "
        "which take part in one run (scripts/train.py --distributed): 192 environments, 32 steps, "
        f"else as shipped in gin/experiments/{_EXPERIMENT}.gin; compilation apart.",
        tuple(_rows(rates, "Anakin", "processes")),
        (
            "The processes share the machine's cores: this says that several work, and what they "
            "cost, not how well several machines scale.",
        ),
    )


def distributed_speed(count: int, bindings: Sequence[str]) -> float:
    """Returns the agent steps per second of a run of so many processes.

    Raises:
      errors.UserError, errors.RunFailure: one of them failed, or they took too long.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        arguments = [
            *training_process.flags([f"gin/experiments/{_EXPERIMENT}.gin"], bindings),
            *("--run_dir", str(folder / "run")),
            *("--distributed", "--coordinator", f"127.0.0.1:{_free_port()}"),
            *("--num_processes", str(count)),
        ]
        processes = {}
        for index in range(count):
            log, own = folder / f"log-{index}", [*arguments, "--process_id", str(index)]
            started = training_process.started(own, log, contender.fake_devices(1))
            processes[log] = stack.enter_context(started)
        _wait(processes)
        rate = json.loads((folder / "run" / "summary.json").read_text())["steps_per_second"]
    if rate is None:
        raise errors.RunFailure("the run was too short for a rate; raise TOTAL_STEPS")
    return rate


def _wait(processes: dict[pathlib.Path, subprocess.Popen]) -> None:
    """Waits until all have ended; if one fails, the others would wait for it for ever."""
    limit = time.monotonic() + _RUN_TIMEOUT
    running = True
    while running:
        running = any(process.poll() is None for process in processes.values())
        for log, process in processes.items():
            if process.poll():
                raise training_process.failure(process.returncode, log)
        if time.monotonic() > limit:
            raise errors.RunFailure(f"the processes did not end within {_RUN_TIMEOUT:.0f} s")
        time.sleep(_POLL_PERIOD)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
