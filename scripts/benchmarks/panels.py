"""Rows of figures as panels: one for each measure, with lines, columns and a cell for each row."""

import dataclasses
from collections.abc import Iterable, Mapping

from benchmarks import records

Value = str | int
_NO_UNITS = ("ratio", "share")


@dataclasses.dataclass(frozen=True)
class Panel:
    """All figures of one measure.

    Attributes:
      measure: with its unit, where it has one.
      keys: what tells the rows apart, such as `("runner", "devices")`.
      lines: the values of the first key, in the order in which they came.
      columns: those of the others, joined where they are several; `("",)` where there is none.
      cells: the rows, by line and column.
    """

    measure: str
    keys: tuple[str, ...]
    lines: tuple[Value, ...]
    columns: tuple[Value, ...]
    cells: Mapping[tuple[Value, Value], records.Row]


def make(rows: Iterable[records.Row]) -> list[Panel]:
    """Returns the panels of rows, in the order in which their measures came."""
    grouped: dict[tuple, list[records.Row]] = {}
    for row in rows:
        title = row.measure if row.unit in _NO_UNITS else f"{row.measure}, {row.unit}"
        grouped.setdefault((title, tuple(row.case)), []).append(row)
    return [_panel(measure, keys, own) for (measure, keys), own in grouped.items()]


def _panel(measure: str, keys: tuple[str, ...], rows: list[records.Row]) -> Panel:
    cells = {_place(row): row for row in rows}
    lines = tuple(dict.fromkeys(line for line, _ in cells))
    columns = tuple(dict.fromkeys(column for _, column in cells))
    return Panel(measure, keys, lines, columns, cells)


def _place(row: records.Row) -> tuple[Value, Value]:
    first, *others = [*row.case.values()] or [""]
    if len(others) == 1:
        return first, others[0]
    return first, ", ".join(map(str, others))


def tables(panels: Iterable[Panel]) -> list[str]:
    """Returns Markdown: a table for each measure; those with one key and the same lines share one.

    Figures are medians, with the least and the most in brackets.
    """
    written, shared = [], {}
    for panel in panels:
        if len(panel.keys) <= 1:
            shared.setdefault(panel.keys, []).append(panel)
        else:
            header = [f"{panel.measure}: {panel.keys[0]}, by {' and '.join(panel.keys[1:])}"]
            header += map(str, panel.columns)
            lines = [
                [str(line), *(_cell(panel, line, column) for column in panel.columns)]
                for line in panel.lines
            ]
            written.append(_table(header, lines))
    for keys, own in shared.items():
        names = dict.fromkeys(line for panel in own for line in panel.lines)
        lines = [[str(name), *(_cell(panel, name, "") for panel in own)] for name in names]
        header = [*(keys or ("",)), *(panel.measure for panel in own)]
        written.append(_table(header, lines))
    return written


def _cell(panel: Panel, line: Value, column: Value) -> str:
    row = panel.cells.get((line, column))
    return row.spread if row else ""


def _table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
