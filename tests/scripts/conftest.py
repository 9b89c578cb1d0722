"""Scripts as functions of this process: importing JAX takes longer than what most of them do."""

import importlib
import subprocess
import sys
import types

import matplotlib
import pytest

from podracers import command_line
from tests import processes


@pytest.fixture(scope="module")
def tools():
    """Imports modules of the folder of scripts: `tools("plot", "results.groups").groups`."""
    backend = matplotlib.get_backend()

    def load(*names):
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
        return types.SimpleNamespace(**modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(processes.ROOT / "scripts"))
        yield load
    matplotlib.use(backend)


@pytest.fixture
def call(tools, monkeypatch):
    """Calls the `main` of a script with these words, and returns its exit code."""

    def call(script, *words):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        return vars(tools(script))[script].main() or 0

    return call


@pytest.fixture
def run(call, capsys):
    """Runs a script like `processes.run`, in this process."""

    def run(script, *words):
        report = ""
        # Not `command_line.run`, which gives the process that it ends in a moment to do so.
        try:
            code = call(script, *words)
        except Exception as error:
            code, _, report = command_line.ending(error)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(
            [script], code, out, err + (f"{report}\n" * bool(report))
        )

    return run
