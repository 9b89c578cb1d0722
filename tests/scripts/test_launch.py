"""Tests of the launchers: the commands that they print, and processes of a simulated cloud.

Small programs replace gcloud and Slurm and run their arguments on this machine, so quoting, signals
and files are those of real shells and processes.
"""

import contextlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from tests import processes

POD = processes.ROOT / "scripts" / "tpu_pod.sh"
SLURM = processes.ROOT / "scripts" / "slurm.sh"
NAMED = ("--name", "pod-1", "--zone", "us-west4-a")
AWKWARD = """Experiment.name = 'it is "so": $HOME `date` \\ *'"""
# The caller's own settings of launches are removed.
OWN = ("POD_", "SLURM_", "JAX_PLATFORMS")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(OWN)}

# A worker is a folder, its home; the file `state` is that of the TPU VM. A line of the file
# `broken`, a verb and a phrase of its words, breaks one connection; a copy is then incomplete.
FAKE_GCLOUD = """#!/usr/bin/env -S python3 -S
import os, pathlib, shutil, signal, subprocess, sys

root = pathlib.Path(os.environ["FAKE_CLOUD"])
state, queue, broken = (root / name for name in ("state", "queue", "broken"))
service, verb, *words = sys.argv[3:]
flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
names = [word for word in words if not word.startswith("--")]
workers = sorted(root.glob("worker-*"))
with open(root / "calls", "a") as calls:
    calls.write(verb + "\\n")
faults = broken.read_text().splitlines() if broken.exists() else []
hits = [f for f in faults if f.startswith(verb) and f.partition(" ")[2] in " ".join(words)]
if hits:
    faults.remove(hits[0])
    broken.write_text("\\n".join(faults))


def here(path):
    _, remote, rest = path.rpartition(":")
    return root / f"worker-{flags['worker']}" / rest if remote else pathlib.Path(rest)


if service == "queued-resources":
    if verb == "create":
        queue.write_text("WAITING_FOR_RESOURCES")
        sys.exit()
    if verb == "list":
        print(queue.read_text() if queue.exists() else "")
        verb = "create" if queue.exists() else verb  # the capacity becomes available
    elif verb == "delete":
        queue.unlink()
if verb == "create":
    for number in range(2):
        (root / f"worker-{number}").mkdir()
    state.write_text("READY")
elif verb == "delete":
    for worker in workers:
        for note in worker.glob("*.pid"):
            os.killpg(os.getpgid(int(note.read_text())), signal.SIGKILL)
        shutil.rmtree(worker)
    state.unlink()
elif verb == "list":
    print(state.read_text() if state.exists() else "")
elif hits:
    if verb == "scp":
        here(names[1]).mkdir()
    sys.exit(255)
elif verb == "scp":
    shutil.copytree(here(names[0]), here(names[1]))
elif verb == "ssh":
    chosen = workers if flags["worker"] == "all" else [root / f"worker-{flags['worker']}"]
    bash = ["bash", "-c", flags["command"]]
    homes = [{"cwd": home, "env": {**os.environ, "HOME": str(home)}} for home in chosen]
    sys.exit(max([subprocess.run(bash, **home).returncode for home in homes]))
"""

# A repository whose installation takes no time, and whose train.py records its arguments.
FAKE_MAKEFILE = """install:
\tmkdir -p .venv/bin && ln -sf $(shell command -v python3) .venv/bin/python
"""
FAKE_TRAIN = """
import json, os, pathlib, signal, sys, time

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
    starts.write(json.dumps(sys.argv[1:]) + "\\n")
if "fails" in sys.argv:
    sys.exit(int(sys.argv[-1]))
print("training", flush=True)
limit = time.monotonic() + 600
while not (run_dir / "go").exists() and time.monotonic() < limit:
    time.sleep(0.02)
(run_dir / "summary.json").write_text("{}")
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


def _run(*command, **options):
    return processes.finish(_start(*command, **options))


def _wait_for_starts(run_dir, count):
    starts = run_dir / "starts"
    processes.wait_for(lambda: starts.exists() and starts.read_text().count("\n") >= count)


@pytest.fixture
def no_gcloud(tmp_path):
    """An environment whose PATH has the programs that the launchers call, and no gcloud."""
    for name in ("bash", "dirname", "git", "sed", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return {**ENVIRONMENT, "PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "create --type=v5litepod-16 --spot",
            "tpu-vm create {} --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot",
        ),
        (
            "create --queued --reserved --internal-ip --type=v5p-16",
            "queued-resources create {} --accelerator-type=v5p-16 "
            "--runtime-version=v2-alpha-tpuv5 --node-id={} --reserved --internal-ips",
        ),
        ("delete --queued", "queued-resources delete {} --force --quiet"),
        (
            "follow --worker 3 --lines=5",
            "tpu-vm ssh {} --worker=3 '--command=tail -n 5 -F ~/podracers-{}.log'",
        ),
    ],
)
def test_dry_run(no_gcloud, arguments, expected):
    words = (*arguments.split(), *NAMED, "--project", "mine")
    result = _run(POD, *words, "--dry-run", env=no_gcloud)
    assert result.returncode == 0, result.stderr
    expected = ["gcloud", "compute", "tpus", *shlex.split(expected.replace("{}", "pod-1"))]
    assert shlex.split(result.stdout) == [*expected, "--zone=us-west4-a", "--project=mine"]


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
        ((POD, "begin", *NAMED), "'begin'"),
        ((POD, "run", *NAMED), "needs the arguments of train.py"),
        ((POD, "create", *NAMED, "--type", "h100", "--dry-run"), "--version"),
        ((POD, "create", *NAMED, "--tpye", "v4-8"), "'--tpye'"),
        ((POD, "setup", *NAMED, "--ref", "nowhere", "--dry-run"), "'nowhere'"),
        ((POD, "fetch", *NAMED, "--workers", "0"), "--workers"),
        ((POD, "stop", "--name", "a;b", "--zone", "z"), "--name"),
        ((POD, "stop", *NAMED), "gcloud"),
        ((SLURM,), "no arguments for train.py"),
        ((SLURM, "--gin_file", "a"), "not in a Slurm job"),
        ((SLURM, "--gin_file", "a", "--dry-run"), "--dry-run comes first"),
        (("env", "SLURM_JOB_ID=7", "SLURM_SUBMIT_DIR=/", SLURM, "a"), "no scripts/train.py in /"),
        (("env", "SLURM_JOB_ID=7", "PODRACERS_PYTHON=no-python", SLURM, "a"), "no no-python"),
    ],
)
def test_user_errors(no_gcloud, command, phrase):
    if command[0] == "env":
        command = (shutil.which("env"), *command[1:])
    result = _run(*command, env=no_gcloud, cwd=processes.ROOT)
    processes.assert_mistake(result, phrase)
    assert result.stdout == ""


@pytest.fixture
def cloud(tmp_path):
    """The folder of a simulated cloud, and an environment in which its programs are found."""
    slurm = {name: BASH + text for name, text in FAKE_SLURM.items()}
    for name, text in {"gcloud": FAKE_GCLOUD, **slurm}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    repository = tmp_path / "repository"
    (repository / "scripts").mkdir(parents=True)
    (repository / "Makefile").write_text(FAKE_MAKEFILE)
    (repository / "scripts" / "train.py").write_text(FAKE_TRAIN)
    (repository / "scripts" / "tpu_pod.sh").write_bytes(POD.read_bytes())
    git = ("git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "all")):
        assert _run(*git, *words).returncode == 0
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    job = {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(repository)}
    programs = {"PATH": path, "FAKE_CLOUD": str(tmp_path), "PODRACERS_PYTHON": sys.executable}
    yield tmp_path, {**ENVIRONMENT, **programs, **job}
    for note in [*tmp_path.glob("worker-*/*.pid"), *tmp_path.glob("tasks")]:
        for process in map(int, note.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _pod(cloud, command, *arguments, start=_run):
    folder, environment = cloud
    return start(
        *("bash", folder / "repository" / "scripts" / "tpu_pod.sh", command, *NAMED),
        *("--repository", folder / "repository", "--type=v4-16", "--out", folder / "out"),
        *("--poll=1", "--fetch=0", "--workers=2", *arguments),
        env=environment,
    )


def _runs(folder):
    return [folder / f"worker-{number}" / "podracers" / "runs" / "pod-1" for number in (0, 1)]


def _fetched(folder):
    """Makes the copies of an earlier `fetch`: runs that finish as soon as they are started."""
    for number in (0, 1):
        copy = folder / "out" / f"worker-{number}"
        (copy / "checkpoints" / "100").mkdir(parents=True)
        (copy / "go").touch()


def test_workers_run_one_commit_with_the_same_arguments_until_they_are_stopped(cloud):
    folder, _ = cloud
    for command in ("create", "setup"):
        result = _pod(cloud, command)
        assert result.returncode == 0, result.stderr
    head = _run("git", "-C", folder / "repository", "rev-parse", "HEAD").stdout.strip()
    assert result.stdout.splitlines().count(f"installed {head}") == 2
    words = ("--gin_bindings", AWKWARD)
    result = _pod(cloud, "run", "--", *words)
    assert result.returncode == 0, result.stderr
    expected = ["--distributed", "--run_dir", "runs/pod-1", "--resume_if_begun", *words]
    for run in _runs(folder):
        _wait_for_starts(run, 1)
        assert json.loads((run / "starts").read_text()) == expected
        assert (run / "platforms").read_text() == "tpu,cpu"
    assert _pod(cloud, "run", "--", *words).returncode == 1  # while it runs
    stopped = _pod(cloud, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert [(run / "checkpoint").read_text() for run in _runs(folder)] == ["saved"] * 2
    assert "training" in (folder / "worker-1" / "podracers-pod-1.log").read_text()
    assert _pod(cloud, "fetch").returncode == 0
    assert (folder / "out" / "worker-1" / "checkpoint").read_text() == "saved"
    assert _pod(cloud, "delete").returncode == 1  # without confirmation
    assert (folder / "state").exists()
    assert _pod(cloud, "delete", "--yes").returncode == 0
    assert not (folder / "state").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--spot", "--queued"), ("--stall=2",)])
def test_train_restarts_a_run_that_is_preempted_or_stalls(cloud, flags):
    """After a preemption it continues with the copies that were fetched."""
    folder, _ = cloud
    words = (*flags, "--", "--gin_file", "a.gin")
    launcher = _pod(cloud, "train", *words, start=_start)
    try:
        if "--spot" in flags:
            _wait_for_starts(folder / "out" / "worker-1", 1)
            (folder / "state").write_text("PREEMPTED")
        _wait_for_starts(_runs(folder)[1], 2)
        for run in _runs(folder):
            (run / "go").touch()
        _, output = launcher.communicate(timeout=processes.PATIENCE)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    assert (folder / "out" / "worker-0" / "summary.json").exists()
    calls = (folder / "calls").read_text().split()
    count = 1 + ("--spot" in flags)
    assert (calls.count("create"), calls.count("delete")) == (count, count - 1)
    if "--stall=2" in flags:
        assert (_runs(folder)[1] / "checkpoint").read_text() == "saved"
    assert _pod(cloud, "train", *words).returncode == 0
    assert (_runs(folder)[0] / "starts").read_text().count("\n") == 2  # a finished run stays


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "starts", "phrase"),
    [(2, 1, ""), (1, 2, "failed 1, 2 times"), (0, 2, "interrupted, 2 times")],  # 0: no summary
)
def test_train_repeats_failures_but_no_user_errors(cloud, code, starts, phrase):
    folder, _ = cloud
    result = _pod(cloud, "train", "--restarts=1", "--poll=0", "--", "fails", code)
    assert result.returncode == (code or 1), result.stderr
    assert phrase in result.stderr
    assert (_runs(folder)[0] / "starts").read_text().count("\n") == starts


def test_lost_connections_count_as_failures(cloud):
    folder, _ = cloud
    (folder / "broken").write_text("ssh then echo stopped\n" * 2)
    result = _pod(cloud, "train", "--restarts=1", "--poll=0", "--", "--gin_file", "a.gin")
    assert result.returncode == 1
    assert "lost, 2 times" in result.stderr


@pytest.mark.slow
def test_a_broken_connection_starts_no_run_on_a_partial_copy(cloud):
    folder, _ = cloud
    _fetched(folder)
    broken = ("ssh mkdir -p podracers/runs", "scp worker-1 pod-1:", "ssh mv -T podracers")
    (folder / "broken").write_text("\n".join(broken))
    result = _pod(cloud, "train", "--poll=0", "--", "--gin_file", "a.gin")
    assert result.returncode == 0, result.stderr
    assert (folder / "broken").read_text() == ""
    for run in _runs(folder):
        assert (run / "checkpoints" / "100").exists()
        assert (run / "starts").read_text().count("\n") == 1
    assert (folder / "out" / "worker-1" / "summary.json").exists()


def test_a_copy_with_a_later_checkpoint_is_not_replaced(cloud):
    folder, _ = cloud
    assert _pod(cloud, "create").returncode == 0
    _fetched(folder)
    for step, code, kept in ((99, 1, {"100"}), (101, 0, {"99", "101"})):
        for run in _runs(folder):
            (run / "checkpoints" / str(step)).mkdir(parents=True)
        assert _pod(cloud, "fetch").returncode == code
        copies = (folder / "out" / "worker-1" / "checkpoints").iterdir()
        assert {path.name for path in copies} == kept


def test_a_stopped_vm_is_not_deleted(cloud):
    folder, _ = cloud
    assert _pod(cloud, "create").returncode == 0
    (folder / "state").write_text("STOPPED")
    result = _pod(cloud, "train", "--spot", "--", "--gin_file", "a.gin")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "delete" not in (folder / "calls").read_text().split()


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
    result = _run("bash", SLURM, "fails", "1", env={**environment, **variables})
    assert result.returncode == 1
    assert not (folder / "scontrol.words").exists()
    run_dir = folder / "repository" / "runs" / "slurm-77"
    assert (run_dir / "platforms").read_text() == platforms
