"""Runs of Sebulba that fail, are interrupted or are resumed."""

import contextlib
import json
import os
import pathlib
import re
import signal
import time

import pytest

from podracers.checkpoints import integrity
from tests import faults, processes

# 12 updates of 64 steps, and a checkpoint after every other one.
CONFIG = """
from __gin__ import dynamic_registration

from environments import catch
from environments import gymnasium
from podracers.training import experiment
from podracers import sebulba
from tests import faults

include 'gin/agents/impala.gin'
include 'gin/runners.gin'

SEED = 3
TOTAL_STEPS = 768  # agent steps
NUM_ENVS = 8
ROLLOUT_LENGTH = 8  # agent steps

experiment.Experiment.environment = @faults.Faulty
experiment.Experiment.log_period = 1  # updates
experiment.Experiment.evaluation_period = 6  # updates
experiment.Experiment.evaluation_episodes = 4
experiment.Experiment.greedy_evaluation_episodes = 0
experiment.Experiment.evaluation_max_steps = 10
experiment.Experiment.checkpoint_period = 2  # updates

faults.Faulty.inner = @catch.Catch()
sebulba.Sebulba.actor_devices = (0,)
sebulba.Sebulba.learner_devices = (1, 2)
sebulba.Sebulba.batches_per_actor = 2
"""
TRAIN = "train"


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    for factory in faults.factories:
        factory.over.set()


@pytest.fixture(scope="module", name="config")
def _config(tmp_path_factory):
    path = tmp_path_factory.mktemp("sebulba") / "faulty.gin"
    path.write_text(CONFIG)
    return path


def _start(config, run_dir, *bindings):
    """Starts a training run in a session of its own, whose processes `_session` finds."""
    return processes.start(
        *("train", "--gin_file", config, "--run_dir", run_dir, "--gin_bindings", *bindings),
        environment={"PYTHONPATH": str(processes.ROOT)},
        start_new_session=True,
    )


def _finish(process, code=0):
    """Waits for the end, and for every process that was started on the way."""
    ended = processes.finish(process, code)
    processes.wait_for(lambda: not _session(process.pid))
    return ended


def _session(leader):
    """Returns the command lines of the living processes of a session."""
    commands = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == leader and state != "Z":
                commands.append((folder / "cmdline").read_text().replace("\0", " "))
    return commands


def _interrupt(process, when):
    """Interrupts the whole session, as Ctrl-C in a terminal does, once something is true."""
    processes.wait_for(lambda: process.poll() is not None or when())
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)


def _checkpoints(path):
    """Returns the steps of the checkpoints, which are all complete."""
    folders = [folder for folder in (path / "checkpoints").iterdir() if folder.name.isdigit()]
    for folder in folders:
        integrity.verify(folder, ("state", "params", "metadata"))
    return sorted(int(folder.name) for folder in folders)


def _assert_complete(path):
    assert json.loads((path / "summary.json").read_text())["updates"] == 12
    steps = [line["step"] for line in processes.log(path)]
    assert steps == sorted(set(steps)) and steps[-1] == 768
    assert _checkpoints(path)[-1] == 768


@pytest.fixture(name="train")
def _train(run, config, tmp_path):
    """Trains or resumes in this process: `train(*bindings)`."""
    path = tmp_path / "run"

    def train(*bindings, code=0):
        begun = (path / "config.gin").exists()
        begin = ("--resume",) if begun else ("--gin_file", config)
        return run(TRAIN, *begin, "--run_dir", path, "--gin_bindings", *bindings, code=code)

    train.path = path
    return train


AT_UPDATE_7 = "Faulty.step = 61"


@pytest.mark.parametrize(
    ("what", "phrases"),
    [
        (
            "raise",
            (
                "SimulatorError: the simulator broke in recv at step 61",
                "in the thread 'actor 0'",
            ),
        ),
        pytest.param(
            "hang",
            (
                "self.over.wait()",
                "'environment step'",
                "(Sebulba.timeout)",
                "in strike: WorkerError: actor 0 hangs",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_ends_a_run_with_its_cause_and_its_checkpoints(train, what, phrases):
    limit = 4.0 if what == "hang" else 1000.0
    ended = train(f"Faulty.what = '{what}'", AT_UPDATE_7, f"Sebulba.timeout = {limit}", code=1)
    places = [ended.stderr.find(phrase) for phrase in ("Traceback", *phrases)]
    assert places == sorted(places) and places[0] >= 0, ended.stderr
    saved = _checkpoints(train.path)[-1]
    assert saved in (256, 384)  # the learner may not have taken the update before
    if what == "raise":
        assert f"resuming from step {saved}" in train("Faulty.what = ''").stdout
        _assert_complete(train.path)


@pytest.mark.slow
def test_native_code_that_holds_pythons_lock_is_ended(config, tmp_path):
    started = []
    for where, who in (("recv", "actor"), ("close", "actor"), ("make", "evaluation")):
        fault = (
            *("Faulty.what = 'seize'", f"Faulty.where = '{where}'", f"Faulty.who = '{who}'"),
            *("Faulty.child = True", "Sebulba.timeout = 4.0"),
        )
        started.append(_start(config, tmp_path / f"{where}-{who}", *fault))
    for process in started:
        ended = _finish(process, 3)
        assert "failed: for " in ended.stderr and "no thread of Python has run" in ended.stderr
        assert "in strike" in ended.stderr  # where it hangs
        assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_simulators_that_cannot_be_closed_do_not_prevent_the_end(config, tmp_path):
    """One that hangs is abandoned; an error is one line, and the exit code of a failure."""
    started = {}
    for what in (faults.HANG, faults.RAISE):
        fault = (f"Faulty.what = '{what}'", "Faulty.where = 'close'")
        if what == faults.HANG:
            fault = (*fault, "Faulty.child = True", "Sebulba.timeout = 4.0")  # the child is killed
        started[what] = _start(config, tmp_path / what, *fault)
    for what, process in started.items():
        ended = _finish(process, int(what == faults.RAISE))
        assert "Traceback" not in ended.stderr
        assert ended.stderr.count("SimulatorError") == (what == faults.RAISE), ended.stderr
        _assert_complete(tmp_path / what)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "step", "who"),
    [
        ("SIGUSR1", "recv", 61, "actor"),
        ("SIGUSR2", "recv", 5, "evaluation"),
    ],
)
def test_a_signal_ends_a_run_in_order(train, name, where, step, who):
    what = f"Faulty.what = '{name}'", f"Faulty.where = '{where}'"
    stopped = train(*what, f"Faulty.step = {step}", f"Faulty.who = '{who}'")
    steps = int(re.search(r"stopped at ([\d,]+) steps", stopped.stdout)[1].replace(",", ""))
    assert steps < 768
    assert _checkpoints(train.path)[-1] == steps
    if who == "evaluation":  # which was not waited for
        assert "evaluation/return" not in processes.log(train.path)[-1]
    resumed = train("Faulty.what = ''")
    assert f"resuming from step {steps:,}" in resumed.stdout
    _assert_complete(train.path)


@pytest.mark.slow
def test_an_interrupt_while_worker_processes_start_reaches_only_their_parent(config, tmp_path):
    workers = (
        "Faulty.inner = @gymnasium.Gymnasium()",
        "Gymnasium.env_id = 'CartPole-v1'",
        "Gymnasium.vectorization = 'async'",
        "Experiment.evaluation_period = 0",
    )
    process = _start(config, tmp_path / "run", *workers)
    _interrupt(process, lambda: any("async_vector.work(" in x for x in _session(process.pid)))
    stopped = _finish(process)
    assert "Traceback" not in stopped.stderr
    assert _checkpoints(tmp_path / "run")


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_at_once(config, tmp_path):
    path = tmp_path / "run"
    process = _start(config, path, "Faulty.what = 'hang'", AT_UPDATE_7, "Sebulba.timeout = 1000.0")
    _interrupt(process, lambda: processes.num_lines(path) == 6)
    time.sleep(1.0)
    _interrupt(process, lambda: True)
    ended = _finish(process, 130)
    assert ended.stderr.splitlines()[-1] == "interrupted"
    assert _checkpoints(path)[-1] in (256, 384)


@pytest.mark.slow
def test_a_run_reports_where_its_time_goes_and_traces_an_update(train):
    ended = train("Experiment.profile_update = 3", "Experiment.log_period = 2")
    assert list((train.path / "profile").rglob("*.xplane.pb"))
    lines = processes.log(train.path)
    for line in lines:
        for thread in ("learner", "actor"):
            shares = [v for name, v in line.items() if name.startswith(f"time/{thread}/")]
            assert sum(shares) == pytest.approx(1.0)
            assert 0.0 <= line[f"idle/{thread}"] <= 1.0
    assert lines[0]["lag/mean"] == 0.5  # the first rollout cannot be behind
    assert all(line["lag/1"] == 1.0 for line in lines[1:])
    assert re.search(r"(limits?|take turns): ", ended.stdout)
