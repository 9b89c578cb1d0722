"""Tests of the costs of programs that were compiled for TPUs."""

import json
import os
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests import processes

TEXT = """
HloModule jit_update, is_scheduled=true

%condition.1 (state: (s32[], f32[8,4], s32[])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %n.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=2
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT
}

%body.1 (state: (s32[], f32[8,4], s32[])) -> (s32[], f32[8,4], s32[]) {
  %state.2 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i.2, %one)
  %x.2 = f32[8,4]{1,0:T(8,128)} get-tuple-element(%state.2), index=1
  %sine = f32[8,4]{1,0:T(8,128)} sine(%x.2), metadata={op_name="jit(update)/learn/while/body/\
gradient/sin"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %copied = f32[4,8]{1,0:T(8,128)} copy(%sine), \
backend_config={"window_config":{"estimated_cycles":"7"}}
  %n.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=2
  ROOT %out = (s32[], f32[8,4], s32[]) tuple(%next, %x.2, %n.2)
}

ENTRY %main (x: f32[8,4], n: s32[]) -> f32[8,4] {
  %x = f32[8,4]{1,0:T(8,128)} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  %two = s32[]{:T(128)} constant(2)
  %LIMIT = s32[]{:T(128)} LIMIT_IS
  %begun = (s32[], f32[8,4], s32[]) tuple(%two, %x, %LIMIT)
  %loop = (s32[], f32[8,4], s32[]) while(%begun), condition=%condition.1, body=%body.1, \
metadata={op_name="jit(update)/learn/while"}
  ROOT %y = f32[8,4]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture(scope="module")
def costs(tools):
    return tools("benchmarks.costs").costs


@pytest.mark.parametrize(
    ("changes", "passes", "part"),
    [
        ({"LIMIT_IS": "constant(5)"}, 3, "learn/gradient"),  # from 2 to 5
        ({"LIMIT_IS": "add(%n, %two)"}, 11, "learn/gradient"),  # unknown: gradient steps
        # The loop changes its limit.
        ({"LIMIT_IS": "constant(5)", "%x.2, %n.2)": "%x.2, %next)"}, 11, "learn/gradient"),
        ({"LIMIT_IS": "add(%n, %two)", "gradient/sin": "sin"}, 1, "learn"),
    ],
)
def test_passes_of_a_loop(costs, changes, passes, part):
    text = TEXT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    program = costs.Costs(text, 11.0)
    assert program.cycles == passes * 107
    assert program.parts == {part: passes * 107}
    assert program.loops == ([(107, "learn/while")] if passes == 1 else [])


def test_kernels_of_a_loop_with_its_condition(costs):
    kernels = costs.Kernels(TEXT.replace("LIMIT_IS", "constant(5)"), 1.0)  # three passes
    assert kernels.parts == {"learn/gradient": 6, "learn": 6}


def test_kernels_of_a_program_counted_by_hand(tools, monkeypatch):
    modules = tools("benchmarks.kernels")

    def program(x):
        def inner(_, x):
            with jax.named_scope("act"):
                return jnp.sort(x * 2.0)  # a fusion and a sort

        def outer(_, x):
            x = jax.lax.fori_loop(0, 5, inner, x)
            with jax.named_scope("rollout"), jax.named_scope("environment"):
                return x @ x

        return jax.lax.fori_loop(0, 3, outer, x)

    runner = types.SimpleNamespace(agent=None, steps_per_update=1)
    runner.trace = lambda seed: jax.jit(program).trace(jnp.ones((64, 64)))
    monkeypatch.setattr(modules.kernels, "_EXPERIMENTS", {})
    monkeypatch.setattr(modules.kernels, "_runner", lambda agent: runner)
    result = modules.kernels.benchmark(None, None)
    counts = {tuple(row.case.values())[1]: row.median for row in result.rows}
    assert counts["acting"] == 3 * 5 * 2
    assert counts["environment"] == 3 * 2  # a product, and XLA's copy of what the loop carries
    assert counts["all"] == sum(counts[name] for name in ("acting", "environment", "rest"))


def test_of_two_branches_the_costlier_counts(costs):
    def branch(name, cycles):
        config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        return (
            f"%{name} (a.{name}: f32[8]) -> f32[8] {{\n  %a.{name} = f32[8] parameter(0)\n"
            f"  ROOT %r.{name} = f32[8] sine(%a.{name}), {config}\n}}\n\n"
        )

    text = branch("cheap", 3) + branch("costly", 30)
    text += (
        "ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {\n  %p = pred[] parameter(0)\n"
        "  %x = f32[8] parameter(1)\n  ROOT %y = f32[8] conditional(%p, %x, %x), "
        "true_computation=%cheap, false_computation=%costly\n}\n"
    )
    assert costs.Costs(text, 1.0).cycles == 30


def _compiler(result):
    """Skips the test if a process found no compiler: it is installed, or in the folder LIBTPU."""
    if "no TPU compiler" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr


FOLDER = ("--libtpu", os.environ["LIBTPU"]) if "LIBTPU" in os.environ else ()


@pytest.mark.parametrize(("agent", "expected"), [("ppo", 1.0), ("dqn", 16.0)])
def test_unknown_numbers_of_passes_are_those_of_gradient_steps(tools, monkeypatch, agent, expected):
    modules = tools("benchmarks.tpu_estimates", "benchmarks.measure")
    monkeypatch.setattr(modules.tpu_estimates, "_compile", lambda traced, steps: steps)
    parts = modules.measure.build([f"gin/experiments/catch_{agent}.gin"])
    assert modules.tpu_estimates._compile_all(parts, 0) == {"update": expected}


def test_estimates_go_on_after_a_program_that_does_not_fit_the_memory(tools, monkeypatch):
    tpu = tools("benchmarks.tpu_estimates").tpu_estimates
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: used 20G of 15.75G hbm.\nAllocations")
    programs = {"update": tpu._Program(1, 2, 30.0, 20.0, ())}
    monkeypatch.setattr(tpu, "find_compiler", lambda folder: "0")
    preset = "gin/hardware/colab_tpu.gin"
    monkeypatch.setattr(tpu, "hardware", lambda count: (preset, jax.devices()[:count]))
    monkeypatch.setattr(tpu, "_compile_all", mock.Mock(side_effect=[error, programs]))
    result = tpu.benchmark("alphazero", (1, 4), (), None)
    assert {row.case["experiment"] for row in result.rows} == {"alphazero, Anakin, 4 chips"}
    expected = "alphazero, Anakin does not compile: RESOURCE_EXHAUSTED: used 20G of 15.75G hbm."
    assert result.notes[1] == expected


@pytest.mark.slow
def test_programs_are_compiled_for_tpus(tmp_path):
    file = tmp_path / "tpu.json"
    started = processes.start("benchmark", "tpu_dqn", "--json", file, *FOLDER)
    _compiler(processes.finish(started, None, 1200.0))
    record = json.loads(file.read_text())["results"]["tpu_dqn"]
    rows = {(row["measure"], row["case"]["experiment"]): row["median"] for row in record["rows"]}
    for name in ("dqn, Anakin", "dqn, Sebulba"):
        assert 1e3 < rows["estimated speed", name] < 1e9
        assert 0 < rows["a step of all streams", name] < rows["an update", name]
    # The replay of frames fits on one chip at its shipped size.
    memory = rows["arguments", "dqn, Sebulba"] + rows["temporaries", "dqn, Sebulba"]
    assert 1e9 < memory < 15.75 * 2**30
