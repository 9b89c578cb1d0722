"""Settings of a runner, measured in their own process: speed and memory."""

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


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of the process that are known before compilation."""

    machine: candidates.Machine
    values: Mapping[str, Any]  # of the runner's fields
    provenance: Mapping[str, Any]


@dataclasses.dataclass
class Outcome:
    """Result of one measurement."""

    rates: list[float] = dataclasses.field(default_factory=list)  # agent steps/s of each turn
    memory: int = 0  # peak bytes: of the fullest device that has its own memory, else of the host
    problem: str = ""  # reason of a failure, in one line
    refused: bool = False  # whether the settings are invalid, for example do not divide
    seconds: float = 0.0  # with start and compilation
    facts: Facts | None = None

    @property
    def rate(self) -> float:
        """Median rate; NaN after a failure."""
        return math.nan if self.problem or not self.rates else statistics.median(self.rates)

    @property
    def text(self) -> str:
        """Rates and memory, or the reason of the failure."""
        if self.problem:
            return self.problem
        spread = f" ({min(self.rates):,.0f} to {max(self.rates):,.0f})" * (len(self.rates) > 1)
        memory = parallel.readable_bytes(self.memory)
        return f"{self.rate:,.0f}{spread} agent steps/s, {memory}"


def run(
    training: tuple[Sequence[str], Sequence[str]],
    limit: float,
    memory: float,
    cache: str,
    floor: float = 0.0,
) -> Outcome:
    """Measures in a child process.

    Args:
      training: arguments of `Trial`.
      limit: seconds; then the child is killed.
      memory: bytes; a child that uses more is killed.
      cache: folder for compiled programs, unless the environment names one.
      floor: agent steps per second; after a slower turn there is no other.
    """
    start, outcome = time.monotonic(), Outcome()
    variable = "JAX_COMPILATION_CACHE_DIR"

    def watch() -> None:
        if outcome.facts is None or outcome.facts.provenance["platform"] == "cpu":
            outcome.memory = max(outcome.memory, child.memory())
        if outcome.memory > memory:
            used, allowed = map(parallel.readable_bytes, (outcome.memory, memory))
            raise errors.RunFailure(f"uses {used}, more than {allowed}")
        if time.monotonic() - start > limit:
            raise errors.RunFailure(f"not measured within {limit:.0f} s")

    with tempfile.TemporaryDirectory() as folder:
        variables = {variable: os.environ.get(variable, cache)}
        log = pathlib.Path(folder) / "log"
        child = contender.Contender("candidate", Trial, *training, environment=variables, log=log)
        try:
            outcome.facts = child.ask("facts", watch)
            child.ask("check", watch)
            while len(outcome.rates) < TURNS:
                outcome.rates.append(child.ask("__call__", watch))
                outcome.memory = child.ask("device_memory", watch) or outcome.memory
                watch()
                if outcome.rates[-1] < floor:
                    break
        except (errors.UserError, errors.RunFailure) as error:
            outcome.problem, outcome.refused = str(error), isinstance(error, errors.UserError)
        finally:
            child.kill()
    outcome.seconds = time.monotonic() - start
    return outcome


class Trial:
    """Settings in their own process.

    Args:
      gin_files: of the experiment.
      bindings: over the files.
    """

    def __init__(self, gin_files: Sequence[str], bindings: Sequence[str]):
        command_line.use_compilation_cache()
        self._settings = experiment.load(gin_files, bindings)
        self._parts = self._settings.build()
        self._stepper: measure.Stepper | None = None

    def check(self) -> None:
        """Raises errors.UserError if the parts do not fit; see `experiment.check`."""
        experiment.check(self._parts, self._settings.seed)

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._stepper is None:
            self._stepper = measure.Stepper(self._parts.runner, lead_in=measure.LEAD_IN)
        return self._stepper()

    def facts(self) -> Facts:
        """Returns facts without compilation."""
        runner, devices = self._parts.runner, jax.local_devices()
        try:
            placement = getattr(runner, "placement", None)
        except errors.UserError:  # the streams do not divide; `check` reports it
            placement = None
        split = (placement.actors, placement.learners) if placement else ((), ())
        machine = candidates.Machine(
            len(devices),
            len(os.sched_getaffinity(0)),
            environment_lib.is_host(self._parts.environment),
            *(tuple(map(devices.index, own)) for own in split),
            getattr(runner, "num_batches", None),
        )
        fields = {field for own in candidates.FIELDS.values() for field in own}
        values = {name: getattr(runner, name) for name in fields if hasattr(runner, name)}
        return Facts(machine, values, run_directory.provenance())

    def device_memory(self) -> int | None:
        """Returns the peak bytes of the fullest device; None without device memory."""
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [each.get("peak_bytes_in_use") for each in stats]
        return None if None in peaks else max(peaks)
