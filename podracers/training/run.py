"""One run from its first update to its summary: it logs, evaluates, saves, stops and resumes."""

import contextlib
import dataclasses
import logging
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podracers import errors, evaluation, metrics, population, types
from podracers.hosts import peers, processes
from podracers.training import (
    checkpoint,
    clock,
    config,
    config_values,
    gathering,
    loggers,
    run_directory,
    shared_evaluation,
    signals,
    storage,
    weights_and_biases,
)
from podracers.training import experiment as experiment_lib

_LOGGER = logging.getLogger(__name__)


class Run:
    """Trains one experiment in one run directory.

    Of several processes each has one, takes the same decisions, and plays its share of evaluations;
    only the first of them writes and speaks.

    Args:
      experiment: the settings of the run.
      parts: the parts that it builds.
      directory: the run directory; it exists.
      stop: true once the run is to end early.
      resume: continue from the newest whole checkpoint in it.
      say: takes lines for the person who watches.
      progress: whether the terminal shows how far the run is.
    """

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        parts: experiment_lib.Parts,
        directory: run_directory.RunDirectory,
        *,
        stop: signals.StopRequest,
        resume: bool = False,
        say: Callable[[str], None] = print,
        progress: bool = True,
    ):
        self._clock = clock.Clock()
        self._experiment = experiment
        self._directory = directory
        self._say = say if processes.is_lead() else lambda line: None
        self._progress = progress
        self._stop = stop
        self._stopping = False  # agreed on by all processes
        self._parts = parts
        if experiment.checkpoint_directory is not None:
            directory.checkpoints = storage.path(experiment.checkpoint_directory)
        self._runner = self._parts.runner
        self._update = 0
        self._loggers: loggers.Loggers | None = None
        self._tensorboard: loggers.TensorBoardLogger | None = None
        self._tracked: weights_and_biases.TrackedRun | None = None
        self._is_configuration_kept = False
        self._resume = resume
        self._verdict = self._said = ""  # of the runner: the newest, and which kind was said
        processes.on_lead(directory.lock.acquire)
        with contextlib.ExitStack() as on_failure:  # the process may live on, as that of a notebook
            on_failure.callback(directory.lock.release)
            self._checkpointer = self._make_checkpointer()
            on_failure.callback(self._checkpointer.close)
            with experiment.configured():
                for line in self._runner.describe():
                    self._say(line)
                self._state = self._runner.init(experiment.seed)
            if resume:
                self._restore()
            on_failure.pop_all()
        # Now: by the end of the run its checkout may be at another commit.
        self._provenance = run_directory.provenance()

    def _make_checkpointer(self) -> checkpoint.Checkpointer | gathering.GatheringCheckpointer:
        settings = self._experiment
        return gathering.open_checkpoints(
            self._directory.checkpoints,
            settings.checkpoint_directory,
            (settings.keep_latest, settings.keep_best),
            settings.checkpoint_replay,
        )

    @property
    def steps(self) -> int:
        """Agent steps so far, over all environments of one member of the population."""
        return self._update * self._runner.steps_per_update

    def train(self) -> dict[str, Any] | None:
        """Runs to the end, or until a signal asks to stop.

        Returns:
          The summary (in process 0; elsewhere an empty one), or None where a signal ended the run
          early.

        Raises:
          errors.RunFailure: a metric is not finite, or a file cannot be written.
        """
        with self._experiment.configured():
            return self._train()

    def _train(self) -> dict[str, Any] | None:
        total = self._parts.num_updates
        try:
            self._loggers = loggers.Loggers(self._writers(total))
            with self._loggers:
                while not self._must_stop() and self._update < total:
                    self._advance()
                if not self._stopping and (summary := self._finish()) is not None:
                    return summary
            if self._update:  # before that there is nothing to go on from
                self._save(None)
                self._commit()
            self._say(f"stopped at {self.steps:,} steps: continue with --resume")
            return None
        finally:
            self._close()

    def _writers(self, total: int) -> list[loggers.Logger]:
        """Returns where the numbers of the run go; in process 0 alone they go anywhere."""
        if not processes.is_lead():
            return []
        resumed = self.steps if self._resume else None
        self._tensorboard = loggers.TensorBoardLogger(self._directory.path, resumed)
        writers = [loggers.JsonlLogger(self._directory.metrics, resumed), self._tensorboard]
        if (tracker := self._experiment.tracker) is not None:
            self._tracked = tracker.open(self._directory.path, self._resume, self._say)
            writers.append(self._tracked)
        if self._progress:
            writers.append(loggers.TerminalLogger(total * self._runner.steps_per_update))
        return writers

    def _must_stop(self) -> bool:
        """Returns whether a signal has reached any process; all of them ask at the same moment."""
        self._stopping = self._stopping or processes.any_process(bool(self._stop))
        return self._stopping

    def _close(self) -> None:
        """Ends threads and simulators, and the last save; what fails here hides no first cause."""
        cause = sys.exception()
        try:
            self._runner.close()
        finally:
            try:
                self._checkpointer.close()
            except errors.RunFailure as error:
                if cause is None:
                    raise
                if self._directory.lock.is_there() and str(error) != str(cause):
                    _LOGGER.warning("%s", error)
            finally:
                self._directory.lock.release()

    def _advance(self) -> None:
        """Takes the updates of one log period, then does whatever falls due."""
        experiment = self._experiment
        begun = self.steps
        report = self._take_updates(self._until_due())
        self._require_directory()
        if processes.is_lead():
            self._keep_configuration(begun)
        self._check_finite(report)
        values = metrics.summarize(report.means, self._members())
        diagnostics = self._runner.diagnostics()
        values |= diagnostics.values
        self._note_verdict(diagnostics.verdict)
        values["steps_per_second"] = self._clock.latest_rate
        values["wall_time"] = self._clock.wall
        score = None
        if _due(self._update, experiment.evaluation_period):
            score, judged = self._judge()
            values |= judged
        self._loggers.write(self.steps, values)
        # The last state is saved with the score of the final evaluation.
        due = _due(self._update, experiment.checkpoint_period)
        if score is not None or (due and self._update < self._parts.num_updates):
            self._save(score)

    def _judge(self) -> tuple[float | None, dict[str, float]]:
        """Returns a score, and what is logged of it; None where a signal stopped the evaluation."""
        params = self._acting_params()
        key = evaluation.run_key(self._experiment.seed, self._update)

        def play(share: tuple[int, int]) -> evaluation.Evaluation:
            return self._parts.evaluate(params, key, self._stopped, share)

        played = shared_evaluation.play_together(play)
        return processes.on_lead(lambda: self._judged(played))

    def _judged(
        self, played: list[evaluation.Episodes] | None
    ) -> tuple[float | None, dict[str, float]]:
        if played is None:
            return None, {}
        judged, values, members = evaluation.Evaluation(*played), {}, self._members()
        for prefix, episodes in judged.by_prefix().items():
            name, lengths = f"evaluation/{prefix}", np.mean(episodes.lengths, axis=-1)
            values |= metrics.label(f"{name}return", episodes.mean_return(), members)
            values |= metrics.label(f"{name}length", lengths, members)
        return judged.score, values

    def _take_updates(self, count: int) -> metrics.Report:
        """Takes updates, fewer if the run is to stop and the runner can; returns their report."""
        most = self._runner.updates_per_dispatch or count
        report, taken = None, 0
        with self._clock.dispatch() as dispatch, self._profiled(count):
            while taken < count and not (taken and self._must_stop()):
                chunk = min(most, count - taken)
                self._state, part = self._runner.step(self._state, chunk)
                report = part if report is None else metrics.merge(report, part)
                taken += chunk
            report = jax.device_get(report)
            dispatch.steps = taken * self._runner.steps_per_update
        self._update += taken
        return report

    def _profiled(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context that is traced if `profile_update` is among the next updates.

        TensorBoard (with its profile plugin) and Perfetto read what is written.
        """
        update = self._experiment.profile_update
        if update is None or not self._update <= update < self._update + count:
            return contextlib.nullcontext()
        if not processes.is_lead():
            return contextlib.nullcontext()
        return jax.profiler.trace(self._directory.path / "profile", create_perfetto_trace=True)

    def _note_verdict(self, verdict: str) -> None:
        """Says what limits the speed once it has been the same for two periods, and is news."""
        kind, latest = (line.partition(":")[0] for line in (verdict, self._verdict))
        if kind and kind == latest and kind != self._said:
            self._say(verdict)
            self._said = kind
        self._verdict = verdict

    def _until_due(self) -> int:
        """Returns how many updates to take: never beyond the next boundary of any period."""
        experiment = self._experiment
        periods = (
            experiment.log_period,
            experiment.evaluation_period,
            experiment.checkpoint_period,
        )
        distances = [period - self._update % period for period in periods if period]
        return min(*distances, self._parts.num_updates - self._update)

    def _members(self) -> list[int]:
        """Returns the seed of each member of a population; empty where there is but one."""
        count, first = self._runner.population, self._experiment.seed
        return list(range(first, first + count)) if count > 1 else []

    def _check_finite(self, report: metrics.Report) -> None:
        first = {name: int(np.min(update)) for name, update in report.first_nonfinite.items()}
        name = min(first, key=first.get)
        if first[name] == metrics.NEVER:
            return
        members = np.atleast_1d(report.first_nonfinite[name])
        worst, values = int(np.argmin(members)), self._runner.population_values
        own = population.described(values, worst)
        member = f" of seed {self._members()[worst]}{own}" if self._members() else ""
        saved = self._checkpointer.latest_step()
        kept = (
            f"the newest checkpoint is of step {saved:,}"
            if saved is not None
            else "nothing was saved yet"
        )
        raise errors.RunFailure(
            f"the metric '{name}'{member} became NaN or infinite at update {first[name]} "
            f"({first[name] * self._runner.steps_per_update:,} steps); {kept}"
        )

    def _acting_params(self) -> types.PyTree:
        """Returns what evaluation acts with, on devices of this process."""
        return processes.local(self._runner.actor_params(self._state))

    def _stopped(self) -> bool:
        """Returns whether this process is to stop; evaluations ask at every step."""
        peers.touch()
        return bool(self._stop)

    def _save(self, score: float | None) -> None:
        self._require_directory()
        metadata = {
            "update": self._update,
            "seed": self._experiment.seed,
            "population": self._runner.population,
            "clock": self._clock.record(),
        }
        params = self._runner.actor_params(self._state)
        self._checkpointer.save(self.steps, self._state, params, metadata, score)

    def _commit(self) -> None:
        """Waits until the last checkpoint is where it belongs."""
        self._checkpointer.wait()
        self._require_directory()

    def _require_directory(self) -> None:
        if processes.is_lead():
            self._directory.require_there()

    def _restore(self) -> None:
        restored = self._checkpointer.restore(self._state)
        if restored is None:
            self._say("there is no checkpoint yet: starting from the beginning")
            return
        step, state, metadata = restored
        if metadata["seed"] != self._experiment.seed:
            raise errors.UserError(
                f"this run has the seed {metadata['seed']}, and cannot go on with "
                f"{self._experiment.seed}"
            )
        if step != metadata["update"] * self._runner.steps_per_update:
            raise errors.UserError(
                f"this run has updates of {step // metadata['update']} agent steps, and cannot go "
                f"on with {self._runner.steps_per_update}"
            )
        self._state, self._update = state, metadata["update"]
        self._clock.resume(metadata["clock"])
        self._say(f"resuming from step {step:,}")

    def _keep_configuration(self, begun: int) -> None:
        """Writes what was used, also to TensorBoard, unless an earlier start has written the same.

        What gin has called is known once an update was taken.

        Args:
          begun: agent steps before that update: what is logged up to there outlives a resumption.
        """
        path = self._directory.operative_config
        if self._is_configuration_kept and path.exists():
            return
        self._is_configuration_kept = True
        used = config.operative_text()
        hyperparameters = config_values.hyperparameters(used)
        if self._tracked is not None:
            self._tracked.write_configuration(hyperparameters)
        if path.is_file() and path.read_bytes() == used.encode():
            return
        if used:  # what Python alone has configured is not known here
            texts = {"config": config.text(), "operative_config": used}
            self._tensorboard.write_texts(begun, texts)
            self._tensorboard.write_hyperparameters(hyperparameters)
        self._directory.write(path, used)

    def _finish(self) -> dict[str, Any] | None:
        """Evaluates for the last time, saves, and writes the summary; None where it was stopped."""
        params = self._acting_params()
        key = evaluation.run_key(self._experiment.seed)

        def play(share: tuple[int, int]) -> list[evaluation.Episodes | None]:
            judged = self._parts.evaluate(params, key, self._stopped, share)
            return [*judged, self._uniform(key, share)]

        played = shared_evaluation.play_together(play)
        judged = evaluation.Evaluation(*played[:-1]) if played else None
        score = processes.on_lead(lambda: judged and judged.score)
        if score is None:
            return None
        self._save(score)
        self._commit()
        return self._summarize(judged, played[-1]) if judged else {}

    def _summarize(
        self, judged: evaluation.Evaluation, uniform: evaluation.Episodes
    ) -> dict[str, Any]:
        """Returns the summary, and writes it."""
        summary = {
            "evaluation": {
                f"{prefix}{name}": value
                for prefix, episodes in judged.by_prefix().items()
                for name, value in self._numbers(episodes).items()
            },
            "random_policy_return": float(np.mean(uniform.returns)),
            "environment_steps": self.steps * self._runner.population,
            "wall_time_s": round(self._clock.wall, 3),
            "steps_per_second": _rounded(self._clock.rate * self._runner.population),
            "first_dispatch_s": round(self._clock.first_dispatch, 3),  # compilation included
            "seed": self._experiment.seed,
            "updates": self._update,
            "best_checkpoint": self._checkpointer.best_step(),
            **self._experiment.precision.describe(),
            **self._provenance,
        }
        if values := self._runner.population_values:
            columns = {f"{p}return": each.mean_return() for p, each in judged.by_prefix().items()}
            summary["members"] = population.rows(values, self._members(), columns)
        self._directory.write_summary(summary)
        if self._tracked is not None:
            self._tracked.write_summary(summary)
        return summary

    def _numbers(self, episodes: evaluation.Episodes) -> dict[str, Any]:
        """Returns what the summary says of episodes."""
        values = {
            "return": float(np.mean(episodes.returns)),
            "standard_error": episodes.standard_error(),
            "length": float(np.mean(episodes.lengths)),
            "episodes": int(episodes.returns.size),
            "unfinished": int(np.sum(~episodes.finished)),
        }
        if self._members():
            by_seed = zip(self._members(), episodes.mean_return())
            values["return_by_seed"] = {str(seed): float(mean) for seed, mean in by_seed}
        return values

    def _uniform(self, key: jax.Array, share: tuple[int, int]) -> evaluation.Episodes:
        """Returns what a policy reaches that acts uniformly at random."""
        policy = evaluation.UniformPolicy(self._parts.environment.spec)
        evaluator = dataclasses.replace(self._parts.evaluator, agent=policy, population=1)
        return evaluator.run((), key, self._stopped, share)


def train(
    experiment: experiment_lib.Experiment,
    path: str | pathlib.Path,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any] | None:
    """Trains an experiment in a new run directory, from Python and in one process.

    It is what the command `train.py` does, without a word but to `say`. `loggers.read_rows` reads
    what it logs, `trained.load` what was learnt.

    Args:
      experiment: as `experiment.load` returns it.
      path: the run directory's path; it is made.
      say: takes lines for the person who watches.

    Returns:
      The summary, or None where a signal ended the run early.

    Raises:
      errors.UserError: the parts do not fit, or there is a directory already.
      errors.RunFailure: see `Run.train`.
    """
    directory = run_directory.RunDirectory(path)
    parts = experiment.build()
    with experiment.configured():
        experiment_lib.check(parts, experiment.seed)
    if experiment.tracker is not None:
        experiment.tracker.require()
    directory.create()
    with experiment.configured():
        directory.write_config(config.text())
    with signals.StopRequest() as stop:
        return Run(experiment, parts, directory, stop=stop, say=say, progress=False).train()


def _due(update: int, period: int) -> bool:
    return bool(period) and update % period == 0


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 1)
