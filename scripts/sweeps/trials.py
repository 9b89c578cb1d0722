"""Trials, which are ordinary runs in this process: alone, over seeds, or many in one program."""

import ctypes
import dataclasses
import gc
import inspect
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optuna

from podracers import anakin, errors
from podracers.scripts.sweeps import space as space_lib
from podracers.scripts.sweeps import studies
from podracers.training import experiment, loggers, run, run_directory, stop_request

SPEED = "steps_per_second"
_SPEED_TIME = 10.0  # seconds after the first log line in which a speed is measured


class Interrupted(Exception):
    """A signal has stopped the run, which can be continued."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains trials of one experiment, in folders of the study's.

    Under Anakin `seeds` are members of a population, and so are trials of one program: of `B`, the
    trial `b` has the members `b`, `b + B`, ... Under other runners each seed is a run.
    """

    gin_files: Sequence[str]
    gin_bindings: Sequence[str]
    objective: str
    last: int  # logged values, whose mean is the objective
    seeds: int
    folder: pathlib.Path
    stop: stop_request.StopRequest

    def load(self, *bindings: str) -> experiment.Experiment:
        """Returns the experiment with more bindings."""
        speed = ["Experiment.evaluation_period = 0"] if self.objective == SPEED else []
        return experiment.load(self.gin_files, [*self.gin_bindings, *speed, *bindings])

    def _members(self, params: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the bindings of one program for trials with these parameters."""
        count = self.seeds * len(params)
        population = [f"Anakin.population = {count}"] if count > 1 else []
        if len(params) == 1:
            return [*population, *space_lib.bindings(params[0])]
        values = {name: tuple(trial[name] for trial in params) for name in params[0]}
        return [*population, f"Anakin.population_values = {values!r}"]

    def check(self, space: space_lib.Space, path: pathlib.Path, batch: int) -> None:
        """Refuses mistakes before the first trial: builds the experiment at the ends of ranges.

        Raises:
          errors.UserError: the experiment, the space or the objective does not fit.
        """
        settings = self.load()
        if settings.checkpoint_directory is not None:
            raise errors.UserError("Experiment.checkpoint_directory: trials would share it")
        for name, distribution in space.items():
            for value in space_lib.ends(distribution):
                try:
                    self.load(*space_lib.bindings({name: value})).build()
                except errors.UserError as error:
                    raise errors.UserError(f"{path}: {name}: {errors.first_line(error)}") from error
        parts = settings.build()
        experiment.check(parts, settings.seed, settings.tracker)
        _, report = parts.runner.trace(settings.seed).out_info
        played = ["return", "length", *parts.environment.spec.metrics]
        greedy = [f"greedy_{name}" for name in played] if parts.greedy_evaluator else []
        known = [SPEED, "wall_time", *report.means, *(f"evaluation/{x}" for x in played + greedy)]
        errors.require_known("--objective: no run logs", self.objective, known)
        if batch > 1:
            if not _is_anakin(settings):
                raise errors.UserError("--batch: expected the runner Anakin")
            pairs = {name: space_lib.ends(x) for name, x in space.items()}
            low, high = ({name: x[end] for name, x in pairs.items()} for end in (0, -1))
            pair = self.load(*self._members([low, high]))
            experiment.check(pair.build(), pair.seed)

    def train(self, trials: Sequence[optuna.Trial]) -> list[float]:
        """Trains trials, in one program if there are several; returns their objectives.

        Raises:
          errors.UserError, errors.RunFailure: the settings are refused, or the run fails.
          optuna.TrialPruned: it was pruned, after a checkpoint.
          Interrupted: a signal has stopped it.
        """
        name = f"trial-{trials[0].number:04d}"
        if len(trials) > 1:
            name = f"trials-{trials[0].number:04d}-{trials[-1].number:04d}"
        elif (begun := trials[0].user_attrs.get("run", "")).startswith("trial-"):
            name = begun  # the run of a worker that has ended
        for trial in trials:
            trial.set_user_attr("run", name)
        base = self.load(*space_lib.bindings(trials[0].params))
        if _is_anakin(base) or self.seeds == 1:
            together = self._members([trial.params for trial in trials])
            return self._train(trials, self.load(*together), self.folder / name)
        scores = []
        for seed in range(base.seed, base.seed + self.seeds):  # pruners see the first one
            settings = self.load(*space_lib.bindings(trials[0].params), f"SEED = {seed}")
            reported = [] if scores else trials
            scores += self._train(reported, settings, self.folder / name / f"seed-{seed}")
        return [float(np.mean(scores))]

    def _train(
        self, trials: Sequence[optuna.Trial], settings: experiment.Experiment, path: pathlib.Path
    ) -> list[float]:
        """Trains one run, or continues it, and reports to the study."""
        parts, directory = settings.build(), run_directory.RunDirectory(path)
        experiment.check(parts, settings.seed, settings.tracker)
        size, count = parts.runner.population, len(trials) or 1
        members = [f"/seed_{seed}" for seed in range(settings.seed, settings.seed + size)]
        suffixes = [members[index::count] for index in range(count)] if size > 1 else [[""]]
        if not directory.summary.exists():
            total = parts.num_updates * parts.runner.steps_per_update
            reporter = _Reporter(self, trials, suffixes, total)
            options: dict[str, Any] = {"stop": reporter, "extra_loggers": [reporter]}
            options |= {"print_line": lambda line: None, "progress": False}
            try:
                run.begin(settings, parts, directory, directory.config.is_file(), **options).train()
            finally:
                _free_memory()
            if reporter.is_pruned:
                raise optuna.TrialPruned
            if not (reporter.is_over or directory.summary.exists()):
                raise Interrupted
        rows: list[Mapping[str, Any]] = [*loggers.read_rows(directory.metrics)]
        if directory.summary.exists():  # the final evaluation
            final = directory.read_summary()["evaluation"]
            name = self.objective.removeprefix("evaluation/")
            seeds = final.get(f"{name}_by_seed", {}).items()
            rows.append({f"{self.objective}/seed_{seed}": value for seed, value in seeds})
            if size == 1 and f"evaluation/{name}" == self.objective and name in final:
                rows.append({self.objective: final[name]})
        return [self.score(rows, names) for names in suffixes]

    def score(self, rows: Sequence[Mapping[str, Any]], suffixes: Sequence[str]) -> float:
        """Returns the mean of the last logged values, over members; NaN without values."""
        means = []
        for suffix in suffixes:  # speed is that of all members
            logged = (row.get(self.objective + suffix, row.get(self.objective)) for row in rows)
            values = [value for value in logged if value is not None and not math.isnan(value)]
            last = len(values) if self.objective == SPEED else self.last
            means.append(np.mean(values[-last:]) if values else math.nan)
        return float(np.mean(means))


class _Reporter(loggers.Logger):
    """Reports a run's evaluations to the study; as the run's `stop`, it is true to end the run."""

    def __init__(self, trainer: Trainer, trials: Sequence[optuna.Trial], suffixes: Any, total: int):
        self._trainer, self._trials, self._suffixes = trainer, trials, suffixes
        self._total, self._rows, self._percent = total, [], 0
        self.is_over = self.is_pruned = False

    def __bool__(self) -> bool:
        return bool(self.is_over or self.is_pruned or self._trainer.stop)  # NumPy has its own

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.append(values)
        if self._trainer.objective == SPEED:
            self.is_over = values["wall_time"] - self._rows[0]["wall_time"] > _SPEED_TIME
            return
        percent = math.ceil(studies.PERCENT * step / self._total)
        is_evaluation = any(name.startswith("evaluation/") for name in values)
        if not is_evaluation or percent <= self._percent:
            return
        self._percent = percent
        for trial, suffixes in zip(self._trials, self._suffixes):
            if not math.isnan(score := self._trainer.score(self._rows, suffixes)):
                trial.report(score, percent)
        if len(self._trials) == 1:  # none of several in one program can end alone
            self.is_pruned = self._trials[0].should_prune()


def _is_anakin(settings: experiment.Experiment) -> bool:
    runner = inspect.unwrap(settings.runner_class())
    return isinstance(runner, type) and issubclass(runner, anakin.Anakin)


def _free_memory() -> None:
    """Drops compiled programs: other trials have their own, and the disk keeps those they share."""
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
