"""Tests of searches over settings: spaces, one study in a journal, workers on PostgreSQL."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import types

import numpy as np
import optuna
import pytest

from podracers.checkpoints import storage
from podracers.training import experiment
from tests import groups, processes

SPACE = """
PPO.learning_rate = {log = [1e-4, 1e-1]}
PPO.entropy_cost = {linear = [0.0, 0.1]}
"""


@pytest.fixture
def study(tmp_path):
    """The words of a study of a run that takes a second."""
    (tmp_path / "space.toml").write_text(SPACE)
    config = processes.config_file(tmp_path)
    return (config, "--space", tmp_path / "space.toml", "--study", tmp_path / "study")


def _rate(file):
    return experiment.load([str(file)]).build().agent.learning_rate


def _open(folder):
    """A study in a journal."""
    file = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    where = {"study_name": folder.name, "storage": optuna.storages.JournalStorage(file)}
    return optuna.create_study(**where, direction="maximize", load_if_exists=True)


def test_a_study_ends_in_a_table_and_an_experiment(tmp_path, study, run):
    """Trials that differ in floats are members of one population."""
    folder, words = tmp_path / "study", ("--batch", 2, "--seeds", 2, "--sampler", "random")
    words += ("--sampler_seed", 0, "--trials")
    result = run("sweep", *study, *words, 2)
    assert "2 complete" in result.stdout
    trials, shared = _open(folder).trials, folder / "trials-0000-0001"
    pictures = {"history.png", "slices.png", "importances.png"}
    files = {"journal.log", "workers", "best.gin", shared.name} | pictures
    assert {path.name for path in folder.iterdir()} == files
    rows, summary = processes.log(shared), json.loads((shared / "summary.json").read_text())
    rates = [member["values"]["learning_rate"] for member in summary["members"]]
    assert rates == [trial.params["PPO.learning_rate"] for trial in trials] * 2
    assert rates[0] == _rate(tmp_path / "tiny.gin") != rates[1]  # first the experiment's own
    # The objective is the mean over members of the last values, the final evaluation included.
    for index, trial in enumerate(trials):
        scores = []
        for seed in (3 + index, 5 + index):
            name = f"evaluation/return/seed_{seed}"
            logged = [row[name] for row in rows if row.get(name) is not None]
            scores += [*logged, summary["evaluation"]["return_by_seed"][str(seed)]][-3:]
        assert trial.value == pytest.approx(np.mean(scores))
        assert f"trial {index}: evaluation/return {trial.value:g} (" in result.stdout
    assert _rate(folder / "best.gin") in rates
    # The study goes on with other draws than those that it began with.
    again = run("sweep", *study, *words, 3)
    assert again.stdout.count(": evaluation/return") == 1
    assert _rate(folder / "trial-0002" / "config.gin") not in rates
    for option, name in (("--seeds", "number of seeds"), ("--last", "objective")):
        refused = run("sweep", *study, *words, 3, option, 1, code=2)
        processes.assert_mistake(refused, f"another {name}")


def test_a_trial_that_another_worker_has_failed_is_left(tmp_path, tools):
    """As happens to a worker that was suspended."""
    modules, study = tools("sweeps.studies", "sweeps.work"), _open(tmp_path)

    def train(trials):
        failed = optuna.trial.TrialState.FAIL
        study._storage.set_trial_state_values(trials[0]._trial_id, failed)
        trials[0].report(1.0, step=1)

    worker = modules.studies.Worker(study, {}, tmp_path)
    modules.work._take(worker, types.SimpleNamespace(train=train), 1)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def stop_once(line):
    if line["step"] == 256:
        signal.raise_signal(signal.SIGTERM)


def test_a_trial_is_continued_after_its_worker_and_pruned(tmp_path, study, run):
    folder = tmp_path / "study"
    rate = {"PPO.learning_rate": optuna.distributions.FloatDistribution(1e-2, 1e-1, log=True)}
    values = {"PPO.learning_rate": 0.02}
    (tmp_path / "space.toml").write_text("PPO.learning_rate = {log = [1e-2, 1e-1]}")
    (folder / "workers" / "gone").mkdir(parents=True)
    begun = _open(folder)
    for _ in range(5):
        others = {"value": 9.0, "intermediate_values": dict.fromkeys((20, 40, 60, 80, 100), 9.0)}
        trial = optuna.create_trial(params=values, distributions=rate, **others)
        begun.add_trial(trial)
    begun.enqueue_trial(values)
    begun.ask(rate).set_user_attr("worker", "gone")
    words = ("--trials", 6, "--pruner", "median", "--gin_bindings")
    words += (f"Experiment.on_log = @{__name__}.stop_once",)
    run("sweep", *study, *words, code=75)
    assert (folder / "best.gin").exists()
    *_, gone, first, waiting = begun.trials
    assert [trial.state.name for trial in (gone, first, waiting)] == ["FAIL", "FAIL", "WAITING"]
    assert processes.num_lines(folder / "trial-0006") == 4
    ended = run("sweep", *study, *words)
    assert "trial 7: pruned (PPO.learning_rate = 0.02, " in ended.stdout
    assert storage.steps(folder / "trial-0006" / "checkpoints") == [256, 512]
    assert [*folder.glob("trial-*")] == [folder / "trial-0006"]
    assert begun.trials[-1].params == values


@pytest.mark.slow
def test_seeds_follow_one_another_under_sebulba_and_settings_that_do_not_divide_fail(
    tmp_path, study, run
):
    (tmp_path / "space.toml").write_text("PPO.num_minibatches = {choice = [1, 7]}")
    words = ("--runner", "sebulba", "--seeds", 2, "--sampler", "grid", "--objective", "speed")
    result = run("sweep", *study, *words)
    assert "(PPO.num_minibatches = 7, " in result.stdout
    assert "1 refused or failed" in result.stdout
    (trial,) = (folder for folder in (tmp_path / "study").glob("trial-*") if any(folder.iterdir()))
    assert {folder.name for folder in trial.iterdir()} == {"seed-3", "seed-4"}
    assert "evaluation/return" not in processes.log(trial / "seed-4")[0]
    assert (
        experiment.load([str(tmp_path / "study" / "best.gin")]).build().agent.num_minibatches == 1
    )


@pytest.fixture
def database():
    """The URL of a PostgreSQL on this machine, which refuses to run as root."""
    if shutil.which("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    folder, port = tempfile.mkdtemp(prefix="postgres-"), groups.free_port()
    if user:
        shutil.chown(folder, "postgres")
    data = f"{folder}/data"
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    start = ["pg_ctl", "-D", data, "-o", options, "-l", f"{folder}/log", "-w", "start"]
    for command in (["initdb", "-D", data, "-U", "studies", "-A", "trust"], start):
        subprocess.run([*user, *command], check=True, capture_output=True, cwd="/")
    yield f"postgresql+psycopg://studies@127.0.0.1:{port}/postgres"
    stop = ["pg_ctl", "-D", data, "-m", "immediate", "stop"]
    subprocess.run([*user, *stop], check=True, capture_output=True, cwd="/")
    shutil.rmtree(folder)


@pytest.mark.slow
def test_four_workers_on_postgresql_of_which_one_is_killed(tmp_path, study, database):
    words = (*study, "--storage", database, "--trials", 8, "--heartbeat", 2)
    workers = [processes.start("sweep", *words) for _ in range(4)]
    begun = []

    def running():
        with contextlib.suppress(Exception):  # it is not there yet
            begun[:] = [optuna.load_study(study_name="study", storage=database)]
            return [
                trial.user_attrs["worker"]
                for trial in begun[0].trials
                if trial.state.name == "RUNNING" and "run" in trial.user_attrs
            ]

    processes.wait_for(running)
    killed = int(running()[0].split("-")[-2])
    os.kill(killed, signal.SIGKILL)
    for worker in workers:
        processes.finish(worker, -signal.SIGKILL if worker.pid == killed else 0)
    trials = begun[0].trials
    (lost,) = (trial for trial in trials if trial.state.name == "FAIL")
    (again,) = (trial for trial in trials if trial.system_attrs.get("failed_trial") is not None)
    assert again.system_attrs["failed_trial"] == lost.number
    assert again.params == lost.params
    assert {trial.state.name for trial in trials if trial is not lost} == {"COMPLETE"}
    assert len({trial.user_attrs["worker"] for trial in trials}) == 4
    assert len(trials) - 1 in (8, 9)  # two workers may take the last one
    assert (tmp_path / "study" / "best.gin").exists()


def test_a_study_of_failures_fails(tmp_path, study, run):
    (tmp_path / "space.toml").write_text("PPO.num_minibatches = {choice = [7, 9]}")
    result = run("sweep", *study, "--sampler", "grid", code=1)
    assert result.stderr.startswith("failed: all trials have failed, the last: num_minibatches = ")


@pytest.mark.parametrize("name", ["tpe", "cmaes", "random", "grid"])
def test_samplers_draw_values_of_gin(tmp_path, tools, name):
    modules = tools("sweeps.space", "sweeps.studies")
    (tmp_path / "space.toml").write_text(
        'PPO.epochs = {int = [1, 2]}\nPPO.network = {choice = ["@a.b", "None", [1, "x"], true]}'
    )
    space = modules.space.read(tmp_path / "space.toml")
    study = optuna.create_study(sampler=modules.studies.sampler(name, space, 0))
    for _ in range(8):
        study.tell(study.ask(dict(space)), 0.0)
    texts = {line for trial in study.trials for line in modules.space.bindings(trial.params)}
    values = ("@a.b", "None", "(1, 'x')", "True")
    expected = {f"PPO.epochs = {n}" for n in (1, 2)} | {f"PPO.network = {x}" for x in values}
    assert texts <= expected
    assert texts == expected or name != "grid"
