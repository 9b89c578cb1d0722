"""The TPU compiler's estimates of every agent's programs, without a TPU: memory and cycles."""

import pathlib
from collections.abc import Iterator, Sequence

from benchmarks import measure, records
from jax.experimental import topologies
from tracing import ahead_of_time

from podracers import errors
from podracers.training import experiment

_ATARI = "gin/experiments/pong_ppo.gin"
# Files of each agent under Sebulba, on Atari's frames; no simulator is stepped.
EXPERIMENTS = {
    "ppo": (_ATARI,),
    "impala": ("gin/experiments/pong_impala.gin",),
    "dqn": (_ATARI, "gin/agents/dqn_atari.gin"),
    "r2d2": (_ATARI, "gin/agents/r2d2_atari.gin"),
    "sac": (_ATARI, "gin/agents/sac_pixels.gin"),
    "muzero": (_ATARI, "gin/agents/muzero_atari.gin"),
    "alphazero": (),  # it searches in its environment, which must be written in JAX
}
# Bindings that an agent's file requires of the experiment under Sebulba.
_BINDINGS = {
    "r2d2": ("ROLLOUT_LENGTH = 40",),  # period of sequences (gin/agents/r2d2_atari.gin)
    "sac": ("SAC.replay_capacity = 200_000",),  # for the environments of four chips
}
# Agents that use each rollout once have a preset for large batches under Anakin, too.
_LARGE_BATCH = ("ppo", "impala")
# Preset and topology by number of chips.
_HARDWARE = {
    1: ("colab_tpu", "v5e:2x2"),
    4: ("v4_8", "v5e:2x2"),
    8: ("v5e_8", "v5e:2x4"),
}


def benchmark_agent(
    agent: str,
    counts: Sequence[int] = (1,),
    bindings: Sequence[str] = (),
    compiler: pathlib.Path | None = None,
) -> records.Result:
    """Compiles one agent's programs under both runners.

    Args:
      agent: a name in `EXPERIMENTS`.
      counts: numbers of chips.
      bindings: over those of the experiments.
      compiler: the folder of libtpu (see `ahead_of_time.find_compiler`).

    Raises:
      ahead_of_time.NoCompilerError: there is no compiler.
      errors.UserError: there is no preset for a number of chips.
    """
    version = ahead_of_time.find_compiler(compiler)
    rows, notes = [], []
    for count in counts:
        if count not in _HARDWARE:
            raise errors.UserError(f"--devices: expected one of {[*_HARDWARE]} chips, got {count}")
        preset, topology = _HARDWARE[count]
        grid = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        for runner, files, large in _files(agent):
            presets = (preset, f"large_batch_{count}") if large else (preset,)
            named = (*files, *(f"gin/hardware/{each}.gin" for each in presets))
            needed = _BINDINGS.get(agent, ()) if runner == "Sebulba" else ()
            made = experiment.load(named, [*needed, *bindings])
            found = ahead_of_time.estimate(made.build().runner, made.seed, grid.devices[:count])
            name = f"{agent}, {runner}" + (", large batch" if large else "")
            name += f", {count} chips" if count > 1 else ""
            rows += _rows(name, found)
            notes.append(f"{name}: {', '.join([*named, *needed])}")
            notes += [f"{name}, {note}" for note in _notes(found)]
    return records.Result(
        "The TPU compiler's estimates for chips of a v5e of 1.5 GHz, with the presets of "
        f"gin/hardware: compiled by libtpu {version}, not run. The host, simulators, copies beside "
        "other work, scalar operations and sums over devices count as zero; a loop whose number of "
        "passes depends on data counts as one pass, except for gradient steps.",
        tuple(rows),
        tuple(notes),
        group="tpu",
    )


def _files(agent: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yields runners, their files, and whether the preset for large batches is added."""
    anakin = tuple(measure.files(measure.EXPERIMENTS[agent], "Anakin"))
    yield "Anakin", anakin, False
    if agent in _LARGE_BATCH:
        yield "Anakin", anakin, True
    if EXPERIMENTS[agent]:
        yield "Sebulba", EXPERIMENTS[agent], False


def _rows(name: str, found: ahead_of_time.Estimate) -> Iterator[records.Row]:
    if found.update:
        yield records.row("estimated speed", "agent steps/s", found.rate, experiment=name)
        yield records.row("an update", "cycles", found.update, experiment=name)
    if found.step:
        yield records.row("a step of all streams", "cycles", found.step, experiment=name)
    for program, each in found.programs.items():
        if program in ("begin", "finish"):
            continue
        line = f"{name}, {program}" if program == "act" else name
        if not each.failure:
            yield records.row("arguments", "bytes", each.arguments, experiment=line)
        yield records.row("temporaries", "bytes", each.temporaries, experiment=line)


def _notes(found: ahead_of_time.Estimate) -> Iterator[str]:
    for program, each in found.programs.items():
        if each.failure:
            yield f"{program}: does not compile: {each.failure}"
        for loop in each.loops:
            cycles = records.short(loop.cycles)
            yield f"{program}: a pass of the loop `{loop.operation}` takes {cycles} cycles"
