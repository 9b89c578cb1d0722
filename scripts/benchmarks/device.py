"""Checks of the device at hand: agreement of runners, and with the CPU; learning."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from podracers import errors, evaluation, parallel, types
from podracers.scripts.benchmarks import measure, records
from podracers.training import experiment

NOT_LEARNT = "DOES NOT LEARN"  # in the note on an agent
_UPDATES = (1, 5)  # numbers of updates after which parameters are compared
_CATCH_SOLVED = 0.9  # return on Catch, of 1 that is possible


def benchmark_parity() -> records.Result:
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


def benchmark_learning() -> records.Result:
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
        verdict = "learns" if mean >= _CATCH_SOLVED else NOT_LEARNT
        notes.append(f"{runner} {verdict}: {mean:.2f}, required {_CATCH_SOLVED}")
    about = "IMPALA on Catch, as shipped: 500k agent steps; the highest return is 1."
    return records.Result(about, tuple(rows), tuple(notes))
