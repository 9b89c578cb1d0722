"""What the TPU compiler says of every agent's programs, with no TPU: memory, cycles, copies."""

import pathlib
from collections.abc import Iterator, Sequence

from benchmarks import agent_speed, records
from tracing import ahead_of_time

from podracers import errors
from podracers.training import experiment

_ATARI = "gin/experiments/pong_ppo.gin"
# Under Anakin in JAX, and under Sebulba on Atari's frames; no simulator is stepped.
EXPERIMENTS = {
    "ppo": (_ATARI,),
    "impala": ("gin/experiments/pong_impala.gin",),
    **{
        agent: (_ATARI, f"gin/agents/{name}.gin")
        for agent, name in (
            ("dqn", "dqn_atari"),
            ("r2d2", "r2d2_atari"),
            ("sac", "sac_pixels"),
            ("muzero", "muzero_atari"),
        )
    },
    "alphazero": (),  # searches in its environment, which has to be written in JAX
}
# Under Sebulba: what an agent needs of the experiment.
_BINDINGS = {
    "r2d2": ("ROLLOUT_LENGTH = 40",),  # sequences begin so often (gin/agents/r2d2_atari.gin)
    "sac": ("SAC.replay_capacity = 200_000",),  # for the environments of four chips
}
# Agents that learn from each rollout once have a preset for a chip under Anakin, too.
_LARGE_BATCH = ("ppo", "impala")
# By the number of chips: the preset, and the topology.
_HARDWARE = {
    1: ("colab_tpu", ahead_of_time.TOPOLOGY),
    4: ("v4_8", ahead_of_time.TOPOLOGY),
    8: ("v5e_8", "v5e:2x4"),
}
_EXPLAINED = 0.05  # share of a program's cycles from which on a copy is named

# Why copies that are left are there.
_WHY = {
    "ppo": "copies of u8[..., 84, 84, 1] turn frames, which are gathered as rows, so that those of "
    "a minibatch lie in the lanes of the convolutions: the older frames, and the newest",
    "r2d2": "copies of bf16[..., 84, 84, 4] turn stacked frames, which are gathered as rows, so "
    "that those of all sequences lie in the lanes of the convolutions, for the two networks",
}

_SPEED = records.Kind("estimated speed", "agent steps/s", records.HIGHER, 0)
_UPDATE = records.Kind("an update", "cycles", records.LOWER, 0)
_STEP = records.Kind("a step of all streams", "cycles", records.LOWER, 0)
_ARGUMENTS = records.Kind("arguments", "bytes", records.LOWER, 0)
_TEMPORARIES = records.Kind("temporaries", "bytes", records.LOWER, 0)
_COPY = records.Kind("largest copy's share", "share", records.LOWER, 4)


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
      ahead_of_time.NoCompilerError: there is none.
    """
    version = ahead_of_time.find_compiler(compiler)
    rows, notes = [], []
    for count in counts:
        if count not in _HARDWARE:
            raise errors.UserError(f"--devices {count}: there are presets of {[*_HARDWARE]} chips")
        preset, topology = _HARDWARE[count]
        devices = ahead_of_time.devices(topology, count)
        for runner, files, further in _files(agent):
            presets = (preset, f"{further}_{count}") if further else (preset,)
            named = (*files, *(f"gin/hardware/{each}.gin" for each in presets))
            needed = _BINDINGS.get(agent, ()) if runner == "Sebulba" else ()
            settings = experiment.load(named, [*needed, *bindings])
            found = ahead_of_time.estimate(settings.build().runner, settings.seed, devices)
            name = f"{agent}, {runner}" + (f", {further.replace('_', ' ')}" if further else "")
            name += f", {count} chips" if count > 1 else ""
            rows += _rows(name, found)
            notes.append(f"{name}: {', '.join([*named, *needed])}")
            notes += [f"{name}, {note}" for note in _notes(found)]
    if agent in _WHY:
        notes.append(f"{agent}: {_WHY[agent]}")
    return records.Result(
        "What the TPU compiler estimates for chips of a v5e of 1.5 GHz, as shipped with the preset "
        f"of gin/hardware: compiled by libtpu {version}, never run. The host, simulators, what "
        "copies beside other work, scalar operations and sums over devices count nothing; a loop "
        "whose passes depend on the data counts as one, but for gradient steps.",
        tuple(rows),
        tuple(notes),
        group="tpu",
    )


def _files(agent: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yields runners, their files, and the name of a preset beside that of the machine."""
    anakin = tuple(agent_speed.files(agent_speed.EXPERIMENTS[agent], "Anakin"))
    yield "Anakin", anakin, ""
    if agent in _LARGE_BATCH:
        yield "Anakin", anakin, "large_batch"
    if EXPERIMENTS[agent]:
        yield "Sebulba", EXPERIMENTS[agent], ""


def _rows(name: str, found: ahead_of_time.Estimate) -> Iterator[records.Row]:
    if found.update:
        yield _SPEED.row(found.rate, experiment=name)
        yield _UPDATE.row(found.update, experiment=name)
    if found.step:
        yield _STEP.row(found.step, experiment=name)
    for program, each in found.programs.items():
        if program in ("begin", "finish"):
            continue
        line = f"{name}, {program}" if program == "act" else name
        if not each.failure:
            yield _ARGUMENTS.row(each.arguments, experiment=line)
        yield _TEMPORARIES.row(each.temporaries, experiment=line)
        if each.copies:
            yield _COPY.row(each.copies[0].cycles / each.cycles, experiment=line)


def _notes(found: ahead_of_time.Estimate) -> Iterator[str]:
    for program, each in found.programs.items():
        if each.failure:
            yield f"{program}: does not compile: {each.failure}"
        for copy in each.copies:
            if (share := copy.cycles / each.cycles) >= _EXPLAINED:
                times = f", {copy.passes:g} times" if copy.passes > 1 else ""
                yield f"{program}: a copy to {copy.shape} is {share:.0%} ({copy.source}{times})"
        for loop in each.loops:
            cycles = records.short(loop.cycles)
            yield f"{program}: a pass of the loop `{loop.operation}` takes {cycles} cycles"
