"""Tests of the formulas of docs/scaling.md, against programs compiled for four fake devices."""

import jax
import pytest

from podracers import errors, parallel

DEVICES = [f"Sebulba.{role}_devices = (0, 1, 2, 3)" for role in ("actor", "learner")]


# Bounds of the program's bytes over the formula's: XLA drops leaves of a rollout that no loss
# reads, and a replay has counters.
@pytest.mark.parametrize(
    ("name", "of_rollout", "of_replay"),
    [("catch_impala", (0.97, 1.0), None), ("catch_dqn", (0.85, 1.0), (1.0, 1.001))],
)
def test_formulas_are_those_of_compiled_programs(tools, name, of_rollout, of_replay):
    scale = tools("benchmarks.scale", "benchmarks.measure")
    runner = scale.measure.build(scale.measure.files(name, "Sebulba"), DEVICES).runner
    compiled = runner.trace(0).lower().compile()
    state = jax.eval_shape(lambda: runner.init(0))
    memory = parallel.num_bytes(state.memory) / 4

    def is_within(bounds, size, formula):
        return bounds[0] * formula <= size <= bounds[1] * formula

    rollout = compiled.memory_analysis().argument_size_in_bytes
    rollout -= parallel.num_bytes(state.learner) + memory
    assert is_within(of_rollout, rollout, scale.scale.rollout_bytes(runner, 4))
    assert not of_replay or is_within(of_replay, memory, scale.scale.replay_bytes(runner, 4))
    sums = scale.scale.Messages(compiled.as_text(), scale.scale.gradient_steps(runner)).cycles
    # Statistics: two numbers of each metric, and the first updates with faults.
    assert is_within((1.0, 1.01), sums, scale.scale.summed_bytes(runner))


def test_devices_cannot_be_faked_after_another_benchmark(tools):
    jax.devices()
    with pytest.raises(errors.UserError, match="run it alone"):
        tools("benchmarks.scale").scale.benchmark([4])
