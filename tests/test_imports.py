"""Tests that imports touch no device, and follow the layers."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Modules and subpackages of a package; each imports only those of earlier rows, and its own.
LAYERS = {
    "podracers": (
        ("errors", "keys"),
        ("leaks", "precision", "types"),
        ("trees",),
        ("agent", "parallel"),
        ("device_memory", "environment", "population"),
        ("metrics", "supervision", "tasks", "video"),
        ("contract", "hosts", "runner", "unroll"),
        ("anakin", "checkpoints", "evaluation", "host_contract", "sebulba"),
        ("agent_contract", "training"),
        ("exports",),
        ("commands",),
        ("scripts",),
    ),
    "agents": (
        ("backends",),
        ("networks",),
        ("parts",),
        ("replay",),
        ("search",),
        ("alphazero", "dqn", "impala", "muzero", "ppo", "pqn", "r2d2", "sac", "vmpo"),
        ("meta",),
    ),
}

_IMPORT_ALL = """
import importlib, pkgutil, sys
optional = {"gymnax", "brax", "craftax", "pgx"}
for name in ("podracers", "agents", "environments"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in optional:
                raise
from tests.environments import test_contract
for make in test_contract.ENVIRONMENTS.values():
    make().spec.zero_observation()
from jax._src import xla_bridge
sys.exit(f"importing initialised {list(xla_bridge._backends)}" if xla_bridge._backends else 0)
"""


def _imports(path: pathlib.Path) -> set[str]:
    """Returns the dotted names that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.slow  # `make check` has it
def test_imports_and_specs_touch_no_device():
    command = [sys.executable, "-c", _IMPORT_ALL]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_start_imports_slow_libraries_late():
    code = """
import sys
from agents import dqn, impala, muzero, ppo
from podracers.commands import train
print(*{"distrax", "orbax.checkpoint", "tensorboard"}.intersection(sys.modules))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == [], run.stderr


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("podracers", ("agents.", "environments.")),
        ("agents", ("podracers.anakin", "podracers.sebulba", "environments.")),
        ("environments", ("podracers.anakin", "podracers.sebulba", "agents.")),
    ],
)
def test_packages_import_no_upper_layer(package, others):
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name != "config.py":  # makes objects of the names in a configuration
            for name in _imports(path):
                assert not f"{name}.".startswith(others), f"{path} imports {name}"


@pytest.mark.parametrize("package", LAYERS)
def test_layers_have_every_module(package):
    names = {path.stem for path in (ROOT / package).iterdir()} - {"__init__", "__pycache__", "py"}
    assert sorted(sum(LAYERS[package], ())) == sorted(names - {"docs", "gin"})


@pytest.mark.parametrize(
    ("package", "number"), [(x, number) for x in LAYERS for number in range(len(LAYERS[x]))]
)
def test_modules_import_no_upper_layer(package, number):
    lower = {name for layer in LAYERS[package][:number] for name in layer}
    for name in LAYERS[package][number]:
        place = ROOT / package / name
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        for path in files:
            rooms = {x.split(".")[1] for x in _imports(path) if x.startswith(f"{package}.")}
            assert rooms <= lower | {name}, f"{path} imports {rooms - lower - {name}}"


def test_one_module_of_agents_asks_for_the_platform():
    asking = [x.stem for x in (ROOT / "agents").rglob("*.py") if "platform()" in x.read_text()]
    assert asking == ["layouts"]
