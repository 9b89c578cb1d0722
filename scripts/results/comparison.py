"""Finished runs of several runners side by side: numbers and a picture.

Seeds are runs, or members of a run's population.
"""

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
_AXES = ("agent steps", "wall-clock seconds, with compilation and evaluations")


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

    def mean(name: str) -> float:
        return float(np.mean([each.summary[name] for each in results]))

    return Numbers(
        seeds=sample.runs,
        final_return=sample.mean,
        standard_error=None if math.isnan(sample.standard_error) else sample.standard_error,
        random_policy=mean("random_policy_return"),
        steps_per_second=[rate for rate in rates if rate is not None],
        wall_time_s=mean("wall_time_s"),
        first_dispatch_s=mean("first_dispatch_s"),
    )


def draw(runners: Mapping[str, Sequence[Result]], title: str, path: pathlib.Path) -> None:
    """Draws return against agent steps and against seconds, and the throughput, as a PNG."""
    colors, found = plotting.colors(runners), {k: numbers(own) for k, own in runners.items()}
    widths = (1.0, 1.0, 0.3 + 0.17 * len(runners))
    figure, axes = plt.subplots(
        1, 3, figsize=(13.5, 4.4), width_ratios=widths, layout="constrained"
    )
    for x, axis in enumerate(axes[: len(_AXES)]):
        for label, own in runners.items():
            returns, evaluations = (
                [curve for each in own for curve in plotting.curves(each.rows, metric).values()]
                for metric in (RETURN, EVALUATION)
            )
            if (drawn := plotting.band(returns, x)) is not None:
                plotting.draw_band(axis, drawn, color=colors[label])
            for curve in evaluations:
                axis.plot(curve[:, x], curve[:, 2], "o", color=colors[label], markersize=3)
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
    entries["evaluation of a seed"] = line([], [], marker="o", linestyle="", color="#555555")
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
