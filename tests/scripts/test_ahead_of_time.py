"""Tests of what the TPU compiler says of programs, and of how its text is read."""

import json

import pytest

from podracers import errors
from tests import processes

TEXT = """
HloModule jit_update, is_scheduled=true

FileNames
1 "/own/agents/ppo.py"
2 "/own/.venv/lib/site-packages/optax/adam.py"

FunctionNames
1 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%moved (p: f32[8,4]) -> f32[4,8] {
  %p.0 = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %t.0 = f32[4,8]{1,0:T(8,128)} transpose(%p.0), dimensions={1,0}
}

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
gradient/sin" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %copied = f32[4,8]{1,0:T(8,128)} fusion(%sine), kind=kLoop, calls=%moved, \
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
metadata={op_name="jit(update)/learn/while" stack_frame_id=1}
  ROOT %y = f32[8,4]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture(scope="module")
def costs(tools):
    return tools("tracing.costs").costs


@pytest.fixture(scope="module")
def ahead_of_time(tools):
    return tools("tracing.ahead_of_time").ahead_of_time


def test_a_loop_counts_up_from_where_it_begins_to_its_limit(costs):
    found = costs.Costs(TEXT.replace("LIMIT_IS", "constant(5)"), 1.0, "/own/")
    assert found.cycles == 3 * 107
    assert found.parts() == {"learn/gradient": 3 * 107}
    assert found.loops == []


def test_where_the_limit_depends_on_data_a_loop_takes_as_many_passes_as_gradient_steps(costs):
    of_data = TEXT.replace("LIMIT_IS", "add(%n, %two)")
    found = costs.Costs(of_data, 11.0, "/own/")
    assert found.cycles == 11 * 107
    found = costs.Costs(of_data.replace("gradient/", "", 1), 11.0, "/own/")
    assert found.cycles == 107
    assert found.loops == [(107, "learn", "learn/while")]


def test_a_limit_that_the_loop_changes_is_none(costs):
    changed = TEXT.replace("tuple(%next, %x.2, %n.2)", "tuple(%next, %x.2, %next)")
    found = costs.Costs(changed.replace("LIMIT_IS", "constant(5)"), 11.0, "/own/")
    assert found.cycles == 11 * 107


def test_a_fusion_that_only_transposes_is_a_copy_of_the_line_that_it_reads_from(costs):
    found = costs.Costs(TEXT.replace("LIMIT_IS", "constant(5)"), 1.0, "/own/")
    (copy,) = found.copies()
    assert (copy.instruction, copy.shape, copy.passes, copy.cycles) == ("copied", "f32[4,8]", 3, 21)
    # The frame of a library leads to that of its caller.
    assert copy.source == "agents/ppo.py:12"
    computing = TEXT.replace(" transpose(", " sine(").replace("LIMIT_IS", "constant(5)")
    assert costs.Costs(computing, 1.0, "/own/").copies() == []


def test_of_two_branches_the_costlier_counts(costs):
    def branch(name, cycles):
        config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        return (
            f"%{name} (a.{name}: f32[8]) -> f32[8] {{\n  %a.{name} = f32[8] parameter(0)\n"
            f"  ROOT %r.{name} = f32[8] sine(%a.{name}), {config}\n}}\n\n"
        )

    text = branch("cheap", 3) + branch("dear", 30)
    text += (
        "ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {\n  %p = pred[] parameter(0)\n"
        "  %x = f32[8] parameter(1)\n  ROOT %y = f32[8] conditional(%p, %x, %x), "
        "true_computation=%cheap, false_computation=%dear\n}\n"
    )
    assert costs.Costs(text, 1.0, "/own/").cycles == 30


def test_without_the_compiler_one_line_says_what_to_install(ahead_of_time, tmp_path):
    with pytest.raises(ahead_of_time.NoCompilerError, match=r"libtpu==.* --libtpu") as caught:
        ahead_of_time.find_compiler(tmp_path)
    assert str(caught.value).startswith(f"no TPU compiler in {tmp_path}")
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_scripts_end_without_the_compiler(run, tmp_path):
    asked = ("--compile_for", "v5e:2x2", "--libtpu", tmp_path, "--out", tmp_path)
    result = run("profiles", "--gin_file", "gin/experiments/cartpole_ppo.gin", *asked)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert f"no TPU compiler in {tmp_path}" in line
    assert "libtpu==" in line
    result = run("benchmark", "tpu_ppo", "--libtpu", tmp_path)
    assert result.returncode == 2
    assert "no TPU compiler" in result.stderr


@pytest.fixture(scope="module")
def compiler(ahead_of_time):
    """Skips where TPU_LIBRARY_PATH names no compiler, and none is installed."""
    try:
        return ahead_of_time.find_compiler()
    except errors.UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_a_program_is_compiled_for_tpus(compiler, tmp_path, runner, num_devices):
    config = processes.config_file(tmp_path, "")
    result = processes.run(
        "profiles",
        *("--gin_file", config, "--runner", runner, "--out", tmp_path),
        *("--compile_for", "v5e:2x2", "--num_devices", num_devices),
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / f"tiny_{runner}.json").read_text())["estimate"]
    assert {each["failure"] for each in found["programs"].values()} == {""}
    names = ["update"] if runner == "anakin" else ["learn", "begin", "act", "finish"]
    assert [*found["programs"]] == names
    parts = set().union(*(each["parts"] for each in found["programs"].values()))
    assert {"act", "learn", "learn/gradient"} <= parts
    assert ("environment" in parts) == (runner == "anakin")
    assert 0 < found["step"] < found["update"]
    assert 1e3 < found["rate"] < 1e9
    assert found["programs"][names[0]]["arguments"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "bindings"),
    [("dqn", ()), ("r2d2", ("--gin_bindings", "ROLLOUT_LENGTH = 40")), ("muzero", ())],
)
def test_replay_of_frames_fits_on_one_chip_at_its_shipped_size(compiler, tmp_path, agent, bindings):
    files = ("experiments/pong_ppo", f"agents/{agent}_atari", "hardware/colab_tpu")
    started = processes.start(
        "profiles",
        *(part for file in files for part in ("--gin_file", f"gin/{file}.gin")),
        *("--out", tmp_path, "--name", agent, "--compile_for", "v5e:2x2", *bindings),
    )
    result = processes.finish(started, timeout=1200.0)
    assert result.returncode == 0, result.stderr
    programs = json.loads((tmp_path / f"{agent}.json").read_text())["estimate"]["programs"]
    assert {each["failure"] for each in programs.values()} == {""}
    learn = programs["learn"]
    assert 1e9 < learn["arguments"] + learn["temporaries"] < 15.75 * 2**30
