"""Speed and memory of meta-training, with and without recomputation of activations."""

import dataclasses
from collections.abc import Sequence

from benchmarks import measure, records

# Lifetimes and devices for two cores and their memory.
_BINDINGS = ("NUM_ENVS = 8", "Anakin.num_devices = 1")


def benchmark_lpg(repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures meta-training at the published size of the rule, with fewer lifetimes.

    Args:
      repeats: turns of each program.
      bindings: over gin/experiments/lpg.gin and those of the benchmark.
    """
    runner = measure.build(["gin/experiments/lpg.gin"], [*_BINDINGS, *bindings]).runner
    agent, lifetimes = runner.agent, runner.environment
    runners = {
        name: dataclasses.replace(runner, agent=dataclasses.replace(agent, recompute=recompute))
        for name, recompute in {"Anakin": False, "Anakin, recomputing": True}.items()
    }
    steppers = {name: measure.Stepper(each, 1) for name, each in runners.items()}
    rates = measure.take_turns(steppers, repeats)
    rows = []
    for name, each in runners.items():
        rate = [lifetimes.num_envs * value for value in rates[name]]
        rows.append(records.row("speed", "environment steps/s", rate, program=name))
        found = each.trace(0).lower().compile().memory_analysis()
        size = found.argument_size_in_bytes + found.temp_size_in_bytes
        rows.append(records.row("memory of the compiled update", "bytes", size, program=name))
    size = f"{runner.num_envs} lifetimes x {lifetimes.num_envs} environments"
    size += f" x T = {agent.chunk_length} x (K + 1 = {agent.updates + 1})"
    steps = lifetimes.num_envs * runner.steps_per_update
    return records.Result(
        "Meta-training of LPG's rule, including acting, backward pass and validation rollout: "
        f"{size} = {steps:,} environment steps an update, otherwise as in gin/experiments/lpg.gin. "
        "Memory counts arguments and temporaries.",
        tuple(rows),
    )
