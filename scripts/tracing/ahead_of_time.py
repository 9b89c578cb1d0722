"""Compiles a runner's programs for TPUs that are not there, and reads what they would cost.

The TPU compiler needs no TPU: it is in the package `libtpu`, in the version that jax's extra `tpu`
names. Beside an environment for CPU it is installed into a folder of its own.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from tracing import costs

from podracers import errors, parallel, runner, sebulba
from podracers.training import config_names

TOPOLOGY = "v5e:2x2"
# Hz, by what JAX calls the chips. Of a v5e: 197e12 operations a second in bfloat16, of four units
# of 128 x 128 multiplications and additions (https://cloud.google.com/tpu/docs/v5e).
_CLOCKS = {"TPU v5 lite": 1.5e9}
_LIBRARY = "TPU_LIBRARY_PATH"  # the variable in which JAX looks for the compiler
# No machine is asked which TPUs it has, and several processes may compile.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SHOWN = 3  # copies of a program


class NoCompilerError(errors.UserError):
    """There is no TPU compiler."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What one compiled program takes.

    Where it does not compile, all is zero but its temporaries, where the compiler says them.
    """

    arguments: int = 0  # bytes
    temporaries: int = 0  # bytes
    cycles: float = 0.0  # of one run
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # cycles
    copies: tuple[costs.Cost, ...] = ()  # the largest ones
    # Of loops of which the number of passes depends on the data, and counts as one.
    loops: tuple[costs.Loop, ...] = ()
    failure: str = ""  # why it does not compile


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What an update takes of each device.

    Attributes:
      programs: `update` of Anakin; `learn`, `begin`, `act` and `finish` of Sebulba.
      update: cycles of the busiest device for one update.
      step: cycles of one step of all streams of a device (of one of Sebulba's actors): acting and,
        under Anakin, the environments.
      rate: agent steps a second, over all devices; None where the clock is not known. What the
        compiler gives no estimate for counts nothing, nor does the host.
    """

    programs: dict[str, Program]
    update: float
    step: float
    rate: float | None


def find_compiler(folder: pathlib.Path | None = None) -> str:
    """Says to JAX where the TPU compiler is, and returns its version.

    Args:
      folder: that `libtpu` was installed into (`pip install --target`); by default it is where
        `TPU_LIBRARY_PATH` says, or an installed package.

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
        wanted = [name for name in importlib.metadata.requires("jax") if name.startswith("libtpu")]
        raise NoCompilerError(
            f"no TPU compiler in {library or 'this environment'}: pip install --no-deps --target "
            f"DIR '{wanted[0].split(';')[0] if wanted else 'libtpu'}', and name DIR with --libtpu"
        )
    os.environ |= {_LIBRARY: library} | _ALONE
    jax.config.update("jax_platforms", "cpu")  # TPUs that are there are left alone
    jax.config.update("jax_enable_compilation_cache", False)  # programs without a TPU are not read
    beside = str(pathlib.Path(library).parents[1])
    found = importlib.metadata.Distribution.discover(name="libtpu", path=[beside])
    return next((each.version for each in found), "of an unknown version")


def devices(topology: str, count: int) -> list[jax.Device]:
    """Returns descriptions of so many TPUs.

    Args:
      topology: their kind and their grid, such as "v5e:2x2".
      count: how many of them; the grid has at least as many.

    Raises:
      errors.UserError: there is no such topology, or it has fewer.
    """
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise errors.UserError(f"topology '{topology}': {errors.first_line(error)}") from error
    if len(found) < count:
        raise errors.UserError(f"topology '{topology}' has {len(found)} devices, not {count}")
    return list(found[:count])


def estimate(of: runner.Runner, seed: int, on: Sequence[jax.Device]) -> Estimate:
    """Compiles the programs of a runner that has not been used.

    Args:
      of: the runner.
      seed: of the run.
      on: devices, of which there may be no more than a description.
    """
    replay = getattr(of.agent, "_replay", None)
    steps = float(replay.mean_gradient_steps(of.steps_per_update)) if replay else 1.0
    with parallel.compiling_for(on):
        if isinstance(of, sebulba.Sebulba):
            traced = {"learn": of.trace(seed), **of.trace_acting(seed)._asdict()}
            del traced["init_actor"]  # once in a run
        else:
            traced = {"update": of.trace(seed)}
        programs = {name: _compile(each, steps) for name, each in traced.items()}
        update, step = _cycles(of, programs)
    clock = _CLOCKS.get(on[0].device_kind)
    members = of.steps_per_update * of.population
    rate = members * clock / update if clock and update else None
    return Estimate(programs, update, step, rate)


def _cycles(of: runner.Runner, programs: dict[str, Program]) -> tuple[float, float]:
    """Returns the cycles of an update on the busiest device, and those of a step; 0 if unknown."""
    failed = any(program.failure for program in programs.values())
    if not isinstance(of, sebulba.Sebulba):
        update = programs["update"]
        learning = sum(c for part, c in update.parts.items() if part.startswith("learn"))
        return update.cycles, (update.cycles - learning) / of.rollout_length
    step = of.num_batches * programs["act"].cycles
    rollout = programs["begin"].cycles + of.num_batches * programs["finish"].cycles
    rollout += of.rollout_length * step
    place = of.placement
    busy = [
        place.actors.count(device) * rollout + (device in place.learners) * programs["learn"].cycles
        for device in {*place.actors, *place.learners}
    ]
    return 0.0 if failed else max(busy), step


def _compile(traced: jax.stages.Traced, gradient_steps: float) -> Program:
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error))
    memory = compiled.memory_analysis()
    found = costs.Costs(compiled.as_text(), gradient_steps, f"{config_names.ROOT}{os.sep}")
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        cycles=found.cycles,
        parts=found.parts(),
        copies=tuple(found.copies()[:_SHOWN]),
        loops=tuple(found.loops),
    )


def _refused(message: str) -> Program:
    """Returns a program that takes more memory than there is, by the compiler's message."""
    match = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", message)
    if not match:
        used = re.search(r"Used \S+ of \S+ \w+", message)
        return Program(failure=used[0] if used else message.splitlines()[0])
    size, room = match.groups()
    failure = f"{size} GiB of temporaries, where there are {room}"
    return Program(temporaries=round(float(size) * 2**30), failure=failure)


def plain(found: Estimate) -> dict[str, Any]:
    """Returns an estimate as JSON has it."""
    programs = {
        name: dataclasses.asdict(each)
        | {"copies": [copy._asdict() for copy in each.copies]}
        | {"loops": [loop._asdict() for loop in each.loops]}
        for name, each in found.programs.items()
    }
    return dataclasses.asdict(found) | {"programs": programs}
