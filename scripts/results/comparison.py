"""What finished runs of several runners say when they are set side by side: numbers and a picture.

`S` seeds: runs, or members of a run's population; `K` points of a curve.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.lines
import matplotlib.pyplot as plt
import numpy as np
import rich.box
import rich.table
from results import plotting

from podracers import errors
from podracers.training import run_directory

RETURN, EVALUATION = "episode/return", "evaluation/return"
SPREAD = "least to most over seeds"
_AXES = {  # what the log calls it: what the picture does
    "step": "agent steps",
    "wall_time": "wall-clock seconds, with compilation and evaluations",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """One finished run.

    Attributes:
      label: which of the runners that are compared.
      seed: of the run.
      command: that trains it.
      directory: of the run.
      rows: its log.
      summary: its `summary.json`.
    """

    label: str
    seed: int
    command: str
    directory: run_directory.RunDirectory
    rows: Sequence[dict[str, Any]]
    summary: dict[str, Any]

    def curves(self, metric: str, x: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns `x` and values, both `[K]`, of each seed."""
        where, values = plotting.series(self.rows, metric, x)
        return [(where, member) for member in values]

    def final_returns(self) -> list[float]:
        """Returns the final evaluation of each seed."""
        judged = self.summary["evaluation"]
        return list(judged.get("return_by_seed", {0: judged["return"]}).values())


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What one runner reached; means are over seeds, times in seconds, rates in agent steps/s."""

    seeds: int
    final_return: float
    standard_error: float  # of it, over seeds; NaN with one seed
    random_policy: float
    steps_per_second: list[float]  # of each run; compilation apart
    wall_time_s: float  # of a run, compilation and evaluations included
    first_dispatch_s: float  # compilation included


def read(label: str, seed: int, command: str, directory: run_directory.RunDirectory) -> Result:
    """Returns a finished run."""
    summary = directory.read_summary()
    return Result(label, seed, command, directory, plotting.read_log(directory.path), summary)


def by_label(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Returns the runs of each runner, in the order in which the runners come."""
    groups = collections.defaultdict(list)
    for result in results:
        groups[result.label].append(result)
    return dict(groups)


def numbers(runs: Sequence[Result]) -> Numbers:
    """Returns what the runs of one runner reached."""
    returns = [value for run in runs for value in run.final_returns()]
    spread = np.std(returns, ddof=1) / math.sqrt(len(returns)) if len(returns) > 1 else math.nan
    rates = [run.summary["steps_per_second"] for run in runs]

    def mean(name: str) -> float:
        return float(np.mean([run.summary[name] for run in runs]))

    return Numbers(
        seeds=len(returns),
        final_return=float(np.mean(returns)),
        standard_error=float(spread),
        random_policy=mean("random_policy_return"),
        steps_per_second=[rate for rate in rates if rate is not None],
        wall_time_s=mean("wall_time_s"),
        first_dispatch_s=mean("first_dispatch_s"),
    )


def band(runs: Sequence[Result], x: str) -> plotting.Band | None:
    """Returns the return over seeds; along `wall_time`, each step stands where it was on average.

    Seeds are averaged at equal steps in either case: at equal times, seeds that compiled for longer
    would be averaged with others that had learnt for longer.
    """
    drawn = plotting.band([curve for run in runs for curve in run.curves(RETURN, "step")])
    if drawn is None or x == "step":
        return drawn
    clocks = [plotting.series(run.rows, x) for run in runs]
    times = [np.interp(drawn.x, steps, seconds[0]) for steps, seconds in clocks]
    return drawn._replace(x=np.mean(times, axis=0))


def evaluations(runs: Sequence[Result], x: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns where all seeds were evaluated (means over seeds, `[K]`), and the mean returns."""
    points = collections.defaultdict(list)
    for run in runs:
        for steps, where, value in zip(
            run.curves(EVALUATION, "step")[0][0],
            run.curves(EVALUATION, x)[0][0],
            np.mean([values for _, values in run.curves(EVALUATION, x)], axis=0),
        ):
            points[steps].append((where, value))
    kept = [np.mean(pairs, axis=0) for pairs in points.values() if len(pairs) == len(runs)]
    where, values = np.array(kept).reshape(-1, 2).T
    return where, values


def draw(results: Sequence[Result], title: str, path: pathlib.Path) -> None:
    """Draws return against agent steps and against seconds, and the throughput, as a PNG."""
    groups = by_label(results)
    figure, axes = plt.subplots(
        1,
        3,
        figsize=(13.5, 4.4),
        width_ratios=(1.0, 1.0, 0.3 + 0.17 * len(groups)),
        layout="constrained",
    )
    for axis, x in zip(axes, _AXES):
        _draw_returns(axis, groups, x)
    axes[0].set_ylabel("return per episode")
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    _draw_throughput(axes[2], groups)
    figure.suptitle(title, fontsize=12)
    figure.legend(**_legend(groups), loc="outside lower center", ncols=6, frameon=False)
    plotting.save(figure, path)
    plt.close(figure)


def _colors(groups: Iterable[str]) -> dict[str, str]:
    return {label: plotting.COLORS[n % len(plotting.COLORS)] for n, label in enumerate(groups)}


def _draw_returns(axis: matplotlib.axes.Axes, groups: dict[str, list[Result]], x: str) -> None:
    for label, color in _colors(groups).items():
        runs = groups[label]
        drawn = band(runs, x)
        if drawn is not None:
            plotting.draw_band(axis, drawn, color=color)
        where, values = evaluations(runs, x)
        axis.plot(where, values, "o", color=color, markersize=5, markeredgecolor="white")
    random = np.mean([numbers(runs).random_policy for runs in groups.values()])
    axis.axhline(random, color=plotting.GREY, linestyle="--", linewidth=1.2)
    axis.set_xlim(left=0)
    axis.set_xlabel(_AXES[x])
    axis.xaxis.set_major_formatter(plotting.engineering())
    plotting.tidy(axis)


def _draw_throughput(axis: matplotlib.axes.Axes, groups: dict[str, list[Result]]) -> None:
    for label, color in _colors(groups).items():
        rates = numbers(groups[label]).steps_per_second
        if not rates:
            continue
        mean = np.mean(rates)
        spread = [[mean - min(rates)], [max(rates) - mean]]
        axis.bar(label, mean, width=0.6, color=color, yerr=spread, capsize=4, ecolor="#444444")
        axis.annotate(
            f"{mean:,.0f}",
            (label, max(rates)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axis.margins(x=0.2, y=0.12)
    axis.set_ylabel("agent steps/s, compilation apart")
    axis.yaxis.set_major_formatter(plotting.engineering())
    plotting.tidy(axis)
    axis.grid(axis="x", visible=False)


def _legend(groups: dict[str, list[Result]]) -> dict[str, list]:
    line, patch = matplotlib.lines.Line2D, plt.Rectangle
    entries = {
        label: line([], [], color=color, linewidth=2.5) for label, color in _colors(groups).items()
    }
    if any(numbers(runs).seeds > 1 for runs in groups.values()):
        entries[SPREAD] = patch((0, 0), 1, 1, color=plotting.GREY, alpha=0.3, linewidth=0)
    if any(evaluations(runs, "step")[0].size for runs in groups.values()):
        entries["evaluation"] = line([], [], marker="o", linestyle="", color="#555555")
    entries["random policy"] = line([], [], color=plotting.GREY, linestyle="--", linewidth=1.2)
    return {"handles": list(entries.values()), "labels": list(entries)}


def table(results: Sequence[Result]) -> rich.table.Table:
    """Returns what each runner reached, for the terminal."""
    groups = by_label(results)
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, title_justify="left")
    made.add_column("runner", no_wrap=True)
    most = max(numbers(runs).seeds for runs in groups.values())
    over = f"mean ± s.e. over {most} seeds" if most > 1 else "one seed"
    for heading in (
        f"final return\n{over}",
        "random\npolicy",
        "agent\nsteps/s",
        "wall\ntime",
        "first\ndispatch",
    ):
        made.add_column(heading, justify="right")
    for label, runs in groups.items():
        row = numbers(runs)
        error = "" if math.isnan(row.standard_error) else f" ± {row.standard_error:.2f}"
        rates = row.steps_per_second
        made.add_row(
            label,
            f"{row.final_return:.2f}{error}",
            f"{row.random_policy:.2f}",
            f"{np.mean(rates):,.0f}" if rates else "-",
            f"{row.wall_time_s:.0f} s",
            f"{row.first_dispatch_s:.1f} s",
        )
    return made


def write(results: Sequence[Result], options: dict[str, Any], path: pathlib.Path) -> None:
    """Writes all numbers as JSON; null stands for what is not known."""
    runners = {}
    for label, runs in by_label(results).items():
        values = dataclasses.asdict(numbers(runs))
        error = values["standard_error"]
        runners[label] = values | {"standard_error": None if math.isnan(error) else error}
    provenance = ("commit", "versions", "device", "platform", "host_cores")
    values = {
        "options": options,
        "spread": SPREAD,
        # Of each run there is more in its summary, should runs differ in this.
        **{name: results[0].summary[name] for name in provenance},
        "runners": runners,
        "runs": [
            {
                "runner": run.label,
                "seed": run.seed,
                "command": run.command,
                "run_dir": run.directory.path.as_posix(),
                "curves": _columns(run),
                "summary": run.summary,
            }
            for run in results
        ],
    }
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise errors.RunFailure(f"cannot write '{path}': {error.strerror}") from error


def _columns(run: Result) -> dict[str, list[float | None]]:
    """Returns the log's columns that are drawn; null where a line has none."""
    names = ["step", "wall_time", "steps_per_second"]
    drawn = {name for row in run.rows for name in row if name.startswith((RETURN, EVALUATION))}
    return {name: [row.get(name) for row in run.rows] for name in [*names, *sorted(drawn)]}
