"""Tests of the benchmarks: turns, processes, the baseline, and that each section runs."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from podracers import errors
from tests import processes

ATARI = {"img_height": 36, "img_width": 36, "frame_skip": 4}


@pytest.fixture(scope="module")
def scripts(tools):
    names = ("measure", "contender", "sebulba_speed", "single_file_sebulba")
    return tools(*(f"benchmarks.{name}" for name in names))


def test_contenders_take_turns_and_the_first_round_only_warms_up(scripts):
    calls = []

    def turn(name, values):
        values = iter(values)
        return lambda: calls.append(name) or next(values)

    turns = {"a": turn("a", [9.0, 1.0, 2.0]), "b": turn("b", [9.0, 3.0, 4.0])}
    assert scripts.measure.take_turns(turns, 2) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert calls == ["a", "b"] * 3


class Slow:
    """A runner that has a lot in store: the first update of a turn takes no time."""

    steps_per_update = 10

    def init(self, seed):
        return 0

    def step(self, state, num_updates):
        time.sleep(0.05 * num_updates)
        return state + num_updates, None


def test_what_leads_in_is_not_counted(scripts):
    stepper = scripts.measure.Stepper(Slow(), updates=4, lead_in=1)
    assert stepper() == pytest.approx(10 / 0.05, rel=0.2)
    assert stepper.state == 4 + 5  # the first updates warm up


def make_turn(ballast):
    """Returns a contender whose turns are its process id."""
    kept = np.ones(ballast, np.uint8)
    return lambda: float(os.getpid()) if kept[-1] else 0.0


class Told:
    """A contender that tells what its environment says, and a fact."""

    answer = 42.0

    def __call__(self):
        return float(os.environ["PODRACERS_TOLD"])


def make_failing():
    raise ValueError("no such luck")


def make_dying():
    return lambda: os._exit(3)


def test_each_contender_has_a_process_and_memory_of_its_own(scripts):
    makers = {"light": make_turn, "heavy": make_turn}
    with scripts.contender.together(makers, {"light": (1,), "heavy": (300_000_000,)}) as both:
        light, heavy = both.values()
        assert len({light(), heavy(), float(os.getpid())}) == 3
        assert light() == light()
        assert 250e6 < heavy.memory() - light.memory() < 350e6


def test_a_contender_has_variables_and_facts_of_its_own(scripts):
    told = scripts.contender.Contender("told", Told, environment={"PODRACERS_TOLD": "7"})
    assert "PODRACERS_TOLD" not in os.environ
    assert told() == 7.0
    assert told.ask("answer") == 42.0
    told.kill()


def test_a_contender_that_is_watched_can_be_given_up(scripts):
    def watch():
        raise errors.RunFailure("enough")

    slow = scripts.contender.Contender("slow", time.sleep, 600)
    with pytest.raises(errors.RunFailure, match="enough"):
        slow.ask("__call__", watch)
    slow.kill()


def make_timed(began):
    """Returns a contender whose turns are the seconds until it was made."""
    made = time.time() - began
    return lambda: made


def test_a_contender_is_made_in_its_first_turn_and_not_beside_the_others(scripts):
    late = scripts.contender.Contender("late", make_timed, time.time())
    time.sleep(4.0)
    assert late() >= 4.0
    late.kill()


@pytest.mark.parametrize(
    ("make", "message"), [(make_failing, "ValueError: no such luck"), (make_dying, "process died")]
)
def test_a_contender_that_fails_says_so(scripts, make, message):
    failing = scripts.contender.Contender("unlucky", make)
    with pytest.raises(errors.RunFailure, match=f"unlucky.*{message}"):
        failing()
    failing.kill()


def test_a_contender_ends_with_a_parent_that_is_killed():
    program = """
import sys
sys.path.insert(0, "scripts")
from benchmarks import contender
contender.Contender("slow", exec, "print(1, flush=True); import time; time.sleep(600)")()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=processes.ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "1\n"
    parent.kill()
    assert parent.communicate(timeout=30)[0] == ""  # the contender has it open, too


@pytest.mark.slow
def test_the_baseline_learns_from_what_its_actor_saw(scripts, monkeypatch):
    settings = scripts.single_file_sebulba.Settings(num_envs=4, rollout_length=8)
    options = {**ATARI, "max_episode_steps": 30}
    runner = scripts.single_file_sebulba.SingleFileSebulba("Pong-v5", options, settings)
    rollouts, update = [], runner._update
    monkeypatch.setattr(runner, "_update", lambda s, r: rollouts.append(r) or update(s, r))
    state = runner.init(0)
    after, loss = runner.step(state, 5)
    runner.close()
    assert np.isfinite(loss)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), state.params, after.params)
    assert all(jax.tree.leaves(changed))
    for rollout, following in itertools.pairwise(rollouts):
        np.testing.assert_array_equal(rollout.observation[-1], following.observation[0])
    steps = [each._replace(observation=each.observation[:-1]) for each in rollouts]
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *steps)
    # Stacks move by one frame a step, but for the resets, which come right after the ends.
    moved = (joined.observation[1:, :, :-1] == joined.observation[:-1, :, 1:]).all((2, 3, 4))
    np.testing.assert_array_equal(moved, ~joined.reset[:-1])
    np.testing.assert_array_equal(joined.done[:-1], joined.reset[1:])
    assert joined.reset.any()


def test_bytes_to_the_device(scripts):
    setting = scripts.sebulba_speed.IMPALA
    spec = setting.build().environment.spec
    assert scripts.sebulba_speed.bytes_per_step(spec) == 84 * 84 + 3 * 4
    baseline = scripts.sebulba_speed._make_baseline(setting)
    assert baseline.bytes_to_device_per_step == 4 * 84 * 84 * 21 / 20 + 4 + 1 + 1


def test_an_unknown_name_is_the_users_mistake(run):
    result = run("benchmark", "sebulbas")
    assert result.returncode == 2
    assert "'sebulba'" in result.stderr


def test_a_wrong_binding_is_met_before_anything_is_started(scripts):
    setting = dataclasses.replace(scripts.sebulba_speed.IMPALA, bindings=("IMPALA.gama = 0.9",))
    with pytest.raises(errors.UserError, match="gamma"):
        scripts.sebulba_speed.benchmark_learning(setting, 1)


@pytest.mark.slow
def test_what_dispatches_cost(tmp_path):
    name, file = "sebulba_dispatches", tmp_path / "result.json"
    result = processes.run("benchmark", name, "--repeats", 1, "--json", file)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["results"][name]["rows"]
    found = {(row["measure"], *row["case"].values()): row["median"] for row in rows}
    assert all(median > 0.0 for median in found.values())
    # A rollout begins, takes 32 steps and ends; learning, parameters, most updates a merge.
    assert 36 <= found["programs run in an update", 16] < 38


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sebulba_impala", "sebulba_environments"])
def test_sections_of_sebulba_run(tmp_path, name):
    bindings = ("NUM_ENVS = 4", "ROLLOUT_LENGTH = 4", f"envpool.EnvPool.options = {ATARI}")
    arguments = [part for each in bindings for part in ("--gin_bindings", each)]
    file = tmp_path / "result.json"
    result = processes.run(
        "benchmark",
        *(name, "--repeats", 1, "--json", file, *arguments),
        environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(file.read_text())["results"][name]
    small = name.endswith("environments")
    ratio = "small network / EnvPool alone" if small else "Sebulba / baseline"
    found = {(row["measure"], row["case"]["program"]): row["median"] for row in results["rows"]}
    assert found["speed", "EnvPool alone"] > 0.0
    assert found["ratio, turn by turn", ratio] > 0.0
