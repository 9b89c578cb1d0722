"""Tests of the folder of a run."""

import json
import pathlib

import pytest

from podracers import errors, run_directory


def test_makes_a_folder_once(tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "runs" / "one")
    directory.create()
    directory.create()  # there is nothing in it yet
    directory.write(directory.config, "SEED = 0\n")
    with pytest.raises(errors.UserError, match="continue it with --resume"):
        directory.create()


def test_refuses_to_make_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(errors.UserError, match="run directory"):
            run_directory.RunDirectory(path).create()


def test_names_the_nearest_run(tmp_path):
    directory = run_directory.RunDirectory(tmp_path / "snake-3")
    directory.create()
    directory.write(directory.config, "")
    directory.require()
    with pytest.raises(errors.UserError, match=r"no config\.gin.*did you mean '.*/snake-3'"):
        run_directory.RunDirectory(tmp_path / "snake-2").require()


def test_writes_whole_files_or_none(tmp_path, monkeypatch):
    directory = run_directory.RunDirectory(tmp_path)
    directory.write(directory.config, "SEED = 0\n")

    def fail(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", fail)
    with pytest.raises(errors.RunFailure, match=r"config\.gin.*No space left"):
        directory.write(directory.config, "SEED = 1\n")
    assert directory.config.read_text() == "SEED = 0\n"


def test_says_where_a_result_comes_from(tmp_path):
    found = run_directory.provenance()
    assert found["device"] == "4 x cpu"
    assert found["platform"] == "cpu"
    assert {"python", "jax", "flax", "optax", "podracers"} <= found["versions"].keys()
    directory = run_directory.RunDirectory(tmp_path)
    directory.write_summary(found)
    assert json.loads(directory.summary.read_text()) == found
