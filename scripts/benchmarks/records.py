"""Results of benchmarks: one schema, its JSON file and its Markdown tables."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from podracers import errors
from podracers.scripts.results import markdown

_NO_UNITS = ("ratio", "share")
_ACRONYMS = ("dqn", "h100", "impala", "lpg", "tpu")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure."""

    measure: str  # such as "speed"
    unit: str
    case: Mapping[str, str | int]  # such as `{"runner": "Anakin", "devices": 4}`
    median: float  # median of the repeats
    min: float | None = None  # None for a single measurement
    max: float | None = None

    @property
    def label(self) -> str:
        """The measure and its case."""
        case = ", ".join(f"{name} {value}" for name, value in self.case.items())
        return f"{self.measure} ({case})" if case else self.measure

    @property
    def spread(self) -> str:
        """Median, with the range of repeated measurements."""
        if self.min is None or self.max is None:
            return short(self.median)
        return f"{short(self.median)} ({short(self.min)} to {short(self.max)})"


def row(measure: str, unit: str, values: Iterable[float] | float, **case: str | int) -> Row:
    """Summarises one measurement, or repeated ones, to six significant digits."""
    values = [float(value) for value in (values if isinstance(values, Iterable) else [values])]
    spread = {"median": statistics.median(values)}
    if len(values) > 1:
        spread |= {"min": min(values), "max": max(values)}
    return Row(measure, unit, case, **{name: float(f"{x:.6g}") for name, x in spread.items()})


def short(number: float) -> str:
    """Returns three significant digits, with k, M or G for thousands, millions or billions."""
    size = abs(float(f"{number:.3g}"))
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{float(f'{number / unit:.3g}'):g}{letter}"
    return f"{number:.3g}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of one benchmark."""

    about: str  # a sentence on the quantity
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    group: str | None = None  # benchmarks of one group share a section


@dataclasses.dataclass(frozen=True)
class Record:
    """One file of results."""

    command: str
    results: Mapping[str, Result]  # keys are names of benchmarks
    provenance: Mapping[str, Any]  # device, versions, commit (see `summary.provenance`)

    def write(self, path: pathlib.Path) -> None:
        """Writes JSON without empty fields."""
        results = {name: dataclasses.asdict(result) for name, result in self.results.items()}
        content = {"command": self.command, "results": markdown.without_empty(results)}
        markdown.write(path, json.dumps(content | {**self.provenance}, indent=1) + "\n")

    def section(self, stem: str, file: str) -> str:
        """Returns the tables of a file, as Markdown; its stem is not repeated as a heading."""
        origin = self.provenance
        cpu = f", {origin['cpu']}" if "cpu" in origin else ""
        versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
        parts = [
            f"- Command: `python {self.command}`; [raw figures]({file})\n"
            f"- Hardware: {origin['device']} ({origin['host_cores']} host cores{cpu})\n"
            f"- Commit: {origin['commit'] or 'unknown'}\n- Versions: {versions}\n"
        ]
        groups: dict[str, list[Result]] = {}
        for name, result in self.results.items():
            groups.setdefault(result.group or name, []).append(result)
        for heading, results in groups.items():
            notes = dict.fromkeys(note for result in results for note in result.notes)
            parts += [f"### {_title(heading)}\n"] if [*groups] != [stem] else []
            parts += [f"{results[0].about}\n"]
            parts += tables([row for result in results for row in result.rows])
            parts += ["".join(f"- {note}\n" for note in notes)] if notes else []
        return "\n".join(parts)


def read(path: pathlib.Path) -> Record:
    """Returns a file of results; raises errors.UserError if it has another schema."""

    def parse(content: dict[str, Any]) -> Record:
        results = {}
        for name, entry in content.pop("results").items():
            rows, notes = tuple(Row(**row) for row in entry["rows"]), tuple(entry.get("notes", ()))
            results[name] = Result(entry["about"], rows, notes, entry.get("group"))
        return Record(content.pop("command"), results, content)

    return markdown.read_json(path, parse)


def page(folder: pathlib.Path) -> str:
    """Returns the page of all files of results in a folder, which is beside the page.

    Raises:
      errors.UserError: there is no such file, or one has another schema.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise errors.UserError(f"no *.json in '{folder}': run scripts/benchmark.py --json")
    parts = [
        "# Benchmarks\n\nGenerated by `python scripts/report.py`; do not edit. [How to read "
        "it](../evidence.md#speed).\n"
    ]
    for path in paths:
        section = read(path).section(path.stem, f"{folder.name}/{path.name}")
        parts.append(f"## {_title(path.stem)}\n\n{section}")
    return "\n".join(parts)


def _title(name: str) -> str:
    """Returns the name of a file or a benchmark in words."""
    words = [word.upper() if word in _ACRONYMS else word for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def tables(rows: Iterable[Row]) -> list[str]:
    """Returns a table for each measure; measures with a single key share one.

    The first key of a case gives the lines of a table, the others its columns.
    """
    tables: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        title = row.measure if row.unit in _NO_UNITS else f"{row.measure}, {row.unit}"
        line, *others = [*map(str, row.case.values())] or [""]
        first, *keys = [*row.case] or [""]
        if keys:
            heading, column = f"{title}: {first}, by {' and '.join(keys)}", ", ".join(others)
        else:
            heading, column = first, title
        tables.setdefault(heading, {})[line, column] = row.spread
    texts = []
    for heading, cells in tables.items():
        lines, columns = (dict.fromkeys(place[axis] for place in cells) for axis in (0, 1))
        body = [[line, *(cells.get((line, column), "") for column in columns)] for line in lines]
        texts.append(markdown.table([heading, *columns], body))
    return texts
