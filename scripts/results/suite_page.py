"""What a suite shows: its rows beside published figures, what they reach together, and curves."""

import collections
import itertools
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.pyplot as plt
import numpy as np
from results import aggregates, markdown, plotting
from results import rows as results

Rows = Mapping[str, results.Row]
_PANEL = (2.6, 2.2)  # inches
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
            f"by seconds; dashed: published](results/suite_{name}.png)\n"
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


def _normalized(row: results.Row) -> list[float]:
    """Returns the returns of a row, where 0 is a random policy and 1 what was published first."""
    random, published = row.measured.random_policy, row.published[0].value
    return [(value - random) / (published - random) for value in row.measured.returns]


def _together(rows: Sequence[results.Row]) -> str:
    """Returns what agents reach over several tasks, and which of two is ahead."""
    groups = _by_contender(rows)
    lines = []
    for named, tasks in groups.items():
        scores = {t: _normalized(row) for t, row in tasks.items() if _is_normalized(row)}
        if len(scores) > 1:
            runs = min(map(len, scores.values()))
            each = [own[:runs] for own in scores.values()]
            found = aggregates.summarize(each)["interquartile mean"]
            interval = "" if found.interval is None else f" ({results.interval(found.interval)})"
            lines.append(
                f"- {named} on {', '.join(scores)}: IQM {results.number(found.value)}{interval}, "
                "where 0 is a random policy and 1 the first figure that is named as published.\n"
            )
    return "".join(lines) + _improvements(groups)


def _improvements(groups: Mapping[str, Mapping[str, results.Row]]) -> str:
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
    named = [name for name in groups if any(name in pair for pair in chances)]
    if not named:
        return ""
    numbers = list(map(str, range(1, 1 + len(named))))
    lines = [
        [f"{number}. {one}", *(chances.get((one, other), "") for other in named)]
        for number, one in zip(numbers, named)
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


def _by_contender(rows: Sequence[results.Row]) -> dict[str, dict[str, results.Row]]:
    """Returns rows whose returns are known by seed, by agent and runner, then by task."""
    groups = collections.defaultdict(dict)
    for row in rows:
        if row.measured is not None and row.measured.runs:
            groups[f"{row.agent} under {row.runner}"][row.environment] = row
    return dict(groups)


def _is_normalized(row: results.Row) -> bool:
    return bool(row.published) and row.measured.random_policy is not None


def _curves(row: results.Row) -> list[np.ndarray]:
    """Returns the curve of each seed that has one: agent steps, seconds and return, `[K, 3]`."""
    runs = row.measured.runs if row.measured else ()
    return [np.array(run.curve, float) for run in runs if run.curve]


def draw(rows: Sequence[results.Row], path: pathlib.Path) -> bool:
    """Draws the curves of a suite, a column for each task; returns whether there are any."""
    tasks = collections.defaultdict(list)
    for row in rows:
        if _curves(row):
            tasks[row.environment].append(row)
    if not tasks:
        return False
    colors = plotting.colors(dict.fromkeys((row.agent, row.runner) for row in rows))
    size = (1.2 + _PANEL[0] * len(tasks), 0.9 + 2 * _PANEL[1])
    figure, axes = plt.subplots(2, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for column, (task, chosen) in zip(axes.T, tasks.items()):
        for x, axis in enumerate(column):
            _panel(axis, chosen, colors, x)
        column[0].set_title(task, fontsize=10)
    for axis, label in zip(axes[:, 0], ("return, by agent steps", "return, by seconds")):
        axis.set_ylabel(label)
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines()}
    shown = [h for label, h in handles.items() if not label.startswith("_")]
    figure.legend(handles=shown, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    plotting.save(figure, path)
    return True


def _panel(axis: matplotlib.axes.Axes, rows: Sequence[results.Row], colors, x: int) -> None:
    for row in rows:
        named = (row.agent, row.runner)
        seeds = [(curve[:, x], curve[:, 2]) for curve in _curves(row)]
        drawn = plotting.band(seeds)
        plotting.draw_band(axis, drawn, color=colors[named], label=" under ".join(named))
        if row.published:
            style = {"color": colors[named], "linestyle": "--", "linewidth": 1}
            axis.axhline(row.published[0].value, label="_published", **style)
    axis.set_xlabel(("agent steps", "s")[x])
    axis.xaxis.set_major_formatter(plotting.engineering())
    plotting.tidy(axis)
