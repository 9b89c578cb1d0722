"""Tests of the device's measurements: pieces that continue, in a file of one machine."""

import json
import subprocess
import sys

import pytest

from podracers import errors
from tests import processes


@pytest.fixture(scope="module")
def scripts(tools):
    return tools("accelerator", "benchmarks.records", "benchmarks.device")


def _record(records, *pieces, **provenance):
    result = records.Result("About.", (records.row("speed", "agent steps/s", 1.0),))
    here = {"device": "1 x cpu", "platform": "cpu", "host_cores": 2, "versions": {}, "commit": "a"}
    results = {f"device_{piece}": result for piece in pieces}
    return records.Record("scripts/benchmark.py", results, here | provenance)


def test_pieces_of_one_machine_become_one_file(scripts, tmp_path):
    file = tmp_path / "deep" / "mine.json"
    record = None
    for piece, commit in (("parity", "a"), ("machine", "b"), ("machine", "b")):
        part = _record(scripts.records, piece, commit=commit)
        record = scripts.accelerator._merge(record, part, file)
    scripts.accelerator._write(record, file)
    read = scripts.records.read(file)
    assert [*read.results] == ["device_machine", "device_parity"]
    assert read.provenance["commit"] == "a, b"
    assert "### device_parity" in file.with_suffix(".md").read_text()
    other = _record(scripts.records, "machine", device="1 x H100")
    with pytest.raises(errors.UserError, match=r"another machine .* name another --json"):
        scripts.accelerator._merge(read, other, file)


def test_known_pieces_are_not_measured_again(run, scripts, tmp_path):
    pieces = [piece for piece in scripts.device.PIECES if piece != "pong"]
    file = tmp_path / "mine.json"
    scripts.accelerator._write(_record(scripts.records, *pieces), file)
    done = run("accelerator", "--json", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("measured before") == len(pieces)
    assert "pong: takes an hour on a CPU" in done.stdout


def test_user_mistakes(run, tmp_path):
    processes.assert_mistake(run("accelerator", "machin"), "'machin'", "machine")
    (tmp_path / "other.json").write_text("{}")
    processes.assert_mistake(run("accelerator", "--json", tmp_path / "other.json"), "other.json")


@pytest.mark.slow
def test_pieces_run_on_a_cpu(tmp_path):
    file = tmp_path / "mine.json"
    script = str(processes.ROOT / "scripts" / "accelerator.py")
    command = [sys.executable, script, "--repeats", "1", "--batches", "8", "--json", str(file)]
    command += ["machine", "parity", "catch", "--minutes", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert [*results] == [f"device_{name}" for name in ("machine", "parity", "catch")]
    difference = [row["median"] for row in results["device_parity"]["rows"]]
    assert len(difference) == 2 and max(difference) < 1e-3  # after one update, and after five


@pytest.mark.slow
def test_pong_stops_at_its_limit(tmp_path):
    file = tmp_path / "pong.json"
    small = ("NUM_ENVS = 4", "ROLLOUT_LENGTH = 8", "Experiment.log_period = 1")
    arguments = [part for each in small for part in ("--gin_bindings", each)]
    result = processes.run(
        "benchmark", "device_pong", "--seconds", 5, "--json", file, *arguments, environment={}
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())["results"]["device_pong"]
    assert found["notes"][0] == "did not reach 18 in its time"
    rows = {row["measure"]: row["median"] for row in found["rows"]}
    assert rows["limit"] == 5.0 < rows["training, compiling included"]
    assert rows["agent steps"] % 32 == 0 < rows["agent steps"]
