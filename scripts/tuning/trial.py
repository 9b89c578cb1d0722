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

from podracers import anakin, errors, parallel, sebulba
from podracers import environment as environment_lib
from podracers.commands import command_line
from podracers.scripts.benchmarks import contender, measure
from podracers.scripts.tuning import candidates
from podracers.training import experiment, summary

_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of a process that are known before compilation."""

    num_devices: int
    num_cores: int  # cores of the host
    settings: candidates.Settings  # settings of the experiment; chosen values replace None
    provenance: Mapping[str, Any]


@dataclasses.dataclass
class Outcome:
    """Result of one measurement."""

    rates: list[float] = dataclasses.field(default_factory=list)  # agent steps/s of each turn
    memory: int = 0  # peak bytes of the host
    problem: str = ""  # reason of a failure, in one line
    refused: bool = False  # the settings are invalid, for example do not divide
    seconds: float = 0.0  # seconds, start and compilation included
    facts: Facts | None = None

    @property
    def rate(self) -> float:
        """Median rate; NaN after a failure."""
        return math.nan if self.problem else statistics.median(self.rates)

    @property
    def text(self) -> str:
        """Rates and memory, or the reason of the failure."""
        if self.problem:
            return self.problem
        spread = f"{self.rate:,.0f} ({min(self.rates):,.0f} to {max(self.rates):,.0f})"
        return f"{spread} agent steps/s, {parallel.readable_bytes(self.memory)}"


def run(
    gin_files: Sequence[str], bindings: Sequence[str], limit: float, memory: float, cache: str
) -> Outcome:
    """Measures in a child process, which is killed after `limit` seconds or beyond `memory` bytes.

    `cache` is the folder for compiled programs, unless the environment names one.
    """
    start, outcome = time.monotonic(), Outcome()

    def watch() -> None:
        outcome.memory = max(outcome.memory, child.memory())
        if outcome.memory > memory:
            used, allowed = map(parallel.readable_bytes, (outcome.memory, memory))
            raise errors.RunFailure(f"uses {used}, more than {allowed}")
        if time.monotonic() - start > limit:
            raise errors.RunFailure(f"not measured within {limit:.0f} s")

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        child = contender.Contender(_Trial, gin_files, bindings, cache, log=log)
        try:
            outcome.facts = child.ask("facts", watch)
            outcome.rates = [child.ask("__call__", watch) for _ in range(_TURNS)]
        except (errors.UserError, errors.RunFailure) as error:
            outcome.problem, outcome.refused = str(error), isinstance(error, errors.UserError)
        finally:
            child.kill()
    outcome.seconds = time.monotonic() - start
    return outcome


class _Trial:
    """Settings in their own process; a call returns agent steps per second."""

    def __init__(self, gin_files: Sequence[str], bindings: Sequence[str], cache: str):
        command_line.use_compilation_cache()
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", cache)
        self._settings = experiment.load(gin_files, bindings)
        self._parts = self._settings.build()
        self._stepper: measure.Stepper | None = None

    def __call__(self) -> float:
        if self._stepper is None:
            self._stepper = measure.Stepper(self._parts.runner, lead_in=measure.LEAD_IN)
        return self._stepper()

    def facts(self) -> Facts:
        """Returns facts without compilation; raises errors.UserError if the parts do not fit."""
        experiment.check(self._parts, self._settings.seed)
        runner, cores = self._parts.runner, len(os.sched_getaffinity(0))
        devices, names = jax.local_device_count(), ("num_envs", "rollout_length")
        options = {name: getattr(runner, name) for name in names if hasattr(runner, name)}
        if isinstance(runner, anakin.Anakin):
            options["reset_batch"] = runner.reset_size
        if isinstance(runner, sebulba.Sebulba):
            actors, learners = set(runner.placement.actors), set(runner.placement.learners)
            options["devices"] = len(actors) if actors.isdisjoint(learners) else devices
            options["actor_threads"] = len(runner.placement.actors) // len(actors)
            options["batches_per_actor"] = runner.num_batches
            if environment_lib.is_host(self._parts.environment):
                options["num_threads"] = runner.num_threads or cores
        return Facts(devices, cores, options, summary.provenance())
