"""Agents that learn from replay: speed under both runners, time and memory of the replay.

Axis legend: `B` streams, `C` time steps of the ring.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import measure, records

from agents import ring_buffer
from podracers import anakin, parallel, types

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
    runner, state = runners["Anakin"], steppers["Anakin"].state
    replay = measure.take_turns({"": _replay_alone(runner, state)}, repeats)[""]
    runners["Sebulba"].close()
    steps = runner.steps_per_update
    gradients = float(runner.agent._replay.mean_gradient_steps(steps))
    share = float(np.median(replay) * np.median(rates["Anakin"])) / steps
    rows = [measure.speed(own, experiment=name, runner=key) for key, own in rates.items()]
    for key, own in rates.items():
        per_second = np.array(own) * gradients / steps
        case = {"experiment": name, "runner": key}
        rows.append(records.row("gradient steps", "gradient steps/s", per_second, **case))
    alone = "the replay alone, for one update of Anakin"
    rows.append(records.row(alone, "ms", 1e3 * np.array(replay), experiment=name))
    rows.append(records.row("its share of that update", "share", share, experiment=name))
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
        "Agents that learn from replay: their speed under both runners, the time of an update's "
        "use of the replay alone, and the memory of the compiled update on each device.",
        tuple(rows),
        (
            f"gin/experiments/{name}.gin: a replay ratio of {runner.agent.replay_ratio:g}, or "
            f"{gradients:g} gradient steps in each update of {steps} agent steps.",
        ),
        group="replay",
    )


def _replay_alone(runner: anakin.Anakin, state: anakin.AnakinState) -> measure.Turn:
    """Returns a turn that stores a rollout, samples as often as an update, and reprioritises."""
    replay = runner.agent._replay
    draws = max(round(replay.mean_gradient_steps(runner.steps_per_update)), 1)

    def use(memory, rollout, key):
        memory = replay.add(memory, rollout)

        def body(index, carry):
            memory, used = carry
            sample = replay.sample(memory, jax.random.fold_in(key, index))
            # The barrier keeps the unused sample in the compiled program.
            drawn = jax.lax.optimization_barrier(sample.rollout)
            used += sum(jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(drawn))
            memory = replay.update_priorities(memory, sample.item, sample.weight)
            return memory, used

        return jax.lax.fori_loop(0, draws, body, (memory, jnp.zeros(())))

    spec = jax.sharding.PartitionSpec
    columns, layout = spec(None, "data"), runner._layout.memory
    rollout_layout = types.Rollout(columns, columns, columns, spec("data"))
    program = jax.jit(
        jax.shard_map(
            use,
            mesh=runner.mesh,
            in_specs=(layout, rollout_layout, spec()),
            out_specs=(layout, spec()),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    rollout = _zero_rollout(runner, state)
    held = [jax.tree.map(lambda x: x.copy(), state.memory)]

    def once(key):
        held[0], used = program(held[0], rollout, key)
        return held[0], used

    return measure.seconds(once, jax.random.key(0))


def _zero_rollout(runner: anakin.Anakin, state: anakin.AnakinState) -> types.Rollout:
    """Returns a rollout of all streams in the form that replay stores, filled with zeros."""
    ring = state.memory.ring  # [B, C, ...]
    streams = ring_buffer.num_streams(ring)
    steps = runner.steps_per_update // streams

    def zeros(tree: Any, *leading: int) -> Any:
        return ring_buffer.map_rows(
            lambda rows: np.zeros((*leading, streams, *rows.shape), rows.data.dtype), tree
        )

    return types.Rollout(
        timestep=zeros(ring.timestep, steps + 1),
        action=zeros(ring.action, steps),
        extras=zeros(ring.extras, steps),
        actor_state=zeros(ring.actor_state),
    )
