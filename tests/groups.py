"""Several processes on this machine that are one run, as the hosts of a pod are."""

import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests import processes

PEER_TIMEOUT = 240  # seconds to come together, and of silence until a process counts as lost


def free_port() -> int:
    """Returns a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(num_devices: int) -> dict[str, str]:
    """Returns the variables with which a child has so many fake devices.

    It imports these tests, and no installed package of their name.
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    return {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={num_devices}",
        "PYTHONPATH": str(processes.ROOT),
    }


def train(
    num_processes: int,
    num_devices: int,
    *arguments: object,
    folders: Sequence[pathlib.Path] = (processes.ROOT,),
) -> list[subprocess.Popen]:
    """Starts `scripts/train.py` in so many processes of so many devices each.

    The processes take their working directories from `folders` in turn.
    """
    group = ("--coordinator", f"127.0.0.1:{free_port()}", "--num_processes", num_processes)
    return [
        processes.start(
            "train",
            *arguments,
            *group,
            *("--process_id", process, "--peer_timeout", PEER_TIMEOUT),
            environment=environment(num_devices),
            cwd=folders[process % len(folders)],
        )
        for process in range(num_processes)
    ]


def finish(
    started: Sequence[subprocess.Popen], codes: Sequence[int] | None = None
) -> list[subprocess.CompletedProcess]:
    """Waits for all, and checks their exit codes, if given; kills all if one takes too long."""
    try:
        return list(map(processes.finish, started, codes or [None] * len(started)))
    finally:
        for process in started:
            process.kill()
            process.wait()


def python(
    code: str, num_processes: int, num_devices: int, codes: Sequence[int] | None = None
) -> list[subprocess.CompletedProcess]:
    """Runs code in so many processes; `sys.argv` has each one's number and the coordinator."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", code]
    variables = environment(num_devices)
    started = [processes.spawn([*command, n, address], variables) for n in range(num_processes)]
    return finish(started, codes)
