"""Tests of what counts as damage, and of the checks of JSON files."""

import errno

import jax
import pytest

from podracers import errors
from podracers.training import manifest

_SCHEMA = {"count": manifest.is_count, "rate": manifest.optional(manifest.is_duration)}
_GOOD = '{"count": 3, "rate": 2, "more": {}}'


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (MemoryError(), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
        (ValueError("Expecting value"), True),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(error, is_damage):
    found = manifest.unreadable("a", error)
    assert isinstance(found, manifest.DamagedError if is_damage else errors.RunFailure)


def test_json_of_the_expected_form_is_returned():
    assert manifest.parse(_GOOD, _SCHEMA)["rate"] == 2
    assert manifest.parse(_GOOD.replace('"rate": 2, ', ""), _SCHEMA)["count"] == 3
    row = {"step": manifest.is_count, str: manifest.optional(manifest.is_number)}
    assert manifest.parse('{"step": 0, "a": null, "b": -1e3}', row)["b"] == -1e3
    with pytest.raises(ValueError, match="'b' is 'x'"):
        manifest.parse('{"step": 0, "b": "x"}', row)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"count": 3, ', "", "'count' is None"),
        ('"count": 3', '"count": -1', "'count' is -1"),
        ('"count": 3', '"count": true', "'count' is True"),
        ('"rate": 2', '"rate": NaN', "'rate' is nan"),
        ('"rate": 2', f'"rate": 1{"0" * 400}', "'rate' is 10*"),
        (_GOOD, "[]", r"'it' is \[\]"),
        (_GOOD, f"{'9' * 5000}", "4300 digits"),
    ],
)
def test_other_json_is_refused_in_one_line(old, new, message):
    with pytest.raises(ValueError, match=message) as caught:
        manifest.parse(_GOOD.replace(old, new), _SCHEMA)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_manifest_without_the_files_of_an_item_is_damage(tmp_path):
    (tmp_path / manifest.MANIFEST).write_text("{}")
    with pytest.raises(manifest.DamagedError, match="no files of state"):
        manifest.verify(tmp_path, ["state"])
