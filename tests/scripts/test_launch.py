"""Tests of the launchers: what they would run, and real processes behind a stand-in for the cloud.

gcloud, srun and their like are replaced by small programs that run what they are given on this
machine, so that quoting, signals and files are those of real shells and real processes.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import processes

POD = processes.ROOT / "scripts" / "tpu_pod.sh"
SLURM = processes.ROOT / "scripts" / "slurm.sh"
NAMED = ("--name", "pod-1", "--zone", "us-west4-a")
AWKWARD = """Experiment.name = 'it is "so": $HOME `date` \\ *'"""
GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")

# Every worker is a folder that is its home; the state of the TPU VM is a file. A line of the file
# `broken`, a verb and a phrase of its words, breaks one connection; a copy is then half done.
FAKE_GCLOUD = """#!/usr/bin/env -S python3 -S
import os, pathlib, shutil, signal, subprocess, sys

root = pathlib.Path(os.environ["FAKE_CLOUD"])
verb, *words = sys.argv[4:]
flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
names = [word for word in words if not word.startswith("--")]
with open(root / "calls", "a") as calls:
    calls.write(verb + "\\n")
state = root / "state"
workers = sorted(root.glob("worker-*"))
broken = (root / "broken").read_text().splitlines() if (root / "broken").exists() else []
said = " ".join(words)
hits = [each for each in broken if each.startswith(verb) and each.partition(" ")[2] in said]
if hits:
    broken.remove(hits[0])
    (root / "broken").write_text("\\n".join(broken))


def here(path):
    _, remote, rest = path.rpartition(":")
    return root / f"worker-{flags['worker']}" / rest if remote else pathlib.Path(rest)


queue = root / "queue"
if sys.argv[3] == "queued-resources":
    if verb == "create":
        queue.write_text("WAITING_FOR_RESOURCES")
        sys.exit()
    if verb == "list":
        print(queue.read_text() if queue.exists() else "")
        verb = "create" if queue.exists() else verb  # what it waits for comes
    elif verb == "delete":
        queue.unlink()

if verb == "create":
    for number in range(2):
        (root / f"worker-{number}").mkdir()
    state.write_text("READY")
elif verb == "delete":
    for worker in workers:
        for note in worker.glob("*.pid"):
            os.killpg(os.getpgid(int(note.read_text())), signal.SIGKILL)  # with what waits for it
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
    codes = [
        subprocess.run(
            ["bash", "-c", flags["command"]], cwd=home, env={**os.environ, "HOME": str(home)}
        ).returncode
        for home in chosen
    ]
    sys.exit(max(codes))
"""

# A repository whose installation takes no time, and whose train.py notes how it was started.
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


signal.signal(signal.SIGTERM, stop)
(run_dir / "platforms").write_text(os.environ.get("JAX_PLATFORMS", ""))
with open(run_dir / "starts", "a") as starts:
    starts.write(json.dumps(sys.argv[1:]) + "\\n")
if "fails" in sys.argv:
    sys.exit(int(sys.argv[-1]))
print("training", flush=True)
limit = time.monotonic() + 60
while not (run_dir / "go").exists() and time.monotonic() < limit:
    time.sleep(0.02)
(run_dir / "summary.json").write_text("{}")
"""

FAKE_SLURM = {
    # Runs the tasks as real processes, and notes their ids for scancel. Like the real one, it kills
    # them when it is sent SIGTERM itself.
    "srun": """#!/usr/bin/env bash
printf '%s\\n' "$*" > "$FAKE_CLOUD/srun.words"
while [[ $1 == --* ]]; do shift; done
tasks=()
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
printf '%s\\n' "${tasks[@]}" > "$FAKE_CLOUD/tasks"
trap 'kill -KILL "${tasks[@]}"; exit 137' TERM
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
""",
    "scancel": """#!/usr/bin/env bash
printf '%s\\n' "$*" > "$FAKE_CLOUD/scancel.words"
xargs kill -TERM < "$FAKE_CLOUD/tasks"
""",
    "squeue": """#!/usr/bin/env bash
echo "${FAKE_STATE:-RUNNING}"
""",
    "scontrol": """#!/usr/bin/env bash
printf '%s\\n' "$*" > "$FAKE_CLOUD/scontrol.words"
""",
}


# What somebody has set for launches of their own is not meant here.
_OWN = ("POD_", "SLURM_", "JAX_PLATFORMS")
_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}


def _program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def _run(*command, timeout=60, **options):
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )


def _without_gcloud(folder):
    """Returns an environment whose PATH has what the launchers call, and no gcloud."""
    for name in ("bash", "dirname", "git", "sed", "cat"):
        (folder / name).symlink_to(shutil.which(name))
    return {**_ENVIRONMENT, "PATH": str(folder)}


def _dry(tmp_path, *arguments):
    """Returns the commands that would run, as lists of words: what a shell makes of the lines."""
    result = _run(POD, *arguments, "--dry-run", env=_without_gcloud(tmp_path))
    assert result.returncode == 0, result.stderr
    first, *rest = result.stdout.split("\ngcloud ")
    return [shlex.split(text) for text in (first, *(f"gcloud {text}" for text in rest))]


def _command(words):
    return next(word for word in words if word.startswith("--command=")).partition("=")[2]


QUEUED = ("gcloud", "compute", "tpus", "queued-resources")


@pytest.mark.parametrize(
    ("arguments", "service", "expected"),
    [
        (
            "create --type=v5litepod-16 --spot",
            GCLOUD,
            "create {} --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot",
        ),
        (
            "create --queued --reserved --internal-ip --type=v5p-16",
            QUEUED,
            "create {} --accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --node-id={} "
            "--reserved --internal-ips",
        ),
        ("delete --queued", QUEUED, "delete {} --force --quiet"),
        (
            "follow --worker 3 --lines=5",
            GCLOUD,
            "ssh {} --worker=3 '--command=tail -n 5 -F ~/podracers-{}.log'",
        ),
    ],
)
def test_a_single_command_is_printed(tmp_path, arguments, service, expected):
    (words,) = _dry(tmp_path, *arguments.split(), *NAMED, "--project", "mine")
    expected = shlex.split(expected.replace("{}", "pod-1"))
    assert words == [*service, *expected, "--zone=us-west4-a", "--project=mine"]


def test_setup_names_one_commit_for_all_workers(tmp_path):
    (words,) = _dry(tmp_path, "setup", *NAMED, "--repository", "https://host/a b.git")
    head = _run("git", "-C", processes.ROOT, "rev-parse", "HEAD").stdout.strip()
    assert words[4:7] == ["ssh", "pod-1", "--worker=all"]
    assert f"git checkout --quiet --detach {head}\n" in _command(words)
    assert "git clone --quiet 'https://host/a b.git' podracers\n" in _command(words)
    assert "EXTRAS=tpu install" in _command(words)


def test_fetch_copies_from_each_worker(tmp_path):
    result = _run(
        *(POD, "fetch", *NAMED, "--workers", "2", "--run_dir", "/disk/my run", "--internal-ip"),
        *("--out", tmp_path / "a b", "--dry-run"),
    )
    copies = [line for line in map(shlex.split, result.stdout.splitlines()) if "scp" in line]
    for number, words in enumerate(copies):
        paths = ["pod-1:/disk/my run", f"{tmp_path}/a b/.worker-{number}"]
        assert words[5:] == [
            *("--recurse", *paths, f"--worker={number}", "--internal-ip", "--zone=us-west4-a")
        ]
    assert len(copies) == 2 and not (tmp_path / "a b").exists()


def test_train_rehearses_everything(tmp_path):
    result = _run(
        *(POD, "train", *NAMED, "--type=v4-8", "--dry-run", "--", "--gin_file", "a.gin"),
        env=_without_gcloud(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    verbs = [line.split()[4] for line in result.stdout.splitlines() if line.startswith("gcloud")]
    assert verbs == ["list", "create", "ssh", "ssh", "scp", *["ssh"] * 4, "scp"]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("begin", *NAMED), "unknown command 'begin'"),
        (("run", *NAMED), "needs the arguments of train.py"),
        (("create", *NAMED, "--type", "h100", "--dry-run"), "give --version"),
        (("create", *NAMED, "--tpye", "v4-8"), "unknown argument '--tpye'"),
        (("setup", *NAMED, "--ref", "nowhere", "--dry-run"), "'nowhere' is no commit"),
        (("fetch", *NAMED, "--workers", "0"), "--workers: expected a whole number"),
        (("stop", "--name", "a;b", "--zone", "z"), "lowercase letters"),
        (("stop", *NAMED), "gcloud was not found"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, phrase):
    result = _run(POD, *arguments, env=_without_gcloud(tmp_path))
    processes.assert_mistake(result, phrase)
    assert result.stdout == ""


@pytest.fixture
def cloud(tmp_path):
    """A cloud on this machine, and an environment in which it is the one that is found."""
    _program(tmp_path, "gcloud", FAKE_GCLOUD)
    repository = tmp_path / "repository"
    (repository / "scripts").mkdir(parents=True)
    (repository / "Makefile").write_text(FAKE_MAKEFILE)
    (repository / "scripts" / "train.py").write_text(FAKE_TRAIN)
    (repository / "scripts" / "tpu_pod.sh").write_bytes(POD.read_bytes())
    git = ("git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "all")):
        assert _run(*git, *words).returncode == 0
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{_ENVIRONMENT['PATH']}"
    yield tmp_path, {**_ENVIRONMENT, "PATH": path, "FAKE_CLOUD": str(tmp_path)}
    for note in [*tmp_path.glob("worker-*/*.pid"), *tmp_path.glob("tasks")]:
        for process in map(int, note.read_text().split()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _pod(cloud, command, *arguments, start=_run):
    folder, environment = cloud
    return start(
        *("bash", folder / "repository" / "scripts" / "tpu_pod.sh", command, *NAMED),
        *("--repository", folder / "repository", "--type=v4-16", "--out", folder / "out"),
        *("--poll=1", "--fetch=0", "--workers=2", *arguments),
        env=environment,
    )


def _start(*command, env):
    return subprocess.Popen(
        [*map(str, command)],
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(condition, seconds=40):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


def _runs(folder):
    return [folder / f"worker-{number}" / "podracers" / "runs" / "pod-1" for number in (0, 1)]


def test_workers_run_the_same_commit_and_words_until_they_are_stopped(cloud):
    folder, _ = cloud
    for command in ("create", "setup"):
        result = _pod(cloud, command)
        assert result.returncode == 0, result.stderr
    installed = [line for line in result.stdout.splitlines() if line.startswith("installed")]
    assert len(installed) == 2 and len(set(installed)) == 1
    words = ("--gin_bindings", AWKWARD)
    result = _pod(cloud, "run", "--", *words)
    assert result.returncode == 0, result.stderr
    starts = [run / "starts" for run in _runs(folder)]
    _wait(lambda: all(note.exists() and note.read_text() for note in starts))
    expected = ["--distributed", "--run_dir", "runs/pod-1", "--resume_if_begun", *words]
    assert [json.loads(note.read_text()) for note in starts] == [expected] * 2
    assert [(run / "platforms").read_text() for run in _runs(folder)] == ["tpu,cpu"] * 2
    again = _pod(cloud, "run", "--", *words)
    assert again.returncode == 1
    assert "running already" in again.stderr
    stopped = _pod(cloud, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert [(run / "checkpoint").read_text() for run in _runs(folder)] == ["saved"] * 2
    assert "training" in (folder / "worker-1" / "podracers-pod-1.log").read_text()
    assert _pod(cloud, "fetch").returncode == 0
    assert (folder / "out" / "worker-1" / "checkpoint").read_text() == "saved"
    refused = _pod(cloud, "delete")
    assert refused.returncode == 1
    assert (folder / "state").exists()
    assert _pod(cloud, "delete", "--yes").returncode == 0
    assert not (folder / "state").exists()


@pytest.mark.slow
def test_train_goes_on_after_a_preemption_with_what_was_fetched(cloud):
    folder, _ = cloud
    launcher = _pod(cloud, "train", "--spot", "--queued", "--", "--gin_file", "a.gin", start=_start)
    try:
        fetched = folder / "out" / "worker-1" / "starts"
        _wait(fetched.exists)
        (folder / "state").write_text("PREEMPTED")
        starts = _runs(folder)[1] / "starts"
        _wait(lambda: starts.exists() and starts.read_text().count("\n") == 2)
        for run in _runs(folder):
            (run / "go").touch()
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    assert "made anew" in output
    assert (folder / "out" / "worker-0" / "summary.json").exists()
    calls = (folder / "calls").read_text().split()
    assert calls.count("create") == 2
    assert calls.count("delete") == 1
    assert "pod-1: WAITING_FOR_RESOURCES" in output
    assert (folder / "queue").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "starts", "phrase"),
    [(2, 1, ""), (1, 2, "failed 1, 2 times"), (0, 2, "interrupted, 2 times")],  # 0: no summary
)
def test_train_repeats_a_failure_and_not_a_mistake(cloud, code, starts, phrase):
    folder, _ = cloud
    result = _pod(cloud, "train", "--restarts=1", "--poll=0", "--", "fails", code)
    assert result.returncode == (code or 1), result.stderr
    assert phrase in result.stderr
    assert (_runs(folder)[0] / "starts").read_text().count("\n") == starts


def _fetched(folder, step=100):
    """Makes what an earlier `fetch` has left: runs that finish as soon as they are started."""
    for number in (0, 1):
        copy = folder / "out" / f"worker-{number}"
        (copy / "checkpoints" / str(step)).mkdir(parents=True)
        (copy / "go").touch()


@pytest.mark.slow
def test_a_broken_connection_is_no_run_and_half_a_copy_neither(cloud):
    folder, _ = cloud
    _fetched(folder)
    broken = ("ssh mkdir -p podracers/runs", "scp worker-1 pod-1:", "ssh mv -T podracers")
    (folder / "broken").write_text("\n".join(broken))
    result = _pod(cloud, "train", "--poll=0", "--", "--gin_file", "a.gin")
    assert result.returncode == 0, result.stderr
    assert (folder / "broken").read_text() == ""
    assert "lost; it goes on" in result.stderr
    for run in _runs(folder):
        assert (run / "checkpoints" / "100").exists()
        assert (run / "starts").read_text().count("\n") == 1
    assert (folder / "out" / "worker-1" / "summary.json").exists()


def test_a_copy_with_a_later_checkpoint_is_not_replaced(cloud):
    folder, _ = cloud
    assert _pod(cloud, "create").returncode == 0
    _fetched(folder)
    for run in _runs(folder):
        (run / "checkpoints" / "99").mkdir(parents=True)
    result = _pod(cloud, "fetch")
    assert result.returncode == 1
    assert "worker 0 has checkpoint 99" in result.stderr
    assert "has 100 and stays" in result.stderr
    assert (folder / "out" / "worker-0" / "checkpoints" / "100").exists()
    for run in _runs(folder):
        (run / "checkpoints" / "101").mkdir()
    assert _pod(cloud, "fetch").returncode == 0
    kept = {path.name for path in (folder / "out" / "worker-1" / "checkpoints").iterdir()}
    assert kept == {"99", "101"}


def test_a_stopped_vm_is_not_deleted(cloud):
    folder, _ = cloud
    assert _pod(cloud, "create").returncode == 0
    (folder / "state").write_text("STOPPED")
    result = _pod(cloud, "train", "--spot", "--", "--gin_file", "a.gin")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "pod-1 is STOPPED: start it" in result.stderr
    assert "delete" not in (folder / "calls").read_text().split()


def test_train_does_not_repeat_a_run_that_has_finished(cloud):
    folder, _ = cloud
    assert _pod(cloud, "create").returncode == 0
    run = _runs(folder)[0]
    for path in _runs(folder):
        path.mkdir(parents=True)
    (run / "summary.json").touch()
    (folder / "worker-0" / "podracers-pod-1.exit").write_text("0\n")
    result = _pod(cloud, "train", "--", "--gin_file", "a.gin")
    assert result.returncode == 0, result.stderr
    assert "pod-1: finished" in result.stderr
    assert not (run / "starts").exists()
    assert (folder / "out" / "worker-0" / "summary.json").exists()


@pytest.mark.slow
def test_train_starts_a_run_again_that_stands_still(cloud):
    folder, _ = cloud
    launcher = _pod(cloud, "train", "--stall=2", "--", "--gin_file", "a.gin", start=_start)
    try:
        runs = _runs(folder)
        starts = runs[0] / "starts"
        _wait(lambda: starts.exists() and starts.read_text().count("\n") == 2)
        for run in runs:
            (run / "go").touch()
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    assert "pod-1: stalled; it goes on" in output
    assert (runs[1] / "checkpoint").read_text() == "saved"


@pytest.fixture
def slurm(cloud):
    folder, environment = cloud
    for name, text in FAKE_SLURM.items():
        _program(folder, name, text)
    job = {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(folder / "repository")}
    return folder, {**environment, **job, "PODRACERS_PYTHON": sys.executable}


def test_slurm_prints_its_line(tmp_path):
    result = _run(SLURM, "--dry-run", "--gin_bindings", AWKWARD, cwd=processes.ROOT)
    expected = (
        "srun --kill-on-bad-exit=1 --output=runs/slurm/%j-%t.log --open-mode=append "
        ".venv/bin/python scripts/train.py --distributed --resume_if_begun "
        "--run_dir runs/slurm-JOB --gin_bindings"
    )
    assert shlex.split(result.stdout) == [*expected.split(), AWKWARD]
    result = _run(SLURM, "--dry-run", "--run_dir=/disk/a", cwd=processes.ROOT)
    assert shlex.split(result.stdout)[-2:] == ["--resume_if_begun", "--run_dir=/disk/a"]


@pytest.mark.parametrize(
    ("arguments", "extra", "phrase"),
    [
        ((), {}, "no arguments for train.py"),
        (("--gin_file", "a"), {"SLURM_JOB_ID": ""}, "not in a Slurm job"),
        (("--gin_file", "a"), {"SLURM_SUBMIT_DIR": "/"}, "no scripts/train.py in /"),
        (("--gin_file", "a"), {"PODRACERS_PYTHON": "no-python"}, "no no-python"),
        (("--gin_file", "a", "--dry-run"), {}, "--dry-run comes first"),
    ],
)
def test_a_mistake_under_slurm_is_one_line(slurm, arguments, extra, phrase):
    folder, environment = slurm
    result = _run(SLURM, *arguments, env={**environment, **extra}, cwd=folder)
    processes.assert_mistake(result, phrase)


@pytest.mark.parametrize(
    ("state", "words", "run_dir", "requeued"),
    [
        ("RUNNING", ("--gin_file", "a"), "runs/slurm-77", True),
        ("COMPLETING", ("--gin_file", "a"), "runs/slurm-77", False),
        ("RUNNING", ("--run_dir", "runs/a b", "ends"), "runs/a b", False),  # with its last update
    ],
)
def test_sigterm_reaches_the_tasks_and_the_job_is_requeued(slurm, state, words, run_dir, requeued):
    folder, environment = slurm
    job = _start("bash", SLURM, *words, env={**environment, "FAKE_STATE": state})
    run_dir = folder / "repository" / run_dir
    try:
        starts = run_dir / "starts"
        _wait(lambda: starts.exists() and starts.read_text().count("\n") == 2)
        job.send_signal(signal.SIGTERM)  # to the shell of the job alone, as --signal=B:TERM does
        output, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert (run_dir / "checkpoint").read_text() == "saved"
    assert (folder / "scancel.words").read_text() == "--signal=TERM 77\n"
    assert (folder / "scontrol.words").exists() == requeued
    if requeued:
        assert (folder / "scontrol.words").read_text() == "requeue 77\n"


@pytest.mark.parametrize(
    ("variables", "platforms"),
    [
        ({"SLURM_GPUS": "8", "SLURM_JOB_GPUS": "0,1,2,3"}, "cuda,cpu"),
        ({}, "cpu"),
        ({"SLURM_GPUS": "8", "JAX_PLATFORMS": "rocm,cpu"}, "rocm,cpu"),
    ],
)
def test_slurm_names_the_platform_and_a_failed_job_is_not_requeued(slurm, variables, platforms):
    folder, environment = slurm
    result = _run("bash", SLURM, "fails", "1", env={**environment, **variables})
    assert result.returncode == 1
    assert not (folder / "scontrol.words").exists()
    run_dir = folder / "repository" / "runs" / "slurm-77"
    assert (run_dir / "platforms").read_text() == platforms
