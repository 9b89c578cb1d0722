"""Curves from run directories, averages over seeds, and pictures of suites.

`S` seeds (runs, or members of a population), `K` points of a curve.
"""

import collections
import itertools
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
import numpy as np
from results import rows as results

from podracers import errors

COLORS = (
    *("#3478c8", "#ee7a30", "#2f9e6e", "#a05cc0", "#c0455a", "#8a6d3b"),
    *("#2bb3c0", "#e377c2", "#9aa624", "#1f2f5f", "#f0b429", "#6b3fa0"),
)
GREY = "#8a8f98"
_GRID = 256  # points of a common grid
_PANEL = (2.6, 2.2)  # inches
_LINES = {"Anakin": "-", "Sebulba": "--"}
_LOG_RATIO = 8.0  # ratio of the longest curve to the shortest from which an axis is logarithmic


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
    seeds = sorted({int(name.removeprefix(prefix)) for x in rows for name in x if prefix in name})
    names = {seed: f"{prefix}{seed}" for seed in seeds} or {None: metric}
    found = {
        seed: [(x["step"], x["wall_time"], x[name]) for x in rows if x.get(name) is not None]
        for seed, name in names.items()
    }
    return {seed: np.array(points, float).reshape(-1, 3) for seed, points in found.items()}


def band(curves: Iterable[np.ndarray], x: int = 0) -> Band | None:
    """Returns the mean over seeds and their range, linearly interpolated at equal agent steps.

    The grid covers the steps that all seeds have. Seeds without a point are left out; None if no
    seed has one. By seconds, each step is at its mean time: at equal times, seeds that compiled for
    longer would be averaged with others that had learnt for longer.

    Args:
      curves: of each seed, `[K, 3]`; `K` may differ.
      x: column of the horizontal axis: 0 for agent steps, 1 for seconds.
    """
    curves = [each for each in curves if len(each)]
    if not curves:
        return None
    start, end = max(each[0, 0] for each in curves), min(each[-1, 0] for each in curves)
    grid = np.linspace(start, max(start, end), _GRID)
    values = np.stack([np.interp(grid, each[:, 0], each[:, 2]) for each in curves])  # [S, K]
    places = np.mean([np.interp(grid, each[:, 0], each[:, x]) for each in curves], axis=0)
    return Band(places, values.mean(0), values.min(0), values.max(0))


def draw_band(axis: matplotlib.axes.Axes, drawn: Band, **style: Any) -> None:
    """Draws the mean as a line, and shades the range."""
    (line,) = axis.plot(drawn.x, drawn.mean, **{"linewidth": 1.8, **style})
    color = line.get_color()
    axis.fill_between(drawn.x, drawn.low, drawn.high, color=color, alpha=0.2, linewidth=0)


def tidy(axis: matplotlib.axes.Axes, xlabel: str = "") -> None:
    """Sets the style of an axis; with a label, its numbers are 5k for 5000, 2M for two million."""
    axis.grid(color="#e4e6ea")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if xlabel:
        axis.set_xlabel(xlabel)
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))


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


def draw_suite(rows: Sequence[results.Row], path: pathlib.Path) -> None:
    """Draws the curves of a suite, in a column for each task, by agent steps and by seconds.

    Implementations of one environment share a column. Colours are agents, line styles runners;
    variants of an agent have further colours.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if any(run.curve for run in row.runs):
            tasks[row.drawn_with or row.environment].append(row)
    agents = dict.fromkeys([*results.AGENTS, *(row.agent for row in rows)])
    colors = dict(zip(agents, itertools.cycle(COLORS)))
    width = 1.2 + _PANEL[0] * len(tasks)
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(width, 0.9 + 2 * _PANEL[1]), layout="constrained", squeeze=False
    )
    for column, (task, chosen) in zip(axes.T, tasks.items()):
        column[0].set_title("\n".join(textwrap.wrap(task, 28)), fontsize=9)
        for x, (axis, xlabel) in enumerate(zip(column, ("agent steps", "wall-clock seconds"))):
            ends = []
            for row in chosen:
                drawn = band([np.array(run.curve, float).reshape(-1, 3) for run in row.runs], x)
                ends.append(drawn.x[-1])
                label = f"{row.agent} under {row.runner}"
                label += f", {row.environment}" if row.drawn_with else ""
                color, line = colors[row.agent], _LINES.get(row.runner, "-.")
                draw_band(axis, drawn, label=label, color=color, linestyle=line)
                for published in row.published[:1]:
                    axis.axhline(published.value, color=color, linestyle=":")
            if max(ends) > _LOG_RATIO * min(ends):
                axis.set_xscale("log")
                axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            tidy(axis, xlabel)
    for axis in axes[:, 0]:
        axis.set_ylabel("evaluation return")
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines()}
    shown = [handle for label, handle in handles.items() if not label.startswith("_")]
    options = {"ncols": max(1, int(width / 2.5)), "fontsize": 8, "frameon": False}
    figure.legend(handles=shown, loc="outside lower center", **options)
    save(figure, path)
