"""What finished runs of several runners say when they are set side by side: numbers and a picture.

`S` seeds: runs, or members of a run's population; `K` points of a curve.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.lines
import matplotlib.pyplot as plt
import numpy as np
import rich.box
import rich.table
from results import aggregates, plotting

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
    """One finished run."""

    label: str  # which of the runners that are compared
    seed: int
    command: str  # that trains it
    directory: run_directory.RunDirectory
    rows: Sequence[dict[str, Any]]  # its log
    summary: dict[str, Any]  # its `summary.json`


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


def numbers(runs: Sequence[Result]) -> Numbers:
    """Returns what the runs of one runner reached."""
    judged = [run.summary["evaluation"] for run in runs]
    returns = [
        value
        for each in judged
        for value in each.get("return_by_seed", {0: each["return"]}).values()
    ]
    sample = aggregates.sample(returns)
    rates = [run.summary["steps_per_second"] for run in runs]
    random, wall_time, first_dispatch = (
        float(np.mean([run.summary[name] for run in runs]))
        for name in ("random_policy_return", "wall_time_s", "first_dispatch_s")
    )
    return Numbers(
        *(sample.runs, sample.mean, sample.standard_error, random),
        *([rate for rate in rates if rate is not None], wall_time, first_dispatch),
    )


def band(runs: Sequence[Result], x: str) -> plotting.Band | None:
    """Returns the return over seeds; along `wall_time`, each step stands where it was on average.

    Seeds are averaged at equal steps in either case: at equal times, seeds that compiled for longer
    would be averaged with others that had learnt for longer.
    """
    curves = [plotting.series(run.rows, RETURN) for run in runs]
    drawn = plotting.band([(steps, seed) for steps, values in curves for seed in values])
    if drawn is None or x == "step":
        return drawn
    clocks = [plotting.series(run.rows, x) for run in runs]
    times = [np.interp(drawn.x, steps, seconds[0]) for steps, seconds in clocks]
    return drawn._replace(x=np.mean(times, axis=0))


def evaluations(runs: Sequence[Result], x: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns where all seeds were evaluated (means over seeds, `[K]`), and the mean returns."""
    points = collections.defaultdict(list)
    for run in runs:
        steps, _ = plotting.series(run.rows, EVALUATION)
        where, values = plotting.series(run.rows, EVALUATION, x)
        for step, place, value in zip(steps, where, values.mean(0)):
            points[step].append((place, value))
    kept = [np.mean(pairs, axis=0) for pairs in points.values() if len(pairs) == len(runs)]
    where, values = np.array(kept).reshape(-1, 2).T
    return where, values


class Comparison:
    """Runs side by side, in the order in which their runners come."""

    def __init__(self, results: Iterable[Result]):
        self._runs: dict[str, list[Result]] = collections.defaultdict(list)
        for result in results:
            self._runs[result.label].append(result)
        self._numbers = {label: numbers(runs) for label, runs in self._runs.items()}
        self._colors = plotting.colors(self._runs)

    def draw(self, title: str, path: pathlib.Path) -> None:
        """Draws return against agent steps and against seconds, and the throughput, as a PNG."""
        widths = (1.0, 1.0, 0.3 + 0.17 * len(self._runs))
        figure, axes = plt.subplots(
            1, 3, figsize=(13.5, 4.4), width_ratios=widths, layout="constrained"
        )
        for axis, x in zip(axes, _AXES):
            self._draw_returns(axis, x)
        axes[0].set_ylabel("return per episode")
        axes[1].sharey(axes[0])
        axes[1].tick_params(labelleft=False)
        self._draw_throughput(axes[2])
        figure.suptitle(title, fontsize=12)
        entries = self._legend()
        labels = {"handles": list(entries.values()), "labels": list(entries)}
        figure.legend(**labels, loc="outside lower center", ncols=6, frameon=False)
        plotting.save(figure, path)

    def _draw_returns(self, axis: matplotlib.axes.Axes, x: str) -> None:
        for label, runs in self._runs.items():
            color = self._colors[label]
            drawn = band(runs, x)
            if drawn is not None:
                plotting.draw_band(axis, drawn, color=color)
            where, values = evaluations(runs, x)
            axis.plot(where, values, "o", color=color, markersize=5, markeredgecolor="white")
        random = np.mean([each.random_policy for each in self._numbers.values()])
        axis.axhline(random, color=plotting.GREY, linestyle="--", linewidth=1.2)
        axis.set_xlim(left=0)
        axis.set_xlabel(_AXES[x])
        axis.xaxis.set_major_formatter(plotting.engineering())
        plotting.tidy(axis)

    def _draw_throughput(self, axis: matplotlib.axes.Axes) -> None:
        for label, color in self._colors.items():
            rates = self._numbers[label].steps_per_second
            if not rates:
                continue
            mean = np.mean(rates)
            spread = [[mean - min(rates)], [max(rates) - mean]]
            style = {"width": 0.6, "color": color, "capsize": 4, "ecolor": "#444444"}
            axis.bar(label, mean, yerr=spread, **style)
            place = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{mean:,.0f}", (label, max(rates)), **place)
        axis.margins(x=0.2, y=0.12)
        axis.set_ylabel("agent steps/s, compilation apart")
        axis.yaxis.set_major_formatter(plotting.engineering())
        plotting.tidy(axis)
        axis.grid(axis="x", visible=False)

    def _legend(self) -> dict[str, Any]:
        line, grey = matplotlib.lines.Line2D, plotting.GREY
        entries = {n: line([], [], color=c, linewidth=2.5) for n, c in self._colors.items()}
        if any(each.seeds > 1 for each in self._numbers.values()):
            entries[SPREAD] = plt.Rectangle((0, 0), 1, 1, color=grey, alpha=0.3, linewidth=0)
        if any(evaluations(runs, "step")[0].size for runs in self._runs.values()):
            entries["evaluation"] = line([], [], marker="o", linestyle="", color="#555555")
        entries["random policy"] = line([], [], color=grey, linestyle="--", linewidth=1.2)
        return entries

    def table(self) -> rich.table.Table:
        """Returns what each runner reached, for the terminal."""
        made = rich.table.Table(box=rich.box.SIMPLE_HEAD, title_justify="left")
        made.add_column("runner", no_wrap=True)
        most = max(each.seeds for each in self._numbers.values())
        over = f"mean ± s.e. over {most} seeds" if most > 1 else "one seed"
        headings = (f"final return\n{over}", "random\npolicy", "agent\nsteps/s", "wall\ntime")
        for heading in (*headings, "first\ndispatch"):
            made.add_column(heading, justify="right")
        for label, row in self._numbers.items():
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

    def write(self, options: Mapping[str, Any], path: pathlib.Path) -> None:
        """Writes all numbers as JSON; null stands for what is not known."""
        runners = {label: dataclasses.asdict(row) for label, row in self._numbers.items()}
        for row in runners.values():
            row["standard_error"] = (
                None if math.isnan(row["standard_error"]) else row["standard_error"]
            )
        runs = [run for own in self._runs.values() for run in own]
        provenance = ("commit", "versions", "device", "platform", "host_cores")
        values = {
            "options": dict(options),
            "spread": SPREAD,
            # Of each run there is more in its summary, should runs differ in this.
            **{name: runs[0].summary[name] for name in provenance},
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
                for run in runs
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
