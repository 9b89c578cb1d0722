"""What a benchmark found, as rows that say what they measure, in which unit, and what is better.

A file of results is a `Record` as JSON: `scripts/benchmark.py` writes it and compares two of them,
and `scripts/report.py` shows it.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from podracers import errors

HIGHER, LOWER = "higher", "lower"
_BETTER = (HIGHER, LOWER, None)


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure."""

    measure: str  # what was measured, such as "speed"
    unit: str  # of the figures
    better: str | None  # "higher" or "lower"; None for what is neither, and not compared
    # Of what it was measured, such as `{"runner": "anakin", "devices": 4}`.
    case: Mapping[str, str | int]
    median: float  # of all repeats
    min: float | None = None  # the least of them; None where it was measured once
    max: float | None = None  # the most of them

    def __post_init__(self):
        numbers = [each for each in (self.median, self.min, self.max) if each is not None]
        if not all(isinstance(each, int | float) for each in numbers):
            raise ValueError(f"of {self.measure}, not all figures are numbers")
        if self.better not in _BETTER:
            raise ValueError(f"better is {self.better!r}, not one of {_BETTER}")
        if (self.min is None) != (self.max is None):
            raise ValueError(f"of {self.measure}, min or max is missing")

    @property
    def key(self) -> tuple:
        """What makes this row the same one in another file."""
        return (self.measure, self.unit, self.better, tuple(sorted(self.case.items())))

    @property
    def label(self) -> str:
        """What was measured, and of what."""
        case = ", ".join(f"{name} {value}" for name, value in self.case.items())
        return f"{self.measure} ({case})" if case else self.measure

    @property
    def spread(self) -> str:
        """The median, with the least and the most where there is more than one figure."""
        if self.min is None:
            return short(self.median)
        return f"{short(self.median)} ({short(self.min)} to {short(self.max)})"


def short(number: float) -> str:
    """Returns three digits of a number, and as many zeros as k, M and G save."""
    size = abs(float(f"{number:.3g}"))
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{float(f'{number / unit:.3g}'):g}{letter}"
    return f"{number:.3g}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of figure: what all of its rows share, as of `Row`, and their decimal places."""

    measure: str
    unit: str
    better: str | None
    digits: int

    def row(self, values: Iterable[float] | float, **case: str | int) -> Row:
        """Sums up one figure, or several of the same thing."""
        values = [float(each) for each in (values if isinstance(values, Iterable) else [values])]
        numbers = {"median": statistics.median(values)}
        if len(values) > 1:
            numbers |= {"min": min(values), "max": max(values)}
        rounded = {name: round(number, self.digits) for name, number in numbers.items()}
        return Row(self.measure, self.unit, self.better, case, **rounded)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one benchmark found."""

    about: str  # a sentence: what it measures
    rows: tuple[Row, ...]  # its figures
    # What else is to be known of them, such as how the work was laid out.
    notes: tuple[str, ...] = ()
    group: str | None = None  # benchmarks of one group are shown together


@dataclasses.dataclass(frozen=True)
class Record:
    """A file of results."""

    command: str  # what was run
    results: Mapping[str, Result]  # by the name of the benchmark
    provenance: Mapping[str, Any]  # device, versions, commit (see `run_directory.provenance`)

    def text(self) -> str:
        """Returns it as JSON, without what is not known."""
        content = {"command": self.command, "results": dict(self.results), **self.provenance}
        return json.dumps(content, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # None is an answer to what is better.
    return {n: item for n, item in fields.items() if n == "better" or item not in (None, ())}


def _parse(content: Mapping[str, Any]) -> Record:
    rest = dict(content)
    command, results = rest.pop("command"), rest.pop("results")
    for name in ("device", "platform", "host_cores", "versions", "commit"):
        _ = rest[name]
    return Record(command, {name: _result(each) for name, each in results.items()}, rest)


def _result(content: Mapping[str, Any]) -> Result:
    rows = tuple(Row(**row) for row in content["rows"])
    return Result(**{**content, "rows": rows, "notes": tuple(content.get("notes", ()))})


def read(path: str | pathlib.Path) -> Record:
    """Returns a file of results.

    Raises:
      errors.UserError: there is no such file, or it holds something else.
    """
    try:
        return _parse(json.loads(pathlib.Path(path).read_text()))
    except OSError as error:
        raise errors.UserError(f"cannot read '{path}': {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UserError(
            f"'{path}' holds no results of scripts/benchmark.py: {type(error).__name__}: {error}"
        ) from error
