"""Speed and memory of agents that learn from replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from podracers import anakin, parallel
from podracers.scripts.benchmarks import measure, records

AGENTS = ("dqn", "r2d2", "sac", "muzero")  # agents with replay


def benchmark_agent(algorithm: str, repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures the small experiment of one of `AGENTS` under both runners."""
    name = measure.EXPERIMENTS[algorithm]
    parts = {
        runner: measure.build(measure.files(name, runner), bindings) for runner in measure.RUNNERS
    }
    steppers = {
        key: measure.Stepper(part.runner, lead_in=measure.LEAD_IN) for key, part in parts.items()
    }
    rates = measure.take_turns(steppers, repeats)
    parts["Sebulba"].runner.close()
    runner, state = parts["Anakin"].runner, steppers["Anakin"].state
    assert isinstance(runner, anakin.Anakin)
    agent: Any = runner.agent  # one with replay
    steps = runner.steps_per_update
    gradients = float(agent.buffer.mean_gradient_steps(steps))
    rows = []
    for key, speeds in rates.items():
        case, per_second = {"experiment": name, "runner": key}, np.array(speeds) * gradients / steps
        rows.append(measure.speed(speeds, **case))
        rows.append(records.row("gradient steps", "gradient steps/s", per_second, **case))
    compiled: Any = runner.trace(0).lower().compile().memory_analysis()
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
            f"gin/experiments/{name}.gin: a replay ratio of {agent.replay_ratio:g}, or "
            f"{gradients:g} gradient steps in each update of {steps} agent steps.",
        ),
        group="replay",
    )
