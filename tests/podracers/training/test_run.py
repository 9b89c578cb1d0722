"""Tests of a run between its first update and its summary."""

import contextlib
import dataclasses
import functools
import io
import math
import os
import shutil
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from environments import catch
from podracers import anakin, errors, evaluation
from podracers.training import (
    checkpoint,
    config,
    experiment,
    run,
    run_directory,
    train,
    trained,
)
from tests import contract, documented, processes

POPULATION = (
    "Anakin.population = 2",
    "TOTAL_STEPS = 640",
    "Experiment.log_period = 4",
    "Experiment.evaluation_period = 6",
    "Experiment.checkpoint_period = 3",
)


class Stop:
    """Asks to stop once the run has logged so many lines."""

    def __init__(self, directory=None, lines=math.inf):
        self._directory = directory
        self._lines = lines

    def __bool__(self):
        path = self._directory and self._directory.path
        return bool(path) and processes.num_lines(path) >= self._lines


def _run(settings, directory, stop=None, **options):
    lines = []
    parts = settings.build()
    runner = run.Run(
        settings,
        parts,
        directory,
        stop=Stop() if stop is None else stop,
        print_line=lines.append,
        **options,
    )
    return runner.train(), lines


def _alone(settings, **options):
    """Returns the experiment without a population."""

    def alone(**arguments):
        return dataclasses.replace(settings.runner(**arguments), population=1)

    return dataclasses.replace(settings, runner=alone, **options)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = processes.config_file(tmp_path_factory.mktemp("run"))
    return experiment.load([str(file)], POPULATION)


@pytest.fixture(scope="module")
def population(settings, tmp_path_factory):
    """A run of two seeds, whose periods do not divide one another; its folder and summary."""
    directory = run_directory.RunDirectory(tmp_path_factory.mktemp("population"))
    directory.write(directory.config, config.text())
    summary, _ = _run(settings, directory)
    return directory, summary


def test_every_metric_is_documented_and_logged_at_the_end_of_every_period(population):
    directory, _ = population
    rows = processes.log(directory.path)
    assert [row["step"] // 64 for row in rows] == [3, 4, 6, 8, 9, 10]
    assert [row["step"] // 64 for row in rows if "evaluation/return" in row] == [6]
    names = {name for row in rows for name in row}
    assert "evaluation/return/seed_4" in names
    assert documented.undocumented(names | set(processes.TIMES)) == set()


def _events(directory, tag):
    """Returns steps and texts of one tag, over all starts of a run."""
    accumulator = event_accumulator.EventAccumulator(str(directory.path))
    accumulator.Reload()
    if tag not in accumulator.Tags()["tensors"]:
        return []
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto))
        for event in accumulator.Tensors(tag)
    ]


@pytest.fixture(name="own_configuration")
def _own_configuration():
    """gin's configuration is one for the whole process: the other tests' comes back afterwards."""
    with config.using(config.State({}, {}, set())):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("own_configuration")
def test_tensorboard_has_the_configuration_once(tmp_path):
    file = processes.config_file(tmp_path)
    bindings = ("Experiment.evaluation_period = 0", "PPO.epochs = 1", "PPO.num_minibatches = 1")
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()
    settings = experiment.load([str(file)], bindings)
    directory.write(directory.config, config.text())
    assert _run(settings, directory, stop=Stop(directory, lines=1))[0] is None
    used = directory.operative_config.read_text()
    settings = experiment.load([str(directory.config)], [])
    assert _run(settings, directory, stop=Stop(directory, lines=2), resume=True)[0] is None
    assert directory.operative_config.read_text() == used
    for name, text in {"config": directory.config.read_text(), "operative_config": used}.items():
        ((step, shown),) = _events(directory, name)
        assert step == 0
        assert shown.item().decode() == "".join(f"    {line}\n" for line in text.splitlines())
    assert len(_events(directory, "_hparams_/session_start_info")) == 1
    assert "PPO.learning_rate" in config.hyperparameters(used)
    # Another configuration is news.
    settings = experiment.load([str(directory.config)], ["PPO.entropy_cost = 0.5"])
    assert _run(settings, directory, stop=Stop(directory, lines=3), resume=True)[0] is None
    assert [step for step, _ in _events(directory, "operative_config")] == [0, 128]
    assert "ppo.PPO.entropy_cost = 0.5" in directory.operative_config.read_text()


def test_a_population_is_logged_by_member_and_on_average(population):
    directory, summary = population
    rows = processes.log(directory.path)
    for row in rows:
        members = [row[f"loss/value/seed_{seed}"] for seed in (3, 4)]
        assert row["loss/value"] == pytest.approx(np.mean(members))
        assert row["loss/value/std"] == pytest.approx(np.std(members))
        assert members[0] != members[1]
        for name in ("return", "length") if "evaluation/return" in row else ():
            greedy = [row[f"evaluation/greedy_{name}/seed_{seed}"] for seed in (3, 4)]
            assert row[f"evaluation/greedy_{name}"] == pytest.approx(np.mean(greedy))
    judged = [row for row in rows if "evaluation/return" in row]
    assert any(row["evaluation/greedy_return"] != row["evaluation/return"] for row in judged)
    for prefix in ("", "greedy_"):
        by_seed = summary["evaluation"][f"{prefix}return_by_seed"]
        assert by_seed.keys() == {"3", "4"}
        mean = pytest.approx(np.mean(list(by_seed.values())))
        assert summary["evaluation"][f"{prefix}return"] == mean
        assert summary["evaluation"][f"{prefix}episodes"] == 16
    assert summary["environment_steps"] == 2 * 640
    assert summary["compute_dtype"] == "float32"
    assert summary["matmul_precision"] == "default"


def test_an_agent_without_the_option_has_no_greedy_evaluation(settings):
    def foreign(spec):
        return contract.Recorder(settings.agent(spec=spec))

    assert settings.build().greedy_evaluator is not None
    assert dataclasses.replace(settings, agent=foreign).build().greedy_evaluator is None


@pytest.mark.slow
def test_a_member_of_a_population_is_the_run_of_its_seed(settings, population, tmp_path):
    directory, _ = population

    other = run_directory.RunDirectory(tmp_path)
    _run(_alone(settings, seed=4), other)
    for line, member in zip(processes.log(other.path), processes.log(directory.path), strict=True):
        # Batched over members, products are summed in another order.
        assert line["loss/value"] == pytest.approx(member["loss/value/seed_4"], rel=1e-3)


def test_the_operative_configuration_gives_the_same_experiment(population):
    directory, _ = population
    text = directory.operative_config.read_text()
    assert "ppo.PPO.normalize_advantages = True" in text  # a default that nobody bound
    original = experiment.load([str(directory.config)], [])
    again = experiment.load([str(directory.operative_config)], [])
    for field in dataclasses.fields(experiment.Experiment):
        if field.init and field.name not in ("agent", "environment", "runner"):
            assert getattr(again, field.name) == getattr(original, field.name)
    one, two = original.build(), again.build()
    for part in ("agent", "environment", "runner"):
        for field in dataclasses.fields(getattr(one, part)):
            values = [getattr(getattr(parts, part), field.name) for parts in (one, two)]
            if not callable(values[0]) and not dataclasses.is_dataclass(values[0]):
                assert values[0] == values[1], field.name


@pytest.mark.exact
def test_a_stopped_population_resumes_as_if_nothing_had_happened(settings, population, tmp_path):
    """Also where it had not saved yet, or was stopped before its first update."""
    directory = run_directory.RunDirectory(tmp_path)
    directory.write(directory.config, population[0].config.read_text())
    directory.metrics.write_text('{"step": 64, "loss/value": 1.0}\n')
    _, lines = _run(settings, directory, Stop(directory, 0), resume=True)
    assert "there is no checkpoint yet: starting from the beginning" in lines
    assert lines[-1] == "stopped at 0 steps: continue with --resume"
    summary, lines = _run(settings, directory, Stop(directory, 4), resume=True)
    assert summary is None
    assert lines[-1] == "stopped at 512 steps: continue with --resume"
    summary, lines = _run(settings, directory, resume=True)
    assert "resuming from step 512" in lines
    processes.assert_same_end(population[0].path, directory.path)
    assert summary["evaluation"] == population[1]["evaluation"]
    assert summary["random_policy_return"] == population[1]["random_policy_return"]


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.usefixtures("own_configuration")
def test_members_with_values_of_their_own_are_told_apart_and_resumed(tmp_path):
    bindings = (
        "Anakin.population = 4",
        "Anakin.population_values = {'ppo.PPO.learning_rate': (1e-4, 1e-2)}",
        "PPO.anneal_steps = None",
        "TOTAL_STEPS = 256",
        "Experiment.evaluation_period = 2",
    )
    file = str(processes.config_file(tmp_path))
    summaries = []
    for name, stops in (("whole", [math.inf]), ("stopped", [2, math.inf])):
        directory = run_directory.RunDirectory(tmp_path / name)
        directory.create()
        settings = experiment.load([file], bindings)
        directory.write(directory.config, config.text())
        for start, lines in enumerate(stops):
            settings = experiment.load([str(directory.config)], [])
            summary, _ = _run(settings, directory, Stop(directory, lines), resume=start > 0)
        summaries.append(summary)
    processes.assert_same_end(tmp_path / "whole", tmp_path / "stopped")
    (whole, resumed) = (summary["members"] for summary in summaries)
    assert resumed == whole
    assert [each["seed"] for each in whole] == [3, 4, 5, 6]
    rates = [each["values"] for each in whole]
    assert rates == [{"learning_rate": 1e-4}, {"learning_rate": 1e-2}] * 2
    by_seed = summaries[0]["evaluation"]["return_by_seed"]
    assert [each["return"] for each in whole] == list(by_seed.values())
    greedy = summaries[0]["evaluation"]["greedy_return_by_seed"]
    assert [each["greedy_return"] for each in whole] == list(greedy.values())
    for line in processes.log(tmp_path / "whole"):
        logged = [line[f"learning_rate/seed_{seed}"] for seed in (3, 4, 5, 6)]
        assert logged == pytest.approx([1e-4, 1e-2] * 2)
    # What was learnt is evaluated as it was, by member.
    policy = trained.load(tmp_path / "whole")
    judged = policy.parts.evaluate(policy.params, evaluation.run_key(3))
    assert judged.episodes.mean_return().tolist() == list(by_seed.values())
    shown = io.StringIO()
    directory = run_directory.RunDirectory(tmp_path / "whole")
    train._print_summary(summaries[0], directory, rich.console.Console(file=shown))
    rows = [line.split("│") for line in shown.getvalue().splitlines() if line.count("│") > 3]
    assert [[cell.strip() for cell in row[1:3]] for row in rows] == [
        *(["3", "0.0001"], ["4", "0.01"], ["5", "0.0001"], ["6", "0.01"])
    ]


class Harm:
    """Never asks to stop; does something once, when the run has logged so many lines."""

    def __init__(self, path, lines, harm):
        self._path, self._lines, self._harm = path, lines, harm

    def __bool__(self):
        if self._harm and processes.num_lines(self._path) >= self._lines:
            deadline = time.monotonic() + 60.0  # seconds
            while not any(path.name.isdigit() for path in (self._path / "checkpoints").iterdir()):
                assert time.monotonic() < deadline, "the run has not saved"
                time.sleep(0.01)
            harm, self._harm = self._harm, None
            harm(self._path)
        return False


def _move(path):
    path.rename(path.with_name("moved"))


def _remove(path):
    _move(path)
    while path.with_name("moved").exists():  # what is being written meanwhile
        shutil.rmtree(path.with_name("moved"), ignore_errors=True)


def _replace(path):
    _move(path)
    path.mkdir()


def _remove_checkpoints(path):
    _remove(path / "checkpoints")


def _replace_checkpoints(path):
    _move(path / "checkpoints")
    with contextlib.suppress(IsADirectoryError):  # which was made anew already
        (path / "checkpoints").write_text("not a folder")


def _remove_log(path):
    (path / "metrics.jsonl").unlink()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Six updates of either runner."""
    folder = tmp_path_factory.mktemp("short")
    extra = """
TOTAL_STEPS = 384
experiment.Experiment.evaluation_period = 4  # updates
experiment.Experiment.checkpoint_period = 2  # updates
"""
    files = {"anakin": [str(processes.config_file(folder, extra))]}
    files["sebulba"] = [*files["anakin"], str(processes.ROOT / "gin/runners/sebulba.gin")]
    with config.using(config.snapshot()):  # tests that change a copy of `settings` need its own
        return {runner: experiment.load(paths, ["SEED = 3"]) for runner, paths in files.items()}


_GONE = r"^'.*/run' was {} while the run wrote to it$"


# In the middle, and while it is evaluated for the last time.
@pytest.mark.parametrize(
    ("runner", "lines", "harm", "message"),
    [
        ("anakin", 3, _move, _GONE.format("moved to '.*/moved'")),
        ("sebulba", 6, _remove, _GONE.format("removed")),
        ("anakin", 3, _remove_checkpoints, "^'.*/run/checkpoints' was removed while the run wrote"),
        ("anakin", 3, _remove_log, r"^'.*/run/metrics\.jsonl' was removed while the run wrote to"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [
                ("anakin", 6, _move, _GONE.format("moved to '.*/moved'")),
                ("anakin", 3, _replace, _GONE.format("moved to '.*/moved'")),
                (
                    "anakin",
                    6,
                    _replace_checkpoints,
                    "^'.*/run/checkpoints' was moved to '.*/run/moved' wh",
                ),
            ]
        ),
    ],
)
def test_a_run_directory_that_vanishes_ends_the_run(
    short, tmp_path, caplog, runner, lines, harm, message
):
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()
    directory.write(directory.config, config.text())
    with pytest.raises(errors.RunFailure, match=message):
        _run(short[runner], directory, Harm(directory.path, lines, harm))
    assert not caplog.records  # it is said once
    assert not directory.summary.exists()
    run_directory.RunDirectory(tmp_path / "run").lock.require_free()


def test_a_lock_that_was_removed_is_taken_again(settings, tmp_path, monkeypatch):
    """And the summary names the commit at the start, not that of the checkout by the end."""
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()

    def harm(path):
        (path / ".lock").unlink()
        monkeypatch.setattr(run_directory, "provenance", lambda: {"commit": "later"})

    summary, _ = _run(settings, directory, Harm(directory.path, 2, harm))
    assert summary["commit"] not in ("later", None)
    assert (directory.path / ".lock").exists()


def test_a_second_run_is_kept_out_until_the_first_has_ended(settings, tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()
    refused = []

    def start_another(path):
        other = run_directory.RunDirectory(path)
        for resume in (True, False):
            with pytest.raises(errors.UserError, match=f"in use by process {os.getpid()} on host"):
                _run(settings, other, resume=resume)
            refused.append(resume)

    summary, _ = _run(settings, directory, Harm(directory.path, 2, start_another))
    assert summary and refused == [True, False]
    other = run_directory.RunDirectory(directory.path)
    changed = dataclasses.replace(settings, seed=7)
    with pytest.raises(errors.UserError, match="seed 3"):
        _run(changed, other, resume=True)
    run_directory.RunDirectory(directory.path).lock.acquire()  # a refused run does not keep it


@dataclasses.dataclass(frozen=True, eq=False)
class Poisoned(catch.Catch):
    """Its reward is not a number where the ball lands in the first column."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        poison = timestep.last() & (state.ball_column == 0)
        return state, timestep._replace(reward=jnp.where(poison, jnp.nan, timestep.reward))


def test_a_value_that_is_not_finite_names_metric_member_and_update(settings, tmp_path):
    directory = run_directory.RunDirectory(tmp_path)
    poisoned = dataclasses.replace(
        settings,
        environment=Poisoned,
        runner=functools.partial(settings.runner, population_values={"gamma": (0.9, 0.5)}),
        evaluation_period=0,
    )
    member = r"(seed 3 \(gamma = 0\.9\)|seed 4 \(gamma = 0\.5\))"
    expected = rf"the metric '\S+' of {member} became NaN or infinite at update [23] .*was saved"
    with pytest.raises(errors.RunFailure, match=expected):
        _run(poisoned, directory)
    assert processes.num_lines(directory.path) == 0


@pytest.mark.parametrize(
    ("binding", "message"),
    [("SEED = 7", "seed 3.*7"), ("Anakin.rollout_length = 32", "updates of 64.*with")],
)
def test_resuming_with_what_a_run_cannot_change_is_refused(settings, population, binding, message):
    directory, _ = population
    changed = experiment.load([str(directory.config)], [binding])
    with pytest.raises(errors.UserError, match=message):
        _run(changed, directory, resume=True)


def _score(directory, step):
    """Returns the score of a checkpoint as another process reads it."""
    reader = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    try:
        return reader._scores().get(step)
    finally:
        reader.close()


def test_a_copy_of_an_experiment_keeps_its_configuration(population, tmp_path):
    """Also after another one was loaded; and the last update, evaluated twice, has one score."""
    config_file = [str(population[0].config)]
    bindings = ["Experiment.evaluation_period = 5", "PPO.gamma = 0.5"]
    first = experiment.load(config_file, bindings)
    experiment.load(config_file, ["PPO.gamma = 0.75", "SEED = 8"])
    directory = run_directory.RunDirectory(tmp_path)
    summary, _ = _run(dataclasses.replace(first, checkpoint_period=5), directory)
    assert _score(directory, 640) == pytest.approx(summary["evaluation"]["return"])
    ((_, shown),) = _events(directory, "config")
    for text in (directory.operative_config.read_text(), shown.item().decode()):
        assert "PPO.gamma = 0.5" in text
        assert "SEED = 3" in text


def test_a_final_evaluation_that_was_stopped_counts_once_it_is_made_up_for(
    population, tmp_path, monkeypatch
):
    def stop(*_):
        raise evaluation.Stopped

    bindings = ["Experiment.evaluation_period = 0", "Experiment.checkpoint_period = 5"]
    changed = experiment.load([str(population[0].config)], bindings)
    directory = run_directory.RunDirectory(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(experiment.Parts, "evaluate", stop)
        assert _run(changed, directory)[0] is None
    assert (_score(directory, 640), directory.summary.exists()) == (None, False)
    summary, _ = _run(changed, directory, resume=True)
    assert summary["best_checkpoint"] == 640
    assert _score(directory, 640) == pytest.approx(summary["evaluation"]["return"])


def test_a_run_that_cannot_be_made_does_not_keep_its_directory(settings, tmp_path, monkeypatch):
    def fail(*_):
        raise errors.UserError("no room")

    directory = run_directory.RunDirectory(tmp_path)
    monkeypatch.setattr(anakin.Anakin, "describe", fail)
    with pytest.raises(errors.UserError, match="no room"):
        _run(settings, directory)
    run_directory.RunDirectory(tmp_path).lock.acquire()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_a_second_ctrl_c_interrupts(number, capsys):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with run.StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop.signal == number and stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert number.name in capsys.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_thread_can_train_without_signal_handlers():
    seen = []

    def enter():
        with run.StopRequest() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False]


def test_times_add_up_over_starts_without_the_first_dispatch_of_each(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    clocks = []
    for dispatches in ([(30.0, 64), (2.0, 64), (1.0, 128)], [(10.0, 64), (3.0, 64)]):
        clock = run.Clock()
        now[0] += 5.0  # such as restoring a checkpoint
        if clocks:
            clock.resume(clocks[-1].record() | {"wall": 38.0})
        for index, (seconds, steps) in enumerate(dispatches):
            now[0] += seconds
            clock.add_dispatch(seconds, steps)
            if index == 0:
                assert math.isnan(clock.latest_rate)
                assert clocks or math.isnan(clock.rate)
        clocks.append(clock)
        now[0] += 1000.0  # between two starts
    assert (clocks[0].rate, clocks[0].latest_rate, clocks[0].first_dispatch) == (64.0, 128.0, 30.0)
    assert clocks[1].rate == (64 + 128 + 64) / (2.0 + 1.0 + 3.0)
    assert clocks[1].first_dispatch == 40.0
    assert clocks[1].wall == 38.0 + 18.0 + 1000.0
