"""Tests of `scripts/slurm.sh` on a Slurm of two nodes of a core each, on this machine."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests import groups, processes

CLUSTER = processes.ROOT / "tests" / "slurm_two_nodes.sh"
STEPS, LONG = "TOTAL_STEPS = 6400", "TOTAL_STEPS = 256000000"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Calls a command of Slurm and returns its output, as words."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs root, and Debian's packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    with (folder / "log").open("w") as log:  # the daemons keep it open
        subprocess.run(["bash", CLUSTER, "start", folder], check=True, stdout=log, stderr=log)
    own = {"SLURM_CONF": str(folder / "slurm.conf"), "PODRACERS_PYTHON": sys.executable}
    own |= groups.environment(1)  # sbatch takes it along

    def call(*words):
        ended = processes.finish(processes.spawn(words, own))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split()

    yield call
    call("scancel", "--user=root")
    subprocess.run(["bash", CLUSTER, "stop", folder], check=True)


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits a run: `submit(run_dir, "--nodes=2")` returns the job's id."""

    def submit(run_dir, nodes, steps=STEPS):
        config = ("--gin_file", processes.config_file(tmp_path), "--gin_bindings", steps)
        batch = ("sbatch", "--parsable", nodes, "--gpus=0", "--cpus-per-task=1")
        output = f"--output={tmp_path}/%j.out"
        return slurm(*batch, output, "scripts/slurm.sh", *config, "--run_dir", run_dir)[0]

    return submit


@pytest.fixture
def state(slurm):
    """Returns a property of a job: `state(job, "JobState")`."""

    def state(job, name="JobState"):
        words = slurm("scontrol", "show", "job", "--oneliner", job)
        return dict(word.partition("=")[::2] for word in words)[name]

    return state


def _wait_for_lines(run_dir: pathlib.Path, count: int) -> None:
    processes.wait_for(lambda: processes.num_lines(run_dir) >= count)


def test_a_job_of_two_nodes_returns_to_the_queue_and_ends_as_without(
    slurm, submit, state, tmp_path
):
    """Slurm's signal before the time limit is sent by hand."""
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    job = submit(run_dir, "--nodes=2")
    _wait_for_lines(run_dir, 3)
    slurm("scancel", "--batch", "--signal=TERM", job)
    config = ("--gin_file", tmp_path / "tiny.gin", "--gin_bindings", STEPS)
    ended = processes.run("train", *config, "--run_dir", alone, environment=groups.environment(2))
    assert ended.returncode == 0, ended.stderr
    processes.wait_for(lambda: state(job) == "COMPLETED")
    assert state(job, "Restarts") == "1"
    assert "to continue" in (tmp_path / f"{job}.out").read_text()
    processes.assert_same_end(run_dir, alone)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["processes"] == 2


def test_a_job_that_fails_or_is_cancelled_does_not_return(slurm, submit, state, tmp_path):
    killed, cancelled = tmp_path / "killed", tmp_path / "cancelled"
    jobs = [submit(run_dir, "--nodes=1", steps=LONG) for run_dir in (killed, cancelled)]
    for run_dir in (killed, cancelled):
        _wait_for_lines(run_dir, 3)
    os.kill(int((killed / ".lock").read_text().split()[1]), signal.SIGKILL)
    slurm("scancel", jobs[1])
    for job, expected in zip(jobs, ("FAILED", "CANCELLED")):
        processes.wait_for(lambda job=job: state(job) not in ("RUNNING", "COMPLETING"))
        assert (state(job), state(job, "Restarts")) == (expected, "0")

    # Slurm asks the tasks with SIGTERM, and kills them after a while (KillWait).
    def is_saved() -> bool:
        last = processes.log(cancelled)[-1]["step"]
        return (cancelled / "checkpoints" / str(last)).exists()

    processes.wait_for(is_saved)


def test_the_tasks_of_an_array_join_a_study(slurm, state, tmp_path):
    (tmp_path / "space.toml").write_text("PPO.gamma = {linear = [0.9, 0.99]}")
    words = (processes.config_file(tmp_path), "--space", tmp_path / "space.toml", "--trials", 4)
    script = processes.ROOT / "scripts" / "sweep.py"
    command = [sys.executable, script, *words, "--study", tmp_path / "study"]
    batch = ("sbatch", "--parsable", "--array=0-1", f"--output={tmp_path}/%a.out", "--wrap")
    (job,) = slurm(*batch, " ".join(map(str, command)))
    tasks = [f"{job}_{index}" for index in range(2)]
    processes.wait_for(lambda: all(state(task) == "COMPLETED" for task in tasks))
    outputs = [(tmp_path / f"{index}.out").read_text() for index in range(2)]
    assert any("4 complete" in output or "5 complete" in output for output in outputs)
    assert all("\ntrial " in f"\n{output}" for output in outputs)  # both have worked
