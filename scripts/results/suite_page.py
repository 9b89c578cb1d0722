"""What a suite shows: its rows beside published figures, what they reach together, and curves."""

import collections
import itertools
import pathlib
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.pyplot as plt
import numpy as np
from results import aggregates, markdown, plotting
from results import rows as results

Rows = Mapping[str, results.Row]
_Contender = tuple[str, str]  # agent, runner
_PANEL = (2.6, 2.2)  # inches
_LINES = {"Anakin": "-", "Sebulba": "--"}
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
    """Returns a section for each suite, as Markdown."""
    return "\n".join(_section(name, chosen) for name, chosen in suites(rows).items())


def _section(name: str, rows: Sequence[results.Row]) -> str:
    command = f"`python scripts/reproduce.py --suite {name}`"
    parts = [f"### {name}\n\nTrained by {command}.\n", _table(rows), _together(rows)]
    if any(_curves(row) for row in rows):
        parts.append(
            f"![Learning curves of the suite {name}: mean and range over seeds, by agent steps and "
            f"by seconds; dotted: published](results/suite_{name}.png)\n"
        )
    return "\n".join(part for part in parts if part)


def _table(rows: Sequence[results.Row]) -> str:
    headings = ["experiment", "runner", "agent", "environment", "return, mean ± s.e."]
    headings += ["95%, Student's t", "seeds", "agent steps", "published", "why"]
    lines = []
    for row in rows:
        known = row.measured
        told = ["queued", "", "0", ""]
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
            if None not in (reference, random):
                width = reference - random
                found[task] = [(value - random) / width for value in row.measured.returns]
        if len(found) > 1:
            scores[contender] = found
    return scores


def _together(rows: Sequence[results.Row]) -> str:
    """Returns what agents reach over several tasks, and which of two is ahead."""
    lines = []
    for contender, tasks in _scores(rows).items():
        runs = min(map(len, tasks.values()))
        found = aggregates.summarize([own[:runs] for own in tasks.values()])["interquartile mean"]
        interval = "" if found.interval is None else f" ({results.interval(found.interval)})"
        value = f"{results.number(found.value)}{interval}"
        lines.append([_named(contender), ", ".join(tasks), str(runs), value])
    improvements = _improvements(_by_contender(rows))
    if not lines:
        return improvements
    return (
        "Over tasks, where 0 is a random policy and 1 the first figure that is named as published, "
        "in the row or else for its task:\n\n"
        + markdown.table(["agent", "tasks", "seeds of each", "IQM"], lines)
        + improvements
    )


def _improvements(groups: Mapping[_Contender, Mapping[str, results.Row]]) -> str:
    """Returns a table of how likely a run of one agent is to return more than one of another."""
    chances = {}
    for one, other in itertools.permutations(groups, 2):
        pairs = [
            (groups[one][task].measured.returns, groups[other][task].measured.returns)
            for task in groups[one].keys() & groups[other].keys()
            if _comparable(groups[one][task], groups[other][task])
        ]
        if len(pairs) > 1:
            each = [aggregates.probability_of_improvement(*pair) for pair in pairs]
            chances[one, other] = f"{np.mean(each):.2f} ({len(pairs)})"
    compared = [each for each in groups if any(each in pair for pair in chances)]
    if not compared:
        return ""
    numbers = list(map(str, range(1, 1 + len(compared))))
    lines = [
        [f"{number}. {_named(one)}", *(chances.get((one, other), "") for other in compared)]
        for number, one in zip(numbers, compared)
    ]
    return (
        "\nHow likely a run of the agent on the left is to return more than one of the agent above "
        "(ties count half), and in brackets the tasks that this is the mean of: those that both "
        "have learnt in about as many steps, where there are two or more.\n\n"
        + markdown.table(["probability of improvement", *numbers], lines)
    )


def _comparable(one: results.Row, other: results.Row) -> bool:
    """Returns whether two rows were trained for about as many agent steps."""
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

    Where an agent has learnt several tasks that published figures are known of, the last column is
    the performance profile over them.
    """
    tasks = collections.defaultdict(list)
    for row in rows:
        if _curves(row):
            tasks[row.drawn_with or row.environment].append(row)
    if not tasks:
        return False
    scores = _scores(rows)
    colors = plotting.colors(dict.fromkeys(row.agent for row in rows if row.measured))
    columns = len(tasks) + bool(scores)
    width, height = 1.2 + _PANEL[0] * columns, 0.9 + 2 * _PANEL[1]
    figure, axes = plt.subplots(
        2, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for column, (task, chosen) in zip(axes.T, tasks.items()):
        for x, axis in enumerate(column):
            _panel(axis, chosen, colors, x)
        column[0].set_title("\n".join(textwrap.wrap(task, 28)), fontsize=9)
    for axis, label in zip(axes[:, 0], ("return, by agent steps", "return, by seconds")):
        axis.set_ylabel(label)
    if scores:
        _profile(axes[0, -1], scores, colors)
        axes[1, -1].set_axis_off()
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines()}
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=max(1, int(width / 2.5)),
        fontsize=8,
        frameon=False,
    )
    plotting.save(figure, path)
    return True


def _style(contender: _Contender, colors: Mapping[str, str]) -> dict[str, str]:
    """Returns how an agent under a runner is drawn: colours are agents, line styles runners."""
    agent, runner = contender
    return {"color": colors[agent], "linestyle": _LINES[runner], "label": _named(contender)}


def _panel(axis: matplotlib.axes.Axes, rows: Sequence[results.Row], colors, x: int) -> None:
    for row in rows:
        seeds = [(curve[:, x], curve[:, 2]) for curve in _curves(row)]
        style = _style((row.agent, row.runner), colors)
        if row.drawn_with:
            style["label"] += f", {row.environment}"
        plotting.draw_band(axis, plotting.band(seeds), **style)
    for value in {row.published[0].value for row in rows if row.published}:
        axis.axhline(value, label="published", color=plotting.GREY, linestyle=":", linewidth=1.2)
    axis.set_xlabel(("agent steps", "s")[x])
    axis.xaxis.set_major_formatter(plotting.engineering())
    plotting.tidy(axis)


def _profile(axis: matplotlib.axes.Axes, scores, colors: Mapping[str, str]) -> None:
    each = [value for tasks in scores.values() for runs in tasks.values() for value in runs]
    places = np.linspace(min(0.0, *each), 1.05 * max(1.0, *each), _PROFILE_POINTS)
    for contender, tasks in scores.items():
        shares = aggregates.performance_profile(list(tasks.values()), places)
        axis.plot(places, shares, linewidth=1.8, **_style(contender, colors))
    axis.set_title("performance profile", fontsize=9)
    axis.set_xlabel("return (1: published)")
    axis.set_ylabel("share of runs above")
    plotting.tidy(axis)
