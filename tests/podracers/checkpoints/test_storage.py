"""Tests of the folders of checkpoints; a local folder stands in for a bucket."""

import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

from podracers import errors
from podracers.checkpoints import checkpoint, storage
from podracers.training import run_directory
from tests import groups

_OPTION = "Experiment.checkpoint_directory"


def test_places():
    for place in ("/mnt/runs/a", "gs://bucket/a", "gs://bucket/a/b/"):
        storage.check(_OPTION, place)
        assert os.fspath(storage.path(place)) == place.rstrip("/")
        assert storage.is_bucket(storage.path(place)) == place.startswith("gs")


@pytest.mark.parametrize("character", "*?[\\")
def test_paths_below_which_checkpoints_are_lost_are_refused(tmp_path, monkeypatch, character):
    """Also where the working directory has such a name, or a folder above it."""
    folder = tmp_path / f"lr{character}1,2]" / "sweep"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    words = rf"expected a path without '{re.escape(character)}', .* got '{re.escape(str(folder))}/"
    for act in (
        lambda: storage.check(_OPTION, str(folder / "a")),
        lambda: storage.check(_OPTION, f"gs://bucket{folder}/a"),
        lambda: storage.require_shared(_OPTION, folder / "a", False),
        lambda: run_directory.RunDirectory("a").create(dry_run=True),
        lambda: run_directory.RunDirectory("a").create(),
        lambda: checkpoint.Checkpointer("a/checkpoints"),
    ):
        with pytest.raises(errors.UserError, match=words.replace("'/", "'.*/")) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())


def test_a_folder_has_the_checkpoints_of_one_run(tmp_path):
    place = tmp_path / "new" / "checkpoints"
    for resume in (False, None):
        assert not storage.require_shared(_OPTION, place, resume)
    assert not list(place.iterdir())
    (place / "other").mkdir()
    with pytest.raises(errors.UserError, match=r"is in use \(it contains 'other'\).*--resume"):
        storage.require_shared(_OPTION, place, None)
    (place / "10").mkdir()
    assert storage.require_shared(_OPTION, place, resume=True)
    assert storage.require_shared(_OPTION, place, None)
    with pytest.raises(errors.UserError, match=r"is in use \(it contains '10'\).*--resume"):
        storage.require_shared(_OPTION, place, resume=False)


@pytest.mark.slow
def test_the_folder_is_empty_when_the_check_returns(tmp_path):
    """Process 1 removes its file late."""
    code = f"""
import pathlib, sys, time
from podracers.hosts import processes
from podracers.checkpoints import storage
process = int(sys.argv[1])
processes.initialize(processes.Group(sys.argv[2], 2, process), {groups.PEER_TIMEOUT})
unlink = pathlib.Path.unlink
pathlib.Path.unlink = lambda file: (time.sleep(process), unlink(file))
storage.require_shared("the folder", {str(tmp_path)!r}, True)
print(list(pathlib.Path({str(tmp_path)!r}).iterdir()), flush=True)
"""
    for result in groups.python(code, 2, 1):
        assert result.stdout.strip() == "[]", result.stderr


def _save(checkpointer: checkpoint.Checkpointer, step: int, score: float | None = None) -> None:
    state = {"x": jnp.arange(1000.0) + step}
    checkpointer.save(step, state, state, {}, score)


def test_in_a_bucket_the_last_file_commits(tmp_path, monkeypatch):
    """Other folders are left alone, and partial checkpoints are removed."""
    monkeypatch.setattr(storage, "is_bucket", lambda folder: True)
    bucket = tmp_path / "checkpoints"
    bucket.mkdir()
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
    _save(checkpointer, 30)
    checkpointer.close()
    assert checkpointer.best_step() is None  # the score was that of the damaged one
    names = ["10", "20", "30", "damaged-30", "other"]
    assert sorted(path.name for path in bucket.iterdir()) == names
