"""Tests of the page of benchmarks: it is what the command makes, and it shows every figure."""

import importlib
import json
import re
import shutil
import sys

import pytest

from tests import processes

DOCS = processes.ROOT / "docs"


@pytest.fixture(scope="module")
def page():
    folder = str(processes.ROOT / "scripts")
    sys.path.insert(0, folder)
    yield importlib.import_module("benchmark_page")
    sys.path.remove(folder)


def test_the_page_is_what_the_command_makes_of_the_files(page):
    found = page.read_all(DOCS / "benchmarks")
    assert (DOCS / "benchmarks.md").read_text() == page.text(found, "benchmarks"), (
        "make it anew: python scripts/benchmark_page.py"
    )


def test_the_page_and_its_folder_have_the_same_pictures(page):
    linked = re.findall(r"\]\(benchmarks/([^)]*\.png)\)", (DOCS / "benchmarks.md").read_text())
    assert sorted(linked) == sorted(path.name for path in (DOCS / "benchmarks").glob("*.png"))


def test_no_figure_is_left_out(page):
    record = page.read_all(DOCS / "benchmarks")["replay"]
    text = page.text({"replay": record}, "benchmarks")
    rows = [row for result in record.results.values() for row in result.rows]
    assert len(rows) > 30
    for row in rows:
        assert row.spread in text
        assert row.measure in text
    assert record.command in text
    assert record.provenance["commit"] in text
    assert record.provenance["versions"]["jaxlib"] in text


def test_a_group_is_shown_together_and_what_has_no_figure_stays_empty(page, tmp_path):
    def result(agent, *runners):
        case = [{"agent": agent, "runner": runner} for runner in runners]
        kind = {"measure": "speed", "unit": "agent steps/s", "better": "higher"}
        rows = [{**kind, "case": each, "median": 2e5, "min": 1.5e5, "max": 2e6} for each in case]
        return {"about": "Agents.", "rows": rows, "notes": [agent], "group": "agents"}

    results = {"one": result("ppo", "Anakin", "Sebulba"), "two": result("dqn", "Anakin")}
    provenance = {"device": "1 x H100", "platform": "gpu", "host_cores": 16}
    record = {"command": "c", "results": results, "versions": {}, "commit": None, **provenance}
    (tmp_path / "agents.json").write_text(json.dumps(record))
    text = page.text(page.read_all(tmp_path), "folder")
    figure = "200k (150k to 2M)"
    assert f"| ppo | {figure} | {figure} |\n| dqn | {figure} |  |" in text
    assert "- ppo\n- dqn" in text
    assert text.count("Agents.") == 1
    assert "folder/agents.png" in text
    assert "Not measured" not in text


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("catch", "breakdown_overhead"):
        shutil.copy(DOCS / "benchmarks" / f"{name}.json", folder)
    return folder


def test_the_command_writes_the_page_and_its_pictures(tmp_path, results):
    out = tmp_path / "page.md"
    run = processes.run("benchmark_page", "--results", results, "--out", out)
    assert run.returncode == 0, run.stderr
    text = out.read_text()
    assert "Not measured: there is no file of results of a GPU" in text
    pictures = sorted(path.name for path in results.glob("*.png"))
    assert pictures == [
        "breakdown_overhead-breakdown.png",
        "breakdown_overhead-overhead.png",
        "catch.png",
    ]
    for picture in pictures:
        assert f"(results/{picture})" in text


def test_a_file_of_something_else_is_named(results):
    (results / "broken.json").write_text('{"results": 3}')
    run = processes.run("benchmark_page", "--results", results, "--out", results / "page.md")
    processes.assert_mistake(run, "broken.json", "holds no results")
    assert not (results / "page.md").exists()


def test_without_files_there_is_no_page(tmp_path):
    processes.assert_mistake(processes.run("benchmark_page", "--results", tmp_path), "no *.json")
