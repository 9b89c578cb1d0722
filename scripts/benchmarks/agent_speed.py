"""Speed and memory of agents that learn from replay, and of meta-training."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agents.meta.lpg import meta_training
from environments.meta import lifetimes as lifetimes_lib
from podracers import anakin, parallel
from podracers.scripts.benchmarks import measure, records

AGENTS = ("dqn", "r2d2", "sac", "muzero")  # agents with replay
# Lifetimes and devices of meta-training for two cores and their memory.
_LPG_BINDINGS = ("NUM_ENVS = 8", "Anakin.num_devices = 1")


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


def benchmark_lpg(repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures meta-training with and without recomputation of activations.

    The rule has its published size; there are fewer lifetimes than in gin/experiments/lpg.gin.
    """
    runner = measure.build(["gin/experiments/lpg.gin"], [*_LPG_BINDINGS, *bindings]).runner
    assert isinstance(runner, anakin.Anakin)
    agent, lifetimes = runner.agent, runner.environment
    assert isinstance(agent, meta_training.LPG)
    assert isinstance(lifetimes, lifetimes_lib.Lifetimes)
    runners = {
        name: dataclasses.replace(runner, agent=dataclasses.replace(agent, recompute=recompute))
        for name, recompute in {"Anakin": False, "Anakin, recomputing": True}.items()
    }
    steppers = {name: measure.Stepper(runner, 1) for name, runner in runners.items()}
    rates = measure.take_turns(steppers, repeats)
    rows = []
    for name, variant in runners.items():
        rate = [lifetimes.num_envs * value for value in rates[name]]
        rows.append(records.row("speed", "environment steps/s", rate, program=name))
        memory: Any = variant.trace(0).lower().compile().memory_analysis()
        size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
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
