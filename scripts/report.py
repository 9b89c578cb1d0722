"""Makes the tables and the picture of docs/results.md, and README.md's, out of docs/results.json.

Those of speed come from docs/benchmarks, where scripts/benchmark.py has left them.
Prose stays as it is: only what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is
made anew. With --check nothing is written, and exit code 1 says that something would be.
"""

import argparse
import collections
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from results import aggregates, atari_scores, plotting
from results import rows as results
from results import tables as speed_tables

from podracers import command_line, errors

_DOCUMENT = results.PATH.with_name("results.md")
_README = results.PATH.parents[1] / "README.md"
_PICTURE = results.PATH.parent / "results" / "returns.png"

Rows = Mapping[str, results.Row]


def main() -> int:
    """Parses the command line, and writes."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    parser.add_argument("--results", default=str(results.PATH), metavar="PATH")
    parser.add_argument("--document", default=str(_DOCUMENT), metavar="PATH")
    parser.add_argument("--readme", default=str(_README), metavar="PATH")
    parser.add_argument("--picture", default=str(_PICTURE), metavar="FILE.png")
    arguments = parser.parse_args()
    rows = results.read(pathlib.Path(arguments.results))
    made = {name: make(rows) for name, make in TABLES.items()} | speed_tables.tables()
    stale = [
        _write(pathlib.Path(arguments.document), made, arguments.check),
        _write(pathlib.Path(arguments.readme), {"readme": readme_table(rows)}, arguments.check),
    ]
    if arguments.check:
        return errors.RunFailure.exit_code if any(stale) else 0
    draw(rows, pathlib.Path(arguments.picture))
    print(arguments.picture)
    return 0


def _write(document: pathlib.Path, tables: Mapping[str, str], check: bool) -> bool:
    """Fills a document, unless it is only to be checked; returns whether it held something else."""
    try:
        before = document.read_text()
        after = fill(before, tables)
        if not check:
            document.write_text(after)
    except OSError as error:
        raise errors.UserError(f"cannot use '{document}': {error.strerror}") from error
    stale = before != after
    print(
        f"{document}: {'differs from' if stale else 'is'} what was measured" if check else document
    )
    return stale


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Returns a document with other tables between its markers.

    Raises:
      errors.UserError: a marker is missing.
    """
    for name, table in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        pattern = f"(?<={re.escape(begin)}).*?(?={re.escape(end)})"
        text, found = re.subn(pattern, lambda _, made=table: made, text, flags=re.DOTALL)
        if found != 1:
            raise errors.UserError(f"the document has {found} tables '{name}', expected one")
    return text


def returns_table(rows: Rows) -> str:
    """Returns what each row reached, as Markdown."""
    lines = []
    for row in rows.values():
        title = [*_named(row), row.agent, row.environment]
        known = row.measured
        if known is None:
            lines.append([*title, "not measured", *[""] * 6])
            continue
        by_seed = ", ".join(map(results.number, known.returns)) or "not kept"
        lines.append(
            [
                *title,
                _mean(row),
                results.interval(known.bootstrap_interval()),
                results.interval(known.sample.student_interval()),
                f"{known.sample.runs}: {by_seed}",
                results.number(known.random_policy),
                _steps(known.agent_steps),
                _wall_time(known),
            ]
        )
    headings = ["experiment", "runner", "agent", "environment", "return, mean ± s.e."]
    headings += ["95%, bootstrap", "95%, Student's t", "seeds: returns", "random policy"]
    return speed_tables.table([*headings, "agent steps", "wall time of a seed"], lines)


def readme_table(rows: Rows) -> str:
    """Returns what each row that was measured reached, in few words, as Markdown."""
    lines = []
    for row in rows.values():
        if (known := row.measured) is None:
            continue
        seeds = f"{known.sample.runs} seed{'' if known.sample.runs == 1 else 's'}"
        lines.append(
            [
                *_named(row),
                f"{_mean(row)} ({seeds})",
                _greedy(known),
                results.number(known.random_policy),
                _steps(known.agent_steps),
                _wall_time(known) or "not kept",
            ]
        )
    headings = ["experiment", "runner", "return, mean ± s.e.", "greedy", "random policy"]
    headings.append("agent steps")
    return speed_tables.table([*headings, "wall time"], lines)


def _named(row: results.Row) -> list[str]:
    """Returns what `scripts/reproduce.py` calls a row."""
    return [f"`{row.experiment}`", f"`{row.runner.lower()}`"]


def _mean(row: results.Row) -> str:
    most = "" if row.most is None else f", of {row.most:g}"
    sample = row.measured.sample
    error = "" if sample.runs < 2 else f" ± {_error(sample.standard_error)}"
    return f"{results.number(sample.mean)}{error}{most}"


def _greedy(known: results.Measured) -> str:
    """Returns the mean return of greedy actions, where the row's own evaluations sample."""
    returns = [run.greedy_return for run in known.runs]
    if not returns or None in returns:
        return ""
    return results.number(statistics.fmean(returns))


def _error(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _steps(number: int) -> str:
    return f"{number / 1e6:.3g}M" if number >= 1e6 else f"{number / 1e3:.3g}k"


def _wall_time(known: results.Measured) -> str:
    times = sorted({round(seconds) for seconds in known.wall_times})
    return " to ".join(f"{time}" for time in {times[0]: 0, times[-1]: 0}) + " s" if times else ""


def commands_table(rows: Rows) -> str:
    """Returns how each row came about, as Markdown."""
    lines = []
    for row in rows.values():
        known = row.measured
        told = ["", "", "", ""]
        if known is not None:
            commits = dict.fromkeys(_short(run.commit) for run in known.runs) or {"not kept": None}
            told = [known.date, ", ".join(commits), known.hardware, known.note]
        lines.append([*_named(row), f"`{row.command(0)}`", *told])
    headings = ["experiment", "runner", "command of seed 0", "date", "commit", "hardware", "note"]
    return speed_tables.table(headings, lines)


def _short(commit: str | None) -> str:
    if commit is None:
        return "not kept"
    name, _, changed = commit.partition("-")
    return f"{name[:10]}{' and changes' if changed else ''}"


def tasks_table(rows: Rows) -> str:
    """Returns aggregates over the tasks whose highest return is known, as Markdown."""
    lines = []
    for (agent, runner), chosen in _by_agent(rows).items():
        # A statistic over tasks takes as many runs of each: the first that all of them have.
        runs = min(len(row.measured.runs) for row in chosen)
        tasks = [_normalized(row)[:runs] for row in chosen]
        names = ", ".join(row.environment for row in chosen)
        lines.append([agent, runner, names, str(runs), *_estimates(tasks)])
    headings = ["agent", "runner", "tasks", "seeds of each", "mean", "median", "IQM"]
    return speed_tables.table(headings, lines)


def _estimates(tasks: Sequence[Sequence[float]]) -> list[str]:
    statistics = (aggregates.mean, aggregates.median, aggregates.interquartile_mean)
    return [_estimate(aggregates.estimate(tasks, statistic)) for statistic in statistics]


def _estimate(found: aggregates.Estimate) -> str:
    bounds = "" if found.interval is None else f" ({results.interval(found.interval)})"
    return f"{results.number(found.value)}{bounds}"


def _by_agent(rows: Rows) -> dict[tuple[str, str], list[results.Row]]:
    """Returns the rows that aggregates are taken over: those with returns by seed and a range."""
    groups = collections.defaultdict(list)
    for row in rows.values():
        if row.atari_game is None and _has_range(row):
            groups[row.agent, row.runner].append(row)
    return {key: chosen for key, chosen in groups.items() if len(chosen) > 1}


def _has_range(row: results.Row) -> bool:
    known = row.measured
    return None not in (known, row.most) and known.random_policy is not None and bool(known.runs)


def _normalized(row: results.Row) -> list[float]:
    """Returns the returns of a row, where 0 is a random policy and 1 the highest there is."""
    random = row.measured.random_policy
    return [(value - random) / (row.most - random) for value in row.measured.returns]


def atari_table(rows: Rows) -> str:
    """Returns human-normalised scores by game, as Markdown."""
    lines = []
    for row in rows.values():
        if row.atari_game is None or row.measured is None:
            continue
        random, human = atari_scores.REFERENCES[row.atari_game]
        score = row.measured.sample.mean
        lines.append(
            [
                *(row.atari_game, *_named(row), str(row.measured.sample.runs)),
                *map(results.number, (score, random, human)),
                f"{atari_scores.normalized(row.atari_game, score):.2f}",
            ]
        )
    headings = ["game", "experiment", "runner", "seeds", "score", "random", "human"]
    made = speed_tables.table([*headings, "human-normalised"], lines)
    return made + "\n" + _over_games(rows)


def _over_games(rows: Rows) -> str:
    """Returns lines on what each agent and runner reach over all games that it has played."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = collections.defaultdict(dict)
    for row in rows.values():
        if row.atari_game is not None and row.measured is not None and row.measured.runs:
            groups[row.agent, row.runner][row.atari_game] = row.measured.returns
    lines = []
    for (agent, runner), games in groups.items():
        said = f"{agent} under {runner}: {len(games)} of {len(atari_scores.REFERENCES)} games"
        if len(games) < 2:
            lines.append(f"- {said}: no median and no IQM over games.\n")
            continue
        runs = min(map(len, games.values()))
        found = atari_scores.summarize({game: kept[:runs] for game, kept in games.items()})
        values = [f"{name.replace('_', ' ')} {_estimate(e)}" for name, e in found._asdict().items()]
        lines.append(f"- {said}, {runs} seed(s) of each: {', '.join(values)}.\n")
    return "".join(lines)


TABLES: dict[str, Callable[[Rows], str]] = {
    "returns": returns_table,
    "tasks": tasks_table,
    "atari": atari_table,
    "commands": commands_table,
}


def draw(rows: Rows, path: pathlib.Path) -> None:
    """Draws the normalised return of each row with a range: seeds, mean, bootstrap interval."""
    shown = [row for row in rows.values() if _has_range(row)]
    runners = list(dict.fromkeys(row.runner for row in shown))
    figure, axis = plt.subplots(figsize=(8, 1 + 0.24 * len(shown)), layout="constrained")
    for place, row in enumerate(shown):
        color = plotting.COLORS[runners.index(row.runner)]
        scores = _normalized(row)
        found = aggregates.estimate([scores])
        if found.interval is not None:
            axis.plot(found.interval, (place, place), color=color, linewidth=5, alpha=0.3)
        axis.plot(scores, [place] * len(scores), "o", color=color, markersize=3.5, alpha=0.6)
        axis.plot(found.value, place, "|", color=color, markersize=12, markeredgewidth=2)
    names = [f"{row.agent}, {row.environment}, {row.runner}" for row in shown]
    axis.set_yticks(range(len(shown)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("return: 0 is a random policy, 1 the highest there is")
    plotting.tidy(axis)
    plotting.save(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    command_line.run(main)
