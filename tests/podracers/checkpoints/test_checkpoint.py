"""Tests of checkpoints: they restore what was saved; damaged ones are never restored."""

import contextlib
import errno
import functools
import json
import logging
import os
import pathlib
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from agents.replay import replay
from podracers import errors, parallel
from podracers.checkpoints import checkpoint, integrity
from tests import groups, streams

_assert_equal = functools.partial(streams.assert_same, strict=True)


@functools.cache
def _make_state(num_devices: int = 4, value: float = 1.0) -> dict[str, Any]:
    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(parallel.AXIS))
    kernel = np.float32(value) * np.arange(64, dtype=np.float32).reshape(4, 16)
    params = {"dense": {"kernel": kernel, "none": np.zeros((0, 3), np.float32)}}
    whole = {"params": params, "optimizer": optax.adam(1e-3).init(params), "key": jax.random.key(3)}
    whole["metrics"] = {
        "a/b": np.full(2, value, np.float32),
        "a.b": np.zeros(2, np.float32),
    }  # any names
    ring = (value * np.arange(64, dtype=jnp.bfloat16).reshape(8, 8)).astype(jnp.bfloat16)
    parts = {"ring": ring, "keys": jax.random.split(jax.random.key(4), 8)}
    parts["none"] = np.zeros((8, 0), np.float32)  # MuJoCo's states have arrays without elements
    return jax.device_put(whole, everywhere) | jax.device_put(parts, split) | {"empty": ()}


def _metadata(step: int) -> dict[str, object]:
    clock = {"wall": 2.5, "training": 1.0, "steps": step, "first_dispatch": 1.5}
    return {"update": step, "seed": 3, "population": 1, "clock": clock}


def _save(checkpointer: checkpoint.Checkpointer, step: int, score: float | None = None) -> None:
    state = _make_state(value=float(step))
    checkpointer.save(step, state, state["params"], _metadata(step), score)


def _saved_steps(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory) -> pathlib.Path:
    """A directory with the checkpoints 10, 20 and 30; copy it before damaging it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpointer = checkpoint.Checkpointer(directory)
    for step in (10, 20, 30):
        _save(checkpointer, step)
    checkpointer.close()
    return directory


@pytest.fixture(name="copied")
def _copied(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def _restore(directory: pathlib.Path, **kwargs):
    with contextlib.closing(checkpoint.Checkpointer(directory, **kwargs)) as checkpointer:
        return checkpointer.restore(_make_state())


@pytest.mark.parametrize("num_devices", [1, 4])
def test_restores_on_any_number_of_devices(saved, num_devices):
    reader = checkpoint.Checkpointer(saved, read_only=True)
    template = _make_state(num_devices)
    step, state, metadata = reader.restore(template)
    assert (step, metadata) == (30, _metadata(30))
    _assert_equal(state, _make_state(value=30.0))
    placed, expected = (jax.tree.map(lambda x: x.sharding, tree) for tree in (state, template))
    assert placed == expected


def test_parts_without_arrays_may_differ(saved):
    """A later version may add parts that are empty in the runs of an earlier one."""
    template, expected = (
        {name: part for name, part in state.items() if name != "empty"} | {"new": {}}
        for state in (_make_state(), _make_state(value=30.0))
    )
    _, state, _ = checkpoint.Checkpointer(saved, read_only=True).restore(template)
    _assert_equal(state, expected)


def test_parameters_are_read_without_a_template(saved):
    _, params, _ = checkpoint.Checkpointer(saved, read_only=True).restore(None, "params")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    _assert_equal(params, jax.device_get(_make_state(value=30.0)["params"]))


def test_keeps_the_newest_and_the_best(tmp_path):
    template = _make_state()["params"]
    scores = {1: 0.0, 2: 5.0, 3: float("nan"), 4: 4.0, 5: None, 6: 1.0, 7: 2.0}
    for block in ([1, 2, 3], [4, 5, 6, 7]):  # scores survive a restart
        checkpointer = checkpoint.Checkpointer(tmp_path, keep_latest=2, keep_best=2)
        for step in block:
            _save(checkpointer, step, scores[step])
        checkpointer.close()
    assert _saved_steps(tmp_path) == ["2", "4", "6", "7"]
    reader = checkpoint.Checkpointer(tmp_path, read_only=True)
    assert (reader.latest_step(), reader.best_step()) == (7, 2)
    assert reader.restore(template, "params", best=True)[0] == 2
    assert reader.restore(template, "params")[0] == 7
    shutil.rmtree(tmp_path / "2" / "params")
    assert reader.restore(template, "params", best=True)[0] == 4


def test_a_later_evaluation_scores_a_checkpoint_that_is_there(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path)
    assert checkpointer.latest_step() is None
    assert checkpointer.restore(_make_state()) is None
    assert checkpointer.restore({}, "params", best=True) is None
    _save(checkpointer, 1, 2.0)
    _save(checkpointer, 2, None)
    assert checkpointer.latest_step() == 2
    for score, best in ((None, 1), (float("nan"), 1), (3.0, 2), (1.0, 1), (4.0, 2)):
        _save(checkpointer, 2, score)
        reader = checkpoint.Checkpointer(tmp_path, read_only=True)
        assert checkpointer.best_step() == reader.best_step() == best
    checkpointer.close()
    assert _saved_steps(tmp_path) == ["1", "2"]
    (tmp_path / "2" / "score.json").write_text("{")  # damaged: the older one counts
    assert reader.best_step() == 1


def test_a_later_score_removes_the_best_checkpoint_of_before(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_latest=1)
    for step, score, kept in ((1, 2.0, ["1"]), (2, None, ["1", "2"]), (2, 3.0, ["2"])):
        _save(checkpointer, step, score)
        checkpointer.wait()
        assert _saved_steps(tmp_path) == kept
    checkpointer.close()


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state):
        return jax.tree.map(lambda x: (x * 0 - 1).astype(x.dtype), state)

    checkpointer = checkpoint.Checkpointer(tmp_path)
    _save(checkpointer, 0)  # the first one is waited for
    state = _make_state.__wrapped__(value=2.0)  # without the cache
    checkpointer.save(1, state, state["params"], _metadata(1))
    for name in ("params", "optimizer", "ring"):
        advance(state[name])
    _assert_equal(checkpointer.restore(_make_state())[1], _make_state(value=2.0))
    checkpointer.close()


def test_the_first_checkpoint_of_a_start_is_opened_again(tmp_path, capfd, monkeypatch):
    """Where orbax's glob finds no arrays to merge, it warns, and reports no error."""
    earlier = checkpoint.Checkpointer(tmp_path / "a")
    _save(earlier, 1)
    earlier.close()
    monkeypatch.setattr(type(epath.Path(tmp_path)), "glob", lambda *_: iter(()))
    checkpointer = checkpoint.Checkpointer(tmp_path / "a", keep_latest=1)
    with pytest.raises(errors.RunFailure, match=r"^could not open checkpoint .*/2, .*: ") as caught:
        _save(checkpointer, 2)
    assert "\n" not in str(caught.value)
    checkpointer.close()
    assert _saved_steps(tmp_path / "a") == ["1", "damaged-2"]  # the next start has the good one
    assert "merge" not in capfd.readouterr().err


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    # Of the manifest not the middle: which part that is about depends on names drawn at random.
    data[0 if path.suffix == ".json" else len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), errors.RunFailure),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), errors.RunFailure),
        (PermissionError(errno.EACCES, "Permission denied"), errors.RunFailure),
        (OSError(errno.EIO, "Input/output error"), integrity.DamagedError),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), integrity.DamagedError),
        (ValueError("Expecting value"), integrity.DamagedError),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(error, kind):
    with pytest.raises(kind, match="a/b: "), integrity.reading("a/b"):
        raise error


def test_a_manifest_without_the_files_of_an_item_is_damage(tmp_path):
    (tmp_path / integrity.MANIFEST).write_text("{}")
    with pytest.raises(integrity.DamagedError, match="no files of state"):
        integrity.verify(tmp_path, ["state"])


def test_damage_to_any_file_is_noticed(saved, copied):
    """Every file of the newest checkpoint in turn; the one before it is restored instead."""
    reader = checkpoint.Checkpointer(copied, read_only=True)
    template = _make_state()
    for path in sorted((saved / "30").rglob("*")):
        name = path.relative_to(saved)
        if not path.is_file() or not path.stat().st_size:
            continue
        _flip(copied / name)
        step, tree, metadata = reader.restore(template)
        params_step, params, _ = reader.restore(template["params"], "params")
        steps = {"state": step, "params": params_step}
        assert metadata == _metadata(step)
        _assert_equal(params, _make_state(value=float(params_step))["params"])
        _assert_equal(tree, _make_state(value=float(step)))
        for part, step in steps.items():
            if len(name.parts) > 2:
                assert step == (20 if name.parts[1] in (part, "metadata") else 30), (name, part)
            elif name.name == "manifest.json":
                assert step == 20, part
        shutil.copy(path, copied / name)


def test_a_damaged_checkpoint_is_set_aside_with_a_warning(copied, caplog):
    _flip(max((copied / "30" / "state").rglob("d/*"), key=os.path.getsize))
    (copied / "damaged-30").mkdir()  # of an earlier time
    with caplog.at_level(logging.WARNING):
        checkpointer = checkpoint.Checkpointer(copied)
        step, _, _ = checkpointer.restore(_make_state())
    assert step == 20
    (record,) = caplog.records
    assert record.message.startswith("checkpoint 30 is damaged (state/")
    assert record.message.endswith("; using 20")
    # The steps after the fallback are taken again, and saved again.
    assert (copied / "damaged-30" / "state").is_dir()
    _save(checkpointer, 30)
    checkpointer.close()
    assert _restore(copied)[0] == 30


def test_all_damaged(copied):
    for step in (10, 20, 30):
        (copied / str(step) / "state" / "_METADATA").unlink()
    with pytest.raises(errors.RunFailure, match=r"every checkpoint in .* is damaged") as caught:
        _restore(copied)
    assert "\n" not in str(caught.value)
    assert _saved_steps(copied) == ["10", "20", "30"]


def test_a_half_written_checkpoint_is_ignored(copied):
    (copied / "30").rename(copied / "40.orbax-checkpoint-tmp")
    assert _restore(copied, read_only=True)[0] == 20
    assert (copied / "40.orbax-checkpoint-tmp").exists()  # it may be another process's
    assert _restore(copied)[0] == 20
    assert not (copied / "40.orbax-checkpoint-tmp").exists()
    checkpointer = checkpoint.Checkpointer(copied)
    (copied / "40.orbax-checkpoint-tmp").mkdir()  # it could not be removed
    _save(checkpointer, 50)
    checkpointer.close()
    assert checkpointer.latest_step() == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"params": {"dense": {"kernel": np.zeros((4, 8), np.float32)}}},
            r"'params/dense/kernel': expected float32\[4, 8\], got float32\[4, 16\]",
        ),
        ({"empty": (np.zeros(3),)}, "'empty/0': .* got none"),
        ({"ring": ()}, "'ring': expected none"),
    ],
)
def test_a_foreign_checkpoint_is_refused(copied, change, message):
    checkpointer = checkpoint.Checkpointer(copied)
    with pytest.raises(errors.UserError, match=message) as caught:
        checkpointer.restore(_make_state() | change)
    assert "\n" not in str(caught.value)
    checkpointer.close()
    assert _restore(copied)[0] == 30


def test_a_full_or_read_only_disk_is_reported_and_loses_nothing(mount, capfd, monkeypatch):
    small_disk = mount("2m")
    checkpointer = checkpoint.Checkpointer(small_disk)
    _save(checkpointer, 1)
    checkpointer.wait()
    big = np.random.default_rng(0).integers(0, 256, 4 << 20).astype(np.uint8)
    full = f"^could not save checkpoint {small_disk / '2'}: No space left on device$"
    with pytest.raises(errors.RunFailure, match=full):
        checkpointer.save(2, {"ring": big}, {"w": big[:1]}, _metadata(2), score=9.0)
        checkpointer.wait()
    assert (checkpointer.latest_step(), checkpointer.best_step()) == (1, None)
    _save(checkpointer, 3)  # there is room again
    step, state, _ = checkpointer.restore(_make_state())
    assert step == 3
    _assert_equal(state, _make_state(value=3.0))
    assert _saved_steps(small_disk) == ["1", "3"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(errors.RunFailure, match=r"could not save .*/4: Read-only file system$"):
        _save(checkpointer, 4)
        checkpointer.wait()

    def fail_again():  # as orbax may, where several of its threads have failed
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpointer._writer, "wait_until_finished", fail_again)
    checkpointer.close()
    assert "Traceback" not in capfd.readouterr().err


def test_replay_can_be_left_out(tmp_path):
    """Only a run that expects no replay continues from such a checkpoint."""

    def state(value: float) -> dict[str, Any]:
        return _make_state(value=value) | {
            "memory": replay.Memory(*[value * jnp.ones(1 << 16)] * 4)
        }

    def save(checkpointer: checkpoint.Checkpointer, step: int) -> bool:
        """Returns whether the checkpoint has replay."""
        params = {"w": jnp.ones(1), "updates": jnp.ones((), jnp.int32)}
        checkpointer.save(step, state(float(step)), params, _metadata(step))
        checkpointer.wait()
        return "memory/ring" in (tmp_path / str(step) / "metadata/metadata").read_text()

    bare = checkpoint.Checkpointer(tmp_path, replay=False)
    whole = checkpoint.Checkpointer(tmp_path)
    assert not save(bare, 1)
    with pytest.raises(errors.UserError, match=r"1 has no replay: .*checkpoint_replay = False"):
        whole.restore(state(0.0))
    _assert_equal(bare.restore(state(5.0))[1], state(1.0) | {"memory": state(5.0)["memory"]})
    with pytest.raises(errors.UserError, match="does not fit this run: leaf 'empty/0'"):
        bare.restore(state(0.0) | {"empty": (jnp.zeros(3),)})
    # Acting parameters may have fewer counts than those of earlier versions; nothing else differs.
    _assert_equal(bare.restore({"w": jnp.zeros(1)}, "params")[1], {"w": jnp.ones(1)})
    with pytest.raises(errors.UserError, match="does not fit this run: leaf 'v'"):
        bare.restore({"w": jnp.zeros(1), "v": jnp.zeros(())}, "params")
    assert save(whole, 2)
    _assert_equal(bare.restore(state(0.0))[1], state(2.0))  # a replay that is there is taken
    bare.close()
    whole.close()


_SEVERAL = """
import os, pathlib, resource, signal, sys
import jax, numpy as np
from podracers.commands import command_line
from podracers import parallel
from podracers.hosts import peers, processes
from podracers.checkpoints import checkpoint, integrity

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
    state = make(step)
    checkpointer.save(step, state, {{"whole": state["whole"]}}, {{}}, -step)

def restore():
    step, state, _ = checkpointer.restore(make(0))
    for tree in (state, other := make(step)):
        tree["keys"] = jax.jit(jax.random.key_data)(tree["keys"])
    ours, theirs = map(jax.tree.leaves, (state, other))
    for leaf, other in zip(ours, theirs, strict=True):
        for shard, same in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(same.data))
        assert leaf.sharding == other.sharding
    print("restored", step, checkpointer.best_step(), flush=True)

def main():
    global checkpointer
    peers._FINISH_TIMEOUT = 2.0  # seconds that process 0 waits for the part that is missing
    if count > 1:
        processes.initialize(processes.Group(sys.argv[2], count, process), {timeout})
    checkpointer = checkpoint.Checkpointer(folder, keep_latest=2)
"""


def _several(body: str, folder: pathlib.Path, count: int = 2, num_devices: int = 2):
    code = _SEVERAL.format(count=count, folder=str(folder), timeout=groups.PEER_TIMEOUT)
    code += "".join(f"    {line}\n" for line in body.strip().splitlines())
    return groups.python(code + "\ncommand_line.run(main)\n", count, num_devices)


def _assert_restored(results, *steps: int) -> None:
    for result in results:
        assert result.returncode == 0, result.stderr
        lines = [line for line in result.stdout.splitlines() if line.startswith("restored")]
        assert lines == [f"restored {step} 10" for step in steps]


def _assert_one_restores(folder: pathlib.Path, step: int) -> None:
    _assert_restored(_several("restore()", folder, count=1, num_devices=4), step)


@pytest.mark.slow
def test_what_two_write_any_number_restores(tmp_path):
    """Each sums up its own files; the oldest is kept for its score; damage is seen by all."""
    _assert_restored(
        _several("for step in (10, 20, 30, 40): save(step)\ncheckpointer.close()", tmp_path)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "30", "40"]
    assert sorted(path.name for path in (tmp_path / "40").glob("manifest*")) == ["manifest.json"]
    sums = json.loads((tmp_path / "40/manifest.json").read_text())
    for process in (0, 1):
        assert any(name.startswith(f"state/ocdbt.process_{process}/") for name in sums)
    _assert_one_restores(tmp_path, 40)
    body = """
restore()
save(50)
checkpointer.wait()
restore()
if process == 3:
    files = pathlib.Path(folder, "50/state").glob("ocdbt.process_3/d/*")
    os.truncate(max(files, key=os.path.getsize), 100)
processes.all_gather(None)
restore()
checkpointer.close()
"""
    results = _several(body, tmp_path, count=4, num_devices=1)
    _assert_restored(results, 40, 50, 40)
    assert (tmp_path / "damaged-50").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "ended", "phrase"),
    [
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))", 2, "/20: File too large"),
        (
            "integrity.write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "process 1 was lost",
        ),
    ],
)
def test_a_process_that_fails_or_is_lost_while_it_saves_fails_all(tmp_path, harm, ended, phrase):
    save, wait = "save({})", "checkpointer.wait()"
    body = [save.format(10), wait, f"if process == 1:\n    {harm}", save.format(20), wait]
    for result in _several("\n".join(body), tmp_path)[:ended]:
        assert result.returncode == 1, result.stderr
        assert "failed: " in result.stderr and phrase in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "20").exists()
    _assert_one_restores(tmp_path, 10)


def test_a_copy_under_the_name_of_another_step_is_damaged(copied, caplog):
    shutil.copytree(copied / "20", copied / "40")
    reader = checkpoint.Checkpointer(copied, read_only=True)
    assert reader.restore(_make_state())[0] == 30
    assert reader.restore(_make_state()["params"], "params")[0] == 30
    assert "it was saved as checkpoint 20" in caplog.text


@pytest.mark.parametrize(("fate", "begun"), [("removed", False), ("moved to .*/away'", True)])
def test_a_directory_that_vanishes_ends_saving_at_once(tmp_path, capfd, fate, begun):
    """Between two saves, or after one began."""
    directory, away = tmp_path / "checkpoints", tmp_path / "away"
    checkpointer = checkpoint.Checkpointer(directory)
    _save(checkpointer, 1)
    checkpointer.wait()
    with pytest.raises(errors.RunFailure, match=f"^'{directory}' was {fate}"):
        if begun:
            _save(checkpointer, 2)
        directory.rename(away)
        while fate == "removed" and away.exists():
            shutil.rmtree(away, ignore_errors=True)
        if not begun:
            _save(checkpointer, 2)
        checkpointer.wait()
    with pytest.raises(errors.RunFailure, match=f"^'{directory}' was "):
        checkpointer.close()
    assert "Traceback" not in capfd.readouterr().err
