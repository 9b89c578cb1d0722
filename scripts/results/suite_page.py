"""What a suite shows: its rows beside published figures, what they reach together, and curves."""

import collections
import itertools
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.colors
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
from results import aggregates, markdown, plotting, reproduction
from results import rows as results

Rows = Mapping[str, results.Row]
_Contender = tuple[str, str]  # agent, runner
_PANEL = (2.6, 2.2)  # inches
_LINES = {"Anakin": "-", "Sebulba": "--"}
# The same colour in every picture; variants of an agent are lighter.
_AGENTS = ("PPO", "IMPALA", "PQN", "DQN", "R2D2", "SAC", "MuZero", "AlphaZero")
_LIGHTER = 0.4  # share of white that each further variant adds
_WIDE = 8.0  # ratio of the longest curve to the shortest from which on an axis is logarithmic
_PROFILE_POINTS = 512
_SIMILAR_STEPS = 1.1  # ratio of the agent steps of runs that are set against each other


def suites(rows: Rows) -> dict[str, list[results.Row]]:
    """Returns the rows of each suite."""
    found = collections.defaultdict(list)
    for row in rows.values():
        if row.suite:
            found[row.suite].append(row)
    return dict(found)


def text(rows: Rows) -> str:
    """Returns how much of each suite was trained, and a section for each, as Markdown."""
    found = suites(rows)
    sections = [_section(name, chosen) for name, chosen in found.items()]
    return "\n".join([_overview(found), *sections])


def _overview(found: Mapping[str, Sequence[results.Row]]) -> str:
    lines = []
    for name, rows in found.items():
        seeds = [row.measured.sample.runs for row in rows if row.measured]
        several = sum(number > 1 for number in seeds)
        numbers = len(rows), several, len(seeds) - several, len(rows) - len(seeds)
        lines.append([f"[{name}](#{name})", *map(str, numbers)])
    headings = ["suite", "rows", "several seeds", "one seed", "no result"]
    return markdown.table(headings, lines)


def _section(name: str, rows: Sequence[results.Row]) -> str:
    command = f"`python scripts/reproduce.py --suite {name}`"
    parts = [f"### {name}\n\nTrained by {command}.\n", _table(rows), _together(rows)]
    drawn = [row for row in rows if _curves(row)]
    if drawn:
        dotted = "; dotted, in the agent's colour: published" * any(r.published for r in drawn)
        parts.append(
            f"![Learning curves of the suite {name}, {len(drawn)} of {len(rows)} rows: mean and "
            f"range over seeds, by agent steps and by seconds{dotted}](results/suite_{name}.png)\n"
        )
    return "\n".join(part for part in parts if part)


def _table(rows: Sequence[results.Row]) -> str:
    headings = ["experiment", "runner", "agent", "environment", "return, mean ± s.e."]
    headings += ["95%, Student's t", "seeds", "agent steps", "published", "remarks"]
    lines = []
    for row in rows:
        known = row.measured
        told = ["failed" if row.failures else "queued", "", "0", ""]
        if known is not None:
            interval = results.interval(known.sample.student_interval())
            steps = f"{known.agent_steps:,}"
            told = [results.mean(known), interval, str(known.sample.runs), steps]
        published = "; ".join(map(_published, row.published))
        why = [row.explanation, *(f"seed {f.seed} failed: {f.message}" for f in row.failures)]
        lines.append(
            [
                *(f"`{row.short}`", f"`{row.runner.lower()}`", row.agent, row.environment),
                *(*told, published, "; ".join(filter(None, why))),
            ]
        )
    return markdown.table(headings, lines)


def _published(each: results.Published) -> str:
    error = "" if each.error is None else f" ± {results.number(each.error)}"
    said = ", ".join(filter(None, [each.source, each.steps, each.protocol]))
    return f"{results.number(each.value)}{error} ({said})"


def _scores(rows: Sequence[results.Row]) -> dict[_Contender, dict[str, list[float]]]:
    """Returns normalised returns by agent and runner, then by task, of those with several tasks.

    0 is a random policy, and 1 the first figure that the row names as published, or else the first
    that any row of the suite names for the task.
    """
    references = {row.environment: row.published[0].value for row in rows[::-1] if row.published}
    scores = {}
    for contender, tasks in _by_contender(rows).items():
        found = {}
        for task, row in tasks.items():
            random = row.measured.random_policy
            reference = row.published[0].value if row.published else references.get(task)
            if None not in (reference, random) and reference > random:
                width = reference - random
                found[task] = [(value - random) / width for value in row.measured.returns]
        if len(found) > 1:
            scores[contender] = found
    return scores


def _together(rows: Sequence[results.Row]) -> str:
    """Returns what agents reach over several tasks, and which of two is ahead."""
    lines = []
    for contender, tasks in _scores(rows).items():
        found, runs = _iqm(tasks)
        interval = "" if found.interval is None else f" ({results.interval(found.interval)})"
        value = f"{results.number(found.value)}{interval}"
        lines.append([_named(contender), ", ".join(tasks), str(runs), value])
    improvements = _improvements(_by_contender(rows))
    if not lines:
        return improvements
    return (
        "Over tasks, where 0 is a random policy and 1 the row's first published figure (or the "
        "task's, if the row has none); of every task as many seeds, the first ones:\n\n"
        + markdown.table(["agent", "tasks", "seeds used of each", "IQM"], lines)
        + improvements
    )


def _iqm(tasks: Mapping[str, Sequence[float]]) -> tuple[aggregates.Estimate, int]:
    """Returns the interquartile mean, and of how many seeds of each task it is."""
    runs = min(map(len, tasks.values()))
    cut = [own[:runs] for own in tasks.values()]
    return aggregates.estimate(cut, aggregates.interquartile_mean), runs


def _improvements(groups: Mapping[_Contender, Mapping[str, results.Row]]) -> str:
    """Returns a table of how likely a run of one agent is to return more than one of another."""
    lines = []
    for one, other in itertools.combinations(groups, 2):
        pairs = {
            task: (groups[one][task].measured.returns, groups[other][task].measured.returns)
            for task in groups[one].keys() & groups[other].keys()
            if _comparable(groups[one][task], groups[other][task])
        }
        if len(pairs) > 1:
            found = aggregates.improvement(list(pairs.values()))
            interval = "none" if found.interval is None else results.interval(found.interval)
            value = results.number(found.value)
            tasks = ", ".join(task for task in groups[one] if task in pairs)
            lines.append([_named(one), _named(other), tasks, value, interval])
    if not lines:
        return ""
    return (
        "\nHow likely a run of the first agent is to return more than one of the second (ties "
        "count half): the mean over the tasks that both were trained on for about as many steps "
        "and evaluated on alike (with sampled or greedy actions), where there are two or more; "
        "no interval where a task has one seed.\n\n"
        + markdown.table(["first", "second", "tasks", "probability of improvement", "95%"], lines)
    )


def _comparable(one: results.Row, other: results.Row) -> bool:
    """Returns whether two rows were trained for about as long, and evaluated alike."""
    if reproduction.kind(one.measured.runs) != reproduction.kind(other.measured.runs):
        return False
    steps = one.measured.agent_steps, other.measured.agent_steps
    return max(steps) <= _SIMILAR_STEPS * min(steps)


def _by_contender(rows: Sequence[results.Row]) -> dict[_Contender, dict[str, results.Row]]:
    """Returns rows whose returns are known by seed, by agent and runner, then by task."""
    groups = collections.defaultdict(dict)
    for row in rows:
        if row.measured is not None and row.measured.runs:
            groups[row.agent, row.runner][row.environment] = row
    return dict(groups)


def _named(contender: _Contender) -> str:
    return " under ".join(contender)


def _curves(row: results.Row) -> list[np.ndarray]:
    """Returns the curve of each seed that has one: agent steps, seconds and return, `[K, 3]`."""
    runs = row.measured.runs if row.measured else ()
    return [np.array(run.curve, float) for run in runs if run.curve]


def draw(rows: Sequence[results.Row], path: pathlib.Path) -> bool:
    """Draws the curves of a suite, a column for each task; returns whether there are any.

    Implementations of one environment share a column.

    Where an agent has learnt several tasks that published figures are known of, the last column has
    the performance profile over them and the interquartile mean.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if _curves(row):
            tasks[row.drawn_with or row.environment].append(row)
    if not tasks:
        return False
    scores = _scores(rows)
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


def _style(contender: _Contender, colors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how an agent under a runner is drawn: colours are agents, line styles runners."""
    agent, runner = contender
    style = {"color": colors[agent], "linestyle": _LINES.get(runner, "-.")}
    return style | {"label": _named(contender)}


def _panel(axis: matplotlib.axes.Axes, rows: Sequence[results.Row], colors, x: int) -> None:
    ends = []
    for row in rows:
        drawn = _band(_curves(row), x)
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
        found, _ = _iqm(tasks)
        color = colors[contender[0]]
        if found.interval is not None:
            axis.plot(found.interval, (place, place), color=color, linewidth=6, alpha=0.3)
        axis.plot(found.value, place, "|", color=color, markersize=12, markeredgewidth=2)
    names = [_named(contender).replace(" under ", ", ") for contender in scores]
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.axvline(1.0, color=plotting.GREY, linestyle=":", linewidth=1.2)
    low, high = axis.get_xlim()
    axis.set_xlim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    axis.set_xlabel("IQM of returns (1: published)")
    plotting.tidy(axis)
