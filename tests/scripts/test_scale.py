"""Tests of the formulas of docs/scaling.md, against programs compiled for four fake devices."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from podracers import parallel, types

DEVICES = [f"Sebulba.{role}_devices = (0, 1, 2, 3)" for role in ("actor", "learner")]
_SUMS = "all-reduce|all-gather|reduce-scatter|all-to-all"
_COLLECTIVE = re.compile(rf" = (.*?) (?:{_SUMS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")


def _messages(costs):
    """Returns the class of bytes that devices exchange: those of results of collectives."""

    class Messages(costs.Costs):
        def _cost(self, instruction):
            match = _COLLECTIVE.search(instruction.text)
            return float(sum(map(_num_bytes, _ARRAY.findall(match[1])))) if match else 0.0

        def _passes(self, name):
            num_unknown = len(self.loops)
            passes = super()._passes(name)
            return self._gradient_steps if len(self.loops) > num_unknown else passes

    return Messages


def _num_bytes(array):
    """Returns the bytes of an array, from its dtype and its shape in a program's text."""
    bits = int(re.sub(r"\D", "", array[0]) or 8)
    return bits // 8 * math.prod(int(n) for n in array[1].split(",") if n)


def _rollout_bytes(of, devices):
    """Returns the bytes of a rollout on each of several devices, by docs/scaling.md."""
    return _bytes(of, _transition(of), of.rollout_length + 1) / devices


def _replay_bytes(of, devices):
    """Returns the bytes of stored rollouts on each of several devices, by docs/scaling.md."""
    agent = of.agent
    stored = jax.eval_shape(agent.stored, _transition(of))
    rollouts = agent.replay_capacity // of.steps_per_update
    return rollouts * _bytes(of, stored, of.rollout_length) / devices


def _summed_bytes(of):
    """Returns the bytes of each device in an update's sums over devices, by docs/scaling.md.

    These are gradients, with the count of their losses; statistics come on top.
    """
    learner = jax.eval_shape(lambda: of.init(0)).learner
    return _gradient_steps(of) * (parallel.num_bytes(learner.params) + 4)


def _gradient_steps(of):
    """Returns the mean number of gradient steps of an update."""
    agent = of.agent
    if hasattr(agent, "buffer"):
        return agent.buffer.mean_gradient_steps(of.steps_per_update)
    return getattr(agent, "epochs", 1) * agent.num_minibatches


def _bytes(of, transition, timesteps):
    """Returns the bytes of a rollout of all streams that has a number of time steps."""
    timestep, *choice, state = map(parallel.num_bytes, transition[:4])
    streams = of.num_envs * of.environment.spec.num_agents
    return streams * (timesteps * timestep + of.rollout_length * sum(choice) + state)


def _transition(of):
    """Returns shapes of one stream's rollout with one time step and one action."""
    agent, spec = of.agent, of.environment.spec

    def act():
        key = jax.random.split(jax.random.key(0), 1)
        state = agent.init_actor(jnp.zeros(1, jnp.int32), 1)
        params = agent.actor_params(agent.init_learner(key[0]))
        timestep = spec.timesteps(1)._replace(metrics={})
        timestep = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), timestep)
        action, _, extras = agent.act(params, state, timestep, key)
        timestep, action, extras = jax.tree.map(lambda x: x[None], (timestep, action, extras))
        return types.Rollout(timestep, action, extras, state)

    return jax.eval_shape(act)


# Bounds of the program's bytes over the formula's: XLA drops leaves of a rollout that no loss
# reads, and a replay has counters.
@pytest.mark.parametrize(
    ("name", "of_rollout", "of_replay"),
    [("catch_impala", (0.97, 1.0), None), ("catch_dqn", (0.85, 1.0), (1.0, 1.001))],
)
def test_formulas_are_those_of_compiled_programs(tools, name, of_rollout, of_replay):
    measure = tools("benchmarks.measure").measure
    runner = measure.build(measure.files(name, "Sebulba"), DEVICES).runner
    compiled = runner.trace(0).lower().compile()
    state = jax.eval_shape(lambda: runner.init(0))
    memory = parallel.num_bytes(state.memory) / 4

    def is_within(bounds, size, formula):
        return bounds[0] * formula <= size <= bounds[1] * formula

    rollout = compiled.memory_analysis().argument_size_in_bytes
    rollout -= parallel.num_bytes(state.learner) + memory
    assert is_within(of_rollout, rollout, _rollout_bytes(runner, 4))
    assert not of_replay or is_within(of_replay, memory, _replay_bytes(runner, 4))
    costs = tools("benchmarks.costs").costs
    sums = _messages(costs)(compiled.as_text(), _gradient_steps(runner)).cycles
    # Statistics: two numbers of each metric, and the first updates with faults.
    assert is_within((1.0, 1.01), sums, _summed_bytes(runner))
