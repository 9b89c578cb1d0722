"""Tests of the notebooks: they run, their outputs are complete, and they open on Colab."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

import jax
import nbclient
import nbformat
import pytest

from tests import documented, processes

ROOT = documented.ROOT
# The numbers of plots and of animations in each notebook.
SWITCH = "PODRACERS_NOTEBOOK_SCALE"
OUTPUTS = {"anakin": (4, 2), "sebulba": (4, 2), "compare": (2, 1), "meta_learning": (3, 0)}


@pytest.fixture(scope="module", params=OUTPUTS)
def path(request) -> pathlib.Path:
    return ROOT / "notebooks" / f"{request.param}.ipynb"


@pytest.fixture(scope="module")
def notebook(path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def _cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def _outputs(notebook):
    return [output for cell in _cells(notebook, "code") for output in cell.outputs]


def _data(notebook, mime: str) -> list[str]:
    data = [output.get("data", {}) for output in _outputs(notebook)]
    return [output[mime] for output in data if mime in output]


def _assert_complete(notebook, path):
    for output in _outputs(notebook):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", f"a cell wrote to stderr: {output}"
    gifs = [html for html in _data(notebook, "text/html") if "data:image/gif;base64," in html]
    assert (len(_data(notebook, "image/png")), len(gifs)) == OUTPUTS[path.stem]


def test_every_notebook_is_tested():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(OUTPUTS)


def test_the_documented_variable_shortens_every_notebook(notebook):
    assert f"{SWITCH}=0.02" in (ROOT / "CONTRIBUTING.md").read_text()
    assert f'float(os.environ.get("{SWITCH}", "1"))' in str(_cells(notebook, "code"))


def _installing(notebook) -> int:
    """Returns the index of the code cell that installs the library; none before imports JAX."""
    cells = [cell.source for cell in _cells(notebook, "code")]
    place = next(number for number, source in enumerate(cells) if '"pip", "install"' in source)
    assert not [source for source in cells[:place] if re.search(r"^(import|from) jax", source)]
    return place


def test_it_opens_on_colab_and_installs_from_the_one_address(notebook, path):
    url = documented.setup()["metadata"]["url"]
    place = f"{url.removeprefix('https://github.com/')}/blob/main/notebooks/{path.name}"
    badges = re.findall(r"colab-badge\.svg\)\]\(([^)]*)\)", notebook.cells[0].source)
    assert badges == [f"https://colab.research.google.com/github/{place}"]
    cell = _cells(notebook, "code")[_installing(notebook)].source
    other = nbformat.read(ROOT / "notebooks" / "compare.ipynb", as_version=4)
    assert cell == _cells(other, "code")[_installing(other)].source
    assert re.findall(r"git\+(https?://[^\s\"'@]+)", cell) == [url]
    assert cell.splitlines()[-1].startswith("command_line.require_accelerator()")


def test_links_and_paths_exist(notebook, path):
    text = "\n".join(cell.source for cell in _cells(notebook, "markdown"))
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
        assert (path.parent / target).is_file(), target
    for target in re.findall(r"(?:scripts|gin|environments)/[\w/]+\.(?:py|gin)", text):
        assert (ROOT / target).is_file(), target


def test_committed_outputs(notebook, path):
    assert path.stat().st_size < 2_000_000
    counts = [cell.execution_count for cell in _cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1)), "executed in another order, or not at all"
    _assert_complete(notebook, path)
    texts = [output.get("text", "") for output in _outputs(notebook)]
    places = {str(ROOT), str(pathlib.Path.home()), tempfile.gettempdir(), socket.gethostname()}
    for text in [*texts, *_data(notebook, "text/plain"), str(notebook.metadata)]:
        assert not [place for place in places if place in text], text
        assert not re.search(r"(?<![\w:/.])/(home|root|Users|content|tmp|usr|opt)/", text), text
        assert not re.search(r"[Ww]arning\b", text), text


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernel would share the accelerator")
def test_runs(notebook, path, tmp_path):
    fresh = nbformat.from_dict(notebook)
    for cell in _cells(fresh, "code"):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        fresh, timeout=processes.PATIENCE, kernel_name="python3", resources=resources
    )
    # EnvPool, imported by a test before this one, may have chosen another backend for plots.
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    environment |= {SWITCH: "0.02", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    client.execute(env=environment)
    _assert_complete(fresh, path)
    assert not list(tmp_path.iterdir()), "the notebook left files behind"


# Packages of a Colab runtime (August 2026).
COLAB = {"jax": "0.7.2", "jaxlib": "0.7.2", "flax": "0.11.2", "numpy": "2.1.3"}


@pytest.fixture
def colab(tmp_path):
    """The Python of an environment with Colab's packages; skips where pip cannot fetch them."""
    folder = tmp_path / "colab"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=processes.PATIENCE)
    python = folder / "bin" / "python"
    pinned = [f"{name}=={version}" for name, version in COLAB.items()]
    command = [python, "-m", "pip", "install", "--quiet", *pinned, "ipykernel"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if result.returncode:
        pytest.skip(f"pip cannot fetch {pinned}: {result.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_first_cells_install_beside_the_packages_of_colab(colab, source, tmp_path):
    """One cell installs, because all notebooks have the same; the imports of each follow."""
    notebooks = [nbformat.read(ROOT / "notebooks" / f"{x}.ipynb", as_version=4) for x in OUTPUTS]
    cells = [cell.source for cell in _cells(notebooks[0], "code")[: _installing(notebooks[0]) + 1]]
    cells += [_cells(notebook, "code")[_installing(notebook) + 1].source for notebook in notebooks]
    versions = f"import importlib.metadata as m; print([m.version(x) for x in {list(COLAB)}])"
    script = tmp_path / "cells.py"
    script.write_text("\n".join([*cells, "print(command_line.__file__)", versions]))
    environment = {**os.environ, "REPO": source.as_uri(), "MPLBACKEND": "agg"}
    del environment["XLA_FLAGS"]  # of another XLA
    options = {"capture_output": True, "text": True, "timeout": 1800, "cwd": tmp_path}
    done = subprocess.run([colab, script], env=environment, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
    assert str(colab.parents[1]) in done.stdout, "imported from elsewhere"
    assert done.stdout.splitlines()[-1] == str(list(COLAB.values()))
