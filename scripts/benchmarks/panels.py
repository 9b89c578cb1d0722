"""Rows of figures as panels: one for each measure, with lines, columns and a cell for each row."""

import dataclasses
from collections.abc import Iterable, Mapping

from benchmarks import records
from results import markdown

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

    def cell(self, line: Value, column: Value) -> str:
        """Returns a figure in words; empty where there is none."""
        row = self.cells.get((line, column))
        return row.spread if row else ""


def make(rows: Iterable[records.Row]) -> list[Panel]:
    """Returns the panels of rows, in the order in which their measures came."""
    grouped: dict[tuple, list[records.Row]] = {}
    for row in rows:
        title = row.measure if row.unit in _NO_UNITS else f"{row.measure}, {row.unit}"
        grouped.setdefault((title, tuple(row.case)), []).append(row)
    panels = []
    for (measure, keys), own in grouped.items():
        cells = {_place(row): row for row in own}
        lines, columns = (tuple(dict.fromkeys(place[axis] for place in cells)) for axis in (0, 1))
        panels.append(Panel(measure, keys, lines, columns, cells))
    return panels


def _place(row: records.Row) -> tuple[Value, Value]:
    first, *others = [*row.case.values()] or [""]
    return first, others[0] if len(others) == 1 else ", ".join(map(str, others))


def tables(panels: Iterable[Panel]) -> list[str]:
    """Returns Markdown: a table for each measure; those with one key share one."""
    written, shared = [], {}
    for panel in panels:
        if len(panel.keys) <= 1:
            shared.setdefault(panel.keys, []).append(panel)
            continue
        header = [f"{panel.measure}: {panel.keys[0]}, by {' and '.join(panel.keys[1:])}"]
        header += map(str, panel.columns)
        lines = [
            [str(n), *(panel.cell(n, column) for column in panel.columns)] for n in panel.lines
        ]
        written.append(markdown.table(header, lines))
    for keys, own in shared.items():
        names = dict.fromkeys(line for panel in own for line in panel.lines)
        lines = [[str(name), *(panel.cell(name, "") for panel in own)] for name in names]
        header = [*(keys or ("",)), *(panel.measure for panel in own)]
        written.append(markdown.table(header, lines))
    return written
