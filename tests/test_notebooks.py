"""Tests of the notebooks: they run, they show what they should, and they open on Colab."""

import configparser
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

import jax
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LARGEST = 2_000_000  # bytes, with outputs
# What each notebook is there to show: how many plots, and how many animations.
SHOWS = {
    "anakin": (4, 2),  # curves of two games, speed, a population; an episode of each game
    "sebulba": (4, 2),  # a curve, where the time goes twice, lags; an episode of each game
    "compare": (2, 1),  # curves, throughput; an episode
    "meta_learning": (3, 0),  # curves, what predictions mean twice
}


@pytest.fixture(scope="module", params=SHOWS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(name) -> pathlib.Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


@pytest.fixture(scope="module")
def notebook(path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture(scope="module")
def url() -> str:
    """The repository's public address, which stands in setup.cfg alone."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config["metadata"]["url"]


def _cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def _outputs(notebook):
    return [output for cell in _cells(notebook, "code") for output in cell.outputs]


def _shown(notebook, mime: str) -> list[str]:
    """Returns what the outputs show in one format."""
    shown = [output.get("data", {}) for output in _outputs(notebook)]
    return [data[mime] for data in shown if mime in data]


def _assert_shows_everything(notebook, name):
    for output in _outputs(notebook):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", f"a cell wrote to stderr: {output}"
    num_plots, num_animations = SHOWS[name]
    assert len(_shown(notebook, "image/png")) == num_plots
    gifs = [html for html in _shown(notebook, "text/html") if "data:image/gif;base64," in html]
    assert len(gifs) == num_animations


def test_every_notebook_is_tested():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(SHOWS)


def test_badge_opens_this_notebook(notebook, path, url):
    owner_and_name = url.removeprefix("https://github.com/")
    place = path.relative_to(ROOT).as_posix()
    target = f"https://colab.research.google.com/github/{owner_and_name}/blob/main/{place}"
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    badges = re.findall(r"\[!\[[^\]]*\]\([^)]*colab-badge\.svg\)\]\(([^)]*)\)", first.source)
    assert badges == [target]


def _installing(notebook) -> int:
    """Returns which code cell installs the library: nothing before it imports JAX."""
    cells = [cell.source for cell in _cells(notebook, "code")]
    place = next(number for number, source in enumerate(cells) if '"pip", "install"' in source)
    assert not [source for source in cells[:place] if re.search(r"^(import|from) jax", source)]
    return place


def test_one_cell_installs_from_the_one_address(notebook, url):
    cell = _cells(notebook, "code")[_installing(notebook)].source
    other = nbformat.read(ROOT / "notebooks" / "compare.ipynb", as_version=4)
    assert cell == _cells(other, "code")[_installing(other)].source
    assert re.findall(r"git\+(https?://[^\s\"'@]+)", cell) == [url]
    assert cell.splitlines()[-1].startswith("command_line.require_accelerator()")


def test_defines_no_library_code(notebook):
    for cell in _cells(notebook, "code"):
        assert not re.search(r"^class ", cell.source, re.MULTILINE), cell.source
        assert not re.search(r"^def train\b", cell.source, re.MULTILINE), cell.source
        assert len(cell.source.splitlines()) <= 25, f"a long cell: {cell.source}"
        # What is configured is configured by gin, and trained by the library.
        assert not re.search(r"\bPPO\(|\bAnakin\(|\bSebulba\(", cell.source), cell.source
        assert not re.search(r"^ +.*runner\.step\(.*updates_per_call", cell.source, re.MULTILINE)


def test_links_lead_somewhere(notebook, path):
    text = "\n".join(cell.source for cell in _cells(notebook, "markdown"))
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
        assert (path.parent / target).is_file(), target
    for target in re.findall(r"(?:scripts|gin|environments)/[\w/]+\.(?:py|gin)", text):
        assert (ROOT / target).is_file(), target


def test_committed_outputs(notebook, name, path):
    assert path.stat().st_size < LARGEST
    counts = [cell.execution_count for cell in _cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1)), "executed in another order, or not at all"
    _assert_shows_everything(notebook, name)


def test_committed_outputs_name_no_machine(notebook):
    shown = [output.get("text", "") for output in _outputs(notebook)]
    shown += _shown(notebook, "text/plain")
    places = {str(ROOT), str(pathlib.Path.home()), tempfile.gettempdir(), socket.gethostname()}
    for text in [*shown, str(notebook.metadata)]:
        assert not [place for place in places if place in text], text
        assert not re.search(r"(?<![\w:/.])/(home|root|Users|content|tmp|usr|opt)/", text), text
        assert not re.search(r"[Ww]arning\b", text), text


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernel would share the accelerator")
def test_runs(notebook, name, tmp_path):
    environment = {
        "PODRACERS_NOTEBOOK_SCALE": "0.02",
        # Nothing runs for long, so what is compiled had better be compiled fast.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    fresh = nbformat.from_dict(notebook)
    for cell in _cells(fresh, "code"):
        cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    # EnvPool, imported by a test before this one, may have chosen another backend for plots.
    inherited = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    client.execute(env={**inherited, **environment})
    _assert_shows_everything(fresh, name)
    assert not list(tmp_path.iterdir()), "the notebook left files behind"


# What a Colab runtime brings along (August 2026), as far as it matters here.
COLAB = ("jax==0.7.2", "jaxlib==0.7.2", "flax==0.11.2", "numpy==2.1.3", "ipykernel")
PACKAGES = [name.partition("==")[0] for name in COLAB if "==" in name]
FREEZE = f"import importlib.metadata as m; print([m.version(name) for name in {PACKAGES}])"


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The Python of an environment with Colab's packages; skips where pip cannot fetch them."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", *COLAB]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if made.returncode:
        pytest.skip(f"pip cannot fetch {COLAB}: {made.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """A copy of the library, for pip builds beside the sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("podracers", "agents", "environments", "gin", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.slow
def test_first_cells_install_beside_what_colab_has(notebook, colab, source, tmp_path):
    cells = _cells(notebook, "code")[: _installing(notebook) + 2]  # with the imports
    script = tmp_path / "cells.py"
    script.write_text("\n".join(cell.source for cell in cells) + "\nprint(command_line.__file__)\n")
    environment = {**os.environ, "REPO": source.as_uri(), "MPLBACKEND": "agg"}
    del environment["XLA_FLAGS"]  # of another XLA
    run = {"capture_output": True, "text": True, "timeout": 1800, "cwd": tmp_path}
    done = subprocess.run([colab, script], env=environment, check=False, **run)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
    assert str(colab.parents[1]) in done.stdout, "imported from elsewhere"
    kept = subprocess.run([colab, "-c", FREEZE], check=True, **run).stdout
    assert kept.strip() == str([name.partition("==")[2] for name in COLAB if "==" in name])
