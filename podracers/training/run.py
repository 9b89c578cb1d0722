"""One run from its first update to its summary: it logs, evaluates, saves, stops and resumes."""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from podracers import (
    device_memory,
    environment,
    errors,
    evaluation,
    keys,
    metrics,
    parallel,
    population,
)
from podracers.checkpoints import storage
from podracers.hosts import peers, processes
from podracers.training import clock, config, initial_run, loggers, run_directory, stop_request
from podracers.training import experiment as experiment_lib
from podracers.training import summary as summary_lib

_SAVE_PERIOD = 300.0  # seconds between checkpoints, where no option counts updates between them
_DISPATCH_TIME = 5.0  # seconds, about: a stop waits for the end of a dispatch
_SHARE = (
    ": set Experiment.checkpoint_directory to a folder that all processes see, or to "
    "gs://BUCKET/FOLDER"
)

_LOGGER = logging.getLogger(__name__)
_TRAINING = threading.Lock()  # held by the run that trains


def _closing(close: Callable[[], None]) -> Callable[..., None]:
    """Returns an exit function for `ExitStack.push`: a failure to close hides no first cause."""

    def exit_function(kind, cause, traceback):
        try:
            close()
        except Exception as error:
            if cause is None:
                raise
            if str(error) == str(cause):
                return
            _LOGGER.warning("%s", errors.first_line(error))

    return exit_function


class Run:
    """Trains one experiment in one run directory.

    Each of several processes has a `Run`, makes the same decisions, and plays its share of
    evaluations; only process 0 writes logs and prints.

    The run directory exists, and `stop` is true once the run is to end early. With `resume` it
    continues from the newest valid checkpoint; a new run begins with `initial`, which is loaded
    here if it is None. `print_line` is called with each line, `progress` is for a terminal, and
    `extra_loggers` receive what the others do.
    """

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        parts: experiment_lib.Parts,
        directory: run_directory.RunDirectory,
        *,
        stop: stop_request.StopRequest,
        resume: bool = False,
        initial: initial_run.InitialRun | None = None,
        print_line: Callable[[str], None] = print,
        progress: bool = True,
        extra_loggers: Sequence[loggers.Logger] = (),
    ):
        self._clock = clock.Clock()
        self._experiment, self._parts, self._directory = experiment, parts, directory
        self._print_line = print_line if processes.is_lead() else lambda line: None
        self._progress, self._extra_loggers = progress, extra_loggers
        self._stop = stop
        self._stopping = False  # agreed on by all processes
        self._is_over = False  # `Experiment.on_log` has ended the run
        self._report: metrics.Report | None = None  # covers the updates since the last log line
        self._pace = math.inf  # seconds of an update in the latest dispatch
        self._saved = time.perf_counter()  # when the latest checkpoint was begun
        if experiment.checkpoint_directory is not None:
            directory.checkpoints = storage.path(experiment.checkpoint_directory)
        self._runner = runner = parts.runner
        # Seeds of the members of a population; empty without one.
        seeds = range(experiment.seed, experiment.seed + runner.population)
        self._seeds = list(seeds) if runner.population > 1 else []
        self._pbt_period: int | None = getattr(runner, "pbt_period", None)
        self._update = 0
        self._evaluation_period = experiment.updates_between_evaluations(parts.num_updates)
        self._origin: dict[str, Any] = {}  # the run that it began with, for records
        self._resume = resume
        # See `metrics.Report`; replay keeps observations.
        self._first_fault = np.full((), metrics.NEVER, np.int32)
        self._latest_verdict = self._printed_verdict = ""  # kind of the runner's verdict
        with contextlib.ExitStack() as exits:  # the process may live on, as a notebook's does
            processes.on_lead(directory.lock.acquire)
            exits.push(_closing(directory.lock.release))
            # XLA compiles there without the interpreter's lock. Programs are traced in this thread,
            # which has the caller's contexts of JAX.
            self._compiler = futures.ThreadPoolExecutor(1, "compiler")
            exits.callback(self._compiler.shutdown, wait=False, cancel_futures=True)
            self._evaluations: Iterable[Any] | None = None  # programs, as they are compiled
            # With other runners errors of actors come first.
            compiling = (
                self._compiler.submit(runner.trace(experiment.seed).lower().compile)
                if not resume and runner.updates_per_dispatch is None
                else None
            )
            self._import_and_open()
            exits.push(_closing(self._checkpointer.close))
            exits.push(_closing(runner.close))
            for line in runner.describe():
                self._print_line(line)
            if parts.evaluator.environment is not parts.environment:
                self._print_line("evaluations: in the environment's evaluation_environment")
            self._print_line(self._schedule())
            if compiling is not None:  # two compilations at once take longer than in turn
                start = time.perf_counter()
                compiling.result()
                self._clock.first_dispatch = time.perf_counter() - start
            self._state = runner.init(experiment.seed)
            if resume and self._restore():
                pass
            elif initial := initial or initial_run.load(experiment, parts):
                self._state = initial_run.begin(initial, parts, self._state)
                self._origin = {"initial_run": {"path": initial.path, "step": initial.step}}
                self._print_line(f"beginning with {initial.path}, step {initial.step:,}")
            self._exits = exits.pop_all()
        # Read now: the checkout may be at another commit by the end of the run.
        self._provenance = summary_lib.provenance()

    def _import_and_open(self) -> None:
        """Opens the checkpoints; imports orbax, TensorBoard and rich (0.6 s) while XLA compiles."""
        from podracers.checkpoints import checkpoint  # noqa: PLC0415

        importlib.import_module("podracers.training.displays")
        options = self._experiment
        self._checkpointer = checkpoint.Checkpointer(
            self._directory.checkpoints,
            options.keep_latest,
            options.keep_best,
            replay=options.checkpoint_replay,
        )

    def _restore(self) -> bool:
        """Restores the newest checkpoint; returns whether there is one."""
        if self._checkpointer.latest_step() is None:
            if place := processes.on_lead(self._directory.earlier_checkpoints):
                raise errors.UserError(
                    f"expected the checkpoints of '{place}' in '{self._directory.checkpoints}'; "
                    "got none: bind Experiment.checkpoint_directory to their folder"
                )
            self._print_line("there is no checkpoint yet: starting from the beginning")
            return False
        template = self._state
        if self._experiment.checkpoint_replay:  # a state beside the restored one takes its memory
            template = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template
            )
            self._state = None
        restored = self._checkpointer.restore(template, check=self._require_same_run)
        assert restored is not None  # there is a latest step
        step, self._state, metadata = restored
        self._update = metadata["update"]
        self._clock = clock.Clock(**metadata["clock"])
        self._is_over = metadata.get("is_over", False) and self._experiment.on_log is not None
        if record := metadata.get("report"):
            report = metrics.Report.recorded(record)
            _, expected = self._runner.trace(self._experiment.seed).out_info
            if jax.tree.structure(report) == jax.tree.structure(expected):  # else a changed option
                self._report = report
        saved, current = metadata.get("rounding", {}), summary_lib.rounding()
        for name in (name for name in saved if saved[name] != current.get(name)):
            self._print_line(f"changed: {name}: {saved[name]!r} -> {current.get(name)!r}")
        self._origin = {name: metadata[name] for name in metadata if name == "initial_run"}
        self._print_line(f"resuming from step {step:,}")
        return True

    def _fixed(self) -> dict[str, Any]:
        """Returns the settings that a resumed run keeps, as JSON holds them."""
        values = self._runner.population_values.items()
        return {
            "seed": self._experiment.seed,
            "population": self._runner.population,
            "population_values": {name: list(numbers) for name, numbers in values},
            **keys.generator(),
        }

    def _require_same_run(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Raises `errors.UserError` for the checkpoint of another run, by its metadata.

        Checkpoints of earlier versions lack some settings.
        """
        current = self._fixed() | {"agent steps per update": self._runner.steps_per_update}
        saved = {**metadata, "agent steps per update": step // metadata["update"]}
        for name, value in current.items():
            if saved.get(name, value) != value:
                raise errors.UserError(
                    f"a resumed run keeps its {name}, {saved[name]!r}: got {value!r}"
                )
        if metadata["update"] > self._parts.num_updates:
            raise errors.UserError(
                f"Experiment.total_steps: expected at least {step}, the steps of the checkpoint; "
                f"got {self._experiment.total_steps}"
            )

    def _schedule(self) -> str:
        """Returns a line on the updates or times at which the run evaluates and saves."""

        def every(period: int) -> str:
            steps = period * self._runner.steps_per_update
            return f"every {period:,} updates ({steps:,} agent steps)" if period else ""

        saves = f"every {_SAVE_PERIOD / 60:g} minutes"
        if (period := self._experiment.checkpoint_period) is not None:
            saves = every(period)
        evaluates = " and ".join(filter(None, [every(self._evaluation_period), "at the end"]))
        saves = ", ".join(filter(None, [saves, "after evaluations and at the end"]))
        return f"evaluates {evaluates}; saves {saves}"

    @property
    def _is_trained(self) -> bool:
        """Whether no update is left."""
        return self._is_over or self._update >= self._parts.num_updates

    @property
    def steps(self) -> int:
        """Agent steps so far, over all environments of one member of the population."""
        return self._update * self._runner.steps_per_update

    def train(self) -> dict[str, Any] | None:
        """Trains to the end, or until a signal stops the run.

        Returns:
          The summary (in process 0; an empty one elsewhere), or None if a signal stopped the run.

        Raises:
          errors.UserError: the environment breaks its contract, or another thread trains.
          errors.RunFailure: a metric is not finite, or a file cannot be written.
        """
        with self._exits:
            if not _TRAINING.acquire(blocking=False):
                raise errors.UserError(
                    "another thread of this process trains: two programs that sum over devices "
                    "would wait for one another; wait for its end, or use a process of its own"
                )
            self._exits.callback(_TRAINING.release)
            self._open_loggers()
            while not (self._stopping or self._is_trained):
                self._run_period()
            self._stopping = self._stopping or processes.any_process(bool(self._stop))
            if not self._stopping and (summary := self._finish()) is not None:
                return summary
            if self._update:  # else there is no progress to save
                self._save_finally(None)
        self._print_line(f"stopped at {self.steps:,} steps: continue with --resume")
        return None

    def _open_loggers(self) -> None:
        """Opens the loggers of process 0; other processes have none."""
        self._loggers: list[loggers.Logger] = []
        if not processes.is_lead():
            return
        resumed = self.steps if self._resume else None
        agent = type(self._parts.agent).__name__
        options = {} if self._pbt_period else self._runner.population_values
        members = {
            row["seed"]: {f"{agent}.{name}": x for name, x in row["values"].items()}
            for row in population.rows(options, self._seeds, {})
        }
        from podracers.training import displays  # noqa: PLC0415 (TensorBoard and rich take 0.2 s)

        self._loggers.append(displays.TensorBoardLogger(self._directory.path, resumed, members))
        self._loggers.append(loggers.JsonlLogger(self._directory.metrics, resumed))
        if (tracker := self._experiment.tracker) is not None:
            self._loggers.append(tracker.open(self._directory, self._resume))
        if self._progress:
            total = self._parts.num_updates * self._runner.steps_per_update
            self._loggers.append(displays.TerminalLogger(total))
        self._loggers += self._extra_loggers
        for logger in self._loggers:
            self._exits.push(_closing(logger.close))
        self._write_configuration()

    def _run_period(self) -> None:
        """Runs updates to the next boundary of any period, then logs, evaluates and saves as due.

        It returns earlier, without a log line, if the run is to stop: the report is saved.
        TensorBoard (with its profile plugin) and Perfetto read the trace of `profile_update`.
        """
        options = self._experiment
        periods = options.log_period, self._evaluation_period, options.checkpoint_period
        periods = *periods, self._pbt_period  # each exploit step has a log line
        distances = [period - self._update % period for period in periods if period]
        end = min(self._update + min(distances), self._parts.num_updates)
        profiler, profiled = contextlib.nullcontext(), options.profile_update
        if profiled in range(self._update, end) and processes.is_lead():
            folder = self._directory.path / "profile"
            profiler = jax.profiler.trace(folder, create_perfetto_trace=True)
        with profiler:
            while self._update < end:
                if not (size := self._next_size(end - self._update)):
                    return
                self._dispatch(size)
        self._end_period()

    def _next_size(self, most: int) -> int:
        """Returns the number of updates of the next dispatch, or 0 to stop.

        All processes call it together; it saves if the clock of process 0 requires it.
        """
        size = min(most, self._runner.updates_per_dispatch or most)
        size = max(1, min(size, int(_DISPATCH_TIME / self._pace)))
        by_clock = self._experiment.checkpoint_period is None
        is_due = by_clock and time.perf_counter() - self._saved >= _SAVE_PERIOD
        agreed = processes.all_numbers(bool(self._stop), is_due, size)
        self._stopping = bool(np.any(agreed[:, 0]))
        if self._stopping:
            return 0
        _, is_due, size = agreed[0].tolist()
        if is_due and self._update:
            self._save(None)
        return size

    def _dispatch(self, size: int) -> None:
        """Runs some updates, and adds them to the report of the log period."""
        start = time.perf_counter()
        self._state, report = self._runner.step(self._state, size, self._report)
        is_first, programs = self._evaluations is None, []
        if is_first:  # traced while the devices compute
            params = evaluation.shapes(self._runner.actor_params(self._state))
            programs = self._parts.lower_evaluation(params)
        self._report = report = jax.device_get(report)
        if is_first and not self._stop:  # a compilation cannot be cancelled
            self._evaluations = self._compiler.map(jax.stages.Lowered.compile, programs)
        seconds = time.perf_counter() - start
        self._pace = seconds / size
        self._clock.add_dispatch(seconds, size * self._runner.steps_per_update)
        self._update += size
        if self._update == 1:
            self._require_equal_replicas(1)
        self._directory.lock.require_there()
        self._check(report)

    def _end_period(self) -> None:
        """Logs the report of a period, evaluates and saves, as due."""
        experiment, report = self._experiment, self._report
        assert report is not None
        self._report = None
        values = metrics.summarize(report.means, self._seeds)
        diagnostics = self._runner.diagnostics()
        values |= diagnostics.values
        values["steps_per_second"] = self._clock.lap_rate()
        values["wall_time"] = self._clock.elapsed
        values |= {f"memory/{name}": size for name, size in device_memory.in_use().items()}

        # Print a verdict of a new kind, such as "learner-bound", once two periods agree on it.
        kind = diagnostics.verdict.partition(":")[0]
        if kind and kind == self._latest_verdict and kind != self._printed_verdict:
            self._print_line(diagnostics.verdict)
            self._printed_verdict = kind
        self._latest_verdict = kind

        score, period = None, self._evaluation_period
        # By default evaluations take no more agent steps than training.
        is_cheap = self._clock.evaluation_steps <= self.steps
        is_due = is_cheap or experiment.evaluation_period is not None
        if is_due and period and self._update % period == 0:
            score, results, _ = self._evaluate()
            for prefix, episodes in results.by_prefix().items() if results else ():
                for name, mean in episodes.means().items():
                    values |= metrics.label(f"evaluation/{prefix}{name}", mean, self._seeds)
        if experiment.on_log is not None:
            values = {"step": self.steps, **values}
            self._is_over = processes.on_lead(lambda: self._call_on_log(values))
            del values["step"]
        for logger in self._loggers:
            logger.write(self.steps, values)
        period = experiment.checkpoint_period
        due = period and self._update % period == 0
        if score is not None or due:
            self._save(score)

    def _call_on_log(self, values: dict[str, float]) -> bool:
        """Returns whether `Experiment.on_log` ends the run; it may add numbers to `values`."""
        function = self._experiment.on_log
        assert function is not None
        answer = function(values)
        if answer not in (None, False, True):
            raise errors.UserError(
                f"Experiment.on_log: expected True to end the run, or None; got {answer!r}"
            )
        for name, value in values.items():
            if not isinstance(value, int | float | np.number):
                raise errors.UserError(
                    f"Experiment.on_log: expected a number for '{name}', got {value!r}"
                )
        if answer:
            self._print_line(f"Experiment.on_log ends the run at {self.steps:,} steps")
        return bool(answer)

    def _check(self, report: metrics.Report) -> None:
        """Raises an error, with member and update, for a broken rule or a metric of NaN.

        Raises:
          errors.UserError: the environment breaks its contract.
          errors.RunFailure: a metric is not finite.
        """
        self._first_fault = np.minimum(report.first_fault, self._first_fault)
        # Faults come first, because a fault is the cause of bad metrics.
        first = dict(zip(metrics.FAULTS, np.moveaxis(self._first_fault, -1, 0)))
        if all(np.all(update == metrics.NEVER) for update in report.first_nonfinite.values()):
            del first[metrics.OBSERVATION]
        first |= report.first_nonfinite
        name = min(first, key=lambda name: np.min(first[name]))
        update = int(np.min(first[name]))
        if update == metrics.NEVER:
            return
        member = ""
        if self._seeds:
            index = int(np.argmin(first[name]))
            options = population.described(self._options(), index)
            member = f" of seed {self._seeds[index]}{options}"
        saved = self._checkpointer.latest_step()
        newest = "none" if saved is None else f"step {saved:,}"
        where = (
            f"at update {update} ({update * self._runner.steps_per_update:,} steps); "
            f"newest checkpoint: {newest}"
        )
        if name not in metrics.FAULTS:
            raise errors.RunFailure(f"the metric '{name}'{member} became NaN or infinite {where}")
        path = environment.name_of(self._parts.environment)
        raise errors.UserError(
            f"environment {path}: {name}{member}; `podracers-check` lists all faults; found {where}"
        )

    def _evaluate(
        self, final: bool = False
    ) -> tuple[float | None, evaluation.Evaluation | None, evaluation.Episodes | None]:
        """Plays an evaluation; each process plays its share.

        The final one plays the episodes of `scripts/evaluate.py`, also with a uniform policy.
        Returns the score, None if a signal stopped any process; and in process 0 the evaluation
        and the uniform policy's episodes.
        """
        # None if no update was left, or a stop came in the first dispatch.
        for _ in self._evaluations or ():
            pass
        params = self._runner.actor_params(self._state)
        key = evaluation.run_key(self._experiment.seed, None if final else self._update)

        def stopped() -> bool:  # called at every step of a host environment
            peers.touch()
            return bool(self._stop)

        def play(share: tuple[int, int]) -> list[evaluation.Episodes | None]:
            sets = [*self._parts.evaluate(params, key, stop=stopped, share=share)]
            if final:
                policy = evaluation.UniformPolicy(self._parts.environment.spec)
                evaluator = dataclasses.replace(self._parts.evaluator, agent=policy, population=1)
                sets.append(evaluator.run((), key, stopped, share))
            return sets

        played = evaluation.play_together(play)
        uniform = played.pop() if played and final else None
        results = evaluation.Evaluation(*played) if played else None
        outcome = results and (results.score, results.num_steps)
        score, steps = processes.on_lead(lambda: outcome) or (None, 0)
        self._clock.evaluation_steps += steps // self._runner.population
        return score, results, uniform

    def _require_equal_replicas(self, update: int) -> None:
        """Raises `errors.RunFailure` if devices hold different copies of a replicated leaf."""
        if fault := parallel.unequal_replicas(self._state):
            name = type(self._parts.agent).__name__
            raise errors.RunFailure(f"{name}: after update {update}, {fault}")

    def _options(self) -> population.Values:
        """Returns the numbers by option in which members differ now."""
        return self._state.evolution.options if self._pbt_period else self._runner.population_values

    def _save_finally(self, score: float | None) -> None:
        """Saves, and returns once the checkpoint is there."""
        self._save(score)
        self._checkpointer.wait()
        self._directory.lock.require_there()

    def _save(self, score: float | None) -> None:
        self._require_equal_replicas(self._update)
        metadata = {
            "update": self._update,
            "clock": self._clock.record(),
            "report": self._report and self._report.record(),
            "is_over": self._is_over,
            "rounding": summary_lib.rounding(),
            **self._fixed(),
            **self._origin,
        }
        self._saved = time.perf_counter()
        params = self._runner.actor_params(self._state)
        self._checkpointer.save(self.steps, self._state, params, metadata, score)

    def _write_configuration(self) -> None:
        """Writes the operative configuration; logs it, unless an earlier start has logged it."""
        path = self._directory.operative_config
        used = self._experiment.texts.operative
        hyperparameters = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in config.read(used, str(path)).values.items()
            if value is not None
        }
        texts = {}
        is_logged = path.is_file() and path.read_bytes() == used.encode()
        if used and not is_logged:  # it is empty where Python configured everything
            texts = {"config": self._experiment.texts.bindings, "operative_config": used}
        for logger in self._loggers:
            logger.write_configuration(self.steps, texts, hyperparameters)
        storage.write(path, used)  # last: a run that is killed before logs it when it resumes

    def _finish(self) -> dict[str, Any] | None:
        """Runs the final evaluation, saves, and writes the summary; None if a signal stopped it."""
        self._save(None)  # an evaluation that fails must not lose the training
        score, results, uniform = self._evaluate(final=True)
        if score is None:
            return None
        self._save_finally(score)
        if results is None or uniform is None:
            return {}
        rate = self._clock.rate * self._runner.population
        summary = {
            "evaluation": results.summary(self._seeds),
            "random_policy_return": float(np.mean(uniform.returns)),
            "environment_steps": self.steps * self._runner.population,
            "wall_time_s": round(self._clock.elapsed, 3),
            "steps_per_second": None if math.isnan(rate) else round(rate, 1),
            "first_dispatch_s": round(self._clock.first_dispatch, 3),  # compilation included
            "memory": device_memory.in_use(),
            "seed": self._experiment.seed,
            "updates": self._update,
            "best_checkpoint": self._checkpointer.best_step(),
            **self._origin,
            **self._experiment.precision.describe(),
            **self._provenance,
        }
        if options := self._options():
            by_prefix = results.by_prefix().items()
            returns = {f"{prefix}return": x.mean_return() for prefix, x in by_prefix}
            summary["members"] = population.rows(options, self._seeds, returns)
        storage.write(self._directory.summary, json.dumps(summary, indent=2) + "\n")
        for logger in self._loggers:
            logger.write_summary(summary)
        return summary


def begin(
    experiment: experiment_lib.Experiment,
    parts: experiment_lib.Parts,
    directory: run_directory.RunDirectory,
    resume: bool | None = False,
    **options: Any,
) -> Run:
    """Returns a `Run` with these `options`, once its folders are checked and `config.gin` is there.

    With `resume = None`, the checkpoints in `Experiment.checkpoint_directory`, if any, are resumed
    in a new run directory: they outlive that of a machine that is gone.
    """
    is_new = not resume
    if (shared := experiment.checkpoint_directory) is not None:
        resume = storage.require_shared("Experiment.checkpoint_directory", shared, resume)
    elif processes.is_several():
        storage.require_shared("the run directory", directory.path, True, _SHARE)
    initial = None if resume else initial_run.load(experiment, parts)
    if is_new:
        processes.on_lead(directory.create)
        processes.on_lead(lambda: storage.write(directory.config, experiment.text()))
    return Run(experiment, parts, directory, resume=bool(resume), initial=initial, **options)


def train(
    experiment: experiment_lib.Experiment,
    path: str | pathlib.Path,
    print_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any] | None:
    """Trains an experiment in a new run directory, from Python and in one process.

    It does what the command `podracers-train` does, with `print_line` for its lines, and returns
    and raises as `Run.train`. `loggers.read_rows` reads its log, `trained.load` the trained policy.

    Raises:
      errors.UserError: the parts do not fit, or the directory exists.
    """
    directory, parts = run_directory.RunDirectory(path), experiment.build()
    experiment_lib.check(parts, experiment.seed, experiment.tracker)
    with stop_request.StopRequest() as stop:
        options: dict[str, Any] = {"stop": stop, "print_line": print_line, "progress": False}
        return begin(experiment, parts, directory, **options).train()
