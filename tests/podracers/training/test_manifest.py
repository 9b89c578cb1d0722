"""Tests of what counts as damage, and of the checks of JSON files."""

import errno

import jax
import pytest

from podracers import errors
from podracers.training import manifest

_SCHEMA = {
    "count": manifest.is_count,
    "rate": manifest.optional(manifest.is_duration),
    "leaves": [[manifest.is_text, [manifest.is_count]]],
}
_GOOD = '{"count": 3, "rate": 2, "leaves": [["a", [1, 2]], ["b", []]], "more": {}}'


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (MemoryError(), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
        (ValueError("Expecting value"), True),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(error, is_damage):
    outer = RuntimeError("while restoring")
    outer.__cause__ = error
    for found in (manifest.unreadable("a", error), manifest.unreadable("", outer)):
        assert isinstance(found, manifest.DamagedError if is_damage else errors.RunFailure)


def test_json_of_the_expected_form_is_returned():
    assert manifest.parse(_GOOD, _SCHEMA)["leaves"] == [["a", [1, 2]], ["b", []]]
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
        ('"count": 3', f'"count": {2**63}', "'count' is 9223372036854775808"),
        ('"rate": 2', '"rate": NaN', "'rate' is nan"),
        ('"rate": 2', f'"rate": 1{"0" * 400}', "'rate' is 10*"),
        ('"rate": 2', '"rate": -1', "'rate' is -1"),
        ('"a"', "{}", r"'leaves\[0\]\[0\]' is {}"),
        (_GOOD, "[]", r"'it' is \[\]"),
        (_GOOD, f"{'[' * 100000}", "nested too deeply"),
        (_GOOD, f"{'9' * 5000}", "4300 digits"),
    ],
)
def test_other_json_is_refused_in_one_line(old, new, message):
    assert old in _GOOD
    with pytest.raises(ValueError, match=message) as caught:
        manifest.parse(_GOOD.replace(old, new), _SCHEMA)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
