"""Memory, sums over devices and compilation of an update, by the number of devices.

Programs are compiled for fake CPU devices and not run; docs/scaling.md has the formulas.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from podracers import anakin, errors, parallel, sebulba, types
from podracers.scripts.benchmarks import measure, records, tpu_estimates
from podracers.scripts.tracing import costs

_Runner = anakin.Anakin | sebulba.Sebulba
_ROLES = ("actor", "learner")
# Experiment, runner, and bindings by the number of devices, each of which acts and learns.
_CASES = (
    ("cartpole_ppo", "Anakin", ()),
    ("cartpole_dqn", "Anakin", ("DQN.replay_capacity = {replay}",)),
    ("pong_impala", "Sebulba", tuple(f"Sebulba.{x}_devices = {{devices}}" for x in _ROLES)),
)
_ENVS, _REPLAY = 16, 12_800  # environments and transitions of a device
_SUMS = "all-reduce|all-gather|reduce-scatter|all-to-all"
_COLLECTIVE = re.compile(rf" = (.*?) (?:{_SUMS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")


def benchmark(counts: Sequence[int]) -> records.Result:
    """Compiles updates for each number of fake CPU devices.

    Raises:
      errors.UserError: JAX has initialised its devices already, as for another benchmark.
    """
    try:
        jax.config.update("jax_num_cpu_devices", max(counts))
    except RuntimeError as error:
        raise errors.UserError("scale: run it alone, because it fakes its devices") from error
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for name, kind, templates in _CASES:
        for count in counts:
            devices = tuple(range(count))
            bindings = [text.format(devices=devices, replay=_REPLAY * count) for text in templates]
            bindings.append(f"NUM_ENVS = {_ENVS * count}")
            parts = measure.build(measure.files(name, kind), bindings)
            with parallel.compiling_for(jax.devices("cpu")[:count]):
                of: Any = parts.runner
                rows += _rows(name, of, count)
    return records.Result(
        f"Updates compiled for fake CPU devices, with {_ENVS} environments on each: bytes of a "
        "device, by the program and by the formulas of docs/scaling.md, and the work of the "
        "compiler. Nothing runs. Of pong_impala, under Sebulba, it is the learner's program.",
        tuple(rows),
    )


def _rows(name: str, of: _Runner, count: int) -> Iterator[records.Row]:
    start = time.process_time()
    compiled = of.trace(0).lower().compile()
    seconds = time.process_time() - start
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None  # of every compiler for CPUs
    replay = hasattr(of.agent, "buffer")
    sums = Messages(text, gradient_steps(of)).cycles
    for measured, unit, value in (
        ("rollout, by the formula", "bytes", rollout_bytes(of, count)),
        ("replay, by the formula", "bytes", replay_bytes(of, count) if replay else None),
        ("arguments", "bytes", memory.argument_size_in_bytes),
        ("temporaries", "bytes", memory.temp_size_in_bytes),
        ("sums over devices", "bytes", sums),
        ("sums, by the formula", "bytes", summed_bytes(of)),
        ("tracing and compiling", "core-seconds", seconds),
        ("program", "instructions", text.count(" = ")),
    ):
        if value is not None:
            yield records.row(measured, unit, value, experiment=name, devices=count)


class Messages(costs.Costs):
    """Bytes that devices exchange: `cycles` and `parts` count those of results of collectives."""

    def _cost(self, instruction):
        match = _COLLECTIVE.search(instruction.text)
        return "", float(sum(map(_num_bytes, _ARRAY.findall(match[1])))) if match else 0.0

    def _passes(self, name: str) -> float:
        num_unknown = len(self.loops)
        passes = super()._passes(name)
        return self._gradient_steps if len(self.loops) > num_unknown else passes


def _num_bytes(array: tuple[str, str]) -> int:
    """Returns the bytes of an array, from its dtype and its shape in a program's text."""
    bits = int(re.sub(r"\D", "", array[0]) or 8)
    return bits // 8 * math.prod(int(n) for n in array[1].split(",") if n)


def rollout_bytes(of: _Runner, devices: int) -> float:
    """Returns the bytes of a rollout on each of several devices, by docs/scaling.md."""
    return _bytes(of, _transition(of), of.rollout_length + 1) / devices


def replay_bytes(of: _Runner, devices: int) -> float:
    """Returns the bytes of stored rollouts on each of several devices, by docs/scaling.md."""
    agent: Any = of.agent
    stored = jax.eval_shape(agent.stored, _transition(of))
    rollouts = agent.replay_capacity // of.steps_per_update
    return rollouts * _bytes(of, stored, of.rollout_length) / devices


def summed_bytes(of: _Runner) -> float:
    """Returns the bytes of each device in an update's sums over devices, by docs/scaling.md.

    These are gradients, with the count of their losses; statistics come on top.
    """
    learner: Any = jax.eval_shape(lambda: of.init(0)).learner
    return gradient_steps(of) * (parallel.num_bytes(learner.params) + 4)


def gradient_steps(of: _Runner) -> float:
    """Returns the mean number of gradient steps of an update."""
    agent: Any = of.agent
    if hasattr(agent, "buffer"):
        return tpu_estimates.gradient_steps(agent, of.steps_per_update)
    return getattr(agent, "epochs", 1) * agent.num_minibatches


def _bytes(of: _Runner, transition: types.Rollout, timesteps: int) -> int:
    """Returns the bytes of a rollout of all streams that has a number of time steps."""
    timestep, *choice, state = map(parallel.num_bytes, transition[:4])
    streams = of.num_envs * of.environment.spec.num_agents
    return streams * (timesteps * timestep + of.rollout_length * sum(choice) + state)


def _transition(of: _Runner) -> types.Rollout:
    """Returns shapes of one stream's rollout with one time step and one action."""
    agent, spec = of.agent, of.environment.spec

    def act() -> types.Rollout:
        key = jax.random.split(jax.random.key(0), 1)
        state = agent.init_actor(jnp.zeros(1, jnp.int32), 1)
        params = agent.actor_params(agent.init_learner(key[0]))
        timestep = spec.timesteps(1)._replace(metrics={})
        timestep = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), timestep)
        action, _, extras = agent.act(params, state, timestep, key)
        timestep, action, extras = jax.tree.map(lambda x: x[None], (timestep, action, extras))
        return types.Rollout(timestep, action, extras, state)

    return jax.eval_shape(act)
