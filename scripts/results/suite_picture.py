"""The picture of a suite: learning curves by task, by agent steps and by seconds."""

import collections
import pathlib
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
from results import plotting, tables
from results import rows as results

_PANEL = (2.6, 2.2)  # inches
_LINES = {"Anakin": "-", "Sebulba": "--"}
_AXES = ("agent steps", "wall-clock seconds")
_LOG_RATIO = 8.0  # ratio of the longest curve to the shortest from which an axis is logarithmic


def draw(rows: Sequence[results.Row], path: pathlib.Path) -> bool:
    """Draws a column for each task; returns whether there are curves.

    Implementations of one environment share a column. Colours are agents, line styles runners;
    variants of an agent have further colours.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if any(run.curve for run in row.runs):
            tasks[row.drawn_with or row.environment].append(row)
    if not tasks:
        return False
    variants = dict.fromkeys(row.agent for row in rows if row.agent not in tables.AGENTS)
    colors = plotting.colors([*tables.AGENTS, *variants])
    width = 1.2 + _PANEL[0] * len(tasks)
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(width, 0.9 + 2 * _PANEL[1]), layout="constrained", squeeze=False
    )
    for column, (task, chosen) in zip(axes.T, tasks.items()):
        column[0].set_title("\n".join(textwrap.wrap(task, 28)), fontsize=9)
        for x, axis in enumerate(column):
            ends = []
            for row in chosen:
                curves = [np.array(run.curve, float).reshape(-1, 3) for run in row.runs]
                drawn = plotting.band(curves, x)
                ends.append(drawn.x[-1])
                label = f"{row.agent} under {row.runner}"
                label += f", {row.environment}" if row.drawn_with else ""
                style = {"color": colors[row.agent], "linestyle": _LINES.get(row.runner, "-.")}
                plotting.draw_band(axis, drawn, label=label, **style)
                for published in row.published[:1]:
                    axis.axhline(published.value, color=colors[row.agent], linestyle=":")
            if max(ends) > _LOG_RATIO * min(ends):
                axis.set_xscale("log")
                axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            plotting.tidy(axis, _AXES[x])
    for axis in axes[:, 0]:
        axis.set_ylabel("evaluation return")
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines()}
    figure.legend(
        handles=[handle for label, handle in handles.items() if not label.startswith("_")],
        loc="outside lower center",
        ncols=max(1, int(width / 2.5)),
        fontsize=8,
        frameon=False,
    )
    plotting.save(figure, path)
    return True
