"""Tests of the launcher for Slurm: the command that it prints, and its signals.

Small programs replace Slurm's and run their arguments on this machine: quoting, signals and files
are those of real shells and processes.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from tests import processes

SLURM = processes.ROOT / "scripts" / "slurm.sh"
AWKWARD = """Experiment.name = 'it is "so": $HOME `date` \\ *'"""
# The caller's own settings of launches are removed.
OWN = ("SLURM_", "JAX_PLATFORMS")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(OWN)}

# A train.py that records its starts and signals.
FAKE_TRAIN = """
import os, pathlib, signal, sys, time

run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
run_dir.mkdir(parents=True, exist_ok=True)


def stop(*_):
    (run_dir / "checkpoint").write_text("saved")
    if "ends" in sys.argv:
        (run_dir / "summary.json").write_text("{}")
    sys.exit(0)


for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, stop)
(run_dir / "platforms").write_text(os.environ.get("JAX_PLATFORMS", ""))
with open(run_dir / "starts", "a") as starts:
    starts.write("start\\n")
if "fails" in sys.argv:
    sys.exit(int(sys.argv[-1]))
time.sleep(600)
"""
BASH = "#!/usr/bin/env bash\n"
FAKE_SLURM = {
    # Runs two processes, and records their ids for scancel. Like srun, it kills them on SIGTERM.
    "srun": """
while [[ $1 == --* ]]; do shift; done
tasks=()
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
printf '%s\\n' "${tasks[@]}" > "$FAKE_CLOUD/tasks"
trap 'kill -KILL "${tasks[@]}"; exit 137' TERM
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
""",
    "scancel": """
printf '%s\\n' "$*" > "$FAKE_CLOUD/scancel.words"
xargs kill -TERM < "$FAKE_CLOUD/tasks"
""",
    "squeue": 'echo "${FAKE_STATE:-RUNNING}"\n',
    "scontrol": """printf '%s\\n' "$*" > "$FAKE_CLOUD/scontrol.words"\n""",
}


def _start(*command, **options):
    return processes.spawn(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def _run(*command, code=0, **options):
    return processes.finish(_start(*command, **options), code)


def _wait_for_starts(run_dir, count):
    starts = run_dir / "starts"
    processes.wait_for(lambda: starts.exists() and starts.read_text().count("\n") >= count)


@pytest.fixture
def bare_path(tmp_path):
    """An environment whose PATH has the programs that the launcher calls, and no Slurm."""
    for name in ("bash", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return {**ENVIRONMENT, "PATH": str(tmp_path)}


def test_dry_run_under_slurm():
    result = _run(SLURM, "--dry-run", "--gin_bindings", AWKWARD, cwd=processes.ROOT)
    expected = (
        "srun --kill-on-bad-exit=1 --output=runs/slurm/%j-%t.log --open-mode=append "
        ".venv/bin/python scripts/train.py --distributed --resume_if_begun "
        "--run_dir runs/slurm-JOB --gin_bindings"
    )
    assert shlex.split(result.stdout) == [*expected.split(), AWKWARD]


@pytest.mark.parametrize(
    ("command", "phrase"),
    [
        ((SLURM,), "no arguments for train.py"),
        ((SLURM, "--gin_file", "a"), "not in a Slurm job"),
        ((SLURM, "--gin_file", "a", "--dry-run"), "--dry-run comes first"),
        (("env", "SLURM_JOB_ID=7", "SLURM_SUBMIT_DIR=/", SLURM, "a"), "no scripts/train.py in /"),
        (("env", "SLURM_JOB_ID=7", "PODRACERS_PYTHON=no-python", SLURM, "a"), "no no-python"),
    ],
)
def test_user_errors(bare_path, command, phrase):
    if command[0] == "env":
        command = (shutil.which("env"), *command[1:])
    result = _run(*command, code=2, env=bare_path, cwd=processes.ROOT)
    processes.assert_mistake(result, phrase)
    assert result.stdout == ""


@pytest.fixture
def cloud(tmp_path):
    """The folder of a simulated cluster, and an environment in which its programs are found."""
    for name, text in FAKE_SLURM.items():
        (tmp_path / name).write_text(BASH + text)
        (tmp_path / name).chmod(0o755)
    repository = tmp_path / "repository"
    (repository / "scripts").mkdir(parents=True)
    (repository / "scripts" / "train.py").write_text(FAKE_TRAIN)
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    job = {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(repository)}
    programs = {"PATH": path, "FAKE_CLOUD": str(tmp_path), "PODRACERS_PYTHON": sys.executable}
    yield tmp_path, {**ENVIRONMENT, **programs, **job}
    for note in tmp_path.glob("tasks"):
        for process in map(int, note.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("state", "words", "run_dir", "name", "requeued"),
    [
        ("RUNNING", ("--gin_file", "a"), "runs/slurm-77", "SIGTERM", True),
        ("RUNNING", ("--gin_file", "a"), "runs/slurm-77", "SIGUSR2", True),
        ("RUNNING", ("--gin_file", "a"), "runs/slurm-77", "tasks", True),
        ("COMPLETING", ("--gin_file", "a"), "runs/slurm-77", "SIGTERM", False),
        # It ends with its last update.
        ("RUNNING", ("--run_dir", "runs/a b", "ends"), "runs/a b", "SIGTERM", False),
    ],
)
def test_a_signal_reaches_the_tasks_and_the_job_is_requeued(
    cloud, state, words, run_dir, name, requeued
):
    """Slurm sends it to the shell of the job (--signal=B:TERM@120) or to the tasks."""
    folder, environment = cloud
    job = _start("bash", SLURM, *words, env={**environment, "FAKE_STATE": state})
    run_dir = folder / "repository" / run_dir
    try:
        _wait_for_starts(run_dir, 2)
        if name == "tasks":
            for task in map(int, (folder / "tasks").read_text().split()):
                os.kill(task, signal.SIGUSR1)
        else:
            job.send_signal(getattr(signal, name))
        _, output = job.communicate(timeout=processes.PATIENCE)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert (run_dir / "checkpoint").read_text() == "saved"
    if name != "tasks":
        assert (folder / "scancel.words").read_text() == "--signal=TERM 77\n"
    requests = folder / "scontrol.words"
    assert (requests.read_text() if requests.exists() else "") == "requeue 77\n" * requeued


@pytest.mark.parametrize(
    ("variables", "platforms"),
    [
        ({"SLURM_GPUS": "8", "SLURM_JOB_GPUS": "0,1,2,3"}, "cuda,cpu"),
        ({}, "cpu"),
        ({"SLURM_GPUS": "8", "JAX_PLATFORMS": "rocm,cpu"}, "rocm,cpu"),
    ],
)
def test_slurm_names_the_platform_and_a_failed_job_is_not_requeued(cloud, variables, platforms):
    folder, environment = cloud
    _run("bash", SLURM, "fails", "1", code=1, env={**environment, **variables})
    assert not (folder / "scontrol.words").exists()
    run_dir = folder / "repository" / "runs" / "slurm-77"
    assert (run_dir / "platforms").read_text() == platforms
