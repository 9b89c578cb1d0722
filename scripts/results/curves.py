"""Learning curves of run directories: a panel for each environment, a curve for each configuration.

Runs are grouped by the parameters in their `config.gin`, not by the names of their folders.

`K` points of a curve.
"""

import collections
import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.axes
import numpy as np
from results import plotting

from podracers import errors
from podracers.training import config_values, run_directory

_ROOT = "experiment.Experiment"
_ROLES = ("agent", "environment", "runner")
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
    """One run directory, or some members of its population.

    Parameters have names such as `ppo.PPO.gamma`; those of either runner, `runner.num_envs`.
    """

    directory: run_directory.RunDirectory
    given: dict[str, Any]  # bound parameters, macros replaced by their values
    used: dict[str, Any]  # parameters of `operative_config.gin`, with defaults
    seeds: frozenset[int] | None = None  # of these members; None for all

    def value(self, name: str) -> Any:
        """Returns a parameter; None if it is unknown."""
        return self.given.get(name, self.used.get(name))

    def knows(self, name: str) -> bool:
        """Returns whether the value of a parameter is known."""
        return name in self.given or name in self.used

    def part(self, role: str) -> str:
        """Returns the class of the agent, the environment or the runner."""
        return str(self.value(f"{_ROOT}.{role}"))

    def has(self, part: str) -> bool:
        """Returns whether a class is part of the run."""
        values = (*self.given.values(), *self.used.values())
        return any(isinstance(x, config_values.Reference) and x.name == part for x in values)

    @property
    def environment(self) -> str:
        """Name of the environment inside its wrappers."""
        selector = self.value(f"{_ROOT}.environment").name
        while isinstance(inner := self.value(f"{selector}.environment"), config_values.Reference):
            selector = inner.name
        names = [self.value(f"{selector}.{name}") for name in _NAMES]
        return next((x for x in names if isinstance(x, str)), selector.rpartition(".")[2])


class Panel(NamedTuple):
    """The configurations of one environment."""

    title: str
    # By label: agent steps and values, both `[K]`, of each seed.
    curves: dict[str, list[tuple[np.ndarray, np.ndarray]]]


def read(path: str) -> Run:
    """Returns a run by its directory.

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
    runner = f"{given[f'{_ROOT}.runner'].name}."

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        def name_of(name: str) -> str:
            return f"runner.{name.removeprefix(runner)}" if name.startswith(runner) else name

        return {name_of(name): value for name, value in values.items()}

    return Run(directory, renamed(given), renamed(used))


def _parameters(path: Any) -> dict[str, Any]:
    try:
        values = config_values.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"cannot read '{path}': {error}") from error
    macros = {name: value for name, value in values.items() if "." not in name}
    parameters = {name: value for name, value in values.items() if "." in name}
    return {name: config_values.resolve(value, macros) for name, value in parameters.items()}


def by_values(run: Run) -> list[Run]:
    """Returns a run for each combination of the members' `population_values`."""
    options = run.value("runner.population_values") or {}
    if not options:
        return [run]
    agent, seed = run.value(f"{_ROOT}.agent").name, run.value(f"{_ROOT}.seed")
    members = collections.defaultdict(set)
    for index in range(run.value("runner.population")):
        members[tuple(each[index % len(each)] for each in options.values())].add(seed + index)
    names = [f"{agent}.{str(name).rpartition('.')[2]}" for name in options]
    return [
        dataclasses.replace(run, given=run.given | dict(zip(names, values)), seeds=frozenset(seeds))
        for values, seeds in members.items()
    ]


def panels(runs: Sequence[Run], metric: str) -> tuple[list[Panel], list[str]]:
    """Returns the panels, and a line for each seed that several runs of a configuration have.

    Raises:
      errors.UserError: a run has not logged the metric.
    """
    by_environment = collections.defaultdict(list)
    for part in (part for run in runs for part in by_values(run)):
        by_environment[part.environment].append(part)
    drawn, notes = [], []
    for environment, own in by_environment.items():
        curves = {}
        for difference, group in _configurations(own):
            seeds, lines = _seeds(group, metric)
            count = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
            label = ", ".join(f"{name} = {value}" for name, value in difference.items())
            curves[f"{label} ({count})" if label else count] = list(seeds.values())
            notes += lines
        agents, runners = ({run.part(role) for run in own} for role in ("agent", "runner"))
        title = f"{agents.pop()} on {environment}" if len(agents) == 1 else environment
        title += f", {runners.pop()}" if len(runners) == 1 else ""
        drawn.append(Panel(title, curves))
    return drawn, notes


def _configurations(runs: Sequence[Run]) -> list[tuple[dict[str, str], list[Run]]]:
    """Returns the runs of each configuration, with the parameters that differ between these.

    A parameter of a part is compared between the configurations that have the part.
    """
    given = dict.fromkeys([*_CHOICES, *(name for run in runs for name in run.given)])
    names = [name for name in given if name not in IGNORED]
    groups = collections.defaultdict(list)
    for run in runs:
        groups[tuple(_normal(run.value(name)) for name in names)].append(run)
    firsts = [group[0] for group in groups.values()]
    differences: list[dict[str, str]] = [{} for _ in firsts]
    for name in names:
        part, _, short = name.rpartition(".")
        if part == "runner":
            knowing = {run.part("runner") for run in firsts if run.knows(name)}
            known = [run.part("runner") in knowing for run in firsts]
        else:
            known = [run.knows(name) or run.has(part) for run in firsts]
        values = {_normal(run.value(name)) for run, own in zip(firsts, known) if own}
        for difference, run, own in zip(differences, firsts, known):
            if len(values) > 1 and own:
                value = run.value(name) if run.knows(name) else "default"
                value = f"{value:g}" if isinstance(value, float) else str(value)
                difference[name if short in difference else short] = value
    return list(zip(differences, groups.values()))


def _normal(value: Any) -> str:
    """Returns equal texts for equal settings, such as 1e5 and 100000, a list and a tuple."""
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, dict):
        return repr(sorted((_normal(key), _normal(each)) for key, each in value.items()))
    if type(value) in (list, tuple):
        return repr([_normal(each) for each in value])
    return repr(tuple(value)) if isinstance(value, config_values.Reference) else repr(value)


def _seeds(
    runs: Sequence[Run], metric: str
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Returns the newest curve of each seed, and a note for each seed that has several."""
    curves, sources, notes = {}, {}, {}
    for run in sorted(runs, key=lambda run: run.directory.config.stat().st_mtime_ns):
        path, rows = str(run.directory.path), plotting.read_log(run.directory.path)
        members = [s for s in plotting.members(rows, metric) if run.seeds is None or s in run.seeds]
        names = {seed: f"{metric}/seed_{seed}" for seed in members}
        for seed, name in (names or {run.value(f"{_ROOT}.seed"): metric}).items():
            steps, values = plotting.series(rows, name)
            if not steps.size:
                raise errors.UserError(f"'{path}' has logged no '{metric}'")
            if sources.get(seed, path) != path:
                notes[seed] = f"seed {seed} is in '{sources[seed]}' and in '{path}': the newer one"
                notes[seed] += f", '{path}', is drawn"
            curves[seed], sources[seed] = (steps, values[0]), path
    return dict(sorted(curves.items())), list(notes.values())


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
