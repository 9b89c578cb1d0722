"""Tests of checkpoints: what is saved comes back, and what is damaged never does."""

import functools
import logging
import os
import pathlib
import shutil
import subprocess
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podracers import checkpoint, errors, parallel, types


class _Learner(NamedTuple):
    params: types.PyTree
    optimizer: optax.OptState
    updates: jax.Array


class _State(NamedTuple):
    learner: _Learner
    memory: types.PyTree
    key: jax.Array
    keys: jax.Array  # [8] sharded
    empty: tuple = ()


def _make_state(num_devices: int = 4, value: float = 1.0, width: int = 16) -> _State:
    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(parallel.AXIS))
    params = {"dense": {"kernel": value * jnp.arange(4.0 * width).reshape(4, width)}}
    learner = _Learner(params, optax.adam(1e-3).init(params), jnp.asarray(7, jnp.int32))
    memory = {"ring": value * jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)}
    return _State(
        learner=jax.device_put(learner, everywhere),
        memory=jax.device_put(memory, split),
        key=jax.device_put(jax.random.key(3), everywhere),
        keys=jax.device_put(jax.random.split(jax.random.key(4), 8), split),
    )


def _raw(tree: types.PyTree) -> types.PyTree:
    """Returns NumPy leaves, of typed keys their data."""

    def one(x):
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return jax.tree.map(one, tree)


def _assert_equal(left: types.PyTree, right: types.PyTree) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, _raw(left), _raw(right))


def _save(checkpointer: checkpoint.Checkpointer, step: int, score: float | None = None) -> None:
    state = _make_state(value=float(step))
    checkpointer.save(step, state, state.learner.params, {"frames": step * 10}, score)


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
    checkpointer = checkpoint.Checkpointer(directory, **kwargs)
    try:
        return checkpointer.restore(_make_state())
    finally:
        checkpointer.close()


def test_nothing_saved(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path / "new" / "checkpoints")
    assert checkpointer.latest_step() is None
    assert checkpointer.restore(_make_state()) is None
    assert checkpointer.restore_params({}, best=True) is None
    checkpointer.close()


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_restores_on_any_number_of_devices(saved, num_devices):
    checkpointer = checkpoint.Checkpointer(saved, read_only=True)
    template = _make_state(num_devices)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template
    )
    for one in (template, abstract):
        step, state, metadata = checkpointer.restore(one)
        assert (step, metadata) == (30, {"frames": 300})
        _assert_equal(state, _make_state(value=30.0))
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
            lambda x: x.sharding, template
        )
    checkpointer.close()


def test_params_alone_are_read_without_the_state(copied):
    for step in (10, 20, 30):
        shutil.rmtree(copied / str(step) / "state")
    template = _make_state().learner.params
    checkpointer = checkpoint.Checkpointer(copied, read_only=True)
    step, params, metadata = checkpointer.restore_params(template)
    assert (step, metadata) == (30, {"frames": 300})
    _assert_equal(params, _make_state(value=30.0).learner.params)
    checkpointer.close()


def test_keeps_the_newest_and_the_best(tmp_path):
    template = _make_state().learner.params
    scores = {1: 0.0, 2: 5.0, 3: float("nan"), 4: 1.0, 5: None, 6: 4.0, 7: 2.0}
    for block in ([1, 2, 3], [4, 5, 6, 7]):  # scores survive a restart
        checkpointer = checkpoint.Checkpointer(tmp_path, keep_latest=2, keep_best=2)
        for step in block:
            _save(checkpointer, step, scores[step])
        checkpointer.wait()
        assert checkpointer.best_step() == 2
        checkpointer.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 6, 7]
    reader = checkpoint.Checkpointer(tmp_path, read_only=True)
    assert reader.latest_step() == 7
    assert reader.restore_params(template, best=True)[0] == 2
    assert reader.restore_params(template)[0] == 7
    shutil.rmtree(tmp_path / "2" / "params")
    step, params, _ = reader.restore_params(template, best=True)
    assert step == 6
    _assert_equal(params, _make_state(value=6.0).learner.params)
    reader.close()


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state):
        memory = jax.tree.map(lambda x: x * 0 - 1, state.memory)
        learner = jax.tree.map(lambda x: (x * 0 - 1).astype(x.dtype), state.learner)
        return state._replace(learner=learner, memory=memory)

    checkpointer = checkpoint.Checkpointer(tmp_path)
    state = _make_state(value=2.0)
    checkpointer.save(1, state, state.learner.params, {})
    for _ in range(20):
        state = advance(state)
    _assert_equal(checkpointer.restore(_make_state())[1], _make_state(value=2.0))
    checkpointer.close()


def test_a_step_before_the_newest_is_not_skipped_in_silence(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path)
    _save(checkpointer, 5)
    with pytest.raises(errors.RunFailure, match=r"checkpoint .*3: step 5 was saved already"):
        _save(checkpointer, 3)
    _save(checkpointer, 6)
    assert checkpointer.latest_step() == 6
    checkpointer.close()


def test_a_step_is_saved_once(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path)
    _save(checkpointer, 5)
    _save(checkpointer, 5)
    assert checkpointer.latest_step() == 5
    checkpointer.close()


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    # Of the manifest not the middle: which part that is about depends on names drawn at random.
    data[0 if path.suffix == ".json" else len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, os.remove])
def test_damage_to_any_file_is_noticed(saved, copied, damage):
    """Every file of the newest checkpoint in turn; the one before it is restored instead."""
    reader = checkpoint.Checkpointer(copied, read_only=True)
    template = _make_state()
    names = [path.relative_to(saved) for path in sorted((saved / "30").rglob("*"))]
    for name in names:
        if not (saved / name).is_file() or not (saved / name).stat().st_size:
            continue
        damage(copied / name)
        restored = {
            "state": reader.restore(template),
            "params": reader.restore_params(template.learner.params),
        }
        for part, (step, tree, metadata) in restored.items():
            unread = len(name.parts) > 2 and name.parts[1] not in (part, "metadata")
            if unread:
                assert step == 30, (str(name), part)
            elif len(name.parts) > 2 or name.name == "manifest.json":
                assert step == 20, (str(name), part)
            assert metadata == {"frames": step * 10}
            if part == "state":
                _assert_equal(tree, _make_state(value=float(step)))
        shutil.copy(saved / name, copied / name)
    reader.close()


def test_falls_back_says_so_and_goes_on(copied, caplog):
    (array_file,) = [
        max((copied / "30" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    ]
    _flip(array_file)
    with caplog.at_level(logging.WARNING):
        checkpointer = checkpoint.Checkpointer(copied)
        step, _, _ = checkpointer.restore(_make_state())
    assert step == 20
    (record,) = caplog.records
    assert record.message.startswith("checkpoint 30 is damaged (state/")
    assert record.message.endswith("; resuming from 20")
    # The steps after the fallback are taken again, and saved again.
    _save(checkpointer, 30)
    checkpointer.close()
    assert _restore(copied)[0] == 30
    assert (copied / "damaged-30").is_dir()


def test_a_half_written_checkpoint_is_ignored(copied):
    (copied / "30").rename(copied / "40.orbax-checkpoint-tmp")
    assert _restore(copied, read_only=True)[0] == 20
    assert (copied / "40.orbax-checkpoint-tmp").exists()  # it may be another process's
    assert _restore(copied)[0] == 20
    assert not (copied / "40.orbax-checkpoint-tmp").exists()


def test_all_damaged(copied):
    for step in (10, 20, 30):
        (copied / str(step) / "state" / "_METADATA").unlink()
    with pytest.raises(errors.RunFailure, match=r"every checkpoint in .* is damaged") as caught:
        _restore(copied)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in copied.iterdir()) == ["10", "20", "30"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: _make_state(width=8),
            r"'learner/params/dense/kernel' should be float32\[4, 8\], and is float32\[4, 16\]",
        ),
        (lambda state: state._replace(empty=(jnp.zeros(3),)), "it has no leaf 'empty/0'"),
        (lambda state: state._replace(memory=()), "it has a leaf 'memory/ring' .*not expected"),
        (
            lambda state: state._replace(key=jax.random.key(0, impl="rbg")),
            r"'key' should be uint32\[4\], and is uint32\[2\]",
        ),
    ],
)
def test_a_foreign_checkpoint_is_refused(copied, change, message):
    checkpointer = checkpoint.Checkpointer(copied)
    with pytest.raises(errors.UserError, match=message) as caught:
        checkpointer.restore(change(_make_state()))
    assert "\n" not in str(caught.value)
    checkpointer.close()
    assert _restore(copied)[0] == 30


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path):
    """A file system of 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_reported_and_loses_nothing(small_disk, capfd):
    checkpointer = checkpoint.Checkpointer(small_disk)
    _save(checkpointer, 1)
    checkpointer.wait()
    big = np.random.default_rng(0).integers(0, 256, 4 << 20).astype(np.uint8)
    with pytest.raises(errors.RunFailure, match="No space left on device") as caught:
        checkpointer.save(2, _make_state()._replace(memory=big), {"w": big[:1]}, {}, score=9.0)
        checkpointer.wait()
    assert str(caught.value).startswith(f"could not save checkpoint {small_disk / '2'}: ")
    assert "\n" not in str(caught.value)
    assert checkpointer.latest_step() == 1
    assert checkpointer.best_step() is None
    _save(checkpointer, 3)  # there is room again
    step, state, _ = checkpointer.restore(_make_state())
    assert step == 3
    _assert_equal(state, _make_state(value=3.0))
    checkpointer.close()
    assert sorted(path.name for path in small_disk.iterdir()) == ["1", "3"]
    assert "Traceback" not in capfd.readouterr().err
