"""Tests of where checkpoints lie; a local folder stands in for a bucket."""

import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from podracers import errors
from podracers.training import checkpoint, storage

_OPTION = "Experiment.checkpoint_directory"


@pytest.mark.parametrize("place", ["runs/a", "gs://", "gs://bucket", "gs://bucket/", "s3://a/b", 3])
def test_what_is_no_absolute_path_is_refused(place):
    with pytest.raises(errors.UserError, match=r"expected an absolute path, or gs://BUCKET/FOLDER"):
        storage.check(_OPTION, place)


@pytest.mark.parametrize("place", ["/mnt/runs/a", "gs://bucket/a", "gs://bucket/a/b/"])
def test_folders_and_buckets(place):
    storage.check(_OPTION, place)
    assert os.fspath(storage.path(place)) == place.rstrip("/")
    assert storage.is_bucket(storage.path(place)) == place.startswith("gs")


def test_a_folder_is_of_one_run(tmp_path):
    place = tmp_path / "new" / "checkpoints"
    storage.require(_OPTION, str(place), resume=False)
    storage.require(_OPTION, str(place), resume=False)  # nothing was saved meanwhile
    assert [path.name for path in place.iterdir()] == [".podracers"]
    assert not storage.is_begun(str(place))
    (place / "10").mkdir()
    assert storage.is_begun(str(place))
    storage.require(_OPTION, str(place), resume=True)
    with pytest.raises(errors.UserError, match=r"is in use \(it has '10' in it\).*--resume"):
        storage.require(_OPTION, str(place), resume=False)


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.UserError, match="cannot be written: Not a directory") as caught:
        storage.require(_OPTION, str(tmp_path / "file" / "checkpoints"), resume=False)
    assert "\n" not in str(caught.value)


@pytest.fixture(name="bucket")
def _bucket(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setattr(storage, "is_bucket", lambda folder: True)
    return tmp_path / "checkpoints"


def _save(checkpointer: checkpoint.Checkpointer, step: int, score: float | None = None) -> None:
    clock = {"wall": 2.5, "training": 1.0, "steps": step, "first_dispatch": 1.5}
    metadata = {"update": step, "seed": 3, "population": 1, "clock": clock}
    state = {"x": jnp.arange(1000.0) + step}
    checkpointer.save(step, state, state, metadata, score)


def test_in_a_bucket_the_last_file_commits(bucket):
    """Folders of others are left alone, half-written ones are no checkpoints."""
    checkpointer = checkpoint.Checkpointer(bucket)
    for step in (10, 20, 30):
        _save(checkpointer, step)
    _save(checkpointer, 30, 5.0)  # scored later
    checkpointer.close()
    assert not list(bucket.glob("*tmp*"))
    (bucket / "other").mkdir()
    (bucket / "30" / storage.COMMITTED).unlink()
    assert storage.steps(bucket) == [10, 20]
    checkpointer = checkpoint.Checkpointer(bucket)
    assert sorted(path.name for path in bucket.iterdir()) == ["10", "20", "other"]
    assert checkpointer.restore({"x": jnp.zeros(1000)})[0] == 20
    _save(checkpointer, 30, 5.0)
    checkpointer.wait()
    assert checkpointer.best_step() == 30
    data = max((bucket / "30" / "state").rglob("d/*"), key=os.path.getsize)
    data.write_bytes(data.read_bytes()[:-1])
    step, state, _ = checkpointer.restore({"x": jnp.zeros(1000)})
    assert step == 20
    np.testing.assert_array_equal(state["x"], np.arange(1000.0) + 20)
    checkpointer.close()
    assert sorted(path.name for path in bucket.iterdir()) == ["10", "20", "damaged-30", "other"]
