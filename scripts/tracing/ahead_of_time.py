"""Compiles a runner's programs for TPUs without a TPU, and reads their costs.

The TPU compiler is the package `libtpu`, in the version that jax's extra `tpu` names. In an
environment for CPU, it is installed into its own folder.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence

import jax
from tracing import costs

from podracers import errors, parallel, runner, sebulba

# Hz, by JAX's names of chips. A v5e has 197e12 operations a second in bfloat16, in four units of
# 128 x 128 multiplications and additions (https://cloud.google.com/tpu/docs/v5e).
_CLOCKS = {"TPU v5 lite": 1.5e9}
_LIBRARY = "TPU_LIBRARY_PATH"  # JAX's variable for the path of the compiler
# No query for the TPUs of this machine; several processes may compile.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class NoCompilerError(errors.UserError):
    """There is no TPU compiler."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Costs of one compiled program; of a program that does not compile, only temporaries."""

    arguments: int = 0  # bytes
    temporaries: int = 0  # bytes
    cycles: float = 0.0  # of one execution
    learning: float = 0.0  # cycles of these
    loops: tuple[costs.Loop, ...] = ()  # their number of passes depends on data; one is counted
    failure: str = ""  # reason why it does not compile


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Costs of an update on each device.

    Attributes:
      programs: `update` of Anakin; `learn`, `begin`, `act` and `finish` of Sebulba.
      update: cycles of the busiest device for one update; 0 if a program does not compile.
      step: cycles of one step of all streams of a device (of one of Sebulba's actors): acting and,
        under Anakin, the environments.
      rate: agent steps per second over all devices; None for an unknown clock. An upper bound:
        operations without an estimate and the host count as zero.
    """

    programs: dict[str, Program]
    update: float
    step: float
    rate: float | None


def find_compiler(folder: pathlib.Path | None = None) -> str:
    """Configures JAX for the TPU compiler, and returns the compiler's version.

    Args:
      folder: target folder of the installation of `libtpu`; by default the file that
        `TPU_LIBRARY_PATH` names, or an installed package.

    Raises:
      NoCompilerError: it is not there.
    """
    if folder is None:
        found = importlib.util.find_spec("libtpu")
        library = os.environ.get(_LIBRARY) or (
            found and found.origin and str(pathlib.Path(found.origin).with_name("libtpu.so"))
        )
    else:
        library = str(folder / "libtpu" / "libtpu.so")
    if not library or not pathlib.Path(library).is_file():
        required = next(name for name in importlib.metadata.requires("jax") if "libtpu" in name)
        version = required.split(";")[0]
        raise NoCompilerError(
            f"no TPU compiler in {library or 'this environment'}: pip install --no-deps --target "
            f"DIR '{version}', then --libtpu DIR"
        )
    os.environ |= {_LIBRARY: library} | _ALONE
    jax.config.update("jax_platforms", "cpu")  # leaves the machine's TPUs alone
    jax.config.update("jax_enable_compilation_cache", False)  # cached programs need a TPU
    beside = str(pathlib.Path(library).parents[1])
    found = importlib.metadata.Distribution.discover(name="libtpu", path=[beside])
    return next((each.version for each in found), "of an unknown version")


def estimate(of: runner.Runner, seed: int, on: Sequence[jax.Device]) -> Estimate:
    """Compiles the programs of an unused runner for devices, or descriptions of devices."""
    replay = getattr(of.agent, "_replay", None)
    steps = float(replay.mean_gradient_steps(of.steps_per_update)) if replay else 1.0
    with parallel.compiling_for(on):
        if isinstance(of, sebulba.Sebulba):
            traced = {"learn": of.trace(seed), **of.trace_acting(seed)._asdict()}
            del traced["init_actor"]  # once in a run
        else:
            traced = {"update": of.trace(seed)}
        programs = {name: _compile(each, steps) for name, each in traced.items()}
        if isinstance(of, sebulba.Sebulba):
            update, step = _sebulba_cycles(of, programs)
        else:
            found = programs["update"]
            update, step = found.cycles, (found.cycles - found.learning) / of.rollout_length
    clock = _CLOCKS.get(on[0].device_kind)
    members = of.steps_per_update * of.population
    rate = members * clock / update if clock and update else None
    return Estimate(programs, update, step, rate)


def _sebulba_cycles(of: sebulba.Sebulba, programs: dict[str, Program]) -> tuple[float, float]:
    """Returns the cycles of an update on the busiest device, and those of a step."""
    step = of.num_batches * programs["act"].cycles
    rollout = programs["begin"].cycles + of.num_batches * programs["finish"].cycles
    rollout += of.rollout_length * step
    actors, learners = of.placement.actors, of.placement.learners
    busy = [
        actors.count(device) * rollout + (device in learners) * programs["learn"].cycles
        for device in {*actors, *learners}
    ]
    failed = any(program.failure for program in programs.values())
    return 0.0 if failed else max(busy), step


def _compile(traced: jax.stages.Traced, gradient_steps: float) -> Program:
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _out_of_memory(str(error))
    memory = compiled.memory_analysis()
    found = costs.Costs(compiled.as_text(), gradient_steps)
    found = costs.Costs(compiled.as_text(), gradient_steps)
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        cycles=found.cycles,
        learning=sum(each for part, each in found.parts.items() if part.startswith("learn")),
        loops=tuple(found.loops),
    )


def _out_of_memory(message: str) -> Program:
    match = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", message)
    if not match:
        used = re.search(r"Used \S+ of \S+ \w+", message)
        return Program(failure=used[0] if used else message.splitlines()[0])
    size, room = match.groups()
    failure = f"{size} GiB of temporaries, of {room} available"
    return Program(temporaries=round(float(size) * 2**30), failure=failure)
