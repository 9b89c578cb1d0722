"""Learning curves of run directories: a panel for each environment, a curve for each configuration.

Runs are grouped by the parameters in their `config.gin`, not by the names of their folders.

`K` points of a curve.
"""

import collections
import dataclasses
import pathlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib.axes
import numpy as np
from results import plotting

from podracers import errors
from podracers.training import config, loggers, run_directory

_ROLES = ("Experiment.agent", "Experiment.environment", "Experiment.runner")
# Parameters without influence on learning (docs/architecture.md, "Determinism"). A member of a
# population equals the run of its seed.
_NOT_LEARNT = {
    "Experiment": "seed log_period evaluation_period evaluation_episodes "
    "greedy_evaluation_episodes evaluation_max_steps checkpoint_period keep_latest keep_best "
    "profile_update",
    "runner": "population population_values reset_batch num_threads timeout",
}
IGNORED = {f"{part}.{name}" for part, names in _NOT_LEARNT.items() for name in names.split()}
_NAMES = ("name", "task_id", "env_id")  # parameters by which adaptors choose an environment
_LEGEND_WIDTH = 52  # characters
_LINES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One seed: a run directory, or a member of its population.

    Parameters have names such as `PPO.gamma`; those of either runner, `runner.num_envs`. Values are
    numbers, or texts such as `PPO` of a part.
    """

    directory: run_directory.RunDirectory
    seed: int
    given: Sequence[str]  # names of bound parameters
    values: dict[str, Any]  # all known parameters, with defaults

    @property
    def environment(self) -> str:
        """Name of the environment inside its wrappers."""
        part = self.values["Experiment.environment"]
        while f"{part}.environment" in self.values:
            part = self.values[f"{part}.environment"].removesuffix("()")
        names = (self.values.get(f"{part}.{name}") for name in _NAMES)
        return next(filter(None, names), part)

    def has(self, part: str) -> bool:
        """Returns whether a part, such as `PPO`, belongs to the run."""
        return part == "Experiment" or not {part, f"{part}()"}.isdisjoint(self.values.values())


class Panel(NamedTuple):
    """The configurations of one environment."""

    title: str
    curves: dict[str, list[np.ndarray]]  # by label: the curve of each seed, `[K, 3]`


def read(path: str) -> list[Run]:
    """Returns the seeds of a run by its directory.

    Raises:
      errors.UserError: there is no run, or its configuration cannot be read.
    """
    directory = run_directory.RunDirectory(path)
    directory.require()
    given, used = _parameters(directory.config), directory.operative_config
    for role in _ROLES:
        if role not in given:
            raise errors.UserError(f"'{directory.config}' has no {role}")
    values = (_parameters(used) if used.is_file() else {}) | given
    agent, runner = str(values["Experiment.agent"]), str(values["Experiment.runner"])
    options = values.get(f"{runner}.population_values") or {}
    runs = []
    for index in range(values.get(f"{runner}.population") or 1):
        own = {
            f"{agent}.{str(name).rpartition('.')[2]}": x[index % len(x)]
            for name, x in options.items()
        }
        plain = {
            name.replace(f"{runner}.", "runner.", 1): x if isinstance(x, int | float) else str(x)
            for name, x in (values | own).items()
        }
        names = [name.replace(f"{runner}.", "runner.", 1) for name in given | own]
        runs.append(Run(directory, values.get("Experiment.seed", 0) + index, names, plain))
    return runs


def _parameters(path: pathlib.Path) -> dict[str, Any]:
    """Returns the parameters of a .gin file by class, such as `PPO.gamma`."""
    try:
        return config.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"cannot read '{path}': {error}") from error


def panels(runs: Iterable[Run], metric: str) -> list[Panel]:
    """Returns the panels; of several runs of a configuration and a seed, the newest is drawn.

    Raises:
      errors.UserError: a run has not logged the metric.
    """
    by_environment = collections.defaultdict(list)
    for run in runs:
        by_environment[run.environment].append(run)
    drawn = []
    for environment, own in by_environment.items():
        curves = {}
        for difference, group in _configurations(own):
            newest = sorted(group, key=lambda run: run.directory.config.stat().st_mtime_ns)
            seeds = {run.seed: _curve(run, metric) for run in newest}
            count = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
            label = ", ".join(f"{name} = {value}" for name, value in difference.items())
            curves[f"{label} ({count})" if label else count] = list(seeds.values())
        agents, _, runners = ({run.values[role] for run in own} for role in _ROLES)
        title = f"{agents.pop()} on {environment}" if len(agents) == 1 else environment
        title += f", {runners.pop()}" if len(runners) == 1 else ""
        drawn.append(Panel(title, curves))
    return drawn


def _curve(run: Run, metric: str) -> np.ndarray:
    log = run.directory.metrics
    found = plotting.curves(loggers.read_rows(log) if log.exists() else [], metric)
    curve = found.get(run.seed, found.get(None))
    if curve is None or not len(curve):
        raise errors.UserError(f"'{run.directory.path}' has logged no '{metric}'")
    return curve


def _configurations(runs: Sequence[Run]) -> list[tuple[dict[str, str], list[Run]]]:
    """Returns the runs of each configuration, with the parameters that differ between these.

    A parameter of a part is compared between the configurations that have the part.
    """
    given = dict.fromkeys([*_ROLES, *(name for run in runs for name in run.given)])
    names = [name for name in given if name not in IGNORED]
    groups = collections.defaultdict(list)
    for run in runs:
        groups[tuple(run.values.get(name) for name in names)].append(run)
    found = [({}, group) for group in groups.values()]
    for name in names:
        part, _, short = name.rpartition(".")
        # A runner's parameters have one name under both; a run has those that its runner has.
        runners = {run.values[_ROLES[2]] for run in runs if name in run.values}
        own = [
            (difference, run)
            for difference, (run, *_) in found
            if (run.values[_ROLES[2]] in runners if part == "runner" else run.has(part))
        ]
        if len({run.values.get(name) for _, run in own}) > 1:
            for difference, run in own:
                value = run.values.get(name, "default")
                text = f"{value:g}" if isinstance(value, float) else str(value)
                difference[name if short in difference else short] = text
    return found


def draw(axis: matplotlib.axes.Axes, panel: Panel, metric: str, x: int = 0) -> None:
    """Draws a panel: the mean of each configuration over its seeds, and their range.

    Args:
      axis: of matplotlib.
      panel: the curves.
      metric: name of the vertical axis.
      x: column of the horizontal axis: 0 for agent steps, 1 for seconds.
    """
    for number, (label, seeds) in enumerate(panel.curves.items()):
        row, column = divmod(number, len(plotting.COLORS))
        style = {"color": plotting.COLORS[column], "linestyle": _LINES[row % len(_LINES)]}
        unbroken = ", ".join(part.replace(" ", "\u00a0") for part in label.split(", "))
        wrapped = textwrap.fill(unbroken, _LEGEND_WIDTH)
        plotting.draw_band(axis, plotting.band(seeds, x), label=wrapped, **style)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel(metric.replace("/", " "))
    plotting.tidy(axis, ("agent steps", "seconds, with compilation")[x])
    axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
