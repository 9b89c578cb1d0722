"""What a suite says: its rows beside published figures, and what they reach together."""

import collections
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from results import aggregates, markdown, reproduction
from results import rows as results

Rows = Mapping[str, results.Row]
Contender = tuple[str, str]  # agent, runner
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
    drawn = [row for row in rows if curves(row)]
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


def scores(rows: Sequence[results.Row]) -> dict[Contender, dict[str, list[float]]]:
    """Returns normalised returns by agent and runner, then by task, of those with several tasks.

    0 is a random policy, and 1 the first figure that the row names as published, or else the first
    that any row of the suite names for the task.
    """
    references = {row.environment: row.published[0].value for row in rows[::-1] if row.published}
    normalized = {}
    for contender, tasks in _by_contender(rows).items():
        found = {}
        for task, row in tasks.items():
            random = row.measured.random_policy
            reference = row.published[0].value if row.published else references.get(task)
            if None not in (reference, random) and reference > random:
                width = reference - random
                found[task] = [(value - random) / width for value in row.measured.returns]
        if len(found) > 1:
            normalized[contender] = found
    return normalized


def _together(rows: Sequence[results.Row]) -> str:
    """Returns what agents reach over several tasks, and which of two is ahead."""
    lines = []
    for contender, tasks in scores(rows).items():
        found, runs = iqm(tasks)
        interval = "" if found.interval is None else f" ({results.interval(found.interval)})"
        value = f"{results.number(found.value)}{interval}"
        lines.append([named(contender), ", ".join(tasks), str(runs), value])
    improvements = _improvements(_by_contender(rows))
    if not lines:
        return improvements
    return (
        "Over tasks, where 0 is a random policy and 1 the row's first published figure (or the "
        "task's, if the row has none); of every task as many seeds, the first ones:\n\n"
        + markdown.table(["agent", "tasks", "seeds used of each", "IQM"], lines)
        + improvements
    )


def iqm(tasks: Mapping[str, Sequence[float]]) -> tuple[aggregates.Estimate, int]:
    """Returns the interquartile mean, and of how many seeds of each task it is."""
    runs = min(map(len, tasks.values()))
    cut = [own[:runs] for own in tasks.values()]
    return aggregates.estimate(cut, aggregates.interquartile_mean), runs


def _improvements(groups: Mapping[Contender, Mapping[str, results.Row]]) -> str:
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
            lines.append([named(one), named(other), tasks, value, interval])
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


def _by_contender(rows: Sequence[results.Row]) -> dict[Contender, dict[str, results.Row]]:
    """Returns rows whose returns are known by seed, by agent and runner, then by task."""
    groups = collections.defaultdict(dict)
    for row in rows:
        if row.measured is not None and row.measured.runs:
            groups[row.agent, row.runner][row.environment] = row
    return dict(groups)


def named(contender: Contender) -> str:
    """Returns what tables and pictures call an agent under a runner."""
    return " under ".join(contender)


def curves(row: results.Row) -> list[np.ndarray]:
    """Returns the curve of each seed that has one: agent steps, seconds and return, `[K, 3]`."""
    runs = row.measured.runs if row.measured else ()
    return [np.array(run.curve, float) for run in runs if run.curve]
