"""Measurements of the device at hand: its own speed, both runners on it, and learning.

Each piece runs in its own process, which frees the device's memory when it ends.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import measure, ppo_speed, records, sebulba_speed

from podracers import command_line, errors, evaluation, parallel, types
from podracers.training import experiment

_BATCHED = ("catch", "cartpole", "snake", "breakout")
PIECES = ("machine", "parity", *_BATCHED, "sebulba", "learning", "pong")  # pong takes the rest
SOLVED = 18.0  # mean return of an episode of Pong, of 21 that are possible
_UPDATES = (1, 5)  # numbers of updates after which parameters are compared
_CATCH_SOLVED = 0.9  # return on Catch, of 1 that is possible
_COPIED = 2**26  # bytes


def benchmark(
    piece: str, repeats: int, batches: Sequence[int] | None, bindings: Sequence[str], seconds: float
) -> records.Result:
    """Measures one of `PIECES`.

    Args:
      piece: its name.
      repeats: number of turns.
      batches: numbers of environments; None to choose by the device.
      bindings: gin bindings over the experiments of `sebulba` and `pong`.
      seconds: limit of the training of `pong`.
    """
    command_line.require_accelerator()
    on_cpu = jax.default_backend() == "cpu"
    batches = batches or ((64, 1024) if on_cpu else (1024, 8192, 65536))
    setting = dataclasses.replace(sebulba_speed.ENVIRONMENTS, bindings=bindings)
    pieces: dict[str, Callable[[], records.Result]] = {
        "machine": lambda: _machine(repeats, 1024 if on_cpu else 8192),
        "parity": _parity,
        "sebulba": lambda: sebulba_speed.benchmark_environments(setting, repeats, one_process=True),
        "learning": _learning,
        "pong": lambda: _pong(bindings, seconds),
    }
    for name in _BATCHED:
        run = functools.partial(ppo_speed.benchmark_batches, name, repeats, batches)
        pieces[name] = run
    load = f"{piece}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start"
    result = pieces[piece]()
    return dataclasses.replace(result, notes=(*result.notes, load))


def _machine(repeats: int, size: int) -> records.Result:
    """Measures matrix products, copies and the latency of a dispatch on the first device."""
    device, rows = jax.devices()[0], []
    for name in ("float32", "bfloat16"):
        matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(name))
        once = measure.seconds(jax.jit(lambda x: x @ x), matrix)
        flops = 2 * size**3 / np.array([once() for _ in range(repeats)])
        rows.append(records.row("matrix product", "FLOP/s", flops, of=name))
    host = np.ones(_COPIED, np.uint8)
    there = jax.device_put(host, device)
    # A new array for each fetch: JAX keeps the host's copy of one that was fetched before.
    add = jax.jit(lambda x, n: x + n)
    fresh = [jax.block_until_ready(add(there, np.uint8(n))) for n in range(repeats + 1)]
    copies = {
        "to the device": measure.seconds(jax.device_put, host, device),
        "to the host": lambda: measure.seconds_of(lambda: np.array(fresh.pop())),
    }
    for name, once in copies.items():
        rate = _COPIED / np.array([once() for _ in range(repeats)])
        rows.append(records.row("copying 64 MiB", "bytes/s", rate, of=name))
    small = measure.seconds(jax.jit(lambda x: x + 1), jnp.zeros(()))
    latency = [small() for _ in range(10 * repeats)]
    rows.append(records.row("a dispatch and its wait", "s", latency, of="a sum"))
    if found := device.memory_stats():
        rows.append(records.row("memory", "bytes", found.get("bytes_limit", 0), of="a device"))
    notes = (
        f"{jax.default_backend()}: {', '.join(map(str, jax.devices()))}",
        f"matrices of {size} x {size}, at JAX's default precision",
    )
    return records.Result("The first device by itself.", tuple(rows), notes)


def _parity() -> records.Result:
    """Compares both runners, and the device with the CPU, after updates from one seed."""
    files, sebulba = ["gin/experiments/catch_ppo.gin"], "gin/runners/sebulba.gin"
    reached = {"Anakin": _after(files), "Sebulba": _after([*files, sebulba], ["Sebulba.lag = 0"])}
    notes = ["PPO on Catch, as shipped; Sebulba with a lag of 0."]
    try:
        if jax.default_backend() != "cpu":
            with parallel.compiling_for(jax.devices("cpu")):
                reached["the CPU"] = _after(files)
    except RuntimeError as error:
        notes.append(f"not compared with the CPU: {errors.first_line(error)}")
    rows = []
    for name, found in [*reached.items()][1:]:
        for updates, ours, theirs in zip(_UPDATES, reached["Anakin"], found, strict=True):
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


def _after(files: Sequence[str], bindings: Sequence[str] = ()) -> list[types.PyTree]:
    """Returns the acting parameters after each number of `_UPDATES`, on the host."""
    runner = measure.build(files, bindings).runner
    state, taken, found = runner.init(0), 0, []
    for updates in _UPDATES:
        state, _ = runner.step(state, updates - taken)
        taken = updates
        found.append(jax.device_get(runner.actor_params(state)))
    runner.close()
    return found


def _learning() -> records.Result:
    """Trains IMPALA on Catch to its end under both runners."""
    rows, notes = [], []
    for runner in measure.RUNNERS:
        settings = experiment.load(measure.files("catch_impala", runner), [])
        parts, start = settings.build(), time.perf_counter()
        state, report = parts.runner.step(parts.runner.init(settings.seed), parts.num_updates)
        jax.block_until_ready((state, report))
        taken, params = time.perf_counter() - start, parts.runner.actor_params(state)
        found = parts.evaluator.run(params, evaluation.run_key(settings.seed))
        parts.runner.close()
        mean = float(np.mean(found.returns))
        rows.append(records.row("return of the final evaluation", "return", mean, runner=runner))
        rows.append(records.row("training, compiling included", "s", taken, runner=runner))
        verdict = "learns" if mean >= _CATCH_SOLVED else "DOES NOT LEARN"
        notes.append(f"{runner} {verdict}: {mean:.2f}, required {_CATCH_SOLVED}")
    about = "IMPALA on Catch, as shipped: 500k agent steps; the highest return is 1."
    return records.Result(about, tuple(rows), tuple(notes))


def _pong(bindings: Sequence[str], seconds: float) -> records.Result:
    """Trains PPO on Pong until the mean return of a log period is `SOLVED` or time is up."""
    settings = experiment.load(["gin/experiments/pong_ppo.gin"], bindings)
    parts, start, best, update = settings.build(), time.perf_counter(), -np.inf, 0
    state = parts.runner.init(settings.seed)
    while (taken := time.perf_counter() - start) < seconds and update < parts.num_updates:
        state, report = parts.runner.step(state, settings.log_period)
        update += settings.log_period
        mean = jax.device_get(report.means["episode/return"])
        best = max(best, float(mean.total / mean.count)) if mean.count else best
        if best >= SOLVED:
            break
    parts.runner.close()
    steps = update * parts.runner.steps_per_update
    rows = [
        records.row("training, compiling included", "s", taken),
        records.row("limit", "s", seconds),
        records.row("agent steps", "agent steps", steps),
    ]
    if np.isfinite(best):
        rows.append(records.row("best mean return of a log period", "return", best))
    verdict = f"reached {SOLVED:g}" if best >= SOLVED else f"did not reach {SOLVED:g} in its time"
    about = "PPO on EnvPool's Pong, 84 x 84, to a mean return of 18 or to the end of its time."
    return records.Result(about, tuple(rows), (verdict,))
