"""Tests of the page of benchmarks, which shows every figure; test_report.py writes it."""

import json

import pytest

from podracers import errors
from tests import processes

DOCS = processes.ROOT / "docs"


@pytest.fixture(scope="module")
def page(tools):
    return tools("benchmarks.page").page


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
    assert "Not measured" not in text


def test_a_file_of_something_else_is_named(page, tmp_path):
    with pytest.raises(errors.UserError, match=r"there is no \*\.json in"):
        page.read_all(tmp_path)
    (tmp_path / "broken.json").write_text('{"results": 3}')
    with pytest.raises(errors.UserError, match=r"broken\.json' holds no results"):
        page.read_all(tmp_path)
