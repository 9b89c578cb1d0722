"""Tests of training as a user starts, stops, kills and resumes it."""

import json
import os
import pathlib
import re
import select
import shutil
import signal
import sys

import pytest
from tensorboard.backend.event_processing import event_accumulator

from podracers.commands import train
from tests import processes

_HERE = "train"  # in this process, for the fixture `run`

# The first process of a session that opens a terminal, as a shell in a window; it becomes a script.
_IN_TERMINAL = """
import os, sys

terminal = os.open(sys.argv[1], os.O_RDWR)
os.write(1, b".")
for descriptor in range(3):
    os.dup2(terminal, descriptor)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.fixture(scope="module")
def config(reference):
    return reference.parent / "tiny.gin"


def test_a_run_leaves_its_files(reference):
    summary = json.loads((reference / "summary.json").read_text())
    assert (summary["environment_steps"], summary["updates"]) == (2560, 40)
    assert summary["evaluation"]["episodes"] == 300
    assert summary["wall_time_s"] > summary["first_dispatch_s"] > 0.0
    assert summary["memory"].keys() == {"process"}  # of the machine's: CPUs have none of their own
    assert summary["memory"]["process"] > 0.1  # GB
    assert summary["steps_per_second"] > 0.0
    assert {"device", "versions", "commit", "seed", "random_policy_return"} <= summary.keys()
    lines = processes.log(reference)
    assert [line["step"] for line in lines] == list(range(64, 2561, 64))
    evaluated = [line["step"] for line in lines if "evaluation/return" in line]
    assert evaluated == [512 * n for n in range(1, 6)]
    kept = sorted(int(path.name) for path in (reference / "checkpoints").iterdir())
    assert kept[-3:] == [1536, 2048, 2560]
    assert summary["best_checkpoint"] in kept
    events = event_accumulator.EventAccumulator(str(reference))
    events.Reload()
    points = [(p.step, pytest.approx(p.value)) for p in events.Scalars("loss/total")]
    assert points == [(line["step"], line["loss/total"]) for line in lines]


def _steps(path):
    """Returns the newest checkpoint's step."""
    steps = [int(folder.name) for folder in path.glob("checkpoints/*") if folder.name.isdigit()]
    return max(steps, default=0)


@pytest.mark.exact
@pytest.mark.slow
def test_a_run_that_is_killed_stopped_and_resumed_equals_an_uninterrupted_one(
    reference, tmp_path, config
):
    path = tmp_path / "run"
    often = "from podracers.training import run; run._SAVE_PERIOD = 0.0\n"
    often += "from podracers.commands import train; train.command()"
    begin = ("--gin_file", config, "--run_dir", path)
    by_clock = ("--gin_bindings", "Experiment.checkpoint_period = None")
    processes.interrupt(
        processes.spawn([sys.executable, "-c", often, *begin, *by_clock]),
        signal.SIGKILL,
        lambda: _steps(path) > 512 and _steps(path) % 512,  # evaluations save every 512 steps
    )
    assert _steps(path) % 512
    lines = processes.num_lines(path) + 4  # it is cut back to the checkpoint before it grows
    process = processes.start("train", "--run_dir", path, "--resume")
    stopped = processes.interrupt(
        process, signal.SIGINT, lambda: processes.num_lines(path) >= lines
    )
    assert "Traceback" not in stopped.stderr
    steps = int(re.search(r"stopped at ([\d,]+) steps", stopped.stdout)[1].replace(",", ""))
    assert _steps(path) == steps and steps < 2560
    assert not (path / "summary.json").exists()
    resumed = processes.run(
        *("train", "--run_dir", path, "--resume"),
        environment={"JAX_DEBUG_LOG_MODULES": "jax._src.compiler"},
    )
    assert f"resuming from step {steps:,}" in resumed.stdout
    assert "Persistent compilation cache hit" in resumed.stderr
    assert re.findall(r"CACHE MISS for '(.*?)'", resumed.stderr) == []
    processes.assert_same_end(reference, path)


def test_a_resumed_run_announces_changes_and_keeps_the_earlier_configuration(
    reference, tmp_path, run
):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    changes = ("TOTAL_STEPS = 2624", "PPO.entropy_cost = 0.01", "Experiment.keep_best = 2")
    result = run(_HERE, "--run_dir", path, "--resume", "--gin_bindings", *changes)
    assert re.findall("changed: (.*)", result.stdout) == [
        "Experiment.keep_best: default -> 2",
        "Experiment.total_steps: 2560 -> 2624",
    ]
    assert (path / "config.2560.gin").read_bytes() == (reference / "config.gin").read_bytes()
    assert "Experiment.keep_best = 2" in (path / "config.gin").read_text()


def test_changes_are_those_of_options_that_the_run_uses():
    """Other bindings that `config.gin` had are those that changes replaced."""
    begun = "PPO.gamma = 0.9\nPPO.anneal_steps = %A\nA = 64\nMLP.sizes = (8,)\na.encoder = @MLP()\n"
    text = "PPO.gamma = 0.9\nPPOKL.anneal_steps = 32\na.encoder = @CNN()\nPPOKL.clip = 0.1\n"
    assert train._changes(begun, text) == [
        "changed: PPOKL.anneal_steps: 64 -> 32",
        "changed: PPOKL.clip: default -> 0.1",
        "changed: a.encoder: MLP() -> CNN()",
    ]


@pytest.mark.slow
def test_a_run_without_a_directory_is_named_after_its_configuration(
    tmp_path, config, run, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    more = tmp_path / "more.gin"
    more.write_text("SEED = 5\nTOTAL_STEPS = 128\n")
    both = ("--gin_file", config, "--gin_file", more)
    population = ("--gin_bindings", "Anakin.population = 2")
    run(_HERE, *both, *population)
    (path,) = pathlib.Path("runs").iterdir()
    assert re.fullmatch(r"tiny-anakin-seeds5-6-\d{8}-\d{6}", path.name)
    # A resumed run takes other values.
    more.write_text("TOTAL_STEPS = 192\n")
    run(_HERE, "--run_dir", path, "--resume", "--gin_file", more)
    assert json.loads((path / "summary.json").read_text())["updates"] == 3


@pytest.mark.slow
def test_a_pipe_whose_reader_has_ended_ends_no_run(tmp_path, config):
    """As in `train.py 2>&1 | tee log`, where Ctrl-C also ends `tee`."""
    words = ("--gin_file", config, "--gin_bindings", "TOTAL_STEPS = 10_000_000")
    process = processes.start("train", *words, "--run_dir", tmp_path / "run")
    process.stdout.close()
    process.stderr.close()
    process.stdout = process.stderr = None  # for `communicate`
    processes.interrupt(process, signal.SIGINT, lambda: processes.num_lines(tmp_path / "run") >= 1)
    assert any((tmp_path / "run" / "checkpoints").glob("[1-9]*"))


@pytest.mark.slow
def test_a_terminal_that_closes_ends_a_run_in_order(tmp_path, config):
    """Its output has no reader any more, and fails."""
    words = ("--gin_file", config, "--run_dir", tmp_path / "run")
    words += ("--gin_bindings", "TOTAL_STEPS = 10_000_000", "SEED = 4")
    master, slave = os.openpty()
    process = processes.spawn(
        [sys.executable, "-c", _IN_TERMINAL, os.ttyname(slave), "scripts/train.py", *words],
        start_new_session=True,
    )
    assert process.stdout.read(1) == "."  # the terminal is open
    os.close(slave)
    while process.poll() is None and processes.num_lines(tmp_path / "run") < 3:
        if select.select([master], [], [], 0.02)[0]:
            os.read(master, 2**16)
    os.close(master)
    processes.finish(process)
    step, _ = processes.final_state(tmp_path / "run")
    assert step == processes.log(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
def test_files_and_names_do_not_depend_on_the_locale(tmp_path):
    (tmp_path / "kitchen.py").write_text(
        """
import dataclasses
from environments import catch

@dataclasses.dataclass(frozen=True)
class Kitchen(catch.Catch):
    label: str = "Küche ±"
""",
        "utf-8",
    )
    (tmp_path / "kü.gin").write_text(
        processes.CONFIG.replace("from agents", "import kitchen  # Küche\nfrom agents")
        + "experiment.Experiment.environment = @kitchen.Kitchen\n"
        + "kitchen.Kitchen.label = 'Geschäft'\n",
        "utf-8",
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": f"{processes.ROOT}:{tmp_path}"}
    short = ("--gin_bindings", "TOTAL_STEPS = 512")
    for script, *words in (
        ("train", "--gin_file", "kü.gin", "--run_dir", "run", *short),
        ("plot", "--run_dir", "run", "--out", "ü.png"),
    ):
        ended = processes.run(script, *words, environment=ascii_only, cwd=tmp_path)
        assert ended.stderr.count("Error") == 0
    assert "Geschäft" in (tmp_path / "run" / "config.gin").read_text("utf-8")
    assert (tmp_path / "ü.png").exists()


@pytest.mark.slow
def test_checkpoints_elsewhere_outlive_the_run_directory(tmp_path, run):
    """A launcher goes on from them with a new directory; another run is refused there."""
    config, run_dir, kept = processes.config_file(tmp_path), tmp_path / "run", tmp_path / "kept"
    binding = ("--gin_bindings", f"Experiment.checkpoint_directory = '{kept}'")
    begin = ("--gin_file", config, "--run_dir", run_dir, "--resume_if_begun", *binding)
    run(_HERE, *begin, "--gin_bindings", "TOTAL_STEPS = 1024")
    assert not (run_dir / "checkpoints").exists()
    evaluated = run("evaluate", "--run_dir", run_dir)
    assert "step 1,024: return" in evaluated.stdout, evaluated.stderr
    words = ("--gin_file", config, "--run_dir", tmp_path / "other", *binding)
    other = run(_HERE, *words, code=2)
    processes.assert_mistake(other, f"'{kept}' is in use", "--resume")
    assert not (tmp_path / "other").exists()
    shutil.rmtree(run_dir)
    last = run(_HERE, *begin)
    assert "resuming from step 1,024" in last.stdout
    assert processes.final_state(run_dir)[0] == 2560
    empty = f"Experiment.checkpoint_directory = '{tmp_path / 'empty'}'"
    moved = run(_HERE, "--run_dir", run_dir, "--resume", "--gin_bindings", empty, code=2)
    processes.assert_mistake(moved, f"expected the checkpoints of '{kept}'")
