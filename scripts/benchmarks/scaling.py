"""One amount of work over more and more fake devices, and over more and more processes."""

import contextlib
import json
import pathlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence

from benchmarks import agent_speed as training
from benchmarks import contender, measure, records, startup

from podracers import errors
from podracers.training import experiment

_EXPERIMENT = "catch_ppo"
# 192 divide over any split of 1, 2, 4 or 8 devices that Sebulba chooses, one actor to three
# learners included.
_WORK = ("NUM_ENVS = 192",)
_SPEEDUP = records.Kind("speed, turn by turn, over that of the first", "ratio", records.HIGHER, 3)
_PROCESS_STEPS = 1_000_000  # agent steps of each run
_PATIENCE = 600.0  # seconds
_LOOK = 0.1  # seconds between two looks at the processes


def benchmark_devices(
    repeats: int, devices: Sequence[int], bindings: tuple[str, ...] = ()
) -> records.Result:
    """Measures both runners on several numbers of fake devices, each in a process of its own."""
    bindings = (*_WORK, *bindings)
    rows, notes = [], [contender.FAKE]
    for runner in training.RUNNERS:
        named = training.files(_EXPERIMENT, runner)
        experiment.load([str(startup.ROOT / file) for file in named], list(bindings))
        makers = {str(count): training.Training for count in devices}
        environments = {str(count): contender.fake_devices(count) for count in devices}
        with contender.together(makers, (named, bindings), environments) as contenders:
            rates = measure.take_turns(contenders, repeats)
            for each in contenders.values():
                each.close()
        first = rates[str(devices[0])]
        for count in devices:
            case = {"runner": runner, "devices": count}
            rates_here = rates[str(count)]
            rows.append(measure.SPEED.row(rates_here, **case))
            rows.append(_SPEEDUP.row(measure.ratios(rates_here, first), **case))
    return records.Result(
        "PPO on Catch, the same work over more and more devices: 192 environments, 32 steps, else "
        f"as shipped in gin/experiments/{_EXPERIMENT}.gin.",
        tuple(rows),
        tuple(notes),
    )


def benchmark_processes(
    repeats: int, processes: Sequence[int], bindings: tuple[str, ...] = ()
) -> records.Result:
    """Measures Anakin over several processes on this machine, one fake device each."""
    bindings = (*_WORK, f"TOTAL_STEPS = {_PROCESS_STEPS}", *bindings)
    rates = {str(count): [] for count in processes}
    # Turn by turn, for machines drift; processes start anew, so there is nothing to warm up.
    for _ in range(repeats):
        for count in processes:
            rates[str(count)].append(distributed_speed(count, bindings))
    first = rates[str(processes[0])]
    rows = []
    for count in processes:
        case = {"runner": "Anakin", "processes": count}
        rows.append(measure.SPEED.row(rates[str(count)], **case))
        rows.append(_SPEEDUP.row(measure.ratios(rates[str(count)], first), **case))
    return records.Result(
        "PPO on Catch under Anakin, the same work over more and more processes of this machine, "
        "which take part in one run (scripts/train.py --distributed): 192 environments, 32 steps, "
        f"else as shipped in gin/experiments/{_EXPERIMENT}.gin; compilation apart.",
        tuple(rows),
        (
            "The processes share the machine's cores: this says that several work, and what they "
            "cost, not how well several machines scale.",
        ),
    )


def distributed_speed(count: int, bindings: tuple[str, ...]) -> float:
    """Returns the agent steps per second of a run of so many processes.

    Raises:
      errors.RunFailure: one of them failed, or they took too long.
    """
    bound = [part for binding in bindings for part in ("--gin_bindings", binding)]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        outputs = [folder / f"output-{index}.txt" for index in range(count)]
        arguments = [
            *("--gin_file", f"gin/experiments/{_EXPERIMENT}.gin", *bound),
            *("--run_dir", str(folder / "run")),
            *("--distributed", "--coordinator", f"127.0.0.1:{_free_port()}"),
            *("--num_processes", str(count)),
        ]
        processes = [
            stack.enter_context(
                startup.training(
                    [*arguments, "--process_id", str(index)], output, contender.fake_devices(1)
                )
            )
            for index, output in enumerate(outputs)
        ]
        _wait(processes, outputs)
        summary = json.loads((folder / "run" / "summary.json").read_text())
    rate = summary["steps_per_second"]
    if rate is None:
        raise errors.RunFailure("the run was too short for a rate; raise TOTAL_STEPS")
    return rate


def _wait(processes: Sequence[subprocess.Popen], outputs: Sequence[pathlib.Path]) -> None:
    """Waits until all have ended; if one fails, the others would wait for it for ever."""
    limit = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in processes):
        for process, output in zip(processes, outputs):
            if process.poll():
                raise startup.failure(output)
        if time.monotonic() > limit:
            raise errors.RunFailure(f"the processes did not end within {_PATIENCE:.0f} s")
        time.sleep(_LOOK)
    for process, output in zip(processes, outputs):
        if process.returncode:
            raise startup.failure(output)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
