"""One candidate of `scripts/tune.py`, measured in a process of its own: its speed and its memory.

`run` starts this file as a script, which reads what to measure from its standard input, and answers
with a line of JSON for everything that it knows. It is in a session of its own, so that a Ctrl-C
reaches the parent alone, and everything that it started can be ended with it.
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from podracers import command_line, errors, parallel
from podracers import environment as environment_lib
from podracers.training import experiment, run_directory

FIELDS = (
    "num_envs",
    "rollout_length",
    "reset_batch",
    "batches_per_actor",
    "num_threads",
    "actor_devices",
    "learner_devices",
)
_LOOK = 0.25  # seconds between two looks at a child
_PATIENCE = 5.0  # seconds that a child gets to leave in order
_LEAD_IN = 2  # updates after the one that compiles, and not counted: queues fill


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
      gin_files: of the experiment.
      gin_bindings: over them.
      seconds: of each turn, or the length of one update where that is longer.
      turns: how many.
      floor: agent steps per second; what seems slower, already before the first turn, is not
        measured to the end.
    """

    gin_files: tuple[str, ...]
    gin_bindings: tuple[str, ...]
    seconds: float = 1.0
    turns: int = 3
    floor: float = 0.0


@dataclasses.dataclass
class Outcome:
    """What became of it.

    Attributes:
      rates: agent steps per second of each turn, compilation apart.
      host_memory: the most bytes that the process and its children had resident.
      device_memory: the most bytes in use on the fullest device; None where that is the host's.
      facts: what the child said of the machine and of the runner; None if it did not come so far.
      problem: why it was not measured, in one line; empty where it was.
      refused: the problem is one of the settings, and nothing had been compiled yet.
      seconds: what it took, start of the process and compilation included.
      compiling: seconds of that until the first update was taken.
    """

    rates: list[float] = dataclasses.field(default_factory=list)
    host_memory: int = 0
    device_memory: int | None = None
    facts: dict[str, Any] | None = None
    problem: str = ""
    refused: bool = False
    seconds: float = 0.0
    compiling: float = 0.0

    @property
    def rate(self) -> float:
        """The median rate; NaN where nothing was measured."""
        return math.nan if self.problem or not self.rates else float(np.median(self.rates))

    @property
    def memory(self) -> int:
        """The memory that is bounded: the device's where it has its own, else the host's."""
        return self.host_memory if self.device_memory is None else self.device_memory


def run(
    request: Request,
    limit: float,
    memory: float,
    cache: str,
    watch: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Measures in a child process.

    Args:
      request: what.
      limit: seconds, after which the child is ended.
      memory: bytes; a child that takes more is ended.
      cache: a folder for compiled programs, where the environment names no other.
      watch: told several times a second what the child is at.
    """
    start = time.monotonic()
    outcome = Outcome()
    with tempfile.TemporaryFile() as log, _child(request, log, cache) as process:
        for stage in _listen(process, outcome):
            watch(stage)
            on_host = bool(outcome.facts) and outcome.facts["platform"] == "cpu"
            taken = outcome.host_memory if on_host else outcome.device_memory
            if taken and taken > memory:
                sizes = parallel.readable_bytes(taken), parallel.readable_bytes(memory)
                outcome.problem = "takes {}, more than {}".format(*sizes)
                break
            if time.monotonic() - start > limit:
                outcome.problem = f"not measured within {limit:.0f} s ({stage})"
                break
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            if not outcome.problem and not outcome.rates:
                outcome.problem = _last_words(process, log)
    outcome.seconds = time.monotonic() - start
    return outcome


@contextlib.contextmanager
def _child(request: Request, log, cache: str) -> Iterator[subprocess.Popen]:
    """Starts this file; however the context is left, its session is gone."""
    process = subprocess.Popen(
        # -P: what lies beside this file hides no module of the experiment.
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={"JAX_COMPILATION_CACHE_DIR": cache, **os.environ},
        start_new_session=True,
    )
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            asked = {**dataclasses.asdict(request), "parent": os.getpid()}
            pipe.write(json.dumps(asked).encode())
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the simulators' processes
        process.wait()
        process.stdout.close()


def _listen(process: subprocess.Popen, outcome: Outcome) -> Iterator[str]:
    """Fills in what the child says until it has said all, and yields often what it is at."""
    stage, rest = "starting", b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            yield stage
            ready = selector.select(_LOOK)
            outcome.host_memory = max(outcome.host_memory, _resident(process.pid))
            if not ready:
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                stage = said.pop("stage", stage)
                outcome.rates += said.pop("rates", [])
                outcome.host_memory = max(outcome.host_memory, said.pop("host_memory", 0))
                for name, value in said.items():
                    setattr(outcome, name, value)


def _last_words(process: subprocess.Popen, log) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode and process.returncode < 0:
        return f"its process was killed by {signal.Signals(-process.returncode).name}"
    return lines[-1].strip() if lines else "its process ended and said nothing"


def _resident(session: int) -> int:
    """Returns the peaks of resident memory of a session's processes, added up, where /proc is."""
    total = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(stat.read_text().rpartition(") ")[2].split()[3]) == session:
                total += _peak(stat.with_name("status"))
    return total


def _peak(status: pathlib.Path) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
    return int(found[1]) * 1024 if found else 0


# What follows runs in the child.


def main() -> None:
    """Measures what standard input asks for."""
    asked = json.load(sys.stdin)
    _end_with(asked.pop("parent"))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def say(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")

    command_line.use_compilation_cache()
    request = Request(**asked)
    try:
        parts, seed = _prepared(request, say)
    except Exception as error:
        say(problem=_reason(error), refused=True)
        return
    if not request.turns:
        return
    try:
        _measure(parts.runner, seed, request, say)
    except Exception as error:
        say(problem=_reason(error))
    finally:
        parts.runner.close()


def _end_with(parent: int) -> None:
    """Has the kernel (Linux's) end this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def _prepared(request: Request, say: Callable[..., None]) -> tuple[experiment.Parts, int]:
    """Builds the experiment, says what it is, and traces an update."""
    settings = experiment.load(request.gin_files, request.gin_bindings)
    parts = settings.build()
    say(facts=_facts(parts), stage="tracing")
    experiment.check(parts, settings.seed)
    return parts, settings.seed


def _facts(parts: experiment.Parts) -> dict[str, Any]:
    runner = parts.runner
    devices = jax.local_devices()
    try:
        placement = getattr(runner, "placement", None)
    except errors.UserError:  # the streams do not divide: `check` says so
        placement = None
    split = (placement.actors, placement.learners) if placement else ((), ())
    return {
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "num_cores": len(os.sched_getaffinity(0)),
        "is_host": environment_lib.is_host(parts.environment),
        "values": {name: getattr(runner, name) for name in FIELDS if hasattr(runner, name)},
        "actors": [devices.index(device) for device in split[0]],
        "learners": [devices.index(device) for device in split[1]],
        "num_batches": getattr(runner, "_num_batches", None),
        "provenance": run_directory.provenance(),
    }


def _measure(runner: Any, seed: int, request: Request, say: Callable[..., None]) -> None:
    """Takes turns until there were enough, and says how fast each was."""
    say(stage="compiling")
    start = time.perf_counter()
    state, report = runner.step(runner.init(seed), 1)
    jax.block_until_ready((state, report))
    say(compiling=time.perf_counter() - start)
    while not _is_learning(report):
        say(stage="filling the replay memory")
        state, report = runner.step(state, 1)
    jax.block_until_ready((state, report))
    say(stage="warming up")
    start = time.perf_counter()
    state, report = runner.step(state, _LEAD_IN)
    jax.block_until_ready((state, report))
    each = (time.perf_counter() - start) / _LEAD_IN
    updates = max(math.ceil(request.seconds / each), 1)
    steps = updates * runner.steps_per_update * runner.population
    if steps / updates / each < request.floor:
        say(rates=[steps / updates / each], **_memory())
        return
    for turn in range(request.turns):
        say(stage=f"measuring, {turn + 1} of {request.turns}")
        start = time.perf_counter()
        state, report = runner.step(state, updates)
        jax.block_until_ready((state, report))
        rate = steps / (time.perf_counter() - start)
        say(rates=[rate], **_memory())
        if rate < request.floor:
            return


def _is_learning(report: Any) -> bool:
    """Returns whether losses were measured; before that, an agent with a replay memory fills it."""
    losses = [mean.count for name, mean in report.means.items() if name.startswith("loss/")]
    return not losses or any(np.any(np.asarray(count) > 0) for count in losses)


def _memory() -> dict[str, int | None]:
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    on_device = None if None in peaks else max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    status = pathlib.Path("/proc/self/status")
    # On Linux `ru_maxrss` also counts what the parent had when it made this process.
    return {"host_memory": _peak(status) if status.exists() else here, "device_memory": on_device}


def _reason(error: Exception) -> str:
    message = errors.first_line(error)
    if "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory: {message}"
    return message if isinstance(error, errors.UserError) else f"{type(error).__name__}: {message}"


if __name__ == "__main__":
    main()
