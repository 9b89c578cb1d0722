"""Agents that learn from replay: speed under both runners, and memory of the update."""

from collections.abc import Sequence

import numpy as np
from benchmarks import measure, records

from podracers import parallel

AGENTS = ("dqn", "r2d2", "sac", "muzero")


def benchmark_agent(agent: str, repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures the small experiment of one agent.

    Args:
      agent: one of `AGENTS`.
      repeats: number of turns of each runner.
      bindings: over those of the experiment.
    """
    name = measure.EXPERIMENTS[agent]
    runners = {
        runner: measure.build(measure.files(name, runner), bindings).runner
        for runner in measure.RUNNERS
    }
    steppers = {
        key: measure.Stepper(runner, lead_in=measure.LEAD_IN) for key, runner in runners.items()
    }
    rates = measure.take_turns(steppers, repeats)
    runners["Sebulba"].close()
    runner, state = runners["Anakin"], steppers["Anakin"].state
    steps = runner.steps_per_update
    gradients = float(runner.agent._replay.mean_gradient_steps(steps))
    rows = []
    for key, own in rates.items():
        case, per_second = {"experiment": name, "runner": key}, np.array(own) * gradients / steps
        rows.append(measure.speed(own, **case))
        rows.append(records.row("gradient steps", "gradient steps/s", per_second, **case))
    compiled = runner.trace(0).lower().compile().memory_analysis()
    memory = {  # bytes on each device
        "replay": parallel.num_bytes(state.memory) // runner.mesh.devices.size,
        "arguments": compiled.argument_size_in_bytes,
        "aliased": compiled.alias_size_in_bytes,  # arguments that are overwritten in place
        "temporary": compiled.temp_size_in_bytes,  # a copy of the ring would appear here
    }
    for part, size in memory.items():
        rows.append(records.row("memory of the update", "bytes", size, experiment=name, part=part))
    return records.Result(
        "Agents that learn from replay: their speed under both runners, and the memory of the "
        "compiled update on each device.",
        tuple(rows),
        (
            f"gin/experiments/{name}.gin: a replay ratio of {runner.agent.replay_ratio:g}, or "
            f"{gradients:g} gradient steps in each update of {steps} agent steps.",
        ),
        group="replay",
    )
