"""Tests of checkpoints that several processes write, each its own part."""

import json
import os
import pathlib

import jax
import numpy as np
import pytest

from podracers import parallel
from podracers.training import checkpoint
from tests import groups

_CODE = """
import os, resource, signal, sys, time
import jax, numpy as np
from podracers import command_line, parallel
from podracers.hosts import global_arrays, processes
from podracers.training import checkpoint, manifest, writers

process, count, folder = int(sys.argv[1]), {count}, {folder!r}

def put(x, *spec):
    sharding = jax.sharding.NamedSharding(parallel.make_mesh(), jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

def make(value):
    numbers = np.arange(4096, dtype=np.float32).reshape(8, 512)
    keys = put(np.arange(8, dtype=np.uint32) + value, "data")
    return {{
        "rows": put(value * numbers, "data"),
        "columns": put(value + numbers[:3], None, "data"),
        "whole": put(np.float32(value)),
        "keys": jax.jit(jax.vmap(jax.random.key))(keys),
    }}

def save(step):
    clock = {{"wall": 2.5, "training": 1.0, "steps": step, "first_dispatch": 1.5}}
    metadata = {{"update": step, "seed": 3, "population": 1, "clock": clock}}
    state = make(step)
    checkpointer.save(step, state, {{"whole": state["whole"]}}, metadata, -step)

def restore():
    step, state, _ = checkpointer.restore(make(0))
    ours, theirs = (jax.tree.leaves(global_arrays.plain(x)) for x in (state, make(step)))
    for leaf, other in zip(ours, theirs, strict=True):
        for shard, same in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(same.data))
        assert leaf.sharding == other.sharding
    print("restored", step, checkpointer.best_step(), flush=True)

def main():
    global checkpointer
    processes.initialize(processes.Group(sys.argv[2], count, process), {timeout})
    checkpointer = checkpoint.Checkpointer(folder, keep_latest=2, together=True)
"""


def _run(body: str, folder: pathlib.Path, count: int = 2, num_devices: int = 2, timeout=30.0):
    code = _CODE.format(count=count, folder=str(folder), timeout=timeout)
    code += "".join(f"    {line}\n" for line in body.strip().splitlines())
    return groups.python(code + "\ncommand_line.run(main)\n", count, num_devices)


def _says(results, *phrases: str) -> None:
    for result in results:
        assert result.returncode == 0, result.stderr
        for phrase in phrases:
            assert phrase in result.stdout, result.stdout


def _restore(folder: pathlib.Path) -> int:
    """Restores in this process, on its four devices; returns the step."""
    mesh = parallel.make_mesh(jax.devices()[:4])
    numbers = np.arange(4096, dtype=np.float32).reshape(8, 512)

    def like(x, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    template = {
        "rows": like(numbers, "data"),
        "columns": like(numbers[:3], None, "data"),
        "whole": like(np.float32(0)),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(0), 8),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")),
        ),
    }
    reader = checkpoint.Checkpointer(folder, read_only=True)
    step, state, _ = reader.restore(template)
    reader.close()
    np.testing.assert_array_equal(state["rows"], step * numbers)
    np.testing.assert_array_equal(state["columns"], step + numbers[:3])
    return step


@pytest.mark.slow
def test_what_two_write_any_number_restores(tmp_path):
    """Each vouches for its own files; the oldest stays for its score; damage is seen by all."""
    saved = _run("for step in (10, 20, 30, 40): save(step)\ncheckpointer.close()", tmp_path)
    _says(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "30", "40"]
    sums = json.loads((tmp_path / "40/manifest.json").read_text())
    for process in (0, 1):
        assert any(name.startswith(f"state/ocdbt.process_{process}/") for name in sums)
    assert _restore(tmp_path) == 40
    body = "restore()\nsave(50)\ncheckpointer.wait()\nrestore()\ncheckpointer.close()"
    _says(_run(body, tmp_path, count=4, num_devices=1), "restored 40 10", "restored 50 10")
    largest = max((tmp_path / "50/state").glob("ocdbt.process_3/d/*"), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    _says(_run("restore()\ncheckpointer.close()", tmp_path), "restored 40 10")
    assert (tmp_path / "damaged-50").is_dir()


@pytest.mark.slow
def test_a_write_that_fails_in_one_process_is_said_by_all(tmp_path):
    body = """
save(10)
checkpointer.wait()
if process == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
save(20)
checkpointer.wait()
"""
    for result in _run(body, tmp_path):
        assert result.returncode == 1, result.stderr
        assert "failed: " in result.stderr
        assert "could not save checkpoint" in result.stderr
        assert "process 1: File too large" in result.stderr
        assert "Traceback" not in result.stderr
    assert _restore(tmp_path) == 10


@pytest.mark.slow
def test_a_process_that_is_lost_while_it_saves_leaves_no_checkpoint(tmp_path):
    body = """
save(10)
checkpointer.wait()
if process == 1:
    manifest.part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save(20)
checkpointer.wait()
"""
    lead, _ = _run(body, tmp_path, timeout=8.0)
    assert lead.returncode == 1, lead.stderr
    assert "process 1 was lost" in lead.stderr
    assert not (tmp_path / "20").exists()
    assert _restore(tmp_path) == 10
