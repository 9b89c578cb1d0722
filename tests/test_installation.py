"""What `pip install .` brings along works from any directory."""

import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from podracers import errors
from podracers.training import experiment

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONTENT = ("podracers", "agents", "environments", "gin", "scripts")
CONTENT_FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
NAMES = ("cartpole_ppo.gin", "experiments/cartpole_ppo.gin", "gin/experiments/cartpole_ppo.gin")
# One update of 64 agent steps.
SMALL = (
    "TOTAL_STEPS = 64",
    "NUM_ENVS = 8",
    "ROLLOUT_LENGTH = 8",
    "PPO.epochs = 1",
    "PPO.num_minibatches = 1",
    "Experiment.evaluation_episodes = 4",
    "Experiment.evaluation_max_steps = 10",
)


# What packages are imported as, where that is not their name.
MODULES = {"gin-config": "gin", "orbax-checkpoint": "orbax", "pillow": "PIL", "dm-env": "dm_env"}


def test_library_code_imports_every_package_that_it_requires():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^([\w-]+)>=", setup["options"]["install_requires"], re.MULTILINE)
    paths = [path for package in CONTENT[:3] for path in (ROOT / package).rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    unused = {name for name in required if MODULES.get(name, name) not in imported}
    assert len(required) > 10
    assert not unused


@pytest.fixture(name="elsewhere")
def _elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files_are_found_from_any_directory(elsewhere, name):
    assert experiment.load([name], []).total_steps > 0
    outer = elsewhere / "outer.gin"
    outer.write_text(f"include '{name}'\nSEED = 7\n")
    assert experiment.load(["outer.gin"], []).seed == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_working_directory_wins(elsewhere, name):
    own = elsewhere / name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"include '{ROOT}/gin/experiments/catch_ppo.gin'\nSEED = 7\n")
    assert experiment.load([name], []).seed == 7


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_shipped_file_is_named_from_any_directory(elsewhere, name):
    with pytest.raises(errors.UserError, match=f"did you mean '{name}'"):
        experiment.load([name.replace("cartpole_ppo", "cartpol_ppo")], [])


def _run(*command, **options):
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_trains_and_evaluates(tmp_path, elsewhere):
    source, target = tmp_path / "source", tmp_path / "target"
    for name in CONTENT:  # building leaves files beside the sources
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in CONTENT_FILES:
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    _run(*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        *("podracers", "agents", "environments")  # and no `gin`, which would hide gin-config
    }
    _run(*pip, "install", *offline, "--target", target, wheel, cwd=tmp_path)

    options = {"env": {**os.environ, "PYTHONPATH": str(target)}, "cwd": elsewhere}
    where = _run(sys.executable, "-c", "import podracers; print(podracers.__file__)", **options)
    assert pathlib.Path(where.strip()).is_relative_to(target)
    bindings = [part for binding in SMALL for part in ("--gin_bindings", binding)]
    chosen = ("--gin_file", "cartpole_ppo.gin", *bindings)
    _run(target / "bin/podracers-train", *chosen, "--run_dir", "run", **options)
    summary = json.loads((elsewhere / "run/summary.json").read_text())
    assert (summary["updates"], summary["commit"]) == (1, None)
    said = _run(target / "bin/podracers-evaluate", "--run_dir", "run", **options)
    assert f"return {summary['evaluation']['return']:.2f}" in said
    _run(
        *(target / "bin/podracers-compare", "--gin_file", "cartpole_ppo.gin", "--seeds", 1),
        *("--runners", "anakin", *bindings),
        **options,
    )
    assert list(elsewhere.glob("comparisons/cartpole_ppo/comparison.png"))
