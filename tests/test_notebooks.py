"""Tests of the notebooks: they run, they show what they should, and they open on Colab."""

import configparser
import os
import pathlib
import re
import socket
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


def test_first_code_cell_installs_from_the_public_address(notebook, url):
    first = _cells(notebook, "code")[0].source
    assert re.findall(r"git\+(https?://[^\s\"'@]+)", first) == [url]
    # On a machine of one's own, nothing is installed.
    assert 'if "google.colab" in sys.modules:\n    %pip install' in first


def test_defines_no_library_code(notebook):
    for cell in _cells(notebook, "code"):
        assert not re.search(r"^class ", cell.source, re.MULTILINE), cell.source
        assert len(cell.source.splitlines()) <= 25, f"a long cell: {cell.source}"


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
