"""The page of benchmarks: files of results as tables."""

import pathlib
from collections.abc import Iterable, Mapping

from benchmarks import records
from results import markdown

from podracers import errors

_HEAD = """# Benchmarks

Made by `python scripts/report.py` from the files in `{folder}`: do not edit it. An *agent step* is
one decision in one environment. Figures are medians, with the least and the most of all repeats in
brackets; one without brackets was measured once. Rates are warm, with compilation apart. `python
scripts/benchmark.py --compare OLD.json NEW.json` says what became slower between two files. `make
accelerator` measures what is to be known of a machine, in ten minutes.
"""
_GPU = """## On a GPU

Not measured: there is no file of results of a GPU. `make accelerator` finds out in ten minutes
what a device does, and goes on where it was stopped. By hand: Anakin against the batch, until more
of it brings no more, and Sebulba on Pong against EnvPool alone:

```sh
python scripts/benchmark.py gpu --batches 256 1024 4096 16384 65536 --json {folder}/gpu.json
```
"""
_GPUS = {"gpu", "cuda", "rocm"}
_NO_UNITS = ("ratio", "share")


def read_all(folder: pathlib.Path) -> dict[str, records.Record]:
    """Returns the files of results by name, in the order of the alphabet.

    Raises:
      errors.UserError: there is none, or one holds something else.
    """
    found = {path.stem: records.read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise errors.UserError(
            f"there is no *.json in '{folder}': make one with scripts/benchmark.py --json"
        )
    return found


def text(found: Mapping[str, records.Record], name: str) -> str:
    """Returns the page of files of results, which are in the folder `name` beside it."""
    parts = [_HEAD.format(folder=f"docs/{name}")]
    for stem, record in found.items():
        parts += [f"## {stem}\n", *section(stem, record, f"{name}/{stem}.json")]
    if not any(record.provenance["platform"] in _GPUS for record in found.values()):
        parts.append(_GPU.format(folder=f"docs/{name}"))
    return "\n".join(parts)


def section(stem: str, record: records.Record, file: str) -> list[str]:
    """Returns the paragraphs of one file of results, which is at `file` from the page."""
    parts = [_provenance(record, file)]
    together: dict[str, list[records.Result]] = {}  # one benchmark, or one group
    for benchmark, result in record.results.items():
        together.setdefault(result.group or benchmark, []).append(result)
    for heading, own in together.items():
        notes = dict.fromkeys(note for result in own for note in result.notes)
        rows = (row for result in own for row in result.rows)
        parts += [f"### {heading}\n"] * ([*together] != [stem])
        parts += [f"{own[0].about}\n", *_tables(rows)]
        parts += ["".join(f"- {note}\n" for note in notes)] * bool(notes)
    return parts


def _provenance(record: records.Record, file: str) -> str:
    made = record.provenance
    cpu = f", {made['cpu']}" if "cpu" in made else ""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return "\n".join(
        [
            f"- Command: `python {record.command}`; [raw figures]({file})",
            f"- Hardware: {made['device']} ({made['host_cores']} host cores{cpu})",
            f"- Commit: {made['commit'] or 'unknown'}",
            f"- Versions: {versions}\n",
        ]
    )


def _tables(rows: Iterable[records.Row]) -> list[str]:
    """Returns a table for each measure; measures whose rows only one key tells apart share one.

    The values of the first key, such as `runner` of `{"runner": "anakin", "devices": 4}`, are the
    lines of a table, and those of the others its columns. Figures are medians, with the least and
    the most in brackets.
    """
    by_measure: dict[tuple, list[records.Row]] = {}
    for row in rows:
        title = row.measure if row.unit in _NO_UNITS else f"{row.measure}, {row.unit}"
        by_measure.setdefault((title, tuple(row.case)), []).append(row)
    # Of each table: its first heading, and its rows by line and column.
    written: list[tuple[str, dict[tuple[str, str], records.Row]]] = []
    shared: dict[str, dict[tuple[str, str], records.Row]] = {}
    for (title, keys), own in by_measure.items():
        if len(keys) > 1:
            heading = f"{title}: {keys[0]}, by {' and '.join(keys[1:])}"
            written.append((heading, {_place(row): row for row in own}))
        else:
            cells = {(_place(row)[0], title): row for row in own}
            shared.setdefault(keys[0] if keys else "", {}).update(cells)
    return [_table(heading, cells) for heading, cells in [*written, *shared.items()]]


def _place(row: records.Row) -> tuple[str, str]:
    first, *others = [*row.case.values()] or [""]
    return str(first), ", ".join(map(str, others))


def _table(heading: str, cells: dict[tuple[str, str], records.Row]) -> str:
    lines, columns = (dict.fromkeys(place[axis] for place in cells) for axis in (0, 1))
    figures = {place: row.spread for place, row in cells.items()}
    return markdown.table(
        [heading, *columns],
        [[line, *(figures.get((line, column), "") for column in columns)] for line in lines],
    )
