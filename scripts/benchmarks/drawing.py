"""Pictures of figures: lines along what is a number, bars for what is not, and their spread."""

import math
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.pyplot as plt
from benchmarks import panels, records
from results import plotting

_COLUMNS = 3
_WIDE = 30.0  # times the least: from there on, a linear axis shows nothing of it


def draw(drawn: Sequence[panels.Panel], title: str) -> matplotlib.figure.Figure:
    """Returns a picture with one part for each panel."""
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.3 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(drawn) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, drawn):
        if len(panel.columns) > 1 and all(isinstance(each, int) for each in panel.columns):
            _lines(axis, panel)
        else:
            _bars(axis, panel)
        axis.set_title(panel.measure, fontsize=9)
        plotting.tidy(axis)
    figure.suptitle(title, fontsize=11)
    return figure


def _lines(axis: matplotlib.axes.Axes, panel: panels.Panel) -> None:
    for index, line in enumerate(panel.lines):
        rows = [panel.cells.get((line, column)) for column in panel.columns]
        points = [(x, row) for x, row in zip(panel.columns, rows) if row]
        axis.errorbar(
            [x for x, _ in points],
            [row.median for _, row in points],
            yerr=_spreads([row for _, row in points]),
            color=plotting.COLORS[index % len(plotting.COLORS)],
            marker="o",
            markersize=4,
            linewidth=1.8,
            capsize=2,
            label=f"{panel.keys[0]} {line}",
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.columns, [str(column) for column in panel.columns])
    axis.set_xlabel(panel.keys[1])
    axis.yaxis.set_major_formatter(_number)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)


def _bars(axis: matplotlib.axes.Axes, panel: panels.Panel) -> None:
    count = len(panel.columns)
    height = 0.8 / count
    for index, column in enumerate(panel.columns):
        places = [(y, panel.cells.get((line, column))) for y, line in enumerate(panel.lines)]
        present = [(y, row) for y, row in places if row]
        axis.barh(
            [y + (index - (count - 1) / 2) * height for y, _ in present],
            [row.median for _, row in present],
            height,
            xerr=_spreads([row for _, row in present]),
            color=plotting.COLORS[index % len(plotting.COLORS)],
            ecolor="#444444",
            capsize=2,
            label=str(column),
        )
    medians = [row.median for row in panel.cells.values()]
    if min(medians) > 0.0 and max(medians) > _WIDE * min(medians):
        axis.set_xscale("log")
        axis.set_xlabel("logarithmic", fontsize=8)
    axis.set_yticks(range(len(panel.lines)), [str(line) for line in panel.lines], fontsize=8)
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(_number)
    axis.tick_params(axis="x", labelsize=8)
    if count > 1:
        axis.legend(fontsize=8, frameon=False)


def _number(value: float, position: int) -> str:
    del position
    return records.short(value)


def _spreads(rows: Sequence[records.Row]) -> list[list[float]]:
    """Returns how far the least and the most are from the medians; NaN, which is not drawn."""
    least = [math.nan if row.min is None else row.median - row.min for row in rows]
    most = [math.nan if row.max is None else row.max - row.median for row in rows]
    return [least, most]
