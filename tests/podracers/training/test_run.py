"""Tests of a run between its first update and its summary."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util import tensor_util

from environments import cartpole, catch
from podracers import anakin, errors, evaluation, metrics, types
from podracers.checkpoints import checkpoint
from podracers.commands import train
from podracers.supervision import watchdog
from podracers.training import (
    clock,
    experiment,
    initial_run,
    run,
    run_directory,
    stop_request,
    trained,
)
from podracers.training import summary as summary_lib
from tests import documented, processes

RATES = (1e-4, 1e-2)
POPULATION = (
    "Anakin.population = 2",
    f"Anakin.population_values = {{'ppo.PPO.learning_rate': {RATES}}}",
    "PPO.anneal_steps = None",
    "TOTAL_STEPS = 640",
    "Experiment.log_period = 4",
    "Experiment.evaluation_period = 6",
    "Experiment.checkpoint_period = 3",
)


class At:
    """A stop request that acts once, when the run has logged so many lines.

    Without an action it becomes true, `later` further requests; else it stays false.
    """

    def __init__(self, path=None, lines=math.inf, action=None, later=0):
        self._path, self._lines, self._action, self._later = path, lines, action, later

    def __bool__(self):
        if self._path is None or processes.num_lines(self._path) < self._lines:
            return False
        self._later -= 1
        if self._later >= 0:
            return False
        if self._action is None:
            return True
        folders = (self._path / "checkpoints").iterdir
        processes.wait_for(lambda: any(path.name.isdigit() for path in folders()))
        self._lines = math.inf
        self._action(self._path)
        return False


def _run(settings, directory, stop=None, parts=None, **options):
    """Trains; returns the summary and the printed lines."""
    lines = []
    stop, parts = At() if stop is None else stop, parts or settings.build()
    runner = run.Run(settings, parts, directory, stop=stop, print_line=lines.append, **options)
    return runner.train(), lines


def _directory(path):
    """Returns the run directory in a folder that is there."""
    return run_directory.RunDirectory(path)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = processes.config_file(tmp_path_factory.mktemp("run"), processes.REPORTING)
    return experiment.load([str(file)], POPULATION)


@pytest.fixture(scope="module")
def parts(settings):
    """The parts of the population, which all its runs share: tracing a program takes seconds."""
    return settings.build()


@pytest.fixture(scope="module")
def population(settings, parts, tmp_path_factory):
    """A run of two seeds, whose periods do not divide one another; its folder and summary."""
    directory = run_directory.RunDirectory(tmp_path_factory.mktemp("population"))
    directory.config.write_text(settings.text())
    compiled = []

    def count(event, _, **of):
        if "backend_compile" in event:
            compiled.append(of["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(count)
    summary, _ = _run(settings, directory, parts=parts)
    jax.monitoring.unregister_event_duration_listener(count)
    # The thread that compiles and the calls share programs; evaluations are sampled and greedy. An
    # earlier test may have compiled some of them.
    assert compiled.count("jit(_step_shard)") <= 1
    assert compiled.count("jit(run)") <= 2
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


def test_a_population_is_logged_by_member_and_on_average(population, capsys):
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
            returns = [row[f"evaluation/{name}/seed_{seed}"] for seed in (3, 4)]
            success = [row[f"evaluation/success/seed_{seed}"] for seed in (3, 4)]
            assert name == "length" or success == pytest.approx(returns)
        assert row["episode/success/seed_4"] == pytest.approx(row["episode/return/seed_4"])
        logged = [row[f"learning_rate/seed_{seed}"] for seed in (3, 4)]
        assert logged == pytest.approx(RATES)
    judged = [row for row in rows if "evaluation/return" in row]
    assert any(row["evaluation/greedy_return"] != row["evaluation/return"] for row in judged)
    results, members = summary["evaluation"], summary["members"]
    assert [member["seed"] for member in members] == [3, 4]
    assert [member["values"]["learning_rate"] for member in members] == list(RATES)
    for kind in ("return", "greedy_return"):
        by_seed = results[f"{kind}_by_seed"]
        assert by_seed == {str(member["seed"]): member[kind] for member in members}
        assert results[kind] == pytest.approx(np.mean(list(by_seed.values())))
        mean = results[kind.replace("return", "metrics")]
        assert mean == {"cue": pytest.approx(0.5, abs=0.4), "success": pytest.approx(results[kind])}
    assert (results["episodes"], results["greedy_episodes"]) == (16, 16)
    assert summary["environment_steps"] == 2 * 640
    assert (summary["compute_dtype"], summary["matmul_precision"]) == ("float32", "default")
    more = {"speed": 7.0, "achievement/dig": 1.0}
    numbers = {kind: results[kind] | more for kind in ("metrics", "greedy_metrics")}
    train._print_summary(summary | {"evaluation": results | numbers}, directory)
    row = rf"\n  seed 4, learning_rate = 0\.01 +{members[1]['return']:.2f}\n"
    printed = capsys.readouterr().out
    assert re.search(row, printed)
    assert re.search(rf"\nsuccess +{results['return']:.4g}, greedy ", printed)
    assert re.search(r"\nspeed +7, greedy 7\n", printed) and "achievement" not in printed
    policies = trained.load_all(directory.path), trained.load(directory.path, member=1)
    judged, alone = (
        policy.parts.evaluate(policy.params, evaluation.run_key(3)).episodes.mean_return()
        for policy in policies
    )
    assert judged.tolist() == list(results["return_by_seed"].values())
    assert alone == judged[1] and policies[1].parts.agent.learning_rate == RATES[1]
    for member in (None, 2):
        with pytest.raises(errors.UserError, match=rf"member: expected .*, 0 to 1, got {member}"):
            trained.load(directory.path, member=member)
    bindings = ["Anakin.population = 1", f"Experiment.initial_run = '{directory.path}'"]
    bindings += ["Anakin.population_values = {}"]
    alone = experiment.load([str(directory.config)], bindings)
    with pytest.raises(errors.UserError, match="expected a population of 1, got 2"):
        initial_run.load(alone, alone.build())


def test_tensorboard_has_a_row_of_hyper_parameters_for_each_member(population):
    directory, summary = population
    rows, members = processes.log(directory.path), summary["members"]
    for member, row in zip(members, ("seed_3,learning_rate=0.0001", "seed_4,learning_rate=0.01")):
        events = event_accumulator.EventAccumulator(str(directory.path / row)).Reload()
        shown = [event.value for event in events.Scalars("loss/value")]
        assert shown == pytest.approx([x[f"loss/value/seed_{member['seed']}"] for x in rows])
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        trial = metadata.parse_session_start_info_plugin_data(content).hparams
        assert trial["PPO.learning_rate"].number_value == member["values"]["learning_rate"]
        assert trial["Experiment.seed"].number_value == member["seed"]
    tags = event_accumulator.EventAccumulator(str(directory.path)).Reload().Tags()
    assert not any("seed_" in tag for tag in tags["scalars"])
    assert "_hparams_/session_start_info" not in tags["tensors"]


def test_paths_in_the_results_are_neither_markup_nor_broken(population, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = f"runs/lr[a=1]/x[/b]:smile:/{'y' * 90} z"
    train._print_summary(population[1], run_directory.RunDirectory(path))
    assert re.search(rf"\nfiles +{re.escape(path)}\n", capsys.readouterr().out)


def test_the_operative_configuration_gives_the_same_experiment(population):
    directory, _ = population
    text = directory.operative_config.read_text()
    assert "ppo.PPO.normalize_advantages = True" in text  # an unbound default
    original = experiment.load([str(directory.config)], [])
    again = experiment.load([str(directory.operative_config)], [])
    pairs = [(original, again), *zip(original.build()[:3], again.build()[:3])]
    for one, two in pairs:
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if (
                field.name != "_texts"
                and not callable(value)
                and not dataclasses.is_dataclass(value)
            ):
                assert value == getattr(two, field.name), field.name


def test_a_run_prints_its_schedule_and_that_evaluations_play_another_environment(
    settings, parts, tmp_path
):
    periods = {"log_period": 3, "evaluation_period": None, "checkpoint_period": None}
    candidate, directory = dataclasses.replace(settings, **periods), _directory(tmp_path)
    evaluator = dataclasses.replace(parts.evaluator, environment=cartpole.CartPole())
    other = parts._replace(evaluator=evaluator, num_updates=118)
    _, lines = _run(candidate, directory, At(tmp_path, 0), other)
    assert "evaluations: in the environment's evaluation_environment" in lines
    every = "every 6 updates (384 agent steps) and at the end"
    saves = "every 5 minutes, after evaluations and at the end"
    assert f"evaluates {every}; saves {saves}" in lines


@pytest.mark.exact
def test_a_stopped_population_resumes_as_if_nothing_had_happened(
    settings, parts, population, tmp_path, monkeypatch
):
    """Also if it had not saved yet, or was stopped before its first update or within a period."""
    directory = run_directory.RunDirectory(tmp_path)
    directory.config.write_text(population[0].config.read_text())
    directory.metrics.write_text('{"step": 64, "loss/value": 1.0}\n')
    _, lines = _run(settings, directory, At(tmp_path, 0), parts, resume=True)
    assert "evaluations: in the environment's evaluation_environment" not in lines
    assert "there is no checkpoint yet: starting from the beginning" in lines
    assert lines[-1] == "stopped at 0 steps: continue with --resume"
    with monkeypatch.context() as patched:
        patched.setattr(run, "_DISPATCH_TIME", 0.0)  # one update
        stop = At(tmp_path, 3, later=1)
        summary, lines = _run(settings, directory, stop, parts, resume=True)
    assert summary is None
    assert processes.num_lines(directory.path) == 3
    assert lines[-1] == "stopped at 448 steps: continue with --resume"
    summary, lines = _run(settings, directory, parts=parts, resume=True)
    assert "resuming from step 448" in lines
    every = "6 updates (384 agent steps) and at the end; saves every 3 updates (192 agent steps)"
    assert f"evaluates every {every}, after evaluations and at the end" in lines
    processes.assert_same_end(population[0].path, directory.path)
    assert summary["evaluation"] == population[1]["evaluation"]
    assert summary["random_policy_return"] == population[1]["random_policy_return"]
    saved = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    times = saved.restore(None, "params")[2]["clock"]
    assert times["steps"] == 8 * 64  # updates but the first one of each start


def test_contexts_of_jax_around_a_run_reach_the_traces_of_all_its_programs(
    settings, parts, tmp_path, monkeypatch
):
    """They are those of a thread. A stop in the first dispatch begins no compilation after it.

    Waiting for the update's compilation counts as a part of the first dispatch.
    """
    contexts, times, scheduled = {}, [], threading.Event()

    def record(owner, name):
        original = getattr(owner, name)

        def recording(*arguments):
            contexts[name] = jax.config.jax_log_compiles
            return original(*arguments)

        monkeypatch.setattr(owner, name, recording)

    record(anakin.Anakin, "trace")
    record(anakin.Anakin, "init")
    record(anakin.Anakin, "step")
    record(evaluation.Evaluator, "lower")

    def compile_slowly():
        assert scheduled.wait(60)
        time.sleep(0.2)

    ahead = mock.Mock(side_effect=compile_slowly)
    monkeypatch.setattr(jax.stages.Lowered, "compile", ahead)
    monkeypatch.setattr(run.Run, "_schedule", lambda _: scheduled.set() or "")  # the wait follows
    monkeypatch.setattr(
        clock.Clock, "add_dispatch", lambda self, *_: times.append(self.first_dispatch)
    )
    with jax.log_compiles():
        _, lines = _run(settings, _directory(tmp_path), At(tmp_path, 0, later=1), parts)
    assert lines[-1] == "stopped at 64 steps: continue with --resume"
    assert contexts == dict.fromkeys(("trace", "init", "step", "lower"), True)
    ahead.assert_called_once_with()  # of the update
    assert times[0] >= 0.2


EVOLVING = (
    *("TOTAL_STEPS = 98_304", "NUM_ENVS = 16", "ROLLOUT_LENGTH = 64", "PPO.anneal_steps = None"),
    *("Anakin.num_devices = 1", "Anakin.population = 4", "Anakin.pbt_period = 8"),
    "Anakin.population_values = {'learning_rate': (1e-6, 1e-6, 1e-6, 1e-3)}",
    "Anakin.pbt_ranges = {'PPO.learning_rate': (1e-6, 3e-3)}",
    *("Experiment.log_period = 12", "Experiment.evaluation_period = 0"),
    *("Experiment.checkpoint_period = 12", "Experiment.keep_latest = 9"),
    "Experiment.evaluation_episodes = 32",
)


@pytest.mark.slow
@pytest.mark.exact
def test_an_evolving_population_learns_and_resumes_and_its_lineage_is_logged(tmp_path):
    """Three of four learning rates are hopeless."""
    settings = experiment.load(["gin/experiments/cartpole_ppo.gin"], EVOLVING)
    parts, paths = settings.build(), (tmp_path / "whole", tmp_path / "resumed")
    summary = run.train(settings, paths[0])
    members = summary["members"]
    assert sorted(row["return"] for row in members)[1] > 300, members  # of 500
    rows, names = processes.log(paths[0]), [f"seed_{seed}" for seed in range(4)]
    assert documented.undocumented({name for row in rows for name in row}) == set()
    assert [row["step"] // 1024 for row in rows][:4] == [8, 12, 16, 24]
    steps = [row["step"] // 1024 for row in rows if row["pbt/source/seed_0"] is not None]
    assert steps and not any(step % 8 for step in steps)
    final = {
        f"pbt/learning_rate/seed_{row['seed']}": row["values"]["learning_rate"] for row in members
    }
    copies = 0
    for row, following in zip(rows, [*rows[1:], final]):
        rates, changed = (
            [x[f"pbt/learning_rate/{name}"] for name in names] for x in (row, following)
        )
        sources = [row[f"pbt/source/{name}"] for name in names]
        for index, source in enumerate(sources):
            is_copy = source not in (None, index)
            copies += is_copy
            assert (rates[index] == pytest.approx(changed[index], rel=1e-5)) == (not is_copy)
    assert copies >= 4
    # It resumes from the middle of a period.
    shutil.copytree(*paths)
    for folder in (paths[1] / "checkpoints").iterdir():
        if int(folder.name) > 36 * 1024:
            shutil.rmtree(folder)
    resumed, _ = _run(settings, _directory(paths[1]), parts=parts, resume=True)
    processes.assert_same_end(*paths)
    assert resumed["members"] == members
    policy = trained.load(paths[0], member=2)
    assert policy.parts.agent.learning_rate == members[2]["values"]["learning_rate"]
    played = policy.parts.evaluate(policy.params, evaluation.run_key(0)).episodes.mean_return()
    assert played == pytest.approx(members[2]["return"])
    everyone = trained.load_all(paths[0])
    judged = everyone.parts.evaluate(everyone.params, evaluation.run_key(0)).episodes.mean_return()
    assert judged.tolist() == pytest.approx([row["return"] for row in members])
    evaluator = dataclasses.replace(everyone.parts.evaluator, max_steps=2)
    assert len(evaluator.film(everyone.params, evaluation.run_key(0))) == 3


def test_a_function_sees_adds_to_and_ends_the_log(settings, parts, population, tmp_path):
    """A run that it has ended stays so, unless it is resumed without the function."""
    directory, rows = run_directory.RunDirectory(tmp_path), []

    def end(line):
        rows.append(dict(line))
        line["own/number"] = line["step"] / 2
        return line["step"] == 4 * 64

    ending = dataclasses.replace(settings, on_log=end)
    for resume in (False, True):
        summary, lines = _run(ending, directory, parts=parts, resume=resume)
        assert (summary["updates"], summary["environment_steps"]) == (4, 2 * 256)
        assert [row["step"] for row in rows] == [192, 256]
        assert _score(directory, 256) == pytest.approx(summary["evaluation"]["return"])
        assert ("Experiment.on_log ends the run at 256 steps" in lines) == (not resume)
    _run(settings, directory, parts=parts, resume=True)
    logged = processes.log(directory.path)
    assert [row.pop("own/number", None) for row in logged] == [96, 128, None, None, None, None]
    assert logged == processes.log(population[0].path)


def test_a_function_of_the_log_that_returns_or_adds_no_number_is_refused(settings, parts, tmp_path):
    for answer, number, got in (("stop", 1.0, "'stop'"), (None, "x", "'own/x', got 'x'")):
        mistaken = dataclasses.replace(settings, on_log=lambda line, answer=answer: answer)
        trainer = run.Run(mistaken, parts, _directory(tmp_path), stop=())
        with trainer._exits, pytest.raises(errors.UserError, match=f"on_log: expected .*{got}"):
            trainer._call_on_log({"step": 64, "own/x": number})


def _remove(path):
    path.rename(path.with_name("moved"))
    while path.with_name("moved").exists():  # the run writes meanwhile
        shutil.rmtree(path.with_name("moved"), ignore_errors=True)


@pytest.mark.slow
def test_a_run_directory_that_vanishes_ends_the_run(tmp_path, caplog):
    """In the final evaluation. `test_checkpoint.py` has the folder of checkpoints."""
    files = [str(processes.config_file(tmp_path))]
    periods = ["Experiment.evaluation_period = 4", "Experiment.checkpoint_period = 2"]
    short = experiment.load(files, ["TOTAL_STEPS = 384", *periods])  # six updates
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()
    place = "(.lock|checkpoints)"  # whichever is examined next
    message = f"^'.*/run/{place}' was (moved to '.*moved.*'|removed) while the run wrote to it$"
    with pytest.raises(errors.RunFailure, match=message) as raised:
        _run(short, directory, At(directory.path, 6, _remove))
    assert str(raised.value) not in caplog.text  # it is printed once
    assert not directory.summary.exists()
    (tmp_path / "run").mkdir(exist_ok=True)
    run_directory.Lock(tmp_path / "run").acquire()  # it was released


def test_a_fault_names_member_update_and_newest_checkpoint(settings, parts, tmp_path, monkeypatch):
    """An observation that is not finite counts once a metric is not; replay may sample it later.

    `test_metrics.py` has the reports.
    """
    step, infinite = anakin.Anakin.step, np.array(metrics.FAULTS) == metrics.OBSERVATION

    def fail(runner, state, *arguments):
        state, report = step(runner, state, *arguments)
        update = int(state.update)
        seen = np.where(infinite & (update > 2), [[metrics.NEVER], [2]], metrics.NEVER)
        metric = np.where(np.arange(2) * (update > 4), 4, metrics.NEVER)
        return state, report._replace(first_fault=seen, first_nonfinite={"loss": metric})

    monkeypatch.setattr(anakin.Anakin, "step", fail)
    message = (
        r"Reporting\): an observation is NaN or infinite of seed 4 \(learning_rate = 0\.01\); "
    )
    message += r".* at update 2 \(128 steps\); .*: step 256$"
    with pytest.raises(errors.UserError, match=message):
        _run(dataclasses.replace(settings, checkpoint_period=1), _directory(tmp_path), None, parts)
    assert processes.num_lines(tmp_path) == 4


def test_a_failure_to_compile_ends_the_run_with_its_cause(settings, parts, tmp_path, monkeypatch):
    """The update compiles in a thread, before the initial state."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", mock.Mock(side_effect=MemoryError("none")))
    with pytest.raises(MemoryError, match="none"):
        _run(settings, _directory(tmp_path), parts=parts)
    assert processes.num_lines(tmp_path) == 0


class Endless(catch.Catch):
    """Its episodes never end, and its discounts are those of an algorithm."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(discount=jnp.float32(0.99), step_type=jnp.int8(types.MID))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_a_broken_rule_ends_a_run_after_its_first_dispatch(tmp_path, runner):
    files = [str(processes.config_file(tmp_path)), f"gin/runners/{runner}.gin"]
    broken = dataclasses.replace(experiment.load(files, []), environment=Endless)
    message = r"environment .*Endless\): .* discount other than 1; `podracers-check`.* update 0 "
    with pytest.raises(errors.UserError, match=message):
        _run(broken, _directory(tmp_path))
    assert processes.num_lines(tmp_path) == 0


_SAME = contextlib.nullcontext()


@pytest.mark.parametrize(
    ("binding", "setting", "message"),
    [
        ("SEED = 7", _SAME, "seed, 3: got 7"),
        ("Anakin.population = 4", _SAME, "population, 2: got 4"),
        (
            "Anakin.population_values = {'gamma': (0.9, 0.5)}",
            _SAME,
            r"population_values, \{'learning_rate': \[0.0001, 0.01\]\}: got \{'gamma'",
        ),
        ("Anakin.rollout_length = 32", _SAME, "update, 64: got 256"),
        ("TOTAL_STEPS = 512", _SAME, "at least 640, .*; got 512"),
        ("SEED = 3", jax.threefry_partitionable(False), "partitionable, True: got False"),
        ("SEED = 3", jax.default_prng_impl("rbg"), "prng_impl, 'threefry2x32': got 'rbg'"),
    ],
)
def test_resuming_with_a_fixed_option_changed_is_refused(population, binding, setting, message):
    directory = population[0]
    record = json.loads((directory.checkpoints / "640/metadata/metadata").read_text())["user"]
    changed, resumed = experiment.load([str(directory.config)], [binding]), object.__new__(run.Run)
    with setting, pytest.raises(errors.UserError, match=message):
        resumed._experiment, resumed._parts = changed, changed.build()
        resumed._runner = resumed._parts.runner
        resumed._require_same_run(640, record)


@pytest.mark.parametrize(
    ("binding", "message"),
    [("SEED = 7", "seed, 3"), ("Experiment.checkpoint_directory = '{}'", "of .*; got none")],
)
def test_a_run_that_is_refused_releases_its_directory(
    population, parts, binding, message, tmp_path
):
    directory = _directory(population[0].path)
    changed = experiment.load([str(directory.config)], [binding.replace("{}", str(tmp_path))])
    with pytest.raises(errors.UserError, match=message):
        _run(changed, directory, parts=parts, resume=True)
    run_directory.Lock(directory.path).acquire()


def test_a_failure_while_a_run_ends_hides_no_first_cause(
    settings, parts, tmp_path, caplog, monkeypatch
):
    close = checkpoint.Checkpointer.close

    def fail(checkpointer):
        close(checkpointer)
        raise errors.RunFailure("could not save")

    monkeypatch.setattr(checkpoint.Checkpointer, "close", fail)
    failing = dataclasses.replace(settings, on_log=lambda line: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _run(failing, _directory(tmp_path), parts=parts)
    assert "could not save" in caplog.text


def test_a_resumed_run_prints_settings_that_change_rounding(
    settings, parts, population, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    directory = run_directory.RunDirectory(population[0].path)
    lines = []
    resumed = run.Run(settings, parts, directory, stop=At(), resume=True, print_line=lines.append)
    assert any(re.match("changed: XLA_FLAGS: .* -> '--xla_other'", line) for line in lines)
    resumed._require_same_run(640, {"update": 10, "seed": 3})  # as earlier versions saved
    with resumed._exits:
        pass


def _score(directory, step):
    """Returns the score of a checkpoint."""
    return checkpoint.Checkpointer(directory.checkpoints, read_only=True)._scores().get(step)


def test_a_run_keeps_its_configuration_and_commit_and_keeps_others_out(
    parts, population, tmp_path, monkeypatch
):
    """Other experiments are loaded and started meanwhile.

    The last update, evaluated twice, has one score.
    """
    config_file, refused = [str(population[0].config)], []
    bindings = ["Experiment.evaluation_period = 5", "Experiment.keep_best = 2"]
    first = experiment.load(config_file, bindings)
    later = experiment.load(config_file, ["Experiment.keep_best = 3", "SEED = 8"])
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.create()

    def start_another(path):
        for resume in (True, False):
            with pytest.raises(errors.UserError, match=f"in use by process {os.getpid()} on host"):
                _run(later, run_directory.RunDirectory(path), resume=resume)
            refused.append(resume)
        monkeypatch.setattr(summary_lib, "provenance", lambda: {"commit": "later"})

    copy = dataclasses.replace(first, checkpoint_period=5)
    summary, _ = _run(copy, directory, At(directory.path, 2, start_another), parts)
    assert refused == [True, False]
    assert summary["commit"] not in ("later", None)
    assert (directory.path / ".lock").exists()
    assert _score(directory, 640) == pytest.approx(summary["evaluation"]["return"])
    ((_, shown),) = _events(directory, "config")
    for text in (directory.operative_config.read_text(), shown.item().decode()):
        assert "Experiment.keep_best = 2" in text
        assert "SEED = 3" in text


def test_a_final_evaluation_that_has_ended_early_can_be_repeated(
    parts, population, tmp_path, monkeypatch
):
    """One that has failed, and one that was stopped."""
    bindings = ["Experiment.evaluation_period = 0", "Experiment.checkpoint_period = 0"]
    changed = experiment.load([str(population[0].config)], bindings)
    directory = run_directory.RunDirectory(tmp_path)
    for error in (errors.RunFailure("out of memory"), evaluation.Stopped):
        resume = error is evaluation.Stopped
        with monkeypatch.context() as patched:
            patched.setattr(experiment.Parts, "evaluate", mock.Mock(side_effect=error))
            with contextlib.nullcontext() if resume else pytest.raises(errors.RunFailure):
                assert _run(changed, directory, parts=parts, resume=resume)[0] is None
        assert (_score(directory, 640), directory.summary.exists()) == (None, False)
    restore = checkpoint.Checkpointer.restore

    def restored(self, template, **options):
        # An initial state beside the restored one would take as much memory.
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(template))
        return restore(self, template, **options)

    monkeypatch.setattr(checkpoint.Checkpointer, "restore", restored)
    summary, _ = _run(changed, directory, parts=parts, resume=True)
    assert summary["best_checkpoint"] == 640
    assert _score(directory, 640) == pytest.approx(summary["evaluation"]["return"])


def test_a_signal_counts_after_the_reader_of_stderr_has_ended(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)  # as `tee`, which the same Ctrl-C ends
    stream = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stream)
    with stop_request.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    assert stop.signal == signal.SIGINT


def test_options_that_python_replaced_leave_no_configuration(
    settings, parts, tmp_path, monkeypatch
):
    assert "checkpoint_period = 3" in settings.text()
    names = ("agent", "environment", "runner", "seed", "total_steps")
    built = experiment.Experiment(**{name: getattr(settings, name) for name in names})
    assert built.text() == ""
    monkeypatch.setattr(experiment.Experiment, "build", lambda settings: parts)
    replaced = dataclasses.replace(settings, seed=7)
    kept = {"checkpoint_directory": str(tmp_path / "kept")}
    run.train(dataclasses.replace(replaced, **kept), tmp_path / "run")
    assert (tmp_path / "run" / "config.gin").read_text() == ""
    with pytest.raises(errors.UserError, match="configured in Python"):
        trained.load(tmp_path / "run")
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.checkpoints = tmp_path / "kept"
    assert trained.params(directory, replaced.build())[0] == settings.total_steps
    with pytest.raises(errors.UserError, match="kept' is in use"):
        run.train(dataclasses.replace(settings, **kept), tmp_path / "other")


@pytest.mark.parametrize("number", watchdog.STOP_SIGNALS)
def test_a_signal_asks_to_stop_and_a_second_ctrl_c_interrupts(number, capsys):
    before = list(map(signal.getsignal, watchdog.STOP_SIGNALS))
    with stop_request.StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop.signal == number and stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert number.name in capsys.readouterr().err
    assert list(map(signal.getsignal, watchdog.STOP_SIGNALS)) == before


@pytest.mark.parametrize(
    ("number", "handler"),
    [(signal.SIGHUP, signal.SIG_IGN), (signal.SIGUSR1, lambda *_: None)],  # of `nohup`; of a user
)
def test_a_signal_that_is_ignored_or_handled_does_not_stop(number, handler):
    before = signal.signal(number, handler)
    with stop_request.StopRequest() as stop:
        os.kill(os.getpid(), number)
    assert not stop
    assert signal.signal(number, before) is handler


def test_a_thread_can_train_without_signal_handlers():
    def is_stopped():
        with stop_request.StopRequest() as stop:
            return bool(stop)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(is_stopped).result() is False


def test_one_thread_trains_at_a_time(population, parts, tmp_path):
    """Another one is refused, and may load and build: their configurations stay apart."""
    file = str(population[0].config)
    first, other = (experiment.load([file], [f"SEED = {seed}"]) for seed in (5, 6))
    begun, refused = threading.Event(), threading.Event()

    def hold(values):
        begun.set()
        assert refused.wait(processes.PATIENCE)
        return True

    held, directories = dataclasses.replace(first, on_log=hold), []
    for name in ("first", "other"):
        directories.append(run_directory.RunDirectory(tmp_path / name))
        directories[-1].create()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        trained_first = pool.submit(_run, held, directories[0], parts=parts)
        assert begun.wait(processes.PATIENCE)
        assert experiment.load([file], []).build() and other.build()
        with pytest.raises(errors.UserError, match="another thread of this process trains"):
            _run(other, directories[1], parts=parts)
        refused.set()
        assert trained_first.result()[0]["seed"] == 5
    assert "SEED = 5" in directories[0].operative_config.read_text()
    ending = dataclasses.replace(other, on_log=lambda values: True)
    assert _run(ending, directories[1], parts=parts)[0]["seed"] == 6  # its directory is free


def test_times_add_up_over_starts_without_the_first_dispatch_of_each(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    first = clock.Clock()
    first.add_dispatch(30.0, 64)
    assert math.isnan(first.lap_rate()) and math.isnan(first.rate)
    first.add_dispatch(2.0, 64)
    first.add_dispatch(1.0, 128)
    assert (first.rate, first.lap_rate(), first.first_dispatch) == (64.0, 64.0, 30.0)
    now[0] += 38.0
    record = first.record()
    now[0] += 1000.0  # between two starts
    second = clock.Clock(**record)
    now[0] += 5.0
    second.add_dispatch(10.0, 64)
    assert math.isnan(second.lap_rate())
    second.add_dispatch(3.0, 96)
    assert second.lap_rate() == 32.0
    assert second.rate == (64 + 128 + 96) / (2.0 + 1.0 + 3.0)
    assert (second.first_dispatch, second.elapsed) == (40.0, 38.0 + 5.0)


@pytest.mark.slow
def test_50_evaluations_and_checkpoints_keep_no_memory(tmp_path, monkeypatch):
    """48 objects a checkpoint stayed once, of the library that writes arrays."""
    extra = f"TOTAL_STEPS = {70 * 64}\nexperiment.Experiment.evaluation_period = 1"
    files = [str(processes.config_file(tmp_path, extra)), "gin/runners/sebulba.gin"]
    run_period, measured = run.Run._run_period, {}

    def run_and_measure(trainer):
        run_period(trainer)
        if trainer._update in (20, 70):
            trainer._checkpointer.wait()
            gc.collect()
            measured[trainer._update] = len(gc.get_objects()), psutil.Process().memory_info().rss

    monkeypatch.setattr(run.Run, "_run_period", run_and_measure)
    run.train(experiment.load(files, []), tmp_path / "run")
    (objects, memory), (last_objects, last_memory) = measured[20], measured[70]
    assert last_objects - objects < 500
    assert last_memory - memory < 100e6  # bytes: free memory of the allocator counts
