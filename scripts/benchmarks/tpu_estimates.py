"""The TPU compiler's estimates of every agent's programs, without a TPU: memory and cycles.

The TPU compiler is the package `libtpu`, in the version that jax's extra `tpu` names. In an
environment for CPU, it is installed into its own folder.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from podracers import errors, parallel, runner, sebulba
from podracers.scripts.benchmarks import costs, measure, records
from podracers.training import experiment

_ATARI = "gin/experiments/pong_ppo.gin"
# Files of each agent under Sebulba, on Atari's frames; no simulator is stepped.
EXPERIMENTS = {
    "ppo": (_ATARI,),
    "impala": ("gin/experiments/pong_impala.gin",),
    "impala_resnet": ("gin/experiments/pong_impala.gin", "gin/agents/impala_atari_resnet.gin"),
    "dqn": (_ATARI, "gin/agents/dqn_atari.gin"),
    "r2d2": (_ATARI, "gin/agents/r2d2_atari.gin"),
    "sac": (_ATARI, "gin/agents/sac_pixels.gin"),
    "muzero": (_ATARI, "gin/agents/muzero_atari.gin"),
    "alphazero": (),  # it searches in its environment, which must be written in JAX
}
# Bindings that an agent's file requires of the experiment under Sebulba.
_BINDINGS = {
    "r2d2": ("ROLLOUT_LENGTH = 40",),  # period of sequences (gin/agents/r2d2_atari.gin)
    "sac": ("SAC.replay_capacity = 400_000",),  # fits the environments of four chips
}
# Agents with a preset for large batches under Anakin, by the number of chips.
_LARGE_BATCH = {"ppo": "large_batch_{}", "impala": "large_batch_{}", "dqn": "large_batch_dqn"}
# Preset and topology by number of chips.
_HARDWARE = {1: ("colab_tpu", "v5e:2x2"), 4: ("v4_8", "v5e:2x2"), 8: ("v5e_8", "v5e:2x4")}
# Hz. A v5e has 197e12 operations a second in bfloat16, in four units of 128 x 128 multiplications
# and additions (https://cloud.google.com/tpu/docs/v5e).
_CLOCK = 1.5e9
# No query for the TPUs of this machine; several processes may compile.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class _Program:
    """Costs of one compiled program."""

    arguments: int  # bytes
    temporaries: int  # bytes
    cycles: float  # cycles an execution
    learning: float  # cycles of the part that learns
    loops: Sequence[costs.Loop]  # their number of passes depends on data; one is counted


def benchmark(
    agent: str, counts: Sequence[int], bindings: Sequence[str], folder: pathlib.Path | None
) -> records.Result:
    """Compiles the programs of an agent of `EXPERIMENTS` under both runners.

    `counts` are numbers of chips. `folder` is the target of the installation of `libtpu`; None
    stands for the installed packages.

    Raises:
      errors.UserError: there is no compiler, or no preset for a number of chips.
    """
    version = find_compiler(folder)
    rows, notes = [], []
    for count in counts:
        preset, devices = hardware(count)
        # Files, and bindings that they require.
        cases: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
        if agent in measure.EXPERIMENTS:
            anakin = (*measure.files(measure.EXPERIMENTS[agent], "Anakin"), preset)
            cases["Anakin"] = anakin, ()
            if agent in _LARGE_BATCH:
                large = f"gin/hardware/{_LARGE_BATCH[agent].format(count)}.gin"
                cases["Anakin, large batch"] = (*anakin, large), ()
        if EXPERIMENTS[agent]:
            cases["Sebulba"] = (*EXPERIMENTS[agent], preset), _BINDINGS.get(agent, ())
        for kind, (files, needed) in cases.items():
            settings = experiment.load(files, [*needed, *bindings])
            name = f"{agent}, {kind}" + (f", {count} chips" if count > 1 else "")
            notes.append(f"{name}: {', '.join([*files, *needed])}")
            parts, programs = settings.build(), {}
            try:
                with parallel.compiling_for(devices):
                    programs = _compile_all(parts, settings.seed)
                    rows += _rows(name, parts.runner, programs)
            except jax.errors.JaxRuntimeError as error:  # such as a lack of memory
                notes.append(f"{name} does not compile: {errors.first_line(error)}")
            for part, program in programs.items():
                for cycles, operation in program.loops:
                    cost = f"takes {records.short(cycles)} cycles"
                    notes.append(f"{name}, {part}: a pass of the loop `{operation}` {cost}")
    return records.Result(
        "The TPU compiler's estimates for chips of a v5e of 1.5 GHz, with the presets of "
        f"gin/hardware: compiled by libtpu {version}, not run. The host, simulators, copies beside "
        "other work, scalar operations and sums over devices count as zero; a loop whose number of "
        "passes depends on data counts as one pass, except for gradient steps.",
        tuple(rows),
        tuple(notes),
        group="tpu",
    )


def hardware(count: int) -> tuple[str, list[jax.Device]]:
    """Returns the file of the preset for a number of chips, and chips to compile for."""
    if count not in _HARDWARE:
        raise errors.UserError(f"--devices: expected one of {[*_HARDWARE]} chips, got {count}")
    preset, topology = _HARDWARE[count]
    grid = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return f"gin/hardware/{preset}.gin", grid.devices[:count]


def find_compiler(folder: pathlib.Path | None) -> str:
    """Configures JAX for the TPU compiler, and returns the compiler's version."""
    folder = folder or pathlib.Path(sysconfig.get_path("purelib"))
    library = folder / "libtpu" / "libtpu.so"
    if not library.is_file():
        required = next(
            name for name in importlib.metadata.requires("jax") or () if "libtpu" in name
        )
        install = f"pip install --no-deps --target DIR '{required.split(';')[0]}'"
        raise errors.UserError(f"no TPU compiler in {folder}: {install}, then --libtpu DIR")
    os.environ |= {"TPU_LIBRARY_PATH": str(library)} | _ALONE  # JAX's variable
    jax.config.update("jax_platforms", "cpu")  # leaves the machine's TPUs alone
    jax.config.update("jax_enable_compilation_cache", False)  # cached programs need a TPU
    libraries = importlib.metadata.Distribution.discover(name="libtpu", path=[str(folder)])
    return next((library.version for library in libraries), "of an unknown version")


def gradient_steps(agent: Any, steps_per_update: int) -> float:
    """Returns the gradient steps of an update with replay, the passes of its loop; else 1."""
    replay = getattr(agent, "buffer", None)
    return float(replay.mean_gradient_steps(steps_per_update)) if replay else 1.0


def _compile_all(parts: experiment.Parts, seed: int) -> dict[str, _Program]:
    """Returns `update` of Anakin; `learn`, `begin`, `act` and `finish` of Sebulba."""
    of = parts.runner
    steps = gradient_steps(parts.agent, of.steps_per_update)
    if isinstance(of, sebulba.Sebulba):
        traced = {"learn": of.trace(seed), **of.trace_acting(seed)}
        del traced["init_actor"]  # once in a run
    else:
        traced = {"update": of.trace(seed)}
    return {name: _compile(program, steps) for name, program in traced.items()}


def _rows(name: str, of: runner.Runner, programs: dict[str, _Program]) -> Iterator[records.Row]:
    """Yields the speed over all devices, the cycles of the busiest one, and bytes.

    The speed is an upper bound: operations without an estimate and the host count as zero.
    """
    update = _update_cycles(of, programs)
    if isinstance(of, sebulba.Sebulba):
        step = of.num_batches * programs["act"].cycles
    else:
        step = (update - programs["update"].learning) / of.rollout_length
    rate = of.steps_per_update * of.population * _CLOCK / update
    yield records.row("estimated speed", "agent steps/s", rate, experiment=name)
    yield records.row("an update", "cycles", update, experiment=name)
    yield records.row("a step of all streams", "cycles", step, experiment=name)
    for part in ("update", "learn", "act"):
        if program := programs.get(part):
            line = f"{name}, {part}" if part == "act" else name
            yield records.row("arguments", "bytes", program.arguments, experiment=line)
            yield records.row("temporaries", "bytes", program.temporaries, experiment=line)


def _update_cycles(of: runner.Runner, programs: dict[str, _Program]) -> float:
    """Returns the cycles of an update on the busiest device."""
    if not isinstance(of, sebulba.Sebulba):
        return programs["update"].cycles
    rollout = of.num_batches * programs["finish"].cycles + programs["begin"].cycles
    rollout += of.rollout_length * of.num_batches * programs["act"].cycles
    actors, learners = of.placement.actors, of.placement.learners
    return max(
        actors.count(device) * rollout + (device in learners) * programs["learn"].cycles
        for device in {*actors, *learners}
    )


def _compile(traced: jax.stages.Traced, gradient_steps: float) -> _Program:
    compiled = traced.lower().compile()
    memory: Any = compiled.memory_analysis()
    estimate = costs.Costs(compiled.as_text() or "", gradient_steps)
    return _Program(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        cycles=estimate.cycles,
        learning=sum(cycles for part, cycles in estimate.parts.items() if part.startswith("learn")),
        loops=estimate.loops,
    )
