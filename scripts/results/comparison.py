"""Finished runs of several runners side by side: numbers and a picture.

`S` seeds: runs, or members of a run's population; `K` points of a curve.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.lines
import matplotlib.pyplot as plt
import numpy as np
import rich.box
import rich.table
from results import aggregates, markdown, plotting, training_process

RETURN, EVALUATION = "episode/return", "evaluation/return"
_AXES = {
    "step": "agent steps",
    "wall_time": "wall-clock seconds, with compilation and evaluations",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """One finished run."""

    run: training_process.Run
    rows: Sequence[dict[str, Any]]  # of its log
    summary: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Results of one runner; means are over seeds, times in seconds, rates in agent steps/s."""

    seeds: int
    final_return: float
    standard_error: float | None  # over seeds; None with one seed
    random_policy: float
    steps_per_second: list[float]  # of each run, without compilation
    wall_time_s: float  # of a run, with compilation and evaluations
    first_dispatch_s: float  # with compilation


def read(run: training_process.Run) -> Result:
    """Returns a finished run."""
    rows = plotting.read_log(run.directory.path)
    return Result(run, rows, run.directory.read_summary())


def numbers(results: Sequence[Result]) -> Numbers:
    """Returns the numbers of one runner."""
    found = [each.summary["evaluation"] for each in results]
    returns = [x for e in found for x in e.get("return_by_seed", {"": e["return"]}).values()]
    sample = aggregates.Sample.of(returns)
    rates = [each.summary["steps_per_second"] for each in results]
    means = [
        float(np.mean([each.summary[name] for each in results]))
        for name in ("random_policy_return", "wall_time_s", "first_dispatch_s")
    ]
    return Numbers(
        seeds=sample.runs,
        final_return=sample.mean,
        standard_error=None if math.isnan(sample.standard_error) else sample.standard_error,
        random_policy=means[0],
        steps_per_second=[rate for rate in rates if rate is not None],
        wall_time_s=means[1],
        first_dispatch_s=means[2],
    )


def band(results: Sequence[Result], x: str) -> plotting.Band | None:
    """Returns the return over seeds, averaged at equal steps.

    Along `wall_time`, each step is at its mean time: at equal times, seeds that compiled for longer
    would be averaged with others that had learnt for longer.
    """
    curves = [plotting.series(each.rows, RETURN) for each in results]
    drawn = plotting.band([(steps, seed) for steps, values in curves for seed in values])
    if drawn is None or x == "step":
        return drawn
    clocks = [plotting.series(each.rows, x) for each in results]
    times = [np.interp(drawn.x, steps, seconds[0]) for steps, seconds in clocks]
    return drawn._replace(x=np.mean(times, axis=0))


def evaluations(results: Sequence[Result], x: str) -> np.ndarray:
    """Returns places and mean returns, `[2, K]`, of the evaluations that all seeds have."""
    points = collections.defaultdict(list)
    for each in results:
        steps, _ = plotting.series(each.rows, EVALUATION)
        places, values = plotting.series(each.rows, EVALUATION, x)
        for step, place, value in zip(steps, places, values.mean(0)):
            points[step].append((place, value))
    kept = [np.mean(pairs, axis=0) for pairs in points.values() if len(pairs) == len(results)]
    return np.array(kept).reshape(-1, 2).T


def draw(runners: Mapping[str, Sequence[Result]], title: str, path: pathlib.Path) -> None:
    """Draws return against agent steps and against seconds, and the throughput, as a PNG."""
    colors, found = plotting.colors(runners), {k: numbers(own) for k, own in runners.items()}
    widths = (1.0, 1.0, 0.3 + 0.17 * len(runners))
    figure, axes = plt.subplots(
        1, 3, figsize=(13.5, 4.4), width_ratios=widths, layout="constrained"
    )
    for axis, x in zip(axes, _AXES):
        for label, own in runners.items():
            if (drawn := band(own, x)) is not None:
                plotting.draw_band(axis, drawn, color=colors[label])
            points = evaluations(own, x)
            axis.plot(*points, "o", color=colors[label], markersize=5, markeredgecolor="white")
        random = np.mean([each.random_policy for each in found.values()])
        axis.axhline(random, color=plotting.GREY, linestyle="--", linewidth=1.2)
        axis.set_xlim(left=0)
        plotting.tidy(axis, _AXES[x])
    axes[0].set_ylabel("return per episode")
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    for label, each in found.items():
        if rates := each.steps_per_second:
            mean = np.mean(rates)
            spread = [[mean - min(rates)], [max(rates) - mean]]
            axes[2].bar(label, mean, yerr=spread, width=0.6, color=colors[label], capsize=4)
            place = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
            axes[2].annotate(f"{mean:,.0f}", (label, max(rates)), **place)
    axes[2].margins(x=0.2, y=0.12)
    axes[2].set_ylabel("agent steps/s, without compilation")
    plotting.tidy(axes[2])
    line, grey = matplotlib.lines.Line2D, plotting.GREY
    entries = {name: line([], [], color=color, linewidth=2.5) for name, color in colors.items()}
    entries["range over seeds"] = plt.Rectangle((0, 0), 1, 1, color=grey, alpha=0.3, linewidth=0)
    entries["evaluation"] = line([], [], marker="o", linestyle="", color="#555555")
    entries["random policy"] = line([], [], color=grey, linestyle="--", linewidth=1.2)
    labels = {"handles": list(entries.values()), "labels": list(entries)}
    figure.legend(**labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(title, fontsize=12)
    plotting.save(figure, path)


def table(runners: Mapping[str, Sequence[Result]]) -> rich.table.Table:
    """Returns the numbers of each runner, for the terminal."""
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, title_justify="left")
    made.add_column("runner", no_wrap=True)
    headings = ("final return\nmean ± s.e.", "seeds", "random\npolicy", "agent\nsteps/s")
    for heading in (*headings, "wall\ntime", "first\ndispatch"):
        made.add_column(heading, justify="right")
    for label, own in runners.items():
        row = numbers(own)
        error = "" if row.standard_error is None else f" ± {row.standard_error:.2f}"
        rates = row.steps_per_second
        made.add_row(
            label,
            f"{row.final_return:.2f}{error}",
            str(row.seeds),
            f"{row.random_policy:.2f}",
            f"{np.mean(rates):,.0f}" if rates else "-",
            f"{row.wall_time_s:.0f} s",
            f"{row.first_dispatch_s:.1f} s",
        )
    return made


def write(
    runners: Mapping[str, Sequence[Result]], options: Mapping[str, Any], path: pathlib.Path
) -> None:
    """Writes all numbers and curves as JSON; null means unknown."""
    results = [each for own in runners.values() for each in own]
    provenance = ("commit", "versions", "device", "platform", "host_cores")
    runs = []
    for each in results:
        names = {name for row in each.rows for name in row if name.startswith((RETURN, EVALUATION))}
        names = ["step", "wall_time", "steps_per_second", *sorted(names)]
        columns = {name: [row.get(name) for row in each.rows] for name in names}
        run = {"runner": each.run.label, "seed": each.run.seed, "command": each.run.command}
        run["run_dir"] = each.run.directory.path.as_posix()
        runs.append(run | {"curves": columns, "summary": each.summary})
    values = {
        "options": dict(options),
        **{name: results[0].summary[name] for name in provenance},  # see each run's summary
        "runners": {label: dataclasses.asdict(numbers(own)) for label, own in runners.items()},
        "runs": runs,
    }
    markdown.write(path, json.dumps(values, indent=1) + "\n")
