"""Curves of runs, their means over seeds with confidence intervals, and pictures of suites.

`S` seeds (runs, or members of a population), `K` points of a curve.
"""

import collections
import hashlib
import itertools
import json
import math
import pathlib
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.axes
import matplotlib.collections
import matplotlib.figure
import matplotlib.pyplot as plt
import matplotlib.ticker
import matplotlib.transforms
import numpy as np
import PIL.Image

from podracers import errors
from podracers.scripts.results import aggregates
from podracers.scripts.results import rows as results

COLUMNS = ("agent steps", "seconds, with compilation")  # horizontal axes; columns of a curve
_COLORS = (
    *("#3478c8", "#ee7a30", "#2f9e6e", "#a05cc0", "#c0455a", "#8a6d3b"),
    *("#2bb3c0", "#e377c2", "#9aa624", "#1f2f5f", "#f0b429", "#6b3fa0"),
)
_WIDTH = 8.3  # inches: 830 pixels of a page, with half as many pixels again
_DPI = 150
_SHARES = np.linspace(0, 100, 51)  # percent of agent steps, in aggregates over tasks
_MIN_SEEDS = 3  # fewest for an interval; of two seeds it spans 9 standard deviations to a side
_DIGEST = "rows"  # field of a PNG file
_LEGEND_DISTANCE = -36.0  # points, below the axis
_HALF_WIDTH, _WHOLE_WIDTH = 30, 62  # characters of a column of a legend, of two and of one
_TITLE_WIDTH = 52  # characters
_CROWDED = 4  # more intervals are unreadable as areas
_LINES = ("-", "--", "-.")
_LOG_AXIS = 10  # times the shortest curve: a linear axis would hide it
_LEVELS = ("--", ":", "-.", (0, (8, 4)), (0, (1, 4)))


class Panel(NamedTuple):
    """The curves of one environment."""

    title: str
    curves: dict[str, list[np.ndarray]]  # keys are labels; the curve of each seed is `[K, 3]`
    levels: dict[str, float]  # returns to compare with, by label
    # By label, if known: the returns of which the scores are 0 and 1.
    scales: Mapping[str, tuple[float, float]] = types.MappingProxyType({})


class Band(NamedTuple):
    """Several seeds as one curve, with a 95% confidence interval."""

    x: np.ndarray  # [K]
    mean: np.ndarray  # [K]
    low: np.ndarray  # [K]
    high: np.ndarray  # [K]
    seeds: int
    extent: tuple[float, float]  # the lowest and the highest value of a seed


class _Drawing(NamedTuple):
    """Contents of one pair of axes."""

    title: str
    bands: dict[str, Band]  # keys are labels
    levels: dict[str, float]
    x: str  # names of the axes
    y: str

    @property
    def columns(self) -> int:
        """Number of columns of the legend: long labels need the whole width."""
        return 2 if max(map(len, self.legend)) <= _HALF_WIDTH else 1

    @property
    def legend(self) -> list[str]:
        """Labels of curves with numbers of seeds, broken into lines."""
        texts = []
        for label, band in self.bands.items():
            unbroken = ", ".join(part.replace(" ", "\u00a0") for part in label.split(", "))
            count = f"({band.seeds}\u00a0seed{'s' * (band.seeds > 1)})"
            texts.append(textwrap.fill(f"{unbroken} {count}", _WHOLE_WIDTH))
        return texts

    @property
    def height(self) -> float:
        """Inches, with the legend."""
        lines = "\n".join(self.legend).count("\n") + 1
        return 3.0 + 0.17 * (lines + len(self.levels)) / self.columns


def curves(rows: Iterable[Mapping[str, Any]], metric: str) -> dict[int | None, np.ndarray]:
    """Returns the curve, `[K, 3]`, of each seed of a population, or of a single run (key None).

    Columns are agent steps, seconds since the start and the metric.
    """
    prefix = f"{metric}/seed_"
    seeds = {int(n.removeprefix(prefix)) for x in rows for n in x if n.startswith(prefix)}
    names = {seed: f"{prefix}{seed}" for seed in sorted(seeds)} or {None: metric}
    rows_by_seed = {
        seed: [(x["step"], x["wall_time"], x[name]) for x in rows if x.get(name) is not None]
        for seed, name in names.items()
    }
    return {seed: np.array(points, float).reshape(-1, 3) for seed, points in rows_by_seed.items()}


def band(curves: Sequence[np.ndarray], x: int = 0) -> Band:
    """Returns the mean over seeds at equal agent steps, and Student's 95% interval of the mean.

    Points are all steps of the seeds in the range that all of them have; between its own steps a
    seed is interpolated. By seconds (the column `x` = 1), each step is at its mean time: at equal
    times, seeds that compiled for longer would be averaged with others that had learnt for longer.
    Fewer than three seeds have no interval. Curves are `[K, 3]`; `K` may differ, and is not 0.
    """
    start, end = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    steps = np.concatenate([curve[:, 0] for curve in curves])
    steps = np.unique(np.clip(steps, start, max(start, end)))
    values = np.stack([np.interp(steps, curve[:, 0], curve[:, 2]) for curve in curves])  # [S, K]
    places = np.mean([np.interp(steps, curve[:, 0], curve[:, x]) for curve in curves], axis=0)
    sample, extent = aggregates.Sample.of(values), (values.min(), values.max())
    bounds = sample.interval() if len(curves) >= _MIN_SEEDS else None
    return Band(places, sample.mean, *(bounds or (sample.mean, sample.mean)), len(curves), extent)


def overall(panels: Sequence[Panel]) -> list[_Drawing]:
    """Returns interquartile means over tasks of several curves, with stratified bootstraps.

    These are the tasks that most curves share; without two curves that share three tasks there is
    no drawing. Scores are at equal shares of the agent steps.
    """
    tasks = collections.defaultdict(dict)  # keys are labels, then titles
    for panel in panels:
        for label, (zero, one) in panel.scales.items():
            if one <= zero:
                continue
            scores = [
                np.interp(_SHARES, 100 * steps / steps[-1], returns, left=np.nan)
                for steps, _, returns in (x.T for x in panel.curves[label])
            ]
            tasks[label][panel.title] = (np.stack(scores) - zero) / (one - zero)  # [S, K]
    groups = [
        (titles, [label for label, scaled in tasks.items() if scaled.keys() >= titles])
        for titles in (x.keys() for x in tasks.values() if len(x) >= aggregates.MIN_TASKS)
    ]
    titles, labels = max(groups, key=lambda group: math.prod(map(len, group)), default=((), ()))
    if len(labels) < 2:
        return []
    bands = {}
    for label in labels:
        scores = [tasks[label][title] for title in titles]
        known = ~np.isnan(np.concatenate(scores)).any(0)
        scores = [task[:, known] for task in scores]
        mean, bounds = aggregates.bootstrap(scores, aggregates.interquartile_mean)
        seeds = min(map(len, scores))
        extent = (mean.min(), mean.max())
        bands[label] = Band(_SHARES[known], mean, *(bounds or (mean, mean)), seeds, extent)
    title = f"interquartile mean over {', '.join(titles)}"
    return [_Drawing(title, bands, {}, "agent steps (%)", "scaled return")]


def page(
    panels: Sequence[Panel], metric: str, columns: Sequence[str] = COLUMNS[:1]
) -> matplotlib.figure.Figure:
    """Draws each panel: the mean of each curve over its seeds, its interval, and the levels.

    A label has the same colour in all panels. `metric` is the name of the vertical axis; `columns`,
    of `COLUMNS`, are the horizontal axes of each panel.
    """
    drawings = []
    for panel, x in itertools.product(panels, columns):
        bands = {label: band(seeds, COLUMNS.index(x)) for label, seeds in panel.curves.items()}
        bands = dict(sorted(bands.items(), key=lambda item: -item[1].mean[-1]))
        drawings.append(_Drawing(panel.title, bands, panel.levels, x, metric.replace("/", " ")))
    drawings += overall(panels)
    labels = dict.fromkeys(label for panel in panels for label in panel.curves)
    styles = dict(zip(labels, itertools.cycle(itertools.product(_LINES, _COLORS))))
    width = min(2, len(drawings))
    heights = [drawing.height for drawing in drawings]
    heights = [
        max(heights[n : n + width]) for n in range(0, len(heights), width)
    ]  # one for each row
    shape, size = (len(heights), width), (_WIDTH / 2 * width, sum(heights))
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(drawings) :]:
        axis.remove()
    for axis, drawing in zip(axes.flat, drawings):
        _draw(axis, drawing, styles)
    return figure


def _draw(axis: matplotlib.axes.Axes, drawing: _Drawing, styles: Mapping[str, Any]) -> None:
    bands, texts = drawing.bands.items(), drawing.legend
    for (label, drawn), text in zip(bands, texts):
        line, color = styles[label]
        style = {"color": color, "marker": "o" if len(drawn.x) == 1 else None}
        axis.plot(drawn.x, drawn.mean, line, label=text, linewidth=1.6, **style)
        axis.update_datalim([(drawn.x[-1], value) for value in drawn.extent])
    low, high = axis.dataLim.intervaly
    margin = max(high - low, abs(high), abs(low)) / 2
    for (label, value), line in zip(drawing.levels.items(), itertools.cycle(_LEVELS)):
        style = {"color": "#8a8f98", "linestyle": line, "linewidth": 1.2}
        text = f"{label}: {results.number(value)}"
        if max(low - value, value - high) > margin:  # it would flatten the curves
            axis.plot([], [], label=f"{text} (outside)", **style)
        else:
            axis.axhline(value, label=text, **style)
    axis.set_ylim(axis.get_ylim())  # wide intervals are cut, for they would flatten the curves
    crowded = sum(np.any(drawn.high > drawn.low) for _, drawn in bands) > _CROWDED
    for number, (label, drawn) in enumerate(bands):
        style = {"color": styles[label][1]}
        if crowded:
            ends = np.clip((drawn.low[-1], drawn.high[-1]), *axis.get_ylim())
            place = {"transform": axis.get_yaxis_transform(), "clip_on": False}
            axis.plot([1.02 + 0.018 * number] * 2, ends, linewidth=2.5, **style, **place)
        else:
            axis.fill_between(drawn.x, drawn.low, drawn.high, alpha=0.15, linewidth=0, **style)
    axis.set_title(textwrap.fill(drawing.title, _TITLE_WIDTH), fontsize=9, parse_math=False)
    axis.set_xlabel(drawing.x)
    axis.set_ylabel(drawing.y)
    ends = [drawn.x[-1] for _, drawn in bands]
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
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    place |= {"bbox_transform": below}
    place |= {"ncols": drawing.columns, "columnspacing": 0.8, "handlelength": 1.6}
    for text in axis.legend(fontsize=7.2, frameon=False, borderaxespad=0.0, **place).get_texts():
        text.set_parse_math(False)  # a `$` in a name is no formula


_Line = tuple[int, tuple[tuple[float, float], tuple[float, float]]]  # founder, x and y of both ends


def segments(rows: Sequence[Mapping[str, Any]], option: str) -> tuple[list[_Line], list[_Line]]:
    """Returns lines of an option of an evolving population, and lines from sources to copies.

    A founder is the number of the member from which a line descends.
    """
    names = [x for x in rows[0] if x.startswith(f"pbt/{option}/seed_")]
    founders, start, options, copies = [*range(len(names))], 0, [], []
    for row, following in zip(rows, [*rows[1:], None]):
        values, step = [row[name] for name in names], row["step"]
        options += [(founder, ((start, step), (x, x))) for founder, x in zip(founders, values)]
        sources = [row[name.replace(f"/{option}/", "/source/")] for name in names]
        if None not in sources:
            founders = [founders[int(source)] for source in sources]
            for index, source in enumerate(map(int, sources)):
                if source != index and following is not None:
                    ends = (step, step), (values[source], following[names[index]])
                    copies.append((founders[index], ends))
        start = step
    return options, copies


def lineage(rows: Sequence[Mapping[str, Any]]) -> matplotlib.figure.Figure:
    """Draws the options of an evolving population: a colour is a founder, dotted lines are copies.

    Raises:
      errors.UserError: the rows of its log have no such options.
    """
    names = {x.split("/")[1] for row in rows[:1] for x in row if re.match("pbt/.+/seed_", x)}
    if not names:
        raise errors.UserError("the run has logged no population that evolves (Anakin.pbt_period)")
    options = sorted(names - {"source"})
    size = (_WIDTH, 2.6 * len(options))
    figure, axes = plt.subplots(len(options), figsize=size, squeeze=False, layout="constrained")
    for axis, option in zip(axes.flat, options):
        for lines, style in zip(segments(rows, option), ("-", ":")):
            points = [list(zip(*ends)) for _, ends in lines]
            colors = [_COLORS[founder % len(_COLORS)] for founder, _ in lines]
            axis.add_collection(
                matplotlib.collections.LineCollection(points, colors=colors, linestyles=style)
            )
            axis.update_datalim([point for line in points for point in line])
        is_positive = axis.dataLim.y0 > 0.0
        axis.set(xlabel=COLUMNS[0], ylabel=option, yscale="log" if is_positive else "linear")
        axis.autoscale_view()
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.grid(color="#e4e6ea")
    return figure


def save(figure: matplotlib.figure.Figure, path: str | pathlib.Path, **metadata: str) -> None:
    """Writes a picture, with `metadata` in a PNG file, and closes the figure.

    Raises:
      errors.UserError: the folder or the format does not exist.
    """
    try:
        figure.savefig(path, dpi=_DPI, metadata=metadata or None)
    except (OSError, ValueError) as error:
        raise errors.UserError(f"cannot write '{path}': {error}") from error
    finally:
        plt.close(figure)


def is_current(path: pathlib.Path, panels: Sequence[Panel]) -> bool:
    """Returns whether `draw` made this file, from these panels."""
    try:
        with PIL.Image.open(path) as picture:
            return picture.info.get(_DIGEST) == _digest(panels)
    except OSError:
        return False


def draw(path: pathlib.Path, panels: Sequence[Panel]) -> None:
    """Writes the picture of recorded results, with a digest of its contents."""
    save(page(panels, "evaluation/return"), path, **{_DIGEST: _digest(panels)})


def _digest(panels: Sequence[Panel]) -> str:
    text = json.dumps(panels, default=np.ndarray.tolist)
    return hashlib.sha256(text.encode()).hexdigest()


def suite(rows: Iterable[results.Row]) -> list[Panel]:
    """Returns a panel for each task with curves; implementations of one environment share it."""
    tasks = collections.defaultdict(list)
    for row in rows:
        if any(run.curve for run in row.runs):
            tasks[row.drawn_with or row.environment].append(row)
    panels = []
    for task, chosen in tasks.items():
        curves, scales, levels = {}, {}, results.levels(chosen)
        for row in chosen:
            label = f"{row.agent}, {row.runner}" + f", {row.environment}" * bool(row.drawn_with)
            curves[label] = [np.array(run.curve, float) for run in row.runs if run.curve]
            reference = results.reference(row.agent, chosen)
            if reference is not None:
                scales[label] = (levels["random policy"], reference)
        panels.append(Panel(task, curves, levels, scales))
    return panels
