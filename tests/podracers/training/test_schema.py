"""Tests of what JSON files have to hold."""

import pytest

from podracers.training import schema

_SCHEMA = {
    "count": schema.COUNT,
    "rate": (schema.DURATION, None),
    "leaves": [[str, [schema.COUNT]]],
    "note": schema.Optional(str),
}
_GOOD = '{"count": 3, "rate": 2, "leaves": [["a", [1, 2]], ["b", []]], "more": {}}'


def test_what_fits_is_returned():
    found = schema.parse(_GOOD, _SCHEMA)
    assert found["leaves"] == [["a", [1, 2]], ["b", []]]
    assert schema.parse('{"step": 0, "a": null, "b": -1e3}', {"step": schema.COUNT, str: _ANY})


_ANY = (schema.REAL, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"count": 3, ', "", "it has no 'count'"),
        ('"count": 3', '"count": -1', "'count' is -1"),
        ('"count": 3', '"count": true', "'count' is true"),
        ('"count": 3', '"count": 3.0', "'count' is 3.0"),
        ('"count": 3', '"count": "3"', "'count' is \"3\""),
        ('"count": 3', f'"count": {2**63}', "'count' is 9223372036854775808"),
        ('"rate": 2', '"rate": NaN', "'rate' is NaN"),
        ('"rate": 2', '"rate": 1e999', "'rate' is Infinity"),
        ('"rate": 2', f'"rate": 1{"0" * 400}', "'rate' is 10*"),
        ('"rate": 2', '"rate": []', "'rate' is an array of 0"),
        ('"a"', "{}", r"'leaves\[0\]\[0\]' is an object"),
        ('["b", []]', '["b"]', "is an array of 1"),
        ("[1, 2]", "7", "is 7"),
        ('"more": {}', '"note": 7', "'note' is 7"),
        (_GOOD, "[]", "it is an array of 0"),
        (_GOOD, "", "Expecting value"),
        (_GOOD, f"{'[' * 100000}", "nested too deeply"),
        (_GOOD, f"{'9' * 5000}", "4300 digits"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(old, new, message):
    assert old in _GOOD
    with pytest.raises(ValueError, match=message) as caught:
        schema.parse(_GOOD.replace(old, new), _SCHEMA)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
