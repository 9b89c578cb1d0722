"""Tests of the benchmarks: turns, processes, files of results, smoke runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from podracers import errors
from tests import processes

ATARI = {"img_height": 36, "img_width": 36, "frame_skip": 4}


@pytest.fixture(scope="module")
def scripts(tools):
    names = ("measure", "contender", "records", "sebulba_speed", "peers", "starts")
    return tools(*(f"benchmarks.{name}" for name in names))


def test_contenders_take_turns_and_the_first_round_only_warms_up(scripts):
    calls = []

    def turn(name, values):
        values = iter(values)
        return lambda: calls.append(name) or next(values)

    turns = {"a": turn("a", [9.0, 1.0, 2.0]), "b": turn("b", [9.0, 3.0, 4.0])}
    rates = scripts.measure.take_turns(turns, 2)
    assert rates == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert calls == ["a", "b"] * 3
    ratio = scripts.measure.ratio(rates, "b", "a")
    assert (ratio.min, ratio.max, ratio.case["program"]) == (2.0, 3.0, "b / a")


class Slow:
    """A runner whose updates take 50 ms of its clock."""

    steps_per_update, now = 10, 0.0

    def init(self, seed):
        return 0

    def step(self, state, num_updates):
        self.now += 0.05 * num_updates
        return state + num_updates, None


def test_updates_before_a_measurement_are_not_counted(scripts, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(scripts.measure.time, "perf_counter", lambda: slow.now)
    stepper = scripts.measure.Stepper(slow, updates=4, lead_in=1)
    assert stepper() == pytest.approx(10 / 0.05)
    assert stepper.state == 4 + 5  # the first updates warm up


class Child:
    """Its measurements are its start and the id of its process; the third fails."""

    def __init__(self, ballast):
        self._start, self._calls = time.time(), 0
        self._kept = np.ones(ballast, np.uint8)

    def __call__(self):
        print("no answer")
        self._calls += 1
        if self._calls == 3:
            raise ValueError("no such luck")
        return self._start if self._calls == 1 else float(os.getpid())


def _contender(scripts, ballast):
    return contextlib.closing(scripts.contender.Contender.of(Child, ballast))


@pytest.mark.slow
def test_contenders_have_their_own_processes(scripts, capfd):
    started = time.time()
    with _contender(scripts, 300_000_000) as heavy, _contender(scripts, 1) as light:
        time.sleep(1.0)
        assert min(light(), heavy()) >= started + 1.0  # at the first request
        assert len({light(), heavy(), float(os.getpid())}) == 3
        assert 250e6 < heavy.memory() - light.memory() < 350e6
        with pytest.raises(errors.RunFailure, match="ValueError: no such luck"):
            light()
        assert "Traceback" in capfd.readouterr().err
        os.kill(int(heavy._process.pid), signal.SIGKILL)
        with pytest.raises(errors.RunFailure, match="killed by SIGKILL"):
            heavy()


def sleeper():
    subprocess.Popen(["sleep", "600"])
    return lambda: time.sleep(1.0) or 1.0


def test_a_contender_ends_with_a_parent_that_is_killed():
    """Also in a measurement, and with the processes that it started."""
    program = """
import sys
from podracers.scripts.benchmarks import contender
from tests.scripts import test_benchmark
contender.tempfile.TemporaryFile = lambda mode: sys.stdout  # its end is seen here
program = contender.Contender.of(test_benchmark.sleeper)
program()
print(1, flush=True)
program()
"""
    parent = processes.spawn([sys.executable, "-c", program])
    assert parent.stdout.readline() == "1\n"
    parent.kill()
    assert parent.communicate(timeout=processes.PATIENCE)[0] == ""  # the contender has it open, too


def test_a_peer_that_fails_is_reported_with_its_last_line(scripts, tmp_path):
    peer = scripts.peers.start("rejax", "cartpole", tmp_path)  # a folder without its packages
    with pytest.raises(errors.RunFailure, match="No module named 'rejax'"):
        peer()
    peer.close()


@pytest.mark.parametrize("task", ["cartpole", "pong", "connect_four"])
def test_a_turn_is_as_many_steps_of_this_project_as_of_a_peer(scripts, task):
    assert scripts.peers.TASKS[task].steps % scripts.peers.build(task).steps_per_update == 0


@pytest.mark.parametrize(("notes", "code"), [(("Anakin learns",), 0), (("DOES NOT LEARN",), 1)])
def test_results_are_written_and_an_agent_that_does_not_learn_is_a_failure(
    tools, call, tmp_path, monkeypatch, capsys, notes, code
):
    modules = tools("benchmark", "benchmarks.records")
    result = modules.records.Result("About.", (modules.records.row("speed", "x/s", 1.0),), notes)
    monkeypatch.setitem(modules.benchmark.BENCHMARKS, "learning", lambda options: result)
    assert call("benchmark", "learning", "--json", tmp_path / "x.json") == code
    assert modules.records.read(tmp_path / "x.json").results == {"learning": result}
    assert "speed: 1 x/s" in (output := capsys.readouterr().out) and notes[0] in output


def test_the_time_of_a_start_ends_with_the_first_line_of_the_log(scripts, tmp_path):
    (tmp_path / "scripts").mkdir()
    program = tmp_path / "scripts" / "train.py"
    text = """
import sys, time
time.sleep(0.2)
with open(sys.argv[sys.argv.index("--run_dir") + 1] + "/metrics.jsonl", "w") as log:
    log.write("{}\\n")
time.sleep(0.8)
"""
    program.write_text(text)
    assert 0.2 < scripts.starts._ours("cartpole", tmp_path, str(tmp_path)) < 0.8
    program.write_text(text + "sys.exit(1)")
    with pytest.raises(errors.RunFailure, match="scripts/train"):
        scripts.starts._ours("cartpole", tmp_path, str(tmp_path))


def test_starts_with_an_empty_and_a_filled_cache_take_turns(scripts, tmp_path, monkeypatch):
    calls, total = [], scripts.starts._TOTAL

    def start(work, program, *cache):
        calls.append((work, str(program), cache[-1]))
        return len(calls) % 9 + 1.0

    monkeypatch.setattr(scripts.starts, "_ours", start)
    monkeypatch.setattr(scripts.starts, "_peer", start)
    rows = scripts.starts.benchmark(tmp_path, repeats=1, checkout=tmp_path / "old").rows
    order = [(program, cache) for work, program, cache in calls if work == "cartpole"]
    assert [program for program, _ in order[:8:2]] == [program for program, _ in order[1:8:2]]
    assert len({cache for _, cache in order[:8]}) == 4 == len({name for name, _ in order})
    assert order[8][0] == order[0][0]  # the second round
    medians = {tuple(row.case.values()): row.median for row in rows if row.measure == total}
    assert medians["rejax", "PPO, CartPole", "filled"] == 16 % 9 + 1.0
    ratios = [row.case["program"] for row in rows if row.unit == "ratio"]
    assert ratios[:3] == [f"this project / {name}" for name in ("before", "PureJaxRL", "rejax")]


def test_files_of_results(scripts, tmp_path):
    records = scripts.records

    def result(agent, *runners):
        speed = ("speed", "agent steps/s", [1.5e5, 2e5, 2e6])
        rows = tuple(records.row(*speed, agent=agent, runner=runner) for runner in runners)
        return records.Result("Agents.", rows, (agent,), group="agents")

    results = {"one": result("ppo", "Anakin", "Sebulba"), "two": result("dqn", "Anakin")}
    results["three"] = records.Result("Shares.", (records.row("share", "share", 0.25, part="x"),))
    provenance = {"device": "1 x H100", "platform": "gpu", "host_cores": 16}
    provenance |= {"versions": {"jax": "0.10.2"}, "commit": None}
    record = records.Record("command", results, provenance)
    record.write(tmp_path / "agents.json")
    assert records.read(tmp_path / "agents.json") == record
    page = records.page(tmp_path)
    assert "| ppo | 200k (150k to 2M) | 200k (150k to 2M) |\n| dqn | 200k (150k to 2M) |  |" in page
    assert "| part | share |\n| --- | --- |\n| x | 0.25 |" in page
    assert "- ppo\n- dqn" in page and page.count("Agents.") == 1
    (tmp_path / "broken.json").write_text('{"results": 3}')
    with pytest.raises(errors.UserError, match=r"broken\.json"):
        records.page(tmp_path)


SEBULBA = ("NUM_ENVS = 4", "ROLLOUT_LENGTH = 4", f"envpool.EnvPool.options = {ATARI}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bindings", "expected"),
    [
        ("sebulba_impala", SEBULBA, ("ratio, turn by turn", "Sebulba / EnvPool alone")),
        ("sebulba_environments", SEBULBA, ("ratio, turn by turn", "small network / EnvPool alone")),
        ("dqn", ("NUM_ENVS = 8", "ROLLOUT_LENGTH = 8"), ("memory of the update", "replay")),
        ("entered", (), ("entered", "update")),
        ("parity", (), ("largest difference of parameters over their largest", 5)),
    ],
)
def test_benchmarks_run(scripts, tmp_path, name, bindings, expected):
    arguments = [part for binding in bindings for part in ("--gin_bindings", binding)]
    file = tmp_path / "result.json"
    processes.run(
        "benchmark",
        *(name, "--repeats", 1, "--json", file, *arguments),
        environment={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles faster
        },
    )
    rows = scripts.records.read(file).results[name].rows
    medians = {(row.measure, [*row.case.values()][-1]): row.median for row in rows}
    if name == "parity":
        assert 0.0 <= medians[expected] < 1e-3
    else:
        assert medians[expected] > 0.0
    assert all(row.median > 0.0 for row in rows if row.measure == "speed")
