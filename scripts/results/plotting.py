"""Curves from run directories, averages over seeds, and pictures of suites.

`S` seeds (runs, or members of a population), `K` points of a curve.
"""

import collections
import itertools
import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.axes
import matplotlib.figure
import matplotlib.pyplot as plt
import matplotlib.ticker
import matplotlib.transforms
import numpy as np

from podracers import errors
from podracers.scripts.results import rows as results

COLUMNS = ("agent steps", "seconds, with compilation")  # horizontal axes; columns of a curve
_COLORS = (
    *("#3478c8", "#ee7a30", "#2f9e6e", "#a05cc0", "#c0455a", "#8a6d3b"),
    *("#2bb3c0", "#e377c2", "#9aa624", "#1f2f5f", "#f0b429", "#6b3fa0"),
)
_GRID = 256  # points of a common grid
_LEGEND_DISTANCE = -36.0  # points, below the axis
_LEGEND_WIDTH = 52  # characters
_LINES = ("-", "--", "-.")
_LOG_AXIS = 10  # times the shortest curve: a linear axis would hide it
_LEVELS = ("--", ":", "-.", (0, (8, 4)), (0, (1, 4)))


class Panel(NamedTuple):
    """The curves of one environment."""

    title: str
    curves: dict[str, list[np.ndarray]]  # keys are labels; the curve of each seed is `[K, 3]`
    levels: dict[str, float]  # returns to compare with, by label


class Band(NamedTuple):
    """Several seeds as one curve."""

    x: np.ndarray  # [K]
    mean: np.ndarray  # [K]
    low: np.ndarray  # [K]
    high: np.ndarray  # [K]


def curves(rows: Iterable[Mapping[str, Any]], metric: str) -> dict[int | None, np.ndarray]:
    """Returns the curve, `[K, 3]`, of each seed of a population, or of a single run (key None).

    Columns are agent steps, seconds since the start and the metric.
    """
    prefix = f"{metric}/seed_"
    seeds = {int(n.removeprefix(prefix)) for x in rows for n in x if n.startswith(prefix)}
    names = {seed: f"{prefix}{seed}" for seed in sorted(seeds)} or {None: metric}
    found = {
        seed: [(x["step"], x["wall_time"], x[name]) for x in rows if x.get(name) is not None]
        for seed, name in names.items()
    }
    return {seed: np.array(points, float).reshape(-1, 3) for seed, points in found.items()}


def band(curves: Sequence[np.ndarray], x: int = 0) -> Band:
    """Returns the mean over seeds and their range, linearly interpolated at equal agent steps.

    The grid covers the steps that all seeds have. By seconds, each step is at its mean time: at
    equal times, seeds that compiled for longer would be averaged with others that had learnt for
    longer.

    Args:
      curves: of each seed, `[K, 3]`; `K` may differ, and is not 0.
      x: column of the horizontal axis: 0 for agent steps, 1 for seconds.
    """
    start, end = max(each[0, 0] for each in curves), min(each[-1, 0] for each in curves)
    grid = np.linspace(start, max(start, end), _GRID)
    values = np.stack([np.interp(grid, each[:, 0], each[:, 2]) for each in curves])  # [S, K]
    places = np.mean([np.interp(grid, each[:, 0], each[:, x]) for each in curves], axis=0)
    return Band(places, values.mean(0), values.min(0), values.max(0))


def page(
    panels: Sequence[Panel], metric: str, columns: Sequence[str] = COLUMNS[:1]
) -> matplotlib.figure.Figure:
    """Draws each panel: the mean of each curve over its seeds, their range, and the levels.

    A label has the same colour in all panels.

    Args:
      panels: at least one.
      metric: name of the vertical axis.
      columns: horizontal axes of each panel, of `COLUMNS`.
    """
    labels = dict.fromkeys(label for panel in panels for label in panel.curves)
    styles = dict(zip(labels, itertools.cycle(itertools.product(_LINES, _COLORS))))
    drawn = list(itertools.product(panels, columns))
    width = min(3, math.ceil(math.sqrt(len(drawn))))
    rows = math.ceil(len(drawn) / width)
    entries = max(len(panel.curves) + len(panel.levels) for panel in panels)
    size = (4.6 * width, (2.9 + 0.18 * entries) * rows)  # inches
    figure, axes = plt.subplots(rows, width, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(drawn) :]:
        axis.remove()
    for axis, (panel, x) in zip(axes.flat, drawn):
        _draw(axis, panel, styles, x)
        axis.set_ylabel(metric.replace("/", " "))
    return figure


def _draw(axis: matplotlib.axes.Axes, panel: Panel, styles: Mapping[str, Any], x: str) -> None:
    for label, seeds in panel.curves.items():
        drawn, (line, color) = band(seeds, COLUMNS.index(x)), styles[label]
        unbroken = ", ".join(part.replace(" ", "\u00a0") for part in label.split(", "))
        count = f"({len(seeds)}\u00a0seed{'s' * (len(seeds) > 1)})"
        text = textwrap.fill(f"{unbroken} {count}", _LEGEND_WIDTH)
        axis.plot(drawn.x, drawn.mean, line, color=color, label=text, linewidth=1.8)
        axis.fill_between(drawn.x, drawn.low, drawn.high, color=color, alpha=0.2, linewidth=0)
    low, high = axis.dataLim.intervaly
    margin = max(high - low, abs(high), abs(low)) / 2
    for (label, value), line in zip(panel.levels.items(), itertools.cycle(_LEVELS)):
        style = {"color": "#8a8f98", "linestyle": line, "linewidth": 1.2}
        text = f"{label}: {results.number(value)}"
        if max(low - value, value - high) > margin:  # it would flatten the curves
            axis.plot([], [], label=f"{text}, outside of the panel", **style)
        else:
            axis.axhline(value, label=text, **style)
    axis.set_title(panel.title, fontsize=10, parse_math=False)
    axis.set_xlabel(x)
    ends = [np.asarray(line.get_xdata())[-1] for line in axis.lines[: len(panel.curves)]]
    if max(ends) > _LOG_AXIS * min(ends):
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
        axis.locator_params("x", nbins=6)  # more labels may touch
    axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))  # 5k for 5000
    axis.grid(color="#e4e6ea")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    # A distance in points: labels of axes do not grow with the panel.
    figure, move = axis.figure.figure, {"y": _LEGEND_DISTANCE}
    below = matplotlib.transforms.offset_copy(axis.transAxes, figure, units="points", **move)
    place: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, 0.0),
        "bbox_transform": below,
    }
    for text in axis.legend(fontsize=8, frameon=False, borderaxespad=0.0, **place).get_texts():
        text.set_parse_math(False)  # a `$` in a name is no formula


def save(figure: matplotlib.figure.Figure, path: str | pathlib.Path) -> None:
    """Writes a picture and closes the figure.

    Raises:
      errors.UserError: the folder or the format does not exist.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise errors.UserError(f"cannot write '{path}': {error}") from error
    finally:
        plt.close(figure)


def suite(rows: Sequence[results.Row]) -> list[Panel]:
    """Returns a panel for each task of which at least two rows have curves.

    Implementations of one environment share a panel.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if any(run.curve for run in row.runs):
            tasks[row.drawn_with or row.environment].append(row)
    panels = []
    for task, chosen in tasks.items():
        curves = {}
        for row in chosen if len(chosen) > 1 else ():
            label = f"{row.agent}, {row.runner}" + f", {row.environment}" * bool(row.drawn_with)
            curves[label] = [np.array(run.curve, float) for run in row.runs if run.curve]
        if curves:
            panels.append(Panel(task, curves, results.levels(chosen)))
    return panels


def columns(rows: Sequence[results.Row]) -> Sequence[str]:
    """Returns the horizontal axes of a suite: seconds if all curves are of one kind of hardware."""
    hardware = {run.hardware for row in rows for run in row.runs if run.curve}
    return COLUMNS if len(hardware) == 1 else COLUMNS[:1]
