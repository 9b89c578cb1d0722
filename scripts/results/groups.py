"""Which runs are seeds of one configuration, and what differs between configurations.

Runs are told apart by what their `config.gin` says, never by what their folders are called.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from podracers import errors
from podracers.training import config_values, run_directory

_ROOT = "experiment.Experiment"
_ROLES = ("agent", "environment", "runner")  # what the root chooses
_POPULATION = "runner.population"
_CHOICES = tuple(f"{_ROOT}.{role}" for role in _ROLES)
# What changes neither what is learnt nor from what (docs/architecture.md, "Determinism"). A member
# of a population is the run of its seed.
_UNLEARNT = {
    _ROOT: "seed log_period evaluation_period evaluation_episodes greedy_evaluation_episodes "
    "evaluation_max_steps checkpoint_period keep_latest keep_best profile_update",
    "runner": "population reset_batch num_threads timeout",
}
UNLEARNT = {f"{part}.{name}" for part, names in _UNLEARNT.items() for name in names.split()}
# By which parameter an adaptor is told which environment it is.
_NAMES = ("name", "task_id", "env_id")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    Parameters are called `ppo.PPO.gamma`, and those of either runner `runner.num_envs`.
    """

    directory: run_directory.RunDirectory
    # The parameters in its configuration, macros included where they stand for a value.
    given: dict[str, Any]
    # Those of `operative_config.gin`, defaults included; empty where there is none yet.
    used: dict[str, Any]
    macros: dict[str, Any]  # values by the names of macros
    seeds: frozenset[int] | None = None  # of the members that this is about; None for all

    @property
    def seed(self) -> int:
        """The seed, of the first member where there are several."""
        return self.value(f"{_ROOT}.seed")

    def part(self, role: str) -> str:
        """Returns the class of the agent, the environment or the runner."""
        return str(self.value(f"{_ROOT}.{role}"))

    @property
    def environment(self) -> str:
        """The environment's name, whatever it is wrapped in."""
        selector = self.value(f"{_ROOT}.environment").name
        while isinstance(inner := self.value(f"{selector}.environment"), config_values.Reference):
            selector = inner.name
        names = (self.value(f"{selector}.{name}") for name in _NAMES)
        found = next((name for name in names if isinstance(name, str)), None)
        return found or selector.rpartition(".")[2]

    def value(self, name: str) -> Any:
        """Returns a parameter, with what macros stand for; None where nobody knows it."""
        return config_values.resolve(self.raw(name), self.macros)

    def raw(self, name: str) -> Any:
        """Returns a parameter as it was written."""
        return self.given.get(name, self.used.get(name))

    def knows(self, name: str) -> bool:
        """Returns whether it is known what a parameter is."""
        return name in self.given or name in self.used

    def has_part(self, selector: str) -> bool:
        """Returns whether a value names a part."""
        values = map(self.value, (*self.given, *self.used))
        return any(
            isinstance(value, config_values.Reference) and value.name == selector
            for value in values
        )


def read(path: str | pathlib.Path) -> Run:
    """Returns a run by its directory.

    Raises:
      errors.UserError: there is no run, or its configuration cannot be read.
    """
    directory = run_directory.RunDirectory(path)
    directory.require()
    given, macros = _read(directory.config)
    used = {}
    if directory.operative_config.is_file():
        used, _ = _read(directory.operative_config)
    chosen = {role: config_values.resolve(given.get(f"{_ROOT}.{role}"), macros) for role in _ROLES}
    for role, part in chosen.items():
        if not isinstance(part, config_values.Reference):
            raise errors.UserError(f"'{directory.config}' names no Experiment.{role}")
    runner = chosen["runner"].name
    return Run(directory, _renamed(given, runner), _renamed(used, runner), macros)


def by_values(run: Run) -> list[Run]:
    """Returns a run for each combination of values that members of a population were given.

    Each is that of the seeds with these values, as if it had been given them alone.
    """
    options = run.value(f"{_POPULATION}_values") or {}
    count, agent = run.value(_POPULATION), run.value(f"{_ROOT}.agent").name
    members = collections.defaultdict(set)
    for index in range(count if options else 0):
        members[tuple(each[index % len(each)] for each in options.values())].add(run.seed + index)
    names = [f"{agent}.{str(name).rpartition('.')[2]}" for name in options]
    others = {name: run.given[name] for name in run.given if name != f"{_POPULATION}_values"}
    return [
        dataclasses.replace(run, given=others | dict(zip(names, values)), seeds=frozenset(seeds))
        for values, seeds in members.items()
    ] or [run]


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns parameters, and macros."""
    try:
        values = config_values.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"cannot read '{path}': {error}") from error
    macros = {name: value for name, value in values.items() if "." not in name}
    return {name: value for name, value in values.items() if name not in macros}, macros


def _renamed(values: dict[str, Any], runner: str) -> dict[str, Any]:
    """Returns parameters, those of the runner by one name for all runners."""

    def renamed(name: str) -> str:
        part, _, parameter = name.rpartition(".")
        return f"runner.{parameter}" if part == runner else name

    return {renamed(name): value for name, value in values.items()}


def by_configuration(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs of each configuration, in the order in which they came.

    Two runs have one configuration if every parameter is the same that either of them was given,
    but for the seed and what changes nothing that is learnt; a default counts as what it is.
    """
    names = _names(runs)
    groups = collections.defaultdict(list)
    for run in runs:
        groups[tuple(_normal(run.value(name)) for name in names)].append(run)
    return list(groups.values())


def differences(groups: Sequence[Sequence[Run]]) -> list[dict[str, str]]:
    """Returns what tells each of some configurations from the others: values by short names.

    The parameters of a part count among the configurations that have the part: what else differs
    follows from the choice of another one.
    """
    runs = [group[0] for group in groups]
    found: list[dict[str, str]] = [{} for _ in runs]
    names = {}
    for name in _names(runs):
        known = _have(runs, name)
        if len({_normal(run.value(name)) for run, is_known in zip(runs, known) if is_known}) < 2:
            continue
        written = {run.raw(name) if _is_macro(run.raw(name)) else None for run in runs}
        macro = next(iter(written)) if len(written) == 1 and name not in _CHOICES else None
        shown = names.setdefault(name, macro.name if macro else name.rpartition(".")[2])
        for difference, run, is_known in zip(found, runs, known):
            if is_known:
                difference[name if _is_shared(shown, name, names) else shown] = _shown(run, name)
    return found


def _have(runs: Sequence[Run], name: str) -> list[bool]:
    """Returns which runs have a parameter, whether it is known what it is or a default."""
    part = name.rpartition(".")[0]
    if part != "runner":
        return [run.knows(name) or run.has_part(part) for run in runs]
    runners = {run.part(part) for run in runs if run.knows(name)}
    return [run.part(part) in runners for run in runs]


def _is_macro(value: Any) -> bool:
    return isinstance(value, config_values.Macro)


def _is_shared(shown: str, name: str, names: dict[str, str]) -> bool:
    """Returns whether another part has a parameter of that name, too."""
    return not shown.isupper() and any(
        other != name and value == shown for other, value in names.items()
    )


def _shown(run: Run, name: str) -> str:
    value = run.value(name)
    if not run.knows(name):
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns the parameters that any of the runs was given and that matter; choices come first."""
    given = dict.fromkeys([*_CHOICES, *(name for run in runs for name in run.given)])
    return [name for name in given if name not in UNLEARNT]


def _normal(value: Any) -> str:
    """Returns a value such that equal settings are equal: 1e5 is 100000, a list a tuple."""
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, dict):
        return repr(sorted((_normal(key), _normal(each)) for key, each in value.items()))
    if type(value) in (list, tuple):
        return repr([_normal(each) for each in value])
    return repr(tuple(value)) if isinstance(value, config_values.Reference) else repr(value)
