"""Tests of the Makefile: its commands."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests import documented

ROOT = documented.ROOT


def _make(*arguments: str, code: int = 0) -> str:
    # Without the lines that make adds in a make of its own, as in `make test`.
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ((), "--gin_file gin/experiments/snake_ppo.gin"),
        (
            ("EXPERIMENT=pong_impala", "RUNNER=sebulba", "RUN_DIR=runs/mine"),
            "--gin_file gin/experiments/pong_impala.gin --runner sebulba --run_dir runs/mine",
        ),
    ],
)
def test_train(variables, flags):
    last = _make("-n", *variables, "train").replace("\\\n", " ").splitlines()[-1].split()
    assert last == [".venv/bin/python", "scripts/train.py", *flags.split()]
    assert all((ROOT / word).exists() for word in last if word.startswith("gin/"))


def test_checks_include_types_and_all_tests_are_the_fast_and_the_slow_ones():
    assert ".venv/bin/pyrefly check" in _make("-n", "STAMP=setup.cfg", "check")
    marked = re.findall('-m "(.+)"', _make("-n", "STAMP=setup.cfg", "test-all"))
    assert marked == ["not slow and not learning", "slow and not learning"]


def test_workflows_call_make_on_every_python():
    workflows = {
        path.stem: yaml.safe_load(path.read_text())["jobs"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
    }
    steps = [step for jobs in workflows.values() for job in jobs.values() for step in job["steps"]]
    commands = {step["run"] for step in steps if "run" in step}
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = re.sub(r"\$\{\{.*?\}\}", "", command).split()
        assert program == "make"
        _make("-n", "STAMP=setup.cfg", *arguments)
    versions = re.findall(r":: (3\.\d+)", documented.setup()["metadata"]["classifiers"])
    assert workflows["test"]["test"]["strategy"]["matrix"]["python"] == versions


def test_unknown_extras_are_refused():
    """Pip only warns, and JAX would find only the CPU."""
    assert "got 'cuda'" in _make("--dry-run", "EXTRAS=cuda", "install", code=2)
    known = re.search("KNOWN_EXTRAS := (.*)", (ROOT / "Makefile").read_text())[1].split()
    assert sorted(known) == sorted(documented.setup()["options.extras_require"])
    printed = _make("-n", "STAMP=no-file", "EXTRAS=cuda12,brax", "no-file")
    assert '-e ".[cuda12,brax]"' in printed


@pytest.mark.slow
@pytest.mark.parametrize(("tries", "code"), [(1, 0), (2, 0), (3, 1)])
def test_continuous_integration_names_the_tests_that_needed_a_second_try(tmp_path, tries, code):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "Makefile").write_text(
        "docs slurm:\ntest test-slow:\n\t.venv/bin/python -m pytest\n"
    )
    (tmp_path / "test_own.py").write_text(
        "import os\n"
        "def test_early(): pass\n"
        "def test_late():\n"
        "    open('tries', 'a').write('.')\n"
        f"    assert os.path.getsize('tries') >= {tries}\n"
    )
    # A make within that of `make test` would print its folders.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={**outer, "CI": "true", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    passed = re.findall("^PASSED (.*)$", done.stdout, re.M)
    assert passed == ["test_own.py::test_late"] * (tries == 2)
    costs = re.findall(r"^make (\S+): 0\.\d minutes of CPU, 0\.\d GB$", done.stdout, re.M)
    assert costs == ["test", "test-slow"][: 2 - code]
