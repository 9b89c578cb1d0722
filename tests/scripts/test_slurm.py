"""Tests of `scripts/slurm.sh` on a Slurm of two nodes of two cores each, on this machine."""

import contextlib
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
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PODRACERS_PYTHON": sys.executable}
    variables |= groups.environment(1)  # sbatch takes it along

    def call(*words):
        ended = processes.finish(processes.spawn(words, variables))
        return ended.stdout.split()

    call.folder = folder
    yield call
    call("scancel", "--user=root")
    subprocess.run(["bash", CLUSTER, "stop", folder], check=True)


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits a run: `submit(run_dir, "--nodes=2")` returns the job's id."""

    def submit(run_dir, *options, steps=STEPS):
        config = ("--gin_file", processes.config_file(tmp_path), "--gin_bindings", steps)
        batch = ("sbatch", "--parsable", *options, "--gpus=0", "--cpus-per-task=1")
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of the same run in one process of two devices."""
    folder = tmp_path_factory.mktemp("alone")
    config = ("--gin_file", processes.config_file(folder), "--gin_bindings", STEPS)
    words = ("train", *config, "--run_dir", folder / "run")
    processes.run(*words, environment=groups.environment(2))
    return folder / "run"


_TERM = ("scancel", "--batch", "--signal=TERM")  # as before the time limit; the job follows
_URGENT = (
    "sbatch",
    "--partition=urgent",
    "--nodes=2",
    "--exclusive",
    "--wrap=true",
    "--output=/dev/null",
)


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        (("--nodes=2",), _TERM),
        (("--nodes=1", "--ntasks-per-node=2"), _TERM),
        (("--nodes=2",), _URGENT),  # Slurm itself asks the job with SIGTERM, and requeues it
    ],
    ids=["two nodes", "two tasks", "preempted"],
)
def test_a_job_returns_to_the_queue_and_ends_as_without(
    layout, command, slurm, submit, state, alone, tmp_path
):
    run_dir = tmp_path / "run"
    job = submit(run_dir, *layout)
    _wait_for_lines(run_dir, 3)
    slurm(*command, *([job] if command is _TERM else []))
    processes.wait_for(lambda: state(job) == "COMPLETED")
    assert state(job, "Restarts") == "1"
    assert "to continue" in (tmp_path / f"{job}.out").read_text()
    processes.assert_same_end(run_dir, alone)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["processes"] == 2


def _crash(job: str, folder: pathlib.Path) -> None:
    """Kills the daemons and the tasks of the job on n2, as a node that loses its power."""
    begun = {f"SLURM_JOB_ID={job}".encode(), b"SLURMD_NODENAME=n2"}
    killed = {int((folder / "slurmd-n2.pid").read_text())}
    for task in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if begun <= {*(task / "environ").read_bytes().split(b"\0")}:
                parent = int((task / "stat").read_text().rpartition(")")[2].split()[1])
                is_daemon = "slurmstepd" in pathlib.Path(f"/proc/{parent}/comm").read_text()
                killed |= {int(task.name)} | ({parent} if is_daemon else set())
    for number in sorted(killed):  # daemons before tasks
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def test_a_job_returns_after_a_node_has_crashed(slurm, submit, state, alone, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(run_dir, "--nodes=2")
    _wait_for_lines(run_dir, 3)
    _crash(job, slurm.folder)
    processes.wait_for(lambda: state(job) == "PENDING")
    slurm("slurmd", "-N", "n2", "-f", slurm.folder / "slurm.conf")
    processes.wait_for(lambda: state(job) == "COMPLETED")
    assert int(state(job, "Restarts")) >= 1  # one more where the node was not ready at once
    processes.assert_same_end(run_dir, alone)


def test_a_job_returns_at_its_time_limit(slurm, submit, state, tmp_path):
    """Slurm's signal comes up to a minute early."""
    run_dir = tmp_path / "run"
    job = submit(run_dir, "--nodes=1", "--time=2", "--signal=B:TERM@30", steps=LONG)
    processes.wait_for(lambda: state(job, "Restarts") == "1")
    before = processes.log(run_dir)[-1]["step"]
    processes.wait_for(lambda: processes.log(run_dir)[-1]["step"] > before)
    slurm("scancel", job)
    steps = [line["step"] for line in processes.log(run_dir)]
    assert steps == sorted({*steps})


def test_an_array_trains_a_seed_in_each_task(slurm, state, tmp_path):
    run = f'--run_dir {tmp_path}/$SLURM_ARRAY_TASK_ID --gin_bindings "SEED = $SLURM_ARRAY_TASK_ID"'
    config = f"--gin_file {processes.config_file(tmp_path)} --gin_bindings '{STEPS}'"
    wrapped = f"--wrap=exec bash scripts/slurm.sh {config} {run}"
    words = ("--array=5,6", "--cpus-per-task=1", f"--output={tmp_path}/%a.out", wrapped)
    job = slurm("sbatch", "--parsable", *words)[0]
    for seed in (5, 6):
        path = tmp_path / str(seed) / "summary.json"
        processes.wait_for(lambda path=path: path.exists())
        assert json.loads(path.read_text())["seed"] == seed
    processes.wait_for(lambda: state(f"{job}_6") == "COMPLETED")


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
