"""Sebulba's runs end well, whatever happens to them: real processes, and simulators that fail."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import time

import jax
import pytest

from podracers import errors
from podracers.supervision import pipeline
from podracers.training import experiment, manifest, run, run_directory
from tests import faults, processes, streams

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
experiment.Experiment.evaluation_max_steps = 10
experiment.Experiment.checkpoint_period = 2  # updates

faults.Faulty.inner = @catch.Catch()
sebulba.Sebulba.actor_devices = (0,)
sebulba.Sebulba.learner_devices = (1, 2)
sebulba.Sebulba.batches_per_actor = 2
"""
# CartPole in processes of their own.
WORKERS = (
    "Faulty.inner = @gymnasium.Gymnasium()",
    "Gymnasium.env_id = 'CartPole-v1'",
    "Gymnasium.vectorization = 'async'",
    "Experiment.evaluation_period = 0",  # which would start processes each time
)
PATIENCE = 120.0  # seconds that a loaded machine may take for what takes a moment


@pytest.fixture(scope="module", name="config")
def _config(tmp_path_factory):
    path = tmp_path_factory.mktemp("sebulba") / "faulty.gin"
    path.write_text(CONFIG)
    return path


def _start(*arguments, bindings=()):
    """Starts a training run in a session of its own, to find whatever it leaves behind."""
    flags = [flag for binding in bindings for flag in ("--gin_bindings", binding)]
    return processes.start(
        "train",
        *arguments,
        *flags,
        environment={"PYTHONPATH": str(processes.ROOT)},
        start_new_session=True,
    )


def _finish(process):
    """Waits for the end, and for every process that was started on the way."""
    ended = processes.finish(process)
    limit = time.monotonic() + 10.0
    while left := _session(process.pid):
        assert time.monotonic() < limit, f"left behind: {left}"
        time.sleep(0.05)
    return ended


def _run(*arguments, **options):
    return _finish(_start(*arguments, **options))


def _session(leader):
    """Returns the command lines of the living processes of a session."""
    commands = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == leader and state != "Z":
                commands.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended
            continue
    return commands


def _workers(process):
    return [command for command in _session(process.pid) if "async_vector.work(" in command]


def _signal(process, number, when):
    """Signals the whole session, as Ctrl-C in a terminal does, once something is true."""
    limit = time.monotonic() + PATIENCE
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)
    os.killpg(process.pid, number)


def _checkpoints(path):
    """Returns the steps of the checkpoints, all of which have to be whole."""
    folders = [each for each in (path / "checkpoints").iterdir() if each.name.isdigit()]
    for folder in folders:
        manifest.verify(folder, ("state", "params", "metadata"))
    return sorted(int(folder.name) for folder in folders)


def _resume(path, *bindings):
    resumed = _run("--run_dir", path, "--resume", bindings=bindings)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((path / "summary.json").read_text())["updates"] == 12
    steps = [line["step"] for line in processes.log(path)]
    assert steps == sorted(set(steps)) and steps[-1] == 768
    return resumed


def _assert_traceback(ended, *order):
    """Checks that a run failed with a traceback in which these follow one another."""
    assert ended.returncode == 1, ended.stderr
    places = [ended.stderr.find(phrase) for phrase in ("Traceback", *order)]
    assert places == sorted(places) and places[0] >= 0, ended.stderr


# Failures.


@pytest.mark.slow
def test_an_environment_that_raises(config, tmp_path):
    path = tmp_path / "run"
    fault = ("Faulty.what = 'raise'", "Faulty.step = 61", "Faulty.stream = 5")  # of update 7
    ended = _run("--gin_file", config, "--run_dir", path, bindings=fault)
    _assert_traceback(
        ended,
        "SimulatorError: the simulator broke in recv at step 61",
        "direct cause",
        "WorkerError: actor 0 failed: SimulatorError",
    )
    saved = _checkpoints(path)
    assert saved[-1] in (256, 384)  # the update before may not have been learnt from
    resumed = _resume(path, "Faulty.what = ''")
    assert f"resuming from step {saved[-1]}" in resumed.stdout


@pytest.mark.slow
def test_an_environment_that_hangs(config, tmp_path):
    path, marker = tmp_path / "run", tmp_path / "marker"
    fault = ("Faulty.what = 'hang'", "Faulty.step = 61", f"Faulty.marker = '{marker}'")
    process = _start(
        *("--gin_file", config, "--run_dir", path), bindings=("Sebulba.timeout = 4.0", *fault)
    )
    while not marker.exists() and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    ended = _finish(process)
    assert 3.0 < time.monotonic() - began < PATIENCE / 2
    _assert_traceback(ended, "actor 0 hangs: ", "'environment step'", "plan.over.wait()")
    assert _checkpoints(path)[-1] in (256, 384)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "who"),
    [
        (faults.MAKE, "actor"),
        (faults.MAKE, "evaluation"),
        (faults.RECV, "actor"),
        (faults.CLOSE, "actor"),
    ],
)
def test_an_environment_that_hangs_and_lets_nobody_else_run(config, tmp_path, where, who):
    """Not even the thread that looks for what hangs."""
    path, marker = tmp_path / "run", tmp_path / "marker"
    fault = (
        *("Faulty.what = 'seize'", f"Faulty.where = '{where}'", f"Faulty.who = '{who}'"),
        *(f"Faulty.marker = '{marker}'", "Faulty.child = True", "Sebulba.timeout = 4.0"),
    )
    process = _start("--gin_file", config, "--run_dir", path, bindings=fault)
    while not marker.exists() and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    ended = _finish(process)
    assert 3.0 < time.monotonic() - began < PATIENCE / 2
    assert ended.returncode == 1, ended.stderr
    assert "failed: for " in ended.stderr and "no thread of Python has run" in ended.stderr
    assert "in _strike" in ended.stderr  # where it hangs
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_environment_that_hangs_while_it_is_made(config, tmp_path):
    path = tmp_path / "run"
    fault = ("Faulty.what = 'hang'", "Faulty.where = 'make'", "Sebulba.timeout = 3.0")
    ended = _run("--gin_file", config, "--run_dir", path, bindings=fault)
    _assert_traceback(ended, "actor 0 hangs: ", "'starting', and the limit is 3 s")


@pytest.mark.slow
def test_an_evaluation_that_hangs(config, tmp_path):
    path = tmp_path / "run"
    fault = ("Faulty.what = 'hang'", "Faulty.step = 5", "Faulty.who = 'evaluation'")
    ended = _run(
        *("--gin_file", config, "--run_dir", path), bindings=("Sebulba.timeout = 4.0", *fault)
    )
    _assert_traceback(ended, "evaluation hangs: ", "plan.over.wait()")
    assert _checkpoints(path)[-1] == 256


@pytest.mark.slow
def test_simulators_that_hang_in_closing_do_not_spoil_the_end(config, tmp_path):
    path = tmp_path / "run"
    fault = ("Faulty.what = 'hang'", "Faulty.where = 'close'", "Faulty.child = True")
    ended = _run(
        *("--gin_file", config, "--run_dir", path), bindings=("Sebulba.timeout = 4.0", *fault)
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((path / "summary.json").read_text())["updates"] == 12
    assert _checkpoints(path)[-1] == 768


@pytest.mark.slow
def test_worker_processes_that_hang_or_die(config, tmp_path):
    phrases = {"hang": "actor 0 hangs: ", "exit": "worker process 0 ended with exit code 7"}
    game = (
        *WORKERS,
        "Gymnasium.env_id = 'tests.environments.own_games:Own/Faulty-v0'",
        "Sebulba.timeout = 5.0",
    )
    started = {
        fault: _start(
            *("--gin_file", config, "--run_dir", tmp_path / fault),
            bindings=(*game, f"Gymnasium.options = {{'fault': '{fault}'}}"),
        )
        for fault in phrases
    }
    for fault, process in started.items():
        _assert_traceback(_finish(process), phrases[fault])


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_that_cannot_be_closed_fail_a_run_in_one_line_and_spoil_nothing(
    config, tmp_path, vectorization
):
    path = tmp_path / "run"
    game = (
        *("Faulty.inner = @gymnasium.Gymnasium()", f"Gymnasium.vectorization = '{vectorization}'"),
        "Gymnasium.env_id = 'tests.environments.own_games:Own/Unfit-v0'",
        "Gymnasium.options = {'unclosed': True}",
    )
    ended = _run("--gin_file", config, "--run_dir", path, bindings=game)
    assert ended.returncode == 1, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "closing" in line]
    assert len(said) == 1, ended.stderr
    assert re.search(
        r"failed: Own/Unfit-v0: closing stream \d: ArithmeticError: it is not", said[0]
    )
    assert "Traceback" not in ended.stderr
    assert json.loads((path / "summary.json").read_text())["updates"] == 12
    assert _checkpoints(path)[-1] == 768


@pytest.mark.slow
def test_a_learner_that_meets_a_nan(config, tmp_path):
    path = tmp_path / "run"
    fault = ("Faulty.what = 'nan'", "Faulty.step = 61")
    ended = _run("--gin_file", config, "--run_dir", path, bindings=fault)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.fullmatch(
        r"failed: the metric '\S+' became NaN or infinite at update 7 \(448 steps\); the newest "
        r"checkpoint is of step 384",
        ended.stderr.splitlines()[-1],
    )
    assert _checkpoints(path)[-1] == 384


# Signals.


_MAKING, _COLLECTING = ("make", 0, "actor"), ("recv", 61, "actor")
_EVALUATING = ("recv", 5, "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "where", "step", "who"),
    [
        (signal.SIGINT, *_COLLECTING),
        (signal.SIGTERM, *_EVALUATING),
        (signal.SIGTERM, *_MAKING),
        (signal.SIGINT, *_MAKING),
        (signal.SIGTERM, *_COLLECTING),
        (signal.SIGINT, *_EVALUATING),
    ],
)
def test_a_signal_ends_a_run_in_order(config, tmp_path, number, where, step, who):
    path, marker = tmp_path / "run", tmp_path / "marker"
    slow = (
        *("Faulty.what = 'slow'", "Faulty.seconds = 0.2", f"Faulty.marker = '{marker}'"),
        *(f"Faulty.where = '{where}'", f"Faulty.step = {step}", f"Faulty.who = '{who}'"),
    )
    process = _start("--gin_file", config, "--run_dir", path, bindings=slow)
    _signal(process, number, marker.exists)
    stopped = _finish(process)
    assert stopped.returncode == 0, stopped.stderr
    assert "Traceback" not in stopped.stderr
    steps = int(re.search(r"stopped at ([\d,]+) steps", stopped.stdout)[1].replace(",", ""))
    assert _checkpoints(path)[-1] == steps
    if who == "evaluation":  # which was not waited for
        assert "evaluation/return" not in processes.log(path)[-1]
    resumed = _resume(path, "Faulty.what = ''")
    assert f"resuming from step {steps:,}" in resumed.stdout


@pytest.mark.slow
def test_an_interrupt_while_worker_processes_start_reaches_only_their_parent(config, tmp_path):
    path = tmp_path / "run"
    process = _start("--gin_file", config, "--run_dir", path, bindings=WORKERS)
    _signal(process, signal.SIGINT, lambda: _workers(process))
    stopped = _finish(process)
    assert stopped.returncode == 0, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert _checkpoints(path)


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(config, tmp_path):
    path, marker = tmp_path / "run", tmp_path / "marker"
    hang = ("Faulty.what = 'hang'", "Faulty.step = 61", f"Faulty.marker = '{marker}'")
    process = _start("--gin_file", config, "--run_dir", path, bindings=hang)
    _signal(process, signal.SIGINT, marker.exists)
    began = time.monotonic()
    time.sleep(1.0)
    _signal(process, signal.SIGINT, lambda: True)
    ended = _finish(process)
    assert time.monotonic() - began < PATIENCE / 2
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "interrupted"
    assert _checkpoints(path)[-1] in (256, 384)


@pytest.mark.parametrize(
    ("bindings", "num_workers"), [((), 0), pytest.param(WORKERS, 2, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_takes_its_workers_along_and_resumes(
    config, tmp_path, bindings, num_workers
):
    path = tmp_path / "run"
    process = _start("--gin_file", config, "--run_dir", path, bindings=bindings)
    workers = []

    def learns():
        workers[:] = _workers(process)
        return processes.num_lines(path) >= 5

    killed = processes.interrupt(process, signal.SIGKILL, learns)
    assert killed.returncode == -signal.SIGKILL
    assert len(workers) == num_workers
    _finish(process)
    saved = _checkpoints(path)
    resumed = _resume(path)
    assert f"resuming from step {saved[-1]}" in resumed.stdout


def test_a_resumed_run_has_the_state_that_was_saved(config, tmp_path):
    loaded = experiment.load([str(config)], [])
    directory = run_directory.RunDirectory(tmp_path)

    class Stop:
        def __bool__(self):
            return processes.num_lines(tmp_path) >= 7

    def make(**options):
        return run.Run(loaded, loaded.build(), directory, say=lambda _: None, **options)

    first = make(stop=Stop())
    assert first.train() is None
    saved = streams.to_numpy(first._state)
    assert saved.update >= 7
    second = make(stop=(), resume=True)
    streams.assert_same(streams.to_numpy(second._state), saved)
    assert jax.tree.map(lambda x: x.sharding, second._state) == jax.tree.map(
        lambda x: x.sharding, first._state
    )
    assert second.train()["updates"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_stopped_at_random_moments_gets_to_its_end(config, tmp_path, seed):
    path = tmp_path / "run"
    chance = random.Random(seed)
    for _ in range(6):
        started = (
            ("--run_dir", path, "--resume")
            if (path / "config.gin").exists()
            else (*("--gin_file", config, "--run_dir", path),)
        )
        process = _start(*started, bindings=WORKERS if seed == 0 else ())
        number = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
        time.sleep(chance.uniform(0.0, 12.0))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        ended = _finish(process)
        if "saving a checkpoint" in ended.stderr:
            assert ended.returncode == 0, ended.stderr
            assert "Traceback" not in ended.stderr
        elif ended.returncode not in (0, -number):  # in the middle of Python's imports
            assert ended.stdout == "", ended
        if (path / "checkpoints").exists():
            _checkpoints(path)
    if (path / "config.gin").exists():
        _resume(path)


def test_what_fails_while_a_run_leaves_hides_no_first_cause(config, tmp_path, caplog):
    loaded = experiment.load([str(config)], ["Faulty.what = 'raise'", "Faulty.step = 20"])
    directory = run_directory.RunDirectory(tmp_path)
    trainer = run.Run(loaded, loaded.build(), directory, stop=(), say=lambda _: None)
    close = trainer._checkpointer.close

    def fail():
        close()
        raise errors.RunFailure("could not save")

    trainer._checkpointer.close = fail
    with pytest.raises(pipeline.WorkerError):
        trainer.train()
    assert "could not save" in caplog.text


# What a run says of itself.


@pytest.mark.slow
def test_a_run_tells_where_its_time_goes_and_traces_an_update(config, tmp_path):
    path = tmp_path / "run"
    ended = _run(
        *("--gin_file", config, "--run_dir", path),
        bindings=("Experiment.profile_update = 3", "Experiment.log_period = 2"),
    )
    assert ended.returncode == 0, ended.stderr
    assert list((path / "profile").rglob("*.xplane.pb"))
    lines = processes.log(path)
    for line in lines:
        for thread in ("learner", "actor"):
            shares = [v for name, v in line.items() if name.startswith(f"time/{thread}/")]
            assert sum(shares) == pytest.approx(1.0)
            assert 0.0 <= line[f"idle/{thread}"] <= 1.0
    assert lines[0]["lag/mean"] == 0.5  # the first rollout has nothing to be behind of
    assert all(line["lag/1"] == 1.0 for line in lines[1:])
    assert re.search(r"(limits?|take turns): ", ended.stdout)


# Mistakes.


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Sebulba.num_envs = 7", "does not divide .*: use 6 or 8"),
        ("Sebulba.lag = -1", r"Sebulba\.lag: expected an int of at least 0, got -1"),
        ("Sebulba.timeout = 0", r"Sebulba\.timeout: expected seconds, got 0"),
    ],
)
def test_a_mistake_is_one_line(config, binding, message):
    with pytest.raises(errors.UserError, match=f"^[^\n]*{message}[^\n]*$"):
        loaded = experiment.load([str(config)], [binding])
        experiment.check(loaded.build(), loaded.seed)


@pytest.mark.slow
def test_mistakes_end_a_run_before_it_leaves_anything(config, tmp_path):
    host = ("--gin_file", "gin/environments/envpool_cartpole.gin")
    anakin = ("--gin_file", "gin/experiments/cartpole_impala.gin")
    sebulba = ("--gin_file", "gin/runners/sebulba.gin")
    cases = [
        (
            ("--gin_file", config),
            "Sebulba.actor_devices = (0, 7)",
            ("Sebulba.actor_devices = (0, 7)", "4 devices", "no device 7"),
        ),
        ((*anakin, *sebulba, *host), "EnvPool.task_id = 'CartPol-v1'", ("'CartPole-v1'",)),
        (
            (*anakin, *host, "--runner", "anakin"),
            "SEED = 1",
            ("runs on the host", "--runner sebulba", "@cartpole.CartPole"),
        ),
    ]
    started = [
        _start(*files, "--run_dir", tmp_path / "run", bindings=(binding,))
        for files, binding, _ in cases
    ]
    for process, (_, _, phrases) in zip(started, cases):
        processes.assert_mistake(_finish(process), *phrases)
    assert os.listdir(tmp_path) == []
