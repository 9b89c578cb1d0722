"""Learning curves of run directories: a panel for each environment, a curve for each configuration.

Runs are grouped by the parameters in their `config.gin`, not by the names of their folders.

`K` points of a curve.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from podracers import errors
from podracers.scripts.results import plotting
from podracers.training import config, loggers, run_directory

_ROLES = ("Experiment.agent", "Experiment.environment", "Experiment.runner")
# Parameters without influence on learning (docs/architecture.md, "Determinism"). A member of a
# population equals the run of its seed.
_NOT_LEARNT = {
    "Experiment": "seed log_period evaluation_period evaluation_episodes "
    "greedy_evaluation_episodes evaluation_max_steps checkpoint_period checkpoint_directory "
    "keep_latest keep_best profile_update tracker",
    "runner": "population population_values reset_batch num_threads timeout",
}
IGNORED = {f"{part}.{name}" for part, names in _NOT_LEARNT.items() for name in names.split()}
_NAMES = ("name", "task_id", "env_id")  # parameters by which adaptors choose an environment


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One seed: a run directory, or a member of its population.

    Parameters have names such as `PPO.gamma`; parameters of either runner begin with `runner.`.
    Values are numbers, or texts such as `PPO` of a part.
    """

    directory: run_directory.RunDirectory
    member: int  # index in the population
    seed: int | str  # a name of its own if the configuration computes the seed
    bound: Sequence[str]  # names of bound parameters
    values: dict[str, Any]  # all known parameters, with defaults
    changed: Set[str]  # names of parameters that a resume changed; their values are texts

    @property
    def environment(self) -> str:
        """Name of the environment inside its wrappers."""
        names = (self.values.get(f"{self._part}.{name}") for name in _NAMES)
        return next(filter(None, names), self._part)

    @property
    def task(self) -> frozenset[tuple[str, str]]:
        """Bound parameters of the environment inside its wrappers."""
        names = (name for name in self.bound if name.startswith(f"{self._part}."))
        return frozenset((name, str(self.values[name])) for name in names)

    @property
    def _part(self) -> str:
        part = str(self.values["Experiment.environment"])
        while f"{part}.environment" in self.values:
            part = str(self.values[f"{part}.environment"]).removesuffix("()")
        return part

    def has(self, part: str) -> bool:
        """Returns whether a part, such as `PPO`, belongs to the run."""
        return part == "Experiment" or not {part, f"{part}()"}.isdisjoint(self.values.values())


def find(paths: Iterable[str]) -> list[str]:
    """Returns the directories of the runs in these folders; files beside runs are skipped.

    Raises:
      errors.UserError: there is no run in a folder, or in any of them.
    """
    folders = []
    for path in map(pathlib.Path, paths):
        file = path / "config.gin"
        configs = [file] if file.is_file() else sorted(path.glob("**/config.gin"))
        if not configs and not path.is_file():
            run_directory.RunDirectory(path).require()
        folders += [str(config_file.parent) for config_file in configs]
    if not folders:
        raise errors.UserError(f"expected folders of runs, got files: {', '.join(paths)}")
    return list(dict.fromkeys(folders))


def read(path: str) -> list[Run]:
    """Returns the seeds of a run by its directory.

    Raises:
      errors.UserError: its configuration cannot be read.
    """
    directory = run_directory.RunDirectory(path)
    bindings = directory.read_values()
    changed = _changes(directory, bindings)
    used = directory.operative_config
    for role in _ROLES:
        if role not in bindings:
            raise errors.UserError(f"'{directory.config}' has no {role}")
    defaults = config.read(used.read_text("utf-8"), str(used)).values if used.is_file() else {}
    values = defaults | bindings
    agent, runner = str(values["Experiment.agent"]), str(values["Experiment.runner"])
    evolves = values.get(f"{runner}.pbt_period") is not None  # members are seeds then
    options = {} if evolves else values.get(f"{runner}.population_values") or {}
    first, runs = values.get("Experiment.seed", 0), []
    for index in range(values.get(f"{runner}.population") or 1):
        member_values = {
            f"{agent}.{str(name).rpartition('.')[2]}": x[index % len(x)]
            for name, x in options.items()
        }
        plain = {
            _name(name, runner): x if isinstance(x, int | float) else str(x)
            for name, x in (values | changed | member_values).items()
        }
        names = [_name(name, runner) for name in bindings | changed | member_values]
        seed = first + index if isinstance(first, int) else f"{path}, member {index}"
        resumed = {_name(name, runner) for name in changed}
        runs.append(Run(directory, index, seed, names, plain, resumed))
    return runs


def _changes(directory: run_directory.RunDirectory, bindings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values over time, as a text, of each parameter that a resume changed."""
    files = {int(x.suffixes[0][1:]): x for x in directory.path.glob("config.*.gin")}
    periods: list[tuple[str, Mapping[str, Any]]] = [
        (f" to {step:,} steps", config.read(file.read_text("utf-8"), str(file)).values)
        for step, file in sorted(files.items())
    ]
    periods.append(("", bindings))
    changes = {}
    for name in dict.fromkeys(name for _, values in periods for name in values):
        times = [(_text(values.get(name, "default")), end) for end, values in periods]
        last = [x for x, after in zip(times, [*times[1:], ("", "")]) if x[0] != after[0]]
        if len(last) > 1:
            changes[name] = ", then ".join(map("".join, last))
    return changes


def _name(name: str, runner: str) -> str:
    return name.replace(f"{runner}.", "runner.", 1)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def panels(runs: Iterable[Run], metric: str) -> list[plotting.Panel]:
    """Returns the panels; of several runs of a configuration and a seed, the newest is drawn.

    Runs that have not logged the metric are left out, and printed.

    Raises:
      errors.UserError: no run has logged the metric.
    """
    points = {run: curve(run, metric) for run in runs}
    by_environment, empty = collections.defaultdict(list), {}
    for run, seed_points in points.items():
        if len(seed_points):
            by_environment[run.environment].append(run)
        else:
            empty[run.directory.path] = None
    for path in empty:
        print(f"left out: '{path}' has logged no '{metric}'")
    if not by_environment:
        raise errors.UserError(f"no run has logged '{metric}'")
    drawn = []
    for environment, members in by_environment.items():
        curves = {}
        for difference, group in _configurations(members):
            newest = sorted(group, key=lambda run: run.directory.config.stat().st_mtime_ns)
            seeds = {run.seed: points[run] for run in newest}
            agent, _, runner = (group[0].values[role] for role in _ROLES)
            rest = [f"{k} = {x}" for k, x in difference.items() if k not in ("agent", "runner")]
            label = ", ".join([agent, runner, *rest])
            curves[label] = list(seeds.values())
        # The legend has the other parameters that a resume changed.
        resumed = {x: run.values[x] for run in members for x in sorted(run.changed - IGNORED)}
        shared = [
            f"{name.rpartition('.')[2]} = {text}"
            for name, text in resumed.items()
            if all(run.values.get(name) == text for run in members)
        ]
        title = "; ".join([environment, *shared])
        known = levels(members) if metric.endswith("return") else {}
        drawn.append(plotting.Panel(title, curves, known))
    return drawn


def levels(runs: Sequence[Run]) -> dict[str, float]:
    """Returns the return of a random policy by label, if all runs have the same task."""
    directories = (run.directory for run in runs if run.directory.summary.is_file())
    random = [directory.read_summary().get("random_policy_return") for directory in directories]
    returns = [value for value in random if value is not None]
    if not returns or len({run.task for run in runs}) > 1:
        return {}
    return {"random policy": float(np.mean(returns))}


def curve(run: Run, metric: str) -> np.ndarray:
    """Returns the curve of a run, or of a member of its population; without points if none."""
    log = run.directory.metrics
    by_seed = plotting.curves(loggers.read_rows(log) if log.exists() else [], metric)
    return by_seed[None] if None in by_seed else [*by_seed.values()][run.member]


def _configurations(runs: Sequence[Run]) -> list[tuple[dict[str, str], list[Run]]]:
    """Returns the runs of each configuration, with the parameters that differ between these.

    A parameter of a part is compared between the configurations that have the part.
    """
    bound = dict.fromkeys([*_ROLES, *(name for run in runs for name in run.bound)])
    names = [name for name in bound if name not in IGNORED]
    groups = collections.defaultdict(list)
    for run in runs:
        groups[tuple(run.values.get(name) for name in names)].append(run)
    configurations = [({}, group) for group in groups.values()]
    for name in names:
        part, _, short = name.rpartition(".")
        # A runner's parameters have one name under both; a run has its runner's parameters.
        runners = {run.values[_ROLES[2]] for run in runs if name in run.values}
        holders = [
            (difference, run)
            for difference, (run, *_) in configurations
            if (run.values[_ROLES[2]] in runners if part == "runner" else run.has(part))
        ]
        if len({run.values.get(name) for _, run in holders}) > 1:
            for difference, run in holders:
                text = _text(run.values.get(name, "default"))
                difference[name if short in difference else short] = text
    return configurations
