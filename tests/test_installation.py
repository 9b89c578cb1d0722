"""An installation by `pip install .` works from any directory."""

import json
import pathlib
import re
import sys
import zipfile

import jax
import pytest
import yaml
from packaging import requirements

from podracers import errors
from podracers.training import experiment, gin_names
from tests import documented, processes

ROOT = processes.ROOT
PACKAGES = ("podracers", "agents", "environments")
NAMES = ("cartpole_ppo.gin", "experiments/cartpole_ppo.gin", "gin/experiments/cartpole_ppo.gin")
# One update of 64 agent steps.
SMALL = (
    *("TOTAL_STEPS = 64", "NUM_ENVS = 8", "ROLLOUT_LENGTH = 8"),
    *("PPO.epochs = 1", "PPO.num_minibatches = 1"),
    *("Experiment.evaluation_episodes = 4", "Experiment.evaluation_max_steps = 10"),
)
# Names to import, where they differ from those of the packages.
MODULES = {"gin-config": "gin", "orbax-checkpoint": "orbax", "pillow": "PIL"}


def test_library_code_imports_every_package_that_it_requires():
    required = re.findall(
        r"^([\w-]+)>=", documented.setup()["options"]["install_requires"], re.MULTILINE
    )
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    assert len(required) > 10
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in required}
    assert {name for name, module in modules.items() if module not in imported} == set()


def test_locked_versions_satisfy_the_bounds_of_the_project():
    lock = (ROOT / "requirements.txt").read_text()
    setup = documented.setup()
    extras = setup["options.extras_require"].values()
    bounds = map(
        requirements.Requirement,
        "\n".join([setup["options"]["install_requires"], *extras]).split(),
    )
    compared = {
        f"{bound}, locked {version}": bound.specifier.contains(version)
        for bound in bounds
        for version in re.findall(rf"^{bound.name}==(\S+)", lock, re.MULTILINE)
    }
    assert len(compared) > 40 and [text for text, fits in compared.items() if not fits] == []


def test_the_citation_and_the_pages_repeat_the_projects_metadata():
    metadata = documented.setup()["metadata"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["url"] == citation["repository-code"] == metadata["url"]
    assert citation["license"] == metadata["license"]
    (paper,) = citation["references"]
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert paper["title"] in " ".join(text.split())
    assert set(re.findall(r"git\+(https?://[^\s'\"@`]+)", text)) == {metadata["url"]}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files_are_found_from_any_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("outer.gin").write_text(f"include '{name}'\nSEED = 7\n")
    assert experiment.load(["outer.gin"], []).seed == 7
    with pytest.raises(errors.UserError, match=f"did you mean '{name}'"):
        experiment.load([name.replace("cartpole_ppo", "cartpol_ppo")], [])
    file = tmp_path / name  # a file of the working directory wins
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"include '{ROOT}/gin/experiments/catch_ppo.gin'\nSEED = 8\n")
    assert experiment.load([name], []).seed == 8


def test_every_experiment_has_a_line_in_the_list():
    lines = gin_names.experiments()
    assert {*lines} == {file.name for file in (ROOT / "gin" / "experiments").glob("*.gin")}
    assert [name for name, line in lines.items() if not 3 < len(line) < 80] == []
    assert lines["snake_ppo.gin"] == "PPO on Jumanji's Snake-v1"


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_trains_and_evaluates(tmp_path, source):
    elsewhere, environment = tmp_path / "elsewhere", tmp_path / "environment"
    elsewhere.mkdir()

    def run(*command):
        done = processes.finish(processes.spawn(command, {"PYTHONPATH": ""}, cwd=elsewhere))
        return done.stdout

    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (
        ("init", "--quiet"),
        ("add", "--all"),
        ("commit", "--quiet", "-m", "first"),
        ("tag", "v7.6.5"),
    ):
        run("git", "-C", source, *identity, *command)
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    programs = environment / "bin"
    # The dependencies of this environment, without its editable installation.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(pathlib.Path(jax.__file__).parents[1]))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    # No `gin`, which would hide gin-config.
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    install = (*pip, "--python", programs / "python", "install", *offline)
    run(*install, wheel)
    path = run(programs / "python", "-c", "import agents; print(agents.__file__)")
    assert pathlib.Path(path.strip()).is_relative_to(site)
    chosen = ("--gin_file", "catch_ppo.gin", "--gin_bindings", *SMALL)
    run(programs / "podracers-train", *chosen, "--run_dir", "run")
    summary = json.loads((elsewhere / "run/summary.json").read_text())
    assert (summary["updates"], summary["commit"], summary["other_modules"]) == (1, None, {})
    assert summary["versions"]["podracers"] == "7.6.5"
    printed = run(programs / "podracers-evaluate", "--run_dir", "run")
    assert f"return {summary['evaluation']['return']:.2f}" in printed
    load = "[x.load() for x in importlib.metadata.distribution('podracers').entry_points]"
    run(programs / "python", "-c", f"import importlib.metadata; {load}")
    assert "\nsnake_ppo.gin " in run(programs / "podracers-train", "--list")
    assert "snake_ppo" in run(programs / "podracers-reproduce", "--list")
    refused = processes.spawn(
        (programs / "podracers-reproduce", "cartpole_ppo", "--record"), {"PYTHONPATH": ""}
    )
    processes.assert_mistake(processes.finish(refused, 2), "of a clone")
    for name, *words in (
        ("check", "environments.catch.Catch"),
        ("export", "--run_dir", "run", "--out", "policy", "--platforms", "cpu"),
        ("plot", "--run_dir", "run", "--metric", "loss/total", "--out", "run.png"),
    ):
        run(programs / f"podracers-{name}", *words)
    assert (elsewhere / "run.png").exists() and (elsewhere / "policy").exists()
    run(*install, "--no-build-isolation", "--force-reinstall", f"git+file://{source}")
    commit = "from podracers.training import summary as x; print(x.provenance()['commit'])"
    commit = run(programs / "python", "-c", commit)
    assert commit == run("git", "-C", source, "rev-parse", "HEAD")
