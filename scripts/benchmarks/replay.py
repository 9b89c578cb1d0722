"""Agents that learn from replay: their speed under both runners, what replay costs, and its memory.

Axis legend: `D` devices.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import measure, records

from podracers import anakin, parallel, types
from podracers.training import experiment

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SEBULBA = "gin/runners/sebulba.gin"
_GRADIENTS = records.Kind("gradient steps", "gradient steps/s", records.HIGHER, 1)
_REPLAY = records.Kind("the replay alone, for one update of Anakin", "ms", records.LOWER, 3)
_REPLAY_SHARE = records.Kind("its share of that update", "share", None, 4)
_MEMORY = records.Kind("memory of the update", "bytes", records.LOWER, 0)
_ALIASED = records.Kind("memory of the update", "bytes", None, 0)  # results written over arguments
_LEAD_IN = 2  # updates: under Sebulba a rollout or two lie ready


def _parts(name: str, bindings: tuple[str, ...], runner: str | None = None) -> experiment.Parts:
    files = [str(_ROOT / "gin" / "experiments" / f"{name}.gin")]
    files += [str(_ROOT / runner)] if runner else []
    return experiment.load(files, list(bindings)).build()


def fill(stepper: measure.Stepper) -> None:
    """Steps until the agent learns from its replay."""
    while int(stepper.state.learner.gradient_steps) == 0:
        stepper()


def benchmark_agent(
    name: str, repeats: int, bindings: tuple[str, ...] = (), updates: int = 20
) -> records.Result:
    """Measures an experiment.

    Args:
      name: of a file in gin/experiments, with Anakin as its runner.
      repeats: how many turns each runner takes.
      bindings: over those of the file.
      updates: of each turn.
    """
    parts = {
        "Anakin": _parts(name, bindings),
        "Sebulba": _parts(name, bindings, _SEBULBA),
    }
    agent = parts["Anakin"].agent
    steppers = {key: measure.Stepper(part.runner, updates, _LEAD_IN) for key, part in parts.items()}
    for stepper in steppers.values():
        fill(stepper)
    rates = measure.take_turns(steppers, repeats)
    state, runner = steppers["Anakin"].state, parts["Anakin"].runner
    replay = measure.take_turns({"replay": _replay_alone(runner, state)}, repeats)["replay"]
    parts["Sebulba"].runner.close()
    steps = runner.steps_per_update
    each = float(agent._replay.mean_gradient_steps(steps))
    share = float(np.median(replay) * np.median(rates["Anakin"])) / steps
    case = {"experiment": name}
    return records.Result(
        "Agents that learn from replay: their speed under both runners, how long an update's use "
        "of the replay takes by itself, and the memory of the compiled update on each device.",
        (
            *(measure.SPEED.row(values, **case, runner=key) for key, values in rates.items()),
            *(
                _GRADIENTS.row(np.array(values) * each / steps, **case, runner=key)
                for key, values in rates.items()
            ),
            _REPLAY.row(np.array(replay) * 1e3, **case),
            _REPLAY_SHARE.row(share, **case),
            *(_MEMORY.row(size, **case, part=part) for part, size in memory(runner, state).items()),
        ),
        (
            f"gin/experiments/{name}.gin: a replay ratio of {agent.replay_ratio:g}, that is "
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

        memory, used = jax.lax.fori_loop(0, draws, body, (memory, jnp.zeros(())))
        return memory, used

    layout = runner._layout
    program = jax.jit(
        jax.shard_map(
            use,
            mesh=runner.mesh,
            in_specs=(layout.memory, types.Rollout(*_ROLLOUT), jax.sharding.PartitionSpec()),
            out_specs=(layout.memory, jax.sharding.PartitionSpec()),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    rollout = _rollout(runner, state)
    held = [jax.tree.map(lambda x: x.copy(), state.memory)]

    def once(key):
        held[0], used = program(held[0], rollout, key)
        return held[0], used

    return measure.seconds(functools.partial(once, jax.random.key(0)))


_COLUMNS = jax.sharding.PartitionSpec(None, "data")
_ROLLOUT = (_COLUMNS, _COLUMNS, _COLUMNS, jax.sharding.PartitionSpec("data"))


def _rollout(runner: anakin.Anakin, state: anakin.AnakinState) -> types.Rollout:
    """Returns a rollout of all streams as replay stores it, zeros of its shapes."""
    ring = state.memory.ring  # [B, C, ...]
    steps = runner.steps_per_update // ring.timestep.reward.shape[0]

    def zeros(tree, *leading):
        return jax.tree.map(lambda x: np.zeros((*leading, x.shape[0], *x.shape[2:]), x.dtype), tree)

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
