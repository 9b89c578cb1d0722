"""Tests of profiles: real traces of tiny runs, and what is read from them."""

import contextlib
import functools
import itertools
import json
import math
import re

import jax
import numpy as np
import pytest
from PIL import Image

from agents import dqn, ppo
from environments import catch
from podracers import anakin, sebulba
from tests import processes

DOCS = processes.ROOT / "docs"
SEBULBA = (
    "\nfrom podracers import sebulba\n"
    "sebulba.Sebulba.actor_devices = (0, 1)\nsebulba.Sebulba.learner_devices = (2, 3)\n"
)


@pytest.fixture(scope="module")
def tracing(tools):
    return tools(*(f"tracing.{name}" for name in ("hlo", "pages", "shares", "traces")))


def _profile(folder, runner, extra, *arguments):
    """Runs the script on a tiny run; returns what it printed and what it wrote."""
    config = processes.config_file(folder, extra)
    flags = ("--gin_file", config, "--runner", runner, "--out", folder / "out", "--warm_up", 2)
    run = processes.run("profiles", *flags, *arguments)
    assert run.returncode == 0, run.stderr
    assert Image.open(folder / "out" / f"tiny_{runner}.png").width > 500
    return run.stdout, json.loads((folder / "out" / f"tiny_{runner}.json").read_text())


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anakin")
    page = folder / "page.md"
    page.write_text(
        "before\n<!-- begin: tiny_anakin -->\nstale\n<!-- end: tiny_anakin -->\nafter\n"
    )
    printed, record = _profile(folder, "anakin", "", "--page", page)
    return printed, record, page.read_text()


@pytest.mark.slow
def test_the_parts_of_an_update_add_up_to_one(program):
    found = program[1]["program"]
    shares = found["shares"]
    assert math.isclose(sum(shares.values()), 1.0)
    assert all(-1e-9 <= share < 1 for share in shares.values()), shares
    for part in ("environment", "environment/reset", "act", "learn", "learn/gradient"):
        assert shares[part] > 0
        assert found["instructions"][part] >= 1
    assert math.isclose(
        sum(found["milliseconds"].values()) * program[1]["updates"],
        found["timeline"]["milliseconds"],
    )


def test_the_timeline_is_what_the_shares_are_of(program):
    found = program[1]["program"]
    for part, values in found["timeline"]["parts"].items():
        assert math.isclose(np.mean(values), found["shares"][part], abs_tol=2e-3), part


def test_operations_are_named_with_their_part(program):
    found = program[1]["program"]
    assert len(found["operations"]) == 10
    shares = [each["share"] for each in found["operations"]]
    assert shares == sorted(shares, reverse=True)
    for each in found["operations"]:
        assert each["share"] <= found["shares"][each["part"]]
    assert len(found["gaps_ms"]) == 2
    assert found["gaps_ms"][0] > 0


def test_the_page_gets_what_is_printed(program):
    printed, record, page = program
    made = f"<!-- begin: tiny_anakin -->\n\n{printed}\n<!-- end: tiny_anakin -->"
    assert page == f"before\n{made}\nafter\n"
    assert record["command"] in printed


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sebulba")
    return _profile(folder, "sebulba", SEBULBA, "--lag", 0, 1, "--updates", 3)[1]["threads"]


@pytest.mark.slow
def test_the_activities_of_a_thread_add_up_to_one(threads):
    assert [*threads] == ["0", "1"]
    for found in threads.values():
        assert [*found["shares"]] == ["learner", "actor 0", "actor 1"]
        for shares in found["shares"].values():
            assert math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6)
        assert {"learning", "publishing"} < found["shares"]["learner"].keys()
        for actor in ("actor 0", "actor 1"):
            assert {"environment", "inference", "transfer"} < found["shares"][actor].keys()
        assert len(found["updates_ms"]) == 3
        assert found["verdict"]


def _intervals(found, is_actor, *activities):
    return [
        (start, start + length)
        for thread, activity, start, length in found["spans"]
        if thread.startswith("actor") == is_actor and activity in activities
    ]


@pytest.mark.slow
def test_without_a_lag_nobody_acts_while_there_is_learning(threads):
    learning = _intervals(threads["0"], False, "learning")
    acting_ = _intervals(threads["0"], True, "inference", "environment")
    assert len(learning) == 3
    assert len(acting_) > 3 * 8  # steps of an update
    rounding = 0.01  # ms
    for start, end in learning:
        assert all(b <= start + rounding or a >= end - rounding for a, b in acting_)


@pytest.mark.slow
def test_threads_do_one_thing_at_a_time(threads):
    for found in threads.values():
        for thread in found["shares"]:
            own = sorted(span[2:] for span in found["spans"] if span[0] == thread)
            after = itertools.pairwise(own)
            assert all(start + length <= later + 0.01 for (start, length), (later, _) in after)


# The names of the parts, in programs.


@pytest.fixture
def with_metadata():
    """A cached program may be from before its parts had names: they are no part of the key."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def _anakin(make):
    environment = catch.Catch()
    return anakin.Anakin(
        agent=make(spec=environment.spec),
        environment=environment,
        num_envs=4,
        rollout_length=4,
        num_devices=1,
    )


_DQN = functools.partial(dqn.DQN, min_replay=8, replay_capacity=64, batch_size=8)


@pytest.mark.usefixtures("with_metadata")
def test_anakins_program_says_what_is_of_which_part(tracing):
    text = _anakin(_DQN).trace(0).lower().compile().as_text()
    parts = tracing.hlo.Program(text).parts()
    assert parts > {
        *("environment", "environment/reset", "act", "learn", "learn/gradient", "learn/replay")
    }


@pytest.mark.usefixtures("with_metadata")
def test_sebulbas_programs_say_what_is_of_which_part(tracing):
    environment = catch.Catch()
    agent = ppo.PPO(spec=environment.spec, num_minibatches=1)
    settings = {"agent": agent, "num_envs": 4, "rollout_length": 4}
    runner = sebulba.Sebulba(environment=environment, **settings)
    learn = tracing.hlo.Program(runner.trace(0).lower().compile().as_text())
    assert {"learn", "learn/gradient"} < learn.parts()

    act = runner.trace_acting(0).act.lower().compile().as_text()
    assert "act" in tracing.hlo.Program(act).parts()


@pytest.mark.slow
def test_names_change_nothing_in_a_program(monkeypatch):
    named = _anakin(_DQN).trace(0).lower()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    unnamed = _anakin(_DQN).trace(0).lower()
    assert "gradient/" in named.as_text(debug_info=True)
    assert "gradient/" not in unnamed.as_text(debug_info=True)
    assert named.as_text() == unnamed.as_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(_step_shard)/while/body/environment/vmap()/mul", "environment"),
        ("jit(f)/while/body/vmap(environment)/reset/add", "environment/reset"),
        ("jit(f)/learn/while/body/gradient/transpose(gradient)/jvp(M)/dot", "learn/gradient"),
        ("learn/gradient/jvp(vmap(agent_update))/rule/dot", "learn/gradient/agent_update/rule"),
        ("jit(f)/act/cond/vmap(agent_update)/gather", "act/agent_update"),
        ("jit(f)/agent_update/rule/add", ""),
        ("jit(f)/jit(learn)/reset/add", ""),  # a function's name, and a scope that is not within
        ("jit(f)/act/replay/add", "act"),
    ],
)
def test_scopes_in_a_name(tracing, name, expected):
    assert tracing.hlo.scope(name) == expected


HLO = """HloModule jit_f

%body (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %copy.1 = s32[] copy(%p)
}

ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %while.1 = (s32[], /*index=1*/f32[2]{0:T(8)}) while(%a), condition=%cond, body=%body, \
metadata={op_name="jit(f)/learn/while" stack_frame_id=1}
  %while.2 = s32[] while(%a), condition=%cond, body=%body.2
  %dot.1 = s32[] dot(%a, %a), metadata={op_name="jit(f)/act/transpose(jvp(M))/L_0/dot_general"}
  ROOT %copy.2 = s32[] copy(%dot.1)
}
"""


def test_what_has_no_name_is_of_the_part_that_it_reads_or_that_calls_it(tracing):
    program = tracing.hlo.Program(HLO)
    assert program.part("copy.1") == "learn"
    assert program.part("dot.1") == "act"
    assert program.part("copy.2") == "act"
    assert program.part("while.2") == "other"
    assert program.operation("dot.1") == "L_0/dot_general (backward)"
    assert program.operation("copy.1") == "copy"
    assert program.computes("dot.1")
    assert not program.computes("while.1")
    assert not program.computes("of another program")


def test_an_instant_is_divided_among_those_that_run_at_it(tracing):
    # 0 to 10 and 6 to 10 of the first part, 6 to 14 of the second, nothing until 20, then 2.
    start, end = np.array([0.0, 6.0, 6.0, 20.0]), np.array([10.0, 10.0, 14.0, 22.0])
    instructions = tracing.traces.Instructions(np.arange(4), start, end, ["a", "b", "c", "d"])
    occupation = tracing.traces.Occupation(instructions, np.array([0, 0, 1, 0]), ["one", "two"])
    third = 4 / 3
    np.testing.assert_allclose(
        occupation.by_instruction(instructions), [6 + third, third, third + 4, 2]
    )
    bins = occupation.within(np.array([0.0, 6.0, 12.0, 30.0]))
    np.testing.assert_allclose(bins["one"], [6, 2 * third, 2])
    np.testing.assert_allclose(bins["two"], [0, third + 2, 2])


def test_an_instruction_across_the_end_of_a_dispatch_counts_up_to_there(tracing):
    # Of a dispatch from 10 to 30: idle from 12 to 16 and from 20 to 28, the program still runs.
    start, end = np.array([4.0, 16.0, 28.0]), np.array([12.0, 20.0, 36.0])
    names = ["while.1", "dot.1", "copy.2"]
    trace = tracing.traces.Trace(
        tracing.traces.Instructions(np.arange(3), start, end, names), [], [(10.0, 30.0)]
    )
    found = tracing.shares.of_programs(trace, tracing.hlo.Program(HLO), updates=1)
    between = tracing.traces.BETWEEN
    np.testing.assert_allclose(found["shares"][between], 0.6)
    np.testing.assert_allclose(sum(found["shares"].values()), 1.0)
    np.testing.assert_allclose(np.mean(found["timeline"]["parts"][between]), 0.6, atol=1e-4)


# Mistakes, and the published page.


@pytest.mark.usefixtures("with_metadata")  # which the script sets, too
def test_mistakes_are_said_in_a_line(run, tmp_path):
    config, page = processes.config_file(tmp_path), tmp_path / "page.md"
    command = ("profiles", "--gin_file", config, "--out", tmp_path / "out")
    processes.assert_mistake(run(*command, "--lag", 1), "--lag", "Anakin")
    processes.assert_mistake(run(*command, "--page", page), "cannot read")
    page.write_text("<!-- begin: tiny_anakin -->")
    processes.assert_mistake(run(*command, "--page", page), "0 places for 'tiny_anakin'")


def test_the_published_page_shows_its_files(tracing):
    text = (DOCS / "profiles.md").read_text()
    names = sorted(path.stem for path in (DOCS / "profiles").glob("*.json"))
    assert names
    assert sorted(re.findall(r"\]\(profiles/(\w+)\.png\)", text)) == names
    for name in names:
        record = json.loads((DOCS / "profiles" / f"{name}.json").read_text())
        between = f"<!-- begin: {name} -->\n\n{tracing.pages.text(record)}\n<!-- end: {name} -->"
        assert between in text, f"{name}: make it anew with its command"
