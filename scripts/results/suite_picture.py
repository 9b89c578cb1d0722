"""The picture of a suite: learning curves by task, a performance profile, interquartile means."""

import collections
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.colors
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
from results import aggregates, plotting, suite_page
from results import rows as results

_PANEL = (2.6, 2.2)  # inches
_LINES = {"Anakin": "-", "Sebulba": "--"}
# The same colour in every picture; variants of an agent are lighter.
_AGENTS = ("PPO", "IMPALA", "PQN", "DQN", "R2D2", "SAC", "MuZero", "AlphaZero")
_LIGHTER = 0.4  # share of white that each further variant adds
_WIDE = 8.0  # ratio of the longest curve to the shortest from which on an axis is logarithmic
_PROFILE_POINTS = 512


def draw(rows: Sequence[results.Row], path: pathlib.Path) -> bool:
    """Draws the curves of a suite, a column for each task; returns whether there are any.

    Implementations of one environment share a column.

    Where an agent has learnt several tasks that published figures are known of, the last column has
    the performance profile over them and the interquartile mean.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if suite_page.curves(row):
            tasks[row.drawn_with or row.environment].append(row)
    if not tasks:
        return False
    scores = suite_page.scores(rows)
    colors = _colors(dict.fromkeys(row.agent for row in rows if row.measured))
    columns = len(tasks) + bool(scores)
    width, height = 1.2 + _PANEL[0] * columns, 0.9 + 2 * _PANEL[1]
    figure, axes = plt.subplots(
        2, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for column, (task, chosen) in zip(axes.T, tasks.items()):
        for x, axis in enumerate(column):
            _panel(axis, chosen, colors, x)
        column[0].set_title("\n".join(textwrap.wrap(task, 28)), fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("evaluation return")
    if scores:
        _profile(axes[0, -1], scores, colors)
        _aggregates(axes[1, -1], scores, colors)
    handles = {h.get_label(): h for axis in axes[:, : len(tasks)].flat for h in axis.get_lines()}
    figure.legend(
        handles=[handle for label, handle in handles.items() if not label.startswith("_")],
        loc="outside lower center",
        ncols=max(1, int(width / 2.5)),
        fontsize=8,
        frameon=False,
    )
    plotting.save(figure, path)
    return True


def _colors(agents: Iterable[str]) -> dict[str, tuple[float, float, float]]:
    """Returns the colour of each agent: that of its class, or a lighter one for a variant."""
    found, variants, known = {}, collections.Counter(), list(_AGENTS)
    for agent in sorted(agents, key=lambda agent: "," in agent):
        name = agent.partition(",")[0]
        if name not in known:
            known.append(name)
        white = 1 - (1 - _LIGHTER) ** variants[name]
        color = matplotlib.colors.to_rgb(plotting.COLORS[known.index(name) % len(plotting.COLORS)])
        found[agent] = tuple((1 - white) * part + white for part in color)
        variants[name] += 1
    return found


def _style(contender: suite_page.Contender, colors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how an agent under a runner is drawn: colours are agents, line styles runners."""
    agent, runner = contender
    style = {"color": colors[agent], "linestyle": _LINES.get(runner, "-.")}
    return style | {"label": suite_page.named(contender)}


def _panel(axis: matplotlib.axes.Axes, rows: Sequence[results.Row], colors, x: int) -> None:
    ends = []
    for row in rows:
        drawn = _band(suite_page.curves(row), x)
        ends.append(drawn.x[-1])
        style = _style((row.agent, row.runner), colors)
        if row.drawn_with:
            style["label"] += f", {row.environment}"
        plotting.draw_band(axis, drawn, **style)
    published = {row.published[0].value: colors[row.agent] for row in rows if row.published}
    for value, color in published.items():
        axis.axhline(value, color=color, linestyle=":", linewidth=1.2)
    axis.set_xlabel(("agent steps", "wall-clock seconds")[x])
    if max(ends) > _WIDE * min(ends):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.xaxis.set_major_formatter(plotting.engineering())
    plotting.tidy(axis)


def _band(curves: Sequence[np.ndarray], x: int) -> plotting.Band:
    """Returns seeds as one curve, by agent steps (0) or by the mean seconds that these took (1)."""
    by_steps = plotting.band([(curve[:, 0], curve[:, 2]) for curve in curves])
    if x == 0:
        return by_steps
    seconds = plotting.band([(curve[:, 0], curve[:, 1]) for curve in curves])
    return by_steps._replace(x=seconds.mean)


def _profile(axis: matplotlib.axes.Axes, scores, colors: Mapping[str, Any]) -> None:
    each = [value for tasks in scores.values() for runs in tasks.values() for value in runs]
    places = np.linspace(min(0.0, *each), 1.05 * max(1.0, *each), _PROFILE_POINTS)
    for contender, tasks in scores.items():
        found = aggregates.performance_profile(list(tasks.values()), places)
        style = _style(contender, colors)
        axis.plot(places, found.value, linewidth=1.8, **style)
        if found.interval is not None:
            axis.fill_between(places, *found.interval, color=style["color"], alpha=0.2, linewidth=0)
    axis.set_title("performance profile", fontsize=9)
    axis.set_xlabel("return (1: published)")
    axis.set_ylabel("share of runs above")
    plotting.tidy(axis)


def _aggregates(axis: matplotlib.axes.Axes, scores, colors: Mapping[str, Any]) -> None:
    """Draws the interquartile mean of each agent over tasks, with its interval."""
    for place, (contender, tasks) in enumerate(scores.items()):
        found, _ = suite_page.iqm(tasks)
        color = colors[contender[0]]
        if found.interval is not None:
            axis.plot(found.interval, (place, place), color=color, linewidth=6, alpha=0.3)
        axis.plot(found.value, place, "|", color=color, markersize=12, markeredgewidth=2)
    names = [suite_page.named(contender).replace(" under ", ", ") for contender in scores]
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.axvline(1.0, color=plotting.GREY, linestyle=":", linewidth=1.2)
    low, high = axis.get_xlim()
    axis.set_xlim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    axis.set_xlabel("IQM of returns (1: published)")
    plotting.tidy(axis)
