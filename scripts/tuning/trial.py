"""One candidate of `scripts/tune.py`, in a process of its own: its speed and its memory."""

import dataclasses
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from benchmarks import contender, measure
from tuning import candidates

from podracers import command_line, errors, parallel
from podracers import environment as environment_lib
from podracers.training import experiment, run_directory

TURNS = 3
_CACHE = "JAX_COMPILATION_CACHE_DIR"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the process of a candidate knows before it compiles anything."""

    machine: candidates.Machine  # where it runs
    values: Mapping[str, Any]  # of the runner's fields, by name
    platform: str  # "cpu", "gpu" or "tpu"
    provenance: Mapping[str, Any]  # see `run_directory.provenance`


@dataclasses.dataclass
class Outcome:
    """What became of a candidate."""

    # Agent steps per second of each turn, compilation apart.
    rates: list[float] = dataclasses.field(default_factory=list)
    host_memory: int = 0  # the most bytes that the process and its children had resident
    # The most bytes in use on the fullest device; None where that is the host's.
    device_memory: int | None = None
    facts: Facts | None = None  # of the process; None if it did not come so far
    problem: str = ""  # why it was not measured, in one line; empty where it was
    refused: bool = False  # whether the settings are at fault, such as those that do not divide
    seconds: float = 0.0  # what it took, start of the process and compilation included
    compiling: float = 0.0  # seconds of that which a compiled program saves

    @property
    def rate(self) -> float:
        """The median rate; NaN where nothing was measured."""
        return math.nan if self.problem or not self.rates else statistics.median(self.rates)

    @property
    def memory(self) -> int:
        """The memory that is bounded: the device's where it has its own, else the host's."""
        return self.host_memory if self.device_memory is None else self.device_memory


def run(
    training: tuple[Sequence[str], Sequence[str], float],
    limit: float,
    memory: float,
    cache: str,
    *,
    turns: int = TURNS,
    floor: float = 0.0,
) -> Outcome:
    """Measures in a child process.

    Args:
      training: arguments of `Trial`.
      limit: seconds, after which the child is ended.
      memory: bytes; a child that takes more is ended.
      cache: a folder for compiled programs, where the environment names no other.
      turns: number of measurements.
      floor: agent steps per second; a candidate that is slower gets one turn.
    """
    start = time.monotonic()
    outcome = Outcome()

    def look() -> None:
        outcome.host_memory = max(outcome.host_memory, child.memory())
        on_host = outcome.facts is not None and outcome.facts.platform == "cpu"
        taken = outcome.host_memory if on_host else outcome.device_memory or 0
        if taken > memory:
            taken, memory_ = parallel.readable_bytes(taken), parallel.readable_bytes(memory)
            raise errors.RunFailure(f"takes {taken}, more than {memory_}")
        if time.monotonic() - start > limit:
            raise errors.RunFailure(f"not measured within {limit:.0f} s")

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        variables = {_CACHE: os.environ.get(_CACHE, cache)}
        child = contender.Contender("candidate", Trial, *training, environment=variables, log=log)
        try:
            outcome.facts = child.ask("facts", look)
            child.ask("check", look)
            for _ in range(turns):
                outcome.rates.append(child.ask("__call__", look))
                outcome.compiling = child.ask("compiling", look)
                outcome.device_memory = child.ask("device_memory", look)
                look()
                if outcome.rates[-1] < floor:
                    break
        except (errors.UserError, errors.RunFailure) as error:
            outcome.problem, outcome.refused = str(error), isinstance(error, errors.UserError)
        finally:
            child.kill()
    outcome.seconds = time.monotonic() - start
    return outcome


class Trial:
    """A candidate in its own process."""

    def __init__(self, gin_files: Sequence[str], bindings: Sequence[str], seconds: float):
        command_line.use_compilation_cache()
        self._settings = experiment.load(gin_files, bindings)
        self._parts, self._seconds = self._settings.build(), seconds
        self._stepper: measure.Stepper | None = None

    def check(self) -> None:
        """Refuses parts that do not fit; see `experiment.check`."""
        experiment.check(self._parts, self._settings.seed)

    def compiling(self) -> float:
        """Returns the seconds that the first update took longer than the second one."""
        return self._stepper.compiling

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._stepper is None:
            runner = self._parts.runner
            self._stepper = measure.Stepper(runner, None, measure.LEAD_IN, self._seconds)
        return self._stepper()

    def facts(self) -> Facts:
        """Returns what is known before anything is compiled."""
        parts, devices = self._parts, jax.local_devices()
        runner = parts.runner
        try:
            placement = getattr(runner, "placement", None)
        except errors.UserError:  # the streams do not divide: `check` says so
            placement = None
        split = (placement.actors, placement.learners) if placement else ((), ())
        actors, learners = (tuple(map(devices.index, each)) for each in split)
        machine = candidates.Machine(
            num_devices=len(devices),
            num_cores=len(os.sched_getaffinity(0)),
            is_host=environment_lib.is_host(parts.environment),
            actors=actors,
            learners=learners,
            num_batches=getattr(runner, "num_batches", None),
        )
        fields = [name for name in candidates.FIELDS if hasattr(runner, name)]
        values = {name: getattr(runner, name) for name in fields}
        return Facts(machine, values, devices[0].platform, run_directory.provenance())

    def device_memory(self) -> int | None:
        """Returns the most bytes in use on the fullest device; None where that is the host's."""
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [each.get("peak_bytes_in_use") for each in stats]
        return None if None in peaks else max(peaks)
