"""The tables and the picture of docs/results.md, out of docs/results.json."""

import collections
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from results import aggregates, atari_scores, markdown, plotting, reproduction, suite_page
from results import rows as results

Rows = Mapping[str, results.Row]
_SHIFT = 0.18  # of runners from their line, in lines


def returns(rows: Rows) -> str:
    """Returns what each row that was measured reached, as Markdown, by environment."""
    headings = ["experiment", "runner", "agent", "environment", "return, mean ± s.e."]
    headings += ["highest", "evaluation", "greedy", "95%, bootstrap", "95%, Student's t"]
    headings += ["seeds: returns", "random policy", "agent steps", "wall time of a seed"]
    lines = []
    for row in _by_environment(rows):
        known = row.measured
        if known is None:  # as suites say
            continue
        by_seed = ", ".join(map(results.number, known.returns)) or "not kept"
        lines.append(
            [
                *(*_named(row), row.agent, row.environment),
                results.mean(known),
                "" if row.most is None else f"{row.most:g}",
                f"{known.episodes}, {reproduction.kind(known.runs)}",
                _greedy(known),
                results.interval(known.bootstrap_interval()),
                results.interval(known.sample.student_interval()),
                f"{known.sample.runs}: {by_seed}",
                results.number(known.random_policy),
                _steps(known.agent_steps),
                _wall_time(known),
            ]
        )
    return markdown.table(headings, lines)


def _by_environment(rows: Rows) -> list[results.Row]:
    """Returns the rows of one environment beside each other, in the order of the first ones."""
    environments = list(dict.fromkeys(row.environment for row in rows.values()))
    return sorted(rows.values(), key=lambda row: environments.index(row.environment))


def readme(rows: Rows) -> str:
    """Returns what each agent reached on each environment, a line each, as Markdown."""
    runners = ("Anakin", "Sebulba")
    by_environment = collections.defaultdict(list)
    for row in rows.values():
        if row.measured is not None:
            by_environment[row.environment].append(row)
    lines = []
    for environment, found in by_environment.items():
        random, most = results.number(found[0].measured.random_policy), found[0].most
        told = [
            "; ".join(f"{r.agent} {results.mean(r.measured)}" for r in found if r.runner == runner)
            for runner in runners
        ]
        lines.append([environment, *told, random, "" if most is None else f"{most:g}"])
    return markdown.table(["environment", *runners, "random policy", "highest"], lines)


def _named(row: results.Row) -> list[str]:
    """Returns what `scripts/reproduce.py` calls a row."""
    return [f"`{row.short}`", f"`{row.runner.lower()}`"]


def _greedy(known: results.Measured) -> str:
    """Returns the mean return of greedy actions, where the row's own evaluations sample."""
    returns = [run.greedy_return for run in known.runs]
    return "" if not returns or None in returns else results.number(statistics.fmean(returns))


def _steps(number: int) -> str:
    return f"{number / 1e6:.3g}M" if number >= 1e6 else f"{number / 1e3:.3g}k"


def _wall_time(known: results.Measured) -> str:
    times = sorted({round(seconds) for seconds in known.wall_times})
    return " to ".join(str(time) for time in dict.fromkeys(times[:1] + times[-1:])) + " s" * bool(
        times
    )


def commands(rows: Rows) -> str:
    """Returns how each row that was measured came about, as Markdown."""
    headings = ["experiment", "runner", "command of seed 0", "date", "commit", "hardware", "note"]
    lines = []
    for row in rows.values():
        known = row.measured
        if known is None:
            continue
        commits = dict.fromkeys(_short(run.commit) for run in known.runs) or {"not kept": None}
        told = [known.date, ", ".join(commits), known.hardware, known.note]
        lines.append([*_named(row), f"`{row.command(0)}`", *told])
    return markdown.table(headings, lines)


def _short(commit: str | None) -> str:
    if commit is None:
        return "not kept"
    name, _, changed = commit.partition("-")
    return f"{name[:10]}{' and changes' if changed else ''}"


def tasks(rows: Rows) -> str:
    """Returns aggregates over the tasks whose highest return is known, as Markdown."""
    groups = collections.defaultdict(list)
    for row in rows.values():
        if row.atari_game is None and _has_range(row):
            groups[row.agent, row.runner].append(row)
    lines = []
    for named, chosen in groups.items():
        if len(chosen) > 1:
            # A statistic over tasks takes as many runs of each: the first that all of them have.
            runs = min(len(row.measured.runs) for row in chosen)
            found = aggregates.summarize([_normalized(row)[:runs] for row in chosen])
            names = ", ".join(row.environment for row in chosen)
            lines.append([*named, names, str(runs), *map(_estimate, found.values())])
    headings = ["agent", "runner", "tasks", "seeds used of each", "mean", "median", "IQM"]
    return markdown.table(headings, lines)


def _estimate(found: aggregates.Estimate) -> str:
    bounds = "" if found.interval is None else f" ({results.interval(found.interval)})"
    return f"{results.number(found.value)}{bounds}"


def _has_range(row: results.Row) -> bool:
    known = row.measured
    return None not in (known, row.most) and known.random_policy is not None and bool(known.runs)


def _normalized(row: results.Row) -> list[float]:
    """Returns the returns of a row, where 0 is a random policy and 1 the highest there is."""
    random = row.measured.random_policy
    return [(value - random) / (row.most - random) for value in row.measured.returns]


def atari(rows: Rows) -> str:
    """Returns human-normalised scores by game, and what is reached over games, as Markdown."""
    headings = ["game", "experiment", "runner", "seeds", "score", "random", "human"]
    lines = []
    games: dict[tuple[str, str], dict[str, list[float]]] = collections.defaultdict(dict)
    for row in rows.values():
        if row.atari_game is None or row.measured is None:
            continue
        score = row.measured.sample.mean
        lines.append(
            [
                *(row.atari_game, *_named(row), str(row.measured.sample.runs)),
                *map(results.number, (score, *atari_scores.REFERENCES[row.atari_game])),
                f"{atari_scores.normalized(row.atari_game, score):.2f}",
            ]
        )
        if row.measured.runs:
            games[row.agent, row.runner][row.atari_game] = row.measured.returns
    said = [_over_games(*named, played) for named, played in games.items()]
    return "\n".join([markdown.table([*headings, "human-normalised"], lines), "".join(said)])


def _over_games(agent: str, runner: str, games: Mapping[str, Sequence[float]]) -> str:
    said = f"- {agent} under {runner}: {len(games)} of {len(atari_scores.REFERENCES)} games"
    if len(games) < 2:
        return f"{said}: no median and no IQM over games.\n"
    runs = min(map(len, games.values()))
    found = atari_scores.summarize({game: kept[:runs] for game, kept in games.items()})
    values = ", ".join(f"{name} {_estimate(found[name])}" for name in _GAMES_ORDER)
    return f"{said}, {runs} seed(s) of each: {values}.\n"


_GAMES_ORDER = ("median", "interquartile mean", "mean")  # the field's, by how often they are quoted
TABLES: dict[str, Callable[[Rows], str]] = {
    "returns": returns,
    "tasks": tasks,
    "atari": atari,
    "suites": suite_page.text,
    "commands": commands,
}


def draw(rows: Rows, path: pathlib.Path) -> None:
    """Draws the normalised returns of rows with a range: seeds, mean, bootstrap interval.

    A line is an agent on an environment; runners stand one above the other.
    """
    shown = [row for row in _by_environment(rows) if _has_range(row)]
    lines = list(dict.fromkeys((row.environment, row.agent) for row in shown))
    colors = plotting.colors(sorted({row.runner for row in shown}))
    shift = dict(zip(colors, np.linspace(-_SHIFT, _SHIFT, len(colors)) if len(colors) > 1 else [0]))
    figure, axis = plt.subplots(figsize=(8, 1 + 0.24 * len(lines)), layout="constrained")
    for row in shown:
        place = lines.index((row.environment, row.agent)) + shift[row.runner]
        color, scores = colors[row.runner], _normalized(row)
        found = aggregates.estimate([scores])
        if found.interval is not None:
            axis.plot(found.interval, (place, place), color=color, linewidth=4, alpha=0.3)
        axis.plot(scores, [place] * len(scores), "o", color=color, markersize=3, alpha=0.6)
        axis.plot(found.value, place, "|", color=color, markersize=8, markeredgewidth=2)
    axis.set_yticks(range(len(lines)), [": ".join(line) for line in lines], fontsize=8)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlabel("return: 0 is a random policy, 1 the highest there is")
    handles = [plt.Line2D([], [], color=color, label=runner) for runner, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    plotting.tidy(axis)
    plotting.save(figure, path)
