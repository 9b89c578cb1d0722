"""Tests of what a machine's device does: pieces that go on, and a file that stays one machine's."""

import dataclasses
import json
import subprocess
import sys

import pytest

from podracers import errors
from tests import processes

SMALL = ("--repeats", "1", "--batches", "8")


@pytest.fixture(scope="module")
def scripts(tools):
    return tools("accelerator", "benchmarks.records", "benchmarks.device")


def _record(records, name="machine", notes=(), **provenance):
    kind = records.Kind("speed", "agent steps/s", records.HIGHER, 0)
    result = records.Result("About.", (kind.row(1.0),), notes)
    here = {"device": "1 x cpu", "platform": "cpu", "host_cores": 2, "versions": {}, "commit": "a"}
    return records.Record("scripts/benchmark.py", {f"device_{name}": result}, here | provenance)


def test_pieces_of_one_machine_become_one_file(scripts, tmp_path):
    file = tmp_path / "deep" / "mine.json"
    first = scripts.accelerator._merge(None, _record(scripts.records, "parity"), file)
    both = scripts.accelerator._merge(first, _record(scripts.records, commit="b"), file)
    both = scripts.accelerator._merge(both, _record(scripts.records, commit="b"), file)
    scripts.accelerator._write(both, file)
    read = scripts.records.read(file)
    assert [*read.results] == ["device_machine", "device_parity"]
    assert read.provenance["commit"] == "a, b"
    page = file.with_suffix(".md").read_text()
    assert page.startswith("# What 1 x cpu does")
    assert f"scripts/accelerator.py --json {file}" in page
    assert "### device_parity" in page


@pytest.mark.parametrize("other", [{"device": "1 x H100"}, {"versions": {"jax": "1"}}])
def test_another_machine_is_refused(scripts, tmp_path, other):
    first, second = _record(scripts.records), _record(scripts.records, **other)
    with pytest.raises(errors.UserError, match=r"another machine .* name another --json"):
        scripts.accelerator._merge(first, second, tmp_path / "mine.json")


def test_what_is_there_is_not_measured_again(run, scripts, tmp_path):
    pieces = [f"device_{name}" for name in (*scripts.device.PIECES, "learning")]
    one = _record(scripts.records)
    (result,) = one.results.values()
    file = tmp_path / "mine.json"
    full = dataclasses.replace(one, results=dict.fromkeys(pieces, result))
    scripts.accelerator._write(full, file)
    done = run("accelerator", "--json", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("there already") == len(pieces)
    assert "pong: takes an hour on a CPU; name it to have it" in done.stdout
    assert scripts.records.read(file) == full


def test_mistakes_are_one_line(run, tmp_path):
    processes.assert_mistake(run("accelerator", "machin"), "there is no piece 'machin'", "machine")
    (tmp_path / "other.json").write_text("{}")
    wrong = run("accelerator", "--json", tmp_path / "other.json")
    processes.assert_mistake(wrong, "holds no results")


@pytest.mark.slow
def test_all_pieces_run_on_a_cpu_and_go_on_where_they_were_stopped(tmp_path):
    file = tmp_path / "mine.json"
    command = [sys.executable, str(processes.ROOT / "scripts" / "accelerator.py"), *SMALL]
    command += ["--json", str(file)]

    def run(*words):
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=1800, check=False
        )

    first = run("machine", "parity")
    assert first.returncode == 0, first.stdout + first.stderr
    begun = json.loads(file.read_text())["results"]
    assert [*begun] == ["device_machine", "device_parity"]
    difference = [row["median"] for row in begun["device_parity"]["rows"]]
    assert len(difference) == 2 and max(difference) < 1e-3  # after one update, and after five

    rest = run("--minutes", "25")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "machine: there already" in rest.stdout
    results = json.loads(file.read_text())["results"]
    assert results["device_machine"] == begun["device_machine"]
    assert [*results][2:] == [
        f"device_{name}"
        for name in ("catch", "cartpole", "snake", "breakout", "sebulba", "memory", "learning")
    ]
    for name, result in results.items():
        assert all(row["median"] >= 0.0 for row in result["rows"]), name
    said = [note.split()[1] for note in results["device_learning"]["notes"]]
    assert said == ["learns:", "learns:", "load"]
    ratio = results["device_sebulba"]["rows"][-1]
    assert ratio["case"]["program"] == "small network / EnvPool alone" and ratio["median"] > 0.3


@pytest.mark.slow
def test_pong_stops_with_its_time(tmp_path):
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
    assert rows["the limit"] == 5.0 < rows["training, compiling included"]
    assert rows["agent steps taken"] % 32 == 0 < rows["agent steps taken"]
