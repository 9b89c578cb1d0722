"""Tests of the files in `scripts/sky`: bash runs their commands, as on SkyPilot's machines."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import pytest
import yaml

from tests import groups, processes

FILE, SWEEP_FILE = (processes.ROOT / "scripts" / "sky" / f"{x}.yaml" for x in ("train", "sweep"))
TASK, SWEEP = (yaml.safe_load(file.read_text()) for file in (FILE, SWEEP_FILE))
(UNFINISHED,) = TASK["resources"]["job_recovery"]["recover_on_exit_codes"]
# Loads the file, with the accelerators of the command line, without a cloud.
LOAD = f"""
import sky, yaml

task = yaml.safe_load(open({str(FILE)!r}))
for accelerators in (None, "tpu-v6e-8", "H100:8"):
    loaded = sky.Task.from_yaml_config(dict(task), env_overrides=[("BUCKET", "mine")])
    if accelerators:
        loaded.set_resources_override({{"accelerators": accelerators}})
    (resources,) = loaded.resources
    (storage,) = loaded.storage_mounts.values()
    print(storage.name, storage.mode.value, resources.use_spot, resources.accelerator_args)
task = yaml.safe_load(open({str(SWEEP_FILE)!r}))
print("mine", sky.Task.from_yaml_config(task, env_overrides=[("STORAGE", "x")]).num_nodes)
"""


def _start(folder, command, rank=0, num_nodes=1, task=TASK, **variables):
    """Starts a command of the file on a node, in a folder that stands for the synced one."""
    node = {
        "SKYPILOT_NUM_NODES": num_nodes,
        "SKYPILOT_NODE_RANK": rank,
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * num_nodes),
    }
    variables = {**task["envs"], "BUCKET": "mine", **node, **variables}
    return processes.spawn(
        ("bash", "--norc", "-i", "-c", task[command]),
        {name: str(value) for name, value in variables.items()},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.fixture
def node(tmp_path):
    """Runs the command with a train.py that prints its words: `node(rank, num_nodes, CODE=2)`."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/usr/bin/env bash\necho "$@"\n[ -z "$ENDS" ] || touch summary.json\nexit ${CODE:-0}\n'
    )
    python.chmod(0o755)

    def run(*place, **variables):
        ended = processes.finish(
            _start(tmp_path, "run", *place, EXPERIMENT="a.gin", **variables), None
        )
        return ended.returncode, ended.stdout.strip().removeprefix("scripts/train.py --gin_file ")

    return run


def test_the_command_of_a_node(node):
    resumed = "--resume_if_begun --gin_bindings Experiment.checkpoint_directory ="
    begin = f"--run_dir /runs/snake_ppo {resumed} 'gs://mine/snake_ppo/checkpoints'"
    assert node(CODE=2) == (2, f"a.gin {begin}")
    assert node(0, 2, CODE=1, HARDWARE="b.gin c.gin")[1].startswith(f"a.gin b.gin c.gin {begin} ")
    code, words = node(1, 2)
    assert (code, words.removeprefix(f"a.gin {begin} ")) == (
        0,
        "--distributed --peer_timeout 300 --coordinator 127.0.0.1:8476 --num_processes 2 "
        "--process_id 1",
    )
    # Process 0 alone decides whether the run is over.
    here = {"RUN_DIR": ".", "CHECKPOINTS": "/kept"}
    assert node(**here) == (UNFINISHED, f"a.gin --run_dir . {resumed} '/kept'")
    assert node(**here, ENDS="yes")[0] == 0


@pytest.mark.slow
def test_skypilot_accepts_the_file():
    if (program := shutil.which("sky")) is None:
        pytest.skip("SkyPilot is not installed, in an environment of its own on the PATH")
    python = pathlib.Path(program).resolve().with_name("python")
    loaded = processes.finish(processes.spawn((python, "-c", LOAD), {"PYTHONPATH": ""}))
    rows = [line for line in loaded.stdout.splitlines() if line.startswith("mine ")]
    start = "mine MOUNT_CACHED True"
    tpu = "{'runtime_version': 'v2-alpha-tpuv6e'}"
    assert rows == [f"{start} None", f"{start} {tpu}", f"{start} None", "mine 1"]


@pytest.fixture(scope="module")
def machine(source, tmp_path_factory):
    """A folder in which `setup` has run; pip sees the packages of this environment, too."""
    folder = tmp_path_factory.mktemp("machine") / "sky_workdir"
    shutil.copytree(source, folder, symlinks=True)
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(processes.ROOT / name, folder)
    environment = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(pathlib.Path(jax.__file__).parents[1]))
    variables = {"EXTRAS": "", "PYTHONPATH": "", "CHECKPOINTS": folder}  # no bucket's packages
    processes.finish(_start(folder, "setup", **variables))
    return folder


@pytest.mark.slow
def test_a_run_continues_after_a_preemption(machine, tmp_path):
    """On two nodes of a device each, to the end that one node of two devices reaches."""
    common = {
        "EXPERIMENT": processes.config_file(tmp_path),
        "BINDINGS": "SEED = 4\nExperiment.log_period = 1",
        "CHECKPOINTS": tmp_path / "shared",
        "PYTHONPATH": "",
    }
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    variables = {**common, **groups.environment(2), "RUN_DIR": alone}
    variables["CHECKPOINTS"] = tmp_path / "alone_checkpoints"
    (ended,) = groups.finish([_start(machine, "run", **variables)], [0])
    assert "Results" in ended.stdout
    variables = {**common, **groups.environment(1)}

    def start():
        port = groups.free_port()
        folders = (run_dir, tmp_path / "unused")  # a mount of the bucket for each
        return [
            _start(machine, "run", rank, 2, **variables, RUN_DIR=folders[rank], PORT=port)
            for rank in range(2)
        ]

    started = start()
    processes.wait_for(lambda: processes.num_lines(run_dir) >= 3 or started[0].poll() is not None)
    for node in started:
        os.killpg(node.pid, signal.SIGTERM)
    groups.finish(started, (UNFINISHED, 0))
    assert processes.num_lines(run_dir) < processes.num_lines(alone)
    lead, _ = groups.finish(start(), (0, 0))
    assert "resuming from step" in lead.stdout
    processes.assert_same_end(run_dir, alone)
    assert not (tmp_path / "unused").exists() and not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_machines_join_a_study_and_leave_it_at_a_preemption(machine, tmp_path):
    assert TASK["setup"].startswith(SWEEP["setup"])  # so the machine is set up for it
    (tmp_path / "space.toml").write_text("PPO.gamma = {linear = [0.9, 0.99]}")
    common = {
        "EXPERIMENT": processes.config_file(tmp_path),
        "SPACE": tmp_path / "space.toml",
        "STORAGE": f"sqlite:///{tmp_path}/studies",
        "OPTIONS": "--trials 3 --sampler random",
        "BINDINGS": "SEED = 4",
        "PYTHONPATH": "",
    }

    def start(rank):
        folder = tmp_path / f"disk-{rank}" / "study"
        return _start(machine, "run", rank, 2, task=SWEEP, **common, STUDY=folder)

    nodes = [start(rank) for rank in range(2)]
    processes.wait_for(lambda: any(tmp_path.glob("disk-0/study/trial-*/metrics.jsonl")))
    os.killpg(nodes[0].pid, signal.SIGTERM)
    groups.finish(nodes, (*SWEEP["resources"]["job_recovery"]["recover_on_exit_codes"], 0))
    (again,) = groups.finish([start(0)], [0])
    assert "3 complete" in again.stdout
