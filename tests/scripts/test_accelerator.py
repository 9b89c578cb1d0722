"""Tests of the device's measurements: pieces that continue, in a file of one machine."""

import pytest

from podracers import errors
from tests import processes


@pytest.fixture(scope="module")
def scripts(tools):
    return tools("benchmarks.records", "benchmarks.device")


def _record(records, *pieces, **provenance):
    result = records.Result("About.", (records.row("speed", "agent steps/s", 1.0),))
    here = {"device": "1 x cpu", "platform": "cpu", "host_cores": 2, "versions": {}, "commit": "a"}
    results = {f"device_{piece}": result for piece in pieces}
    return records.Record("scripts/benchmark.py", results, here | provenance)


def test_pieces_of_one_machine_become_one_file(scripts, tmp_path):
    file, record = tmp_path / "mine.json", None
    for piece in ("catch", "parity"):
        record = scripts.device.merge(record, _record(scripts.records, piece), file)
    record.write(file)
    read = scripts.records.read(file)
    assert [*read.results] == ["device_parity", "device_catch"]
    assert "### Device catch" in record.section("mine", "mine.json")
    for name, value in (("device", "1 x H100"), ("commit", "b")):
        other = _record(scripts.records, "catch", **{name: value})
        with pytest.raises(errors.UserError, match=name):
            scripts.device.merge(read, other, file)


def test_known_pieces_are_not_measured_again(run, scripts, tmp_path):
    pieces, file = scripts.device.PIECES, tmp_path / "mine.json"
    _record(scripts.records, *pieces).write(file)
    done = run("accelerator", "--json", file)
    assert done.stdout.count("measured before") == len(pieces)


@pytest.mark.slow
def test_pieces_run_on_a_cpu(scripts, tmp_path):
    file = tmp_path / "deep" / "mine.json"
    started = processes.start("accelerator", "parity", "--json", file, "--minutes", "25")
    processes.finish(started, timeout=1800)
    results = scripts.records.read(file).results
    assert [*results] == ["device_parity"]
    difference = [row.median for row in results["device_parity"].rows]
    assert len(difference) == 2 and max(difference) < 1e-3  # after one update, and after five
