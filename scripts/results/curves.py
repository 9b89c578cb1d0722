"""Learning curves of run directories: a panel for each environment, a curve for each configuration.

`K` points of a curve.
"""

import collections
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.axes
import numpy as np
from results import groups, plotting

from podracers import errors

_LEGEND_WIDTH = 52  # characters
_LINES = ("-", "--", ":", "-.")


class Curve(NamedTuple):
    """One configuration, over its seeds."""

    label: str
    seeds: list[tuple[np.ndarray, np.ndarray]]  # agent steps and values, `[K]`, of each


class Panel(NamedTuple):
    """The configurations of one environment."""

    title: str
    curves: list[Curve]


def panels(runs: Sequence[groups.Run], metric: str) -> tuple[list[Panel], list[str]]:
    """Returns what is drawn, and one line on each seed that several runs of a configuration have.

    Raises:
      errors.UserError: a run has logged no such metric.
    """
    by_environment = collections.defaultdict(list)
    parts = [part for run in runs for part in groups.by_values(run)]
    for group in groups.by_configuration(parts):
        by_environment[group[0].environment].append(group)
    drawn, said = [], []
    for environment, configurations in by_environment.items():
        curves = []
        differences = groups.differences(configurations)
        for configuration, difference in zip(configurations, differences):
            seeds, notes = _seeds(configuration, metric)
            count = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
            what = ", ".join(f"{name} = {value}" for name, value in difference.items())
            curves.append(Curve(f"{what} ({count})" if what else count, list(seeds.values())))
            said += notes
        drawn.append(Panel(_title(environment, configurations), curves))
    return drawn, said


def _title(environment: str, configurations: Sequence[Sequence[groups.Run]]) -> str:
    """Returns the environment, with the agent and the runner where there is but one."""
    agents, runners = (
        {run.part(role) for group in configurations for run in group}
        for role in ("agent", "runner")
    )
    agent = f"{agents.pop()} on " if len(agents) == 1 else ""
    return f"{agent}{environment}" + (f", {runners.pop()}" if len(runners) == 1 else "")


def _seeds(
    runs: Sequence[groups.Run], metric: str
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Returns the curve of each seed, and what to say of those that several runs have."""
    curves, sources, said = {}, {}, {}
    for run in sorted(runs, key=lambda run: run.directory.config.stat().st_mtime_ns):
        path = str(run.directory.path)
        for seed, curve in _members(run, metric).items():
            if sources.get(seed, path) != path:
                said[seed] = (
                    f"seed {seed} of one configuration was trained in '{sources[seed]}' and in "
                    f"'{path}': that counts as one seed, and the newest, '{path}', is drawn"
                )
            curves[seed], sources[seed] = curve, path
    return dict(sorted(curves.items())), list(said.values())


def _members(run: groups.Run, metric: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns agent steps and values, both `[K]`, of each seed of a run."""
    rows = plotting.read_log(run.directory.path)
    seeds = [s for s in plotting.members(rows, metric) if run.seeds is None or s in run.seeds]
    names = {seed: f"{metric}/seed_{seed}" for seed in seeds} or {run.seed: metric}
    curves = {seed: plotting.series(rows, name) for seed, name in names.items()}
    if not all(steps.size for steps, _ in curves.values()):
        raise errors.UserError(f"'{run.directory.path}' has logged no '{metric}'")
    return {seed: (steps, values[0]) for seed, (steps, values) in curves.items()}


def draw(axis: matplotlib.axes.Axes, panel: Panel, metric: str) -> None:
    """Draws a panel: the mean of each configuration over its seeds, and their range."""
    for number, curve in enumerate(panel.curves):
        row, column = divmod(number, len(plotting.COLORS))
        style = {"color": plotting.COLORS[column], "linestyle": _LINES[row % len(_LINES)]}
        label = _wrapped(curve.label)
        plotting.draw_band(axis, plotting.band(curve.seeds), label=label, **style)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("agent steps")
    axis.xaxis.set_major_formatter(plotting.engineering())
    axis.set_ylabel(metric.replace("/", " "))
    plotting.tidy(axis)
    axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _wrapped(label: str) -> str:
    """Returns a label in lines that end between its parts."""
    parts = [part.replace(" ", "\u00a0") for part in label.split(", ")]
    return textwrap.fill(", ".join(parts), _LEGEND_WIDTH)
