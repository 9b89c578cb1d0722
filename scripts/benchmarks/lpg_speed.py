"""Meta-training: its speed and memory, against LPG in one file with one-hot observations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import measure, records, single_file_lpg

from podracers.training import experiment

_SPEED = records.Kind("speed", "environment steps/s", records.HIGHER, 0)
_MEMORY = records.Kind("memory of the compiled update", "bytes", records.LOWER, 0)
_PLAIN = "one file, one-hot"
# Lifetimes, for two cores and their memory; one device, like the file beside it.
_BINDINGS = ("NUM_ENVS = 8", "Anakin.num_devices = 1")


class _Program:
    """A runner whose update is compiled once: what is timed is what its memory is read from."""

    def __init__(self, runner: Any, traced: jax.stages.Traced):
        self.init, self.steps_per_update = runner.init, runner.steps_per_update
        self._compiled = traced.lower().compile()
        analysis = self._compiled.memory_analysis()
        self.memory = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes  # bytes

    def step(self, state: Any, num_updates: int) -> tuple[Any, Any]:
        """Takes `num_updates` updates; `state` is donated."""
        return self._compiled(state, np.int32(num_updates))


def benchmark_lpg(repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Compares meta-training at the published size of the rule, but for the lifetimes.

    Args:
      repeats: turns of each program.
      bindings: over gin/experiments/lpg.gin and those of the benchmark.
    """
    runner = experiment.load(["gin/experiments/lpg.gin"], [*_BINDINGS, *bindings]).build().runner
    agent, lifetimes = runner.agent, runner.environment
    runners = {
        name: dataclasses.replace(runner, agent=dataclasses.replace(agent, recompute=recompute))
        for name, recompute in {"Anakin": False, "Anakin, recomputing": True}.items()
    }
    plain = single_file_lpg.SingleFileLPG(
        lifetimes, runner.num_envs, agent.hidden_size, agent.prediction_size
    )
    shapes = jax.eval_shape(plain.init, 0)
    programs = {name: _Program(each, each.trace(0)) for name, each in runners.items()}
    programs[_PLAIN] = _Program(plain, plain.run.trace(shapes, jnp.int32(0)))
    steppers = {name: measure.Stepper(program, 1) for name, program in programs.items()}
    rates = measure.take_turns(steppers, repeats)
    size = f"{runner.num_envs} lifetimes x {lifetimes.num_envs} environments"
    size += f" x T = {agent.chunk_length} x (K + 1 = {agent.updates + 1})"
    rows = [
        _SPEED.row([lifetimes.num_envs * rate for rate in each], program=name)
        for name, each in rates.items()
    ]
    rows += [
        measure.RATIO.row(measure.ratios(rates[name], rates[_PLAIN]), program=f"{name} / {_PLAIN}")
        for name in runners
    ]
    rows += [_MEMORY.row(program.memory, program=name) for name, program in programs.items()]
    steps = lifetimes.num_envs * runner.steps_per_update
    return records.Result(
        "Meta-training of LPG's rule, acting, backward pass and validation rollout included: "
        f"{size} = {steps:,} environment steps an update, else as in gin/experiments/lpg.gin, and "
        "the same in one file, with one-hot observations and dense layers. Memory is that of "
        "arguments and temporaries.",
        tuple(rows),
    )
