"""A worker of a study: it joins the study, takes trials until none is left, and reports."""

import argparse
import contextlib
import math
import time

import jax
import optuna

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.results import training_process
from podracers.scripts.sweeps import report, studies, trials
from podracers.scripts.sweeps import space as space_lib
from podracers.training import stop_request

_STOPPED = 75  # exit code after a signal, by which a launcher knows that the study goes on


def run(options: argparse.Namespace) -> int:
    """Works with the options of `scripts/sweep.py`; returns the exit code.

    Raises:
      errors.UserError: a mistake, found before the first trial.
      errors.RunFailure: all trials have failed.
    """
    command_line.use_compilation_cache()
    objective = trials.SPEED if options.objective == "speed" else options.objective
    files = options.gin_file, options.gin_bindings
    space = space_lib.read(options.space)
    sampler = studies.sampler(options.sampler, space, options.sampler_seed)
    num_trials = options.trials
    if options.sampler == "grid":
        num_trials = min(num_trials, math.prod(map(len, space_lib.grid(space).values())))
    with stop_request.StopRequest() as stop:
        trainer = trials.Trainer(
            *files, objective, options.last, options.seeds, options.study, stop
        )
        trainer.check(space, options.space, options.batch)
        study = _open(options, trainer, space, sampler)
        worker = studies.Worker(study, space, options.study)
        try:
            while not stop and (count := worker.num_left(num_trials, stop.__bool__)):
                _take(worker, trainer, min(count, options.batch))
        finally:
            worker.lock.release()
    print(*report.write(study, trainer), sep="\n")
    if stop:
        print("stopped: the same command continues")
    return _STOPPED if stop else 0


def _open(
    options: argparse.Namespace,
    trainer: trials.Trainer,
    space: space_lib.Space,
    sampler: optuna.samplers.BaseSampler,
) -> optuna.Study:
    """Begins the study or joins it; raises errors.UserError if it searches something else."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=studies.storage(options.storage, options.study, options.heartbeat),
        study_name=options.study.name,
        direction=options.direction,
        sampler=sampler,
        pruner=studies.PRUNERS[options.pruner](),
        load_if_exists=True,
    )
    texts = trainer.load().texts
    record = {
        "space": {name: str(distribution) for name, distribution in space.items()},
        "experiment": training_process.settings_digest(texts.bindings),
        "objective": [trainer.objective, options.last],
        "number of seeds": options.seeds,
        "direction": options.direction,
    }
    if begun := study.user_attrs.get("podracers"):
        sampler.reseed_rng()  # else it would repeat the first draws
    else:
        study.set_user_attr("podracers", record)
        start = space_lib.start(space, texts)
        if start and options.sampler != "grid":
            study.enqueue_trial(start, skip_if_exists=True)
    for name, value in record.items():
        if begun and value != begun[name]:
            raise errors.UserError(f"the study '{options.study}' has another {name}: see --study")
    return study


def _take(worker: studies.Worker, trainer: trials.Trainer, count: int) -> None:
    """Trains trials that share a program."""
    start = time.perf_counter()
    finished = optuna.exceptions.UpdateFinishedTrialError  # another worker failed the trial
    with worker.take(count) as taken, contextlib.suppress(finished):
        scores, reason = [None] * count, ""
        try:
            scores = trainer.train(taken)
        except trials.Interrupted:
            return worker.leave(taken)
        except optuna.TrialPruned:
            pass
        except (errors.UserError, errors.RunFailure) as error:
            reason = errors.first_line(error)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
                raise
            reason = f"out of memory: {errors.one_line(error)}"
        seconds = time.perf_counter() - start
        for trial, score in zip(taken, scores):
            worker.tell(trial, score, reason)
            text = "pruned" if score is None else f"{trainer.objective} {score:g}"
            settings = ", ".join([*space_lib.bindings(trial.params), f"{seconds:.0f} s"])
            print(f"trial {trial.number}: {reason or text} ({settings})", flush=True)
