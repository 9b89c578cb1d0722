"""Learning curves of run directories: a panel for each environment, a curve for each configuration.

Runs are grouped by the parameters in their `config.gin`, not by the names of their folders.

`K` points of a curve.
"""

import collections
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib.axes
import numpy as np
from results import plotting

from podracers import errors
from podracers.training import config_values, run_directory

_ROOT = "experiment.Experiment"
_ROLES = ("agent", "environment", "runner")
_RUNNER = f"{_ROOT}.runner"
_CHOICES = tuple(f"{_ROOT}.{role}" for role in _ROLES)
# Parameters without influence on learning (docs/architecture.md, "Determinism"). A member of a
# population equals the run of its seed.
_NOT_LEARNT = {
    _ROOT: "seed log_period evaluation_period evaluation_episodes greedy_evaluation_episodes "
    "evaluation_max_steps checkpoint_period keep_latest keep_best profile_update",
    "runner": "population population_values reset_batch num_threads timeout",
}
IGNORED = {f"{part}.{name}" for part, names in _NOT_LEARNT.items() for name in names.split()}
_NAMES = ("name", "task_id", "env_id")  # parameters by which adaptors choose an environment
_LEGEND_WIDTH = 52  # characters
_LINES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One seed: a run directory, or a member of its population.

    Parameters have names such as `ppo.PPO.gamma`; those of either runner, `runner.num_envs`.
    """

    directory: run_directory.RunDirectory
    seed: int
    given: dict[str, Any]  # bound parameters, macros replaced by their values
    values: dict[str, Any]  # all known parameters, with defaults

    def has(self, name: str) -> bool:
        """Returns whether a parameter belongs to a part of the run."""
        part = name.rpartition(".")[0]
        references = (x for x in self.values.values() if isinstance(x, config_values.Reference))
        return name in self.values or any(each.name == part for each in references)

    @property
    def environment(self) -> str:
        """Name of the environment inside its wrappers."""
        selector = self.values[f"{_ROOT}.environment"].name
        while isinstance(
            inner := self.values.get(f"{selector}.environment"), config_values.Reference
        ):
            selector = inner.name
        names = [self.values.get(f"{selector}.{name}") for name in _NAMES]
        return next((x for x in names if isinstance(x, str)), selector.rpartition(".")[2])


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
    given, used = _parameters(directory.config), {}
    if directory.operative_config.is_file():
        used = _parameters(directory.operative_config)
    for name in _CHOICES:
        if not isinstance(given.get(name), config_values.Reference):
            raise errors.UserError(f"'{directory.config}' has no {name.partition('.')[2]}")
    agent, runner = (given[f"{_ROOT}.{role}"].name for role in ("agent", "runner"))

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        pairs = values.items()
        return {re.sub(rf"^{re.escape(runner)}\.", "runner.", name): x for name, x in pairs}

    given, values = renamed(given), renamed(used | given)
    options = values.get("runner.population_values") or {}
    runs = []
    for index in range(values.get("runner.population") or 1):
        own = {
            f"{agent}.{str(name).rpartition('.')[2]}": each[index % len(each)]
            for name, each in options.items()
        }
        seed = values.get(f"{_ROOT}.seed", 0) + index
        runs.append(Run(directory, seed, given | own, values | own))
    return runs


def _parameters(path: Any) -> dict[str, Any]:
    try:
        values = config_values.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"cannot read '{path}': {error}") from error
    macros = {name: value for name, value in values.items() if "." not in name}
    parameters = {name: value for name, value in values.items() if "." in name}
    return {name: config_values.resolve(value, macros) for name, value in parameters.items()}


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
        agents, runners = (
            {str(run.values[f"{_ROOT}.{role}"]) for run in own} for role in ("agent", "runner")
        )
        title = f"{agents.pop()} on {environment}" if len(agents) == 1 else environment
        title += f", {runners.pop()}" if len(runners) == 1 else ""
        drawn.append(Panel(title, curves))
    return drawn


def _curve(run: Run, metric: str) -> np.ndarray:
    found = plotting.curves(plotting.read_log(run.directory.path), metric)
    curve = found.get(run.seed, found.get(None))
    if curve is None or not len(curve):
        raise errors.UserError(f"'{run.directory.path}' has logged no '{metric}'")
    return curve


def _configurations(runs: Sequence[Run]) -> list[tuple[dict[str, str], list[Run]]]:
    """Returns the runs of each configuration, with the parameters that differ between these.

    A parameter of a part is compared between the configurations that have the part.
    """
    given = dict.fromkeys([*_CHOICES, *(name for run in runs for name in run.given)])
    names = [name for name in given if name not in IGNORED]
    groups = collections.defaultdict(list)
    for run in runs:
        groups[tuple(_normal(run.values.get(name)) for name in names)].append(run)
    found = [({}, group) for group in groups.values()]
    for name in names:
        runners = {str(run.values[_RUNNER]) for run in runs if name in run.values}
        own = [
            (difference, group[0])
            for difference, group in found
            if group[0].has(name)
            or (name.startswith("runner.") and str(group[0].values[_RUNNER]) in runners)
        ]
        if len({_normal(run.values.get(name)) for _, run in own}) > 1:
            short = name.rpartition(".")[2]
            for difference, run in own:
                value = run.values.get(name, "default")
                text = f"{value:g}" if isinstance(value, float) else str(value)
                difference[name if short in difference else short] = text
    return found


def _normal(value: Any) -> str:
    """Returns equal texts for equal settings, such as 1e5 and 100000, a list and a tuple."""
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, dict):
        return repr(sorted((_normal(key), _normal(each)) for key, each in value.items()))
    if type(value) in (list, tuple):
        return repr([_normal(each) for each in value])
    return repr(tuple(value)) if isinstance(value, config_values.Reference) else repr(value)


def draw(axis: matplotlib.axes.Axes, panel: Panel, metric: str) -> None:
    """Draws a panel: the mean of each configuration over its seeds, and their range."""
    for number, (label, seeds) in enumerate(panel.curves.items()):
        row, column = divmod(number, len(plotting.COLORS))
        style = {"color": plotting.COLORS[column], "linestyle": _LINES[row % len(_LINES)]}
        unbroken = ", ".join(part.replace(" ", "\u00a0") for part in label.split(", "))
        wrapped = textwrap.fill(unbroken, _LEGEND_WIDTH)
        plotting.draw_band(axis, plotting.band(seeds), label=wrapped, **style)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel(metric.replace("/", " "))
    plotting.tidy(axis, "agent steps")
    axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
