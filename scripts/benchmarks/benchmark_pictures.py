"""Pictures of figures: lines along what is a number, bars for what is not, and their spread."""

import math
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.figure
from benchmarks import panels, records
from results import plotting

_WIDE = 30.0  # times the least: from there on, a linear axis shows nothing of it


def draw(drawn: Sequence[panels.Panel], title: str) -> matplotlib.figure.Figure:
    """Returns a picture with one part for each panel."""
    figure, axes = plotting.grid(len(drawn), 3, (4.6, 3.3))
    for axis, panel in zip(axes, drawn):
        is_line = len(panel.columns) > 1 and all(isinstance(each, int) for each in panel.columns)
        (_lines if is_line else _bars)(axis, panel)
        axis.set_title(panel.measure, fontsize=9)
        plotting.tidy(axis)
    figure.suptitle(title, fontsize=11)
    return figure


def _lines(axis: matplotlib.axes.Axes, panel: panels.Panel) -> None:
    for line, color in plotting.colors(panel.lines).items():
        points = [(x, row) for x in panel.columns if (row := panel.cells.get((line, x)))]
        axis.errorbar(
            *([x for x, _ in points], [row.median for _, row in points]),
            yerr=_spreads([row for _, row in points]),
            **{"color": color, "marker": "o", "markersize": 4, "linewidth": 1.8, "capsize": 2},
            label=f"{panel.keys[0]} {line}",
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.columns, map(str, panel.columns))
    axis.set_xlabel(panel.keys[1])
    axis.yaxis.set_major_formatter(lambda value, _: records.short(value))
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)


def _bars(axis: matplotlib.axes.Axes, panel: panels.Panel) -> None:
    count = len(panel.columns)
    height = 0.8 / count
    for index, (column, color) in enumerate(plotting.colors(panel.columns).items()):
        places = [(y, panel.cells.get((line, column))) for y, line in enumerate(panel.lines)]
        places = [(y + (index - (count - 1) / 2) * height, row) for y, row in places if row]
        axis.barh(
            *([y for y, _ in places], [row.median for _, row in places], height),
            xerr=_spreads([row for _, row in places]),
            **{"color": color, "ecolor": "#444444", "capsize": 2, "label": str(column)},
        )
    medians = [row.median for row in panel.cells.values()]
    if min(medians) > 0.0 and max(medians) > _WIDE * min(medians):
        axis.set_xscale("log")
        axis.set_xlabel("logarithmic", fontsize=8)
    axis.set_yticks(range(len(panel.lines)), map(str, panel.lines), fontsize=8)
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(lambda value, _: records.short(value))
    axis.tick_params(axis="x", labelsize=8)
    if count > 1:
        axis.legend(fontsize=8, frameon=False)


def _spreads(rows: Sequence[records.Row]) -> list[list[float]]:
    """Returns how far the least and the most are from the medians; NaN, which is not drawn."""
    least = [math.nan if row.min is None else row.median - row.min for row in rows]
    most = [math.nan if row.max is None else row.max - row.median for row in rows]
    return [least, most]
