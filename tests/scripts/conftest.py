"""Scripts as functions of this process: importing JAX takes longer than most of them."""

import contextlib
import fcntl
import importlib
import io
import os
import subprocess
import sys
import types

import matplotlib
import pytest

from podracers.commands import command_line
from tests import processes


@pytest.fixture(scope="module")
def tools():
    """Imports modules of the folder of scripts: `tools("plot", "results.curves").curves`."""
    backend = matplotlib.get_backend()

    def load(*names):
        return types.SimpleNamespace(**{name.rpartition(".")[2]: _imported(name) for name in names})

    yield load
    matplotlib.use(backend)


def _imported(name):
    commands = ("train", "evaluate", "export", "check")
    package = "podracers.commands" if name in commands else "podracers.scripts"
    return importlib.import_module(f"{package}.{name}")


# Enough episodes that other ones have another mean return.
_MANY = """
experiment.Experiment.evaluation_episodes = 300
experiment.Experiment.greedy_evaluation_episodes = 200
"""


@pytest.fixture(scope="session")
def reference(tmp_path_factory, run):
    """The directory of an uninterrupted run, beside its configuration `tiny.gin`; copy it.

    One worker trains it for all.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared_reference"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "reference" / "summary.json").exists():
            config = processes.config_file(folder, _MANY)
            result = run("train", "--gin_file", config, "--run_dir", folder / "reference")
            assert "Results" in result.stdout
    return folder / "reference"


@pytest.fixture(scope="session")
def call():
    """Calls the `main` of a module with these words, and returns its exit code."""

    def call(script, *words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
            return _imported(script).main() or 0

    return call


@pytest.fixture(scope="session")
def run(call):
    """Runs a script like `processes.run`, in this process."""

    def run(script, *words, code=0, environment=None):
        out, err = io.StringIO(), io.StringIO()
        patches = pytest.MonkeyPatch.context()
        # Not `command_line.run`, which may end the process.
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patches as patch:
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            try:
                ended = call(script, *words)
            except Exception as error:
                ended, _, report = command_line.ending(error)
                print(report, file=err)
        assert ended == code, out.getvalue() + err.getvalue()
        return subprocess.CompletedProcess([script], ended, out.getvalue(), err.getvalue())

    return run
