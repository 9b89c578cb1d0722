"""What a benchmark found, as rows that say what they measure, in which unit, and what is better.

A file of results is a `Record` as JSON: `benchmark.py` writes it, `benchmark_page.py` shows it and
`benchmark_check.py` compares two.
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
    """One figure.

    Attributes:
      measure: what was measured, such as "speed".
      unit: of the figures.
      better: "higher" or "lower"; None for what is neither, and not compared.
      case: of what it was measured, such as `{"runner": "anakin", "devices": 4}`.
      median: of all repeats.
      min: the least of them; None where it was measured once.
      max: the most of them.
    """

    measure: str
    unit: str
    better: str | None
    case: Mapping[str, str | int]
    median: float
    min: float | None = None
    max: float | None = None

    @property
    def key(self) -> tuple:
        """Returns what makes this row the same one in another file."""
        return (self.measure, self.unit, self.better, tuple(sorted(self.case.items())))

    def text(self) -> str:
        """Returns it in one line."""
        return f"{self.label}: {self.spread} {self.unit}"

    @property
    def label(self) -> str:
        """Says what was measured, and of what."""
        case = ", ".join(f"{name} {value}" for name, value in self.case.items())
        return f"{self.measure} ({case})" if case else self.measure

    @property
    def spread(self) -> str:
        """Returns the median, with the least and the most where there is more than one figure."""
        if self.min is None or self.max is None:
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
    """A kind of figure: of which all rows have the measure, the unit and what is better.

    Attributes:
      measure: as of `Row`.
      unit: as of `Row`.
      better: as of `Row`.
      digits: behind the decimal point.
    """

    measure: str
    unit: str
    better: str | None
    digits: int

    def row(self, values: Iterable[float] | float, **case: str | int) -> Row:
        """Sums up one figure, or several of the same thing."""
        try:
            values = [float(value) for value in values]
        except TypeError:
            values = [float(values)]
        numbers = {"median": statistics.median(values)}
        if len(values) > 1:
            numbers |= {"min": min(values), "max": max(values)}
        rounded = {name: round(number, self.digits) for name, number in numbers.items()}
        return Row(self.measure, self.unit, self.better, case, **rounded)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one benchmark found.

    Attributes:
      about: a sentence: what it measures.
      rows: its figures.
      notes: what else is to be known of them, such as how the work was laid out.
      group: benchmarks of one group are shown together.
    """

    about: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    group: str | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """A file of results.

    Attributes:
      command: what was run.
      results: by the name of the benchmark.
      provenance: device, versions, commit (see `run_directory.provenance`).
    """

    command: str
    results: Mapping[str, Result]
    provenance: Mapping[str, Any]

    def text(self) -> str:
        """Returns it as JSON, without what is not known."""
        content = {"command": self.command, "results": dict(self.results), **self.provenance}
        return json.dumps(content, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    keep = {"better"}  # where None is an answer
    return {name: item for name, item in fields.items() if name in keep or item not in (None, ())}


def parse(content: Mapping[str, Any]) -> Record:
    """Returns the record that a decoded JSON object holds.

    Raises:
      KeyError, TypeError, ValueError: it holds none.
    """
    rest = dict(content)
    command, results = rest.pop("command"), rest.pop("results")
    for name in ("device", "platform", "host_cores", "versions", "commit"):
        _ = rest[name]
    return Record(command, {name: _result(each) for name, each in results.items()}, rest)


def _result(content: Mapping[str, Any]) -> Result:
    rows = tuple(Row(**row) for row in content["rows"])
    for row in rows:
        numbers = [each for each in (row.median, row.min, row.max) if each is not None]
        if not all(isinstance(each, int | float) for each in numbers):
            raise ValueError(f"of {row.measure}, not all figures are numbers")
        if row.better not in _BETTER:
            raise ValueError(f"better is {row.better!r}, not one of {_BETTER}")
        if (row.min is None) != (row.max is None):
            raise ValueError(f"of {row.measure}, min or max is missing")
    return Result(**{**content, "rows": rows, "notes": tuple(content.get("notes", ()))})


def read(path: str | pathlib.Path) -> Record:
    """Returns a file of results.

    Raises:
      errors.UserError: there is no such file, or it holds something else.
    """
    try:
        return parse(json.loads(pathlib.Path(path).read_text()))
    except OSError as error:
        raise errors.UserError(f"cannot read '{path}': {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UserError(
            f"'{path}' holds no results of scripts/benchmark.py: {type(error).__name__}: {error}"
        ) from error


def write(path: str | pathlib.Path, record: Record) -> None:
    """Writes a file of results.

    Raises:
      errors.UserError: it cannot be written.
    """
    try:
        pathlib.Path(path).write_text(record.text())
    except OSError as error:
        raise errors.UserError(f"cannot write '{path}': {error.strerror}") from error
