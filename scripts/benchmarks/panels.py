"""Rows of figures as tables in Markdown."""

from collections.abc import Iterable

from benchmarks import records
from results import markdown

_NO_UNITS = ("ratio", "share")


def tables(rows: Iterable[records.Row]) -> list[str]:
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
