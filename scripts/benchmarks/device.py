"""Measurements on the device at hand: agreement of runners, speed, learning.

Each piece runs in its own process, which frees the device's memory when it ends.
"""

import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from podracers import errors, evaluation, parallel, types
from podracers.commands import command_line
from podracers.scripts.benchmarks import agent_speed, measure, ppo_speed, records, sebulba_speed
from podracers.training import experiment

_BATCHED = ("catch", "cartpole", "snake", "breakout")
_REPLAY = ("r2d2", "muzero")
PIECES = ("parity", *_BATCHED, "sebulba", "residual", *_REPLAY, "learning")
_UPDATES = (1, 5)  # numbers of updates after which parameters are compared
_SAME = ("device", "host_cores", "versions", "commit")  # fields in which all pieces of a file agree
_CATCH_SOLVED = 0.9  # return on Catch, of 1 that is possible


def benchmark(piece: str, repeats: int, bindings: Sequence[str]) -> records.Result:
    """Measures one of `PIECES`; bindings override the experiment of `sebulba` and `residual`."""
    command_line.require_accelerator()
    load = f"{piece}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start"
    small = jax.default_backend() == "cpu"
    batches = (64, 1024) if small else (1024, 8192, 65536)
    benchmarks = {
        "parity": _parity,
        "sebulba": lambda: _environments(repeats, bindings, small),
        "residual": lambda: _residual(repeats, bindings),
        "learning": _learning,
        **dict.fromkeys(_REPLAY, lambda: agent_speed.benchmark_agent(piece, repeats)),
        **dict.fromkeys(_BATCHED, lambda: ppo_speed.benchmark_batches(piece, repeats, batches)),
    }
    result = benchmarks[piece]()
    return dataclasses.replace(result, notes=(*result.notes, load))


def merge(
    record: records.Record | None, part: records.Record, file: pathlib.Path
) -> records.Record:
    """Returns the record with one more piece; raises errors.UserError for another machine."""
    known = record or part
    for name in _SAME:
        if known.provenance[name] != part.provenance[name]:
            raise errors.UserError(f"{file}: another {name} was measured; name another --json")
    results = {**known.results, **part.results}
    order = [f"device_{piece}" for piece in PIECES]
    results = {name: results[name] for name in order if name in results}
    return records.Record(f"scripts/accelerator.py --json {file}", results, part.provenance)


def _parity() -> records.Result:
    """Compares both runners, and the device with the CPU, after updates from one seed."""
    notes = ["PPO on Catch, as shipped; Sebulba with a lag of 0."]
    anakin, others = _after("Anakin"), {"Sebulba": _after("Sebulba", ["Sebulba.lag = 0"])}
    try:
        if jax.default_backend() != "cpu":
            with parallel.compiling_for(jax.devices("cpu")):
                others["the CPU"] = _after("Anakin")
    except RuntimeError as error:
        notes.append(f"not compared with the CPU: {errors.first_line(error)}")
    rows = []
    for name, other in others.items():
        for updates, ours, theirs in zip(_UPDATES, anakin, other, strict=True):
            pairs = [*zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)]
            largest = max(float(np.max(np.abs(x))) for x, _ in pairs)
            share = max(float(np.max(np.abs(x - y))) for x, y in pairs) / largest
            case = {"to Anakin": name, "updates": updates}
            measured = "largest difference of parameters over their largest"
            rows.append(records.row(measured, "share", share, **case))
    return records.Result(
        "Differences between the same updates under both runners, and on the CPU of this machine. "
        "Programs that are compiled differently round differently, and updates amplify it.",
        tuple(rows),
        tuple(notes),
    )


def _after(name: str, bindings: Sequence[str] = ()) -> list[types.PyTree]:
    """Returns the acting parameters after each number of `_UPDATES`, on the host."""
    runner = measure.build(measure.files("catch_ppo", name), bindings).runner
    state, taken, params = runner.init(0), 0, []
    for updates in _UPDATES:
        state, _ = runner.step(state, updates - taken)
        taken = updates
        params.append(jax.device_get(runner.actor_params(state)))
    runner.close()
    return params


def _environments(repeats: int, bindings: Sequence[str], small: bool) -> records.Result:
    """Measures Sebulba's share of EnvPool's rate by environments, actor threads and batches."""
    rows, result = [], None
    configurations = [(8, 1, 2)] if small else itertools.product((32, 128, 256), (1, 2), (1, 2))
    for num_envs, threads, batches in configurations:
        setting = (
            f"NUM_ENVS = {num_envs}",
            f"sebulba.Sebulba.actor_devices = {(0,) * threads}",
            f"sebulba.Sebulba.batches_per_actor = {batches}",
            "sebulba.Sebulba.learner_devices = (0,)",
        )
        result = sebulba_speed.benchmark_environments(repeats, [*setting, *bindings])
        case = {"environments": num_envs, "threads": threads, "batches of each": batches}
        rows += [dataclasses.replace(row, case={**case, **row.case}) for row in result.rows]
    assert result is not None
    return dataclasses.replace(result, rows=tuple(rows))


def _residual(repeats: int, bindings: Sequence[str]) -> records.Result:
    """Measures IMPALA on Pong with its published network, in frames."""
    network = ["actor_critic.encoder = @encoders.ImpalaResNet()", "IMPALA.num_minibatches = 4"]
    setting = sebulba_speed.Setting(4, 0, [*network, *bindings])
    stepper = setting.stepper()
    rates = 4 * np.array(measure.take_turns({"": stepper}, repeats)[""])  # four frames a step
    stepper.close()
    return records.Result(
        "IMPALA on EnvPool's Pong, residual network of Espeholt et al. 2018, 4 minibatches.",
        (
            records.row("frames", "frames/s", rates),
            records.row("frames of a host core", "frames/s", rates / (os.cpu_count() or 1)),
        ),
    )


def _learning() -> records.Result:
    """Trains IMPALA on Catch to its end under both runners."""
    rows, notes = [], []
    for runner in measure.RUNNERS:
        settings = experiment.load(measure.files("catch_impala", runner), [])
        parts, start = settings.build(), time.perf_counter()
        state, report = parts.runner.step(parts.runner.init(settings.seed), parts.num_updates)
        jax.block_until_ready((state, report))
        taken, params = time.perf_counter() - start, parts.runner.actor_params(state)
        result = parts.evaluator.run(params, evaluation.run_key(settings.seed))
        parts.runner.close()
        mean = float(np.mean(result.returns))
        rows.append(records.row("return of the final evaluation", "return", mean, runner=runner))
        rows.append(records.row("training, compiling included", "s", taken, runner=runner))
        verdict = "learns" if mean >= _CATCH_SOLVED else "DOES NOT LEARN"
        notes.append(f"{runner} {verdict}: {mean:.2f}, required {_CATCH_SOLVED}")
    about = "IMPALA on Catch, as shipped: 500k agent steps; the highest return is 1."
    return records.Result(about, tuple(rows), tuple(notes))
