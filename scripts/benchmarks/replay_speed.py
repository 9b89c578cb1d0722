"""Agents that learn from replay: their speed under both runners, what replay costs, and its memory.

Axis legend: `B` streams, `C` time steps of the ring.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import agent_speed, measure, records

from agents import ring_buffer
from podracers import anakin, parallel, types

_GRADIENTS = records.Kind("gradient steps", "gradient steps/s", records.HIGHER, 1)
_REPLAY = records.Kind("the replay alone, for one update of Anakin", "ms", records.LOWER, 3)
_REPLAY_SHARE = records.Kind("its share of that update", "share", None, 4)
_MEMORY = records.Kind("memory of the update", "bytes", records.LOWER, 0)


def benchmark_agent(name: str, repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures an experiment.

    Args:
      name: name of a file in gin/experiments.
      repeats: number of turns of each runner.
      bindings: over those of the file.
    """
    trained = {
        key: measure.Training(agent_speed.files(name, key), bindings) for key in agent_speed.RUNNERS
    }
    rates = measure.take_turns(trained, repeats)
    runner, state = trained["Anakin"].parts.runner, trained["Anakin"].state()
    replay = measure.take_turns({"replay": _replay_alone(runner, state)}, repeats)["replay"]
    trained["Sebulba"].parts.runner.close()
    steps = runner.steps_per_update
    each = float(runner.agent._replay.mean_gradient_steps(steps))
    share = float(np.median(replay) * np.median(rates["Anakin"])) / steps
    rows = [measure.SPEED.row(own, experiment=name, runner=key) for key, own in rates.items()]
    for key, own in rates.items():
        gradients = np.array(own) * each / steps
        rows.append(_GRADIENTS.row(gradients, experiment=name, runner=key))
    rows.append(_REPLAY.row(np.array(replay) * 1e3, experiment=name))
    rows.append(_REPLAY_SHARE.row(share, experiment=name))
    for part, size in memory(runner, state).items():
        rows.append(_MEMORY.row(size, experiment=name, part=part))
    return records.Result(
        "Agents that learn from replay: their speed under both runners, how long an update's use "
        "of the replay takes by itself, and the memory of the compiled update on each device.",
        tuple(rows),
        (
            f"gin/experiments/{name}.gin: a replay ratio of {runner.agent.replay_ratio:g}, that is "
            f"{each:g} gradient steps in each update of {steps} agent steps.",
        ),
        group="replay",
    )


def _replay_alone(runner: anakin.Anakin, state: anakin.AnakinState) -> measure.Turn:
    """Returns a turn that stores a rollout, draws as often as an update does, and reprioritises."""
    replay = runner.agent._replay
    draws = max(round(replay.mean_gradient_steps(runner.steps_per_update)), 1)

    def use(memory, rollout, key):
        memory = replay.add(memory, rollout)

        def body(index, carry):
            memory, used = carry
            sample = replay.sample(memory, jax.random.fold_in(key, index))
            # What was drawn has to be there, although nobody learns from it.
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
    rollout = _rollout(runner, state)
    held = [jax.tree.map(lambda x: x.copy(), state.memory)]

    def once(key):
        held[0], used = program(held[0], rollout, key)
        return held[0], used

    return measure.seconds(once, jax.random.key(0))


def _rollout(runner: anakin.Anakin, state: anakin.AnakinState) -> types.Rollout:
    """Returns a rollout of all streams as replay stores it, zeros of its shapes."""
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


def memory(runner: anakin.Anakin, state: anakin.AnakinState) -> dict[str, int]:
    """Returns what the compiled update takes of each device, in bytes.

    A copy of the ring would show in what is temporary; that it is written in place shows in what is
    aliased: memory of the arguments that results are written into.
    """
    compiled = runner.trace(0).lower().compile().memory_analysis()
    return {
        "replay": parallel.num_bytes(state.memory) // runner.mesh.devices.size,
        "arguments": compiled.argument_size_in_bytes,
        "aliased": compiled.alias_size_in_bytes,
        "temporary": compiled.temp_size_in_bytes,
    }
