"""Tests of what importing costs and who may import whom."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("podracers", "agents", "environments")
# Where a name in a configuration becomes an object: the only place that may look into all packages.
ROOTS = ("config.py",)
RUNNERS = ("podracers.anakin", "podracers.sebulba")

_IMPORT_ALL = """
import importlib, pkgutil, sys
optional = {"gymnax", "brax"}
for name in %r:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in optional:
                raise
from jax._src import xla_bridge
sys.exit(f"importing initialised {list(xla_bridge._backends)}" if xla_bridge._backends else 0)
"""


def _imports(path: pathlib.Path) -> set[str]:
    """Returns the dotted names of everything that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_importing_touches_no_device():
    command = [sys.executable, "-c", _IMPORT_ALL % (PACKAGES,)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_shared_layer_knows_no_agent_and_no_environment():
    for path in sorted((ROOT / "podracers").rglob("*.py")):
        if path.name in ROOTS:
            continue
        for name in _imports(path):
            assert name.split(".")[0] not in ("agents", "environments"), f"{path} imports {name}"


@pytest.mark.parametrize("package", ["agents", "environments"])
def test_agents_and_environments_know_no_runner(package):
    other = {"agents": "environments", "environments": "agents"}[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in _imports(path):
            assert not name.startswith(RUNNERS), f"{path} imports {name}"
            assert name.split(".")[0] != other, f"{path} imports {name}"


def test_gin_configurations_do_not_shadow_gin_config():
    assert not list((ROOT / "gin").rglob("*.py"))
