"""What is to be known of a machine with a device, piece by piece; smaller where it has only a CPU.

Each piece is one process: what it compiled and holds on the device is gone with it, and on some
devices a second process finds no room.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import measure, ppo_speed, records, replay_speed, sebulba_speed

from podracers import command_line, errors, evaluation, parallel, types
from podracers import runner as runner_lib
from podracers.training import experiment

PIECES = ("machine", "parity", "catch", "cartpole", "snake", "breakout", "sebulba", "memory")
LEARNING = ("learning", "pong")  # the latter takes all the time that is left
SOLVED = 18.0  # the mean return of an episode of Pong, of 21 that are possible
_UPDATES = (1, 5)  # after how many the runners and the devices are compared
_CATCH_LEAST = 0.9  # the return that an agent on Catch has to reach: 1 is the most
_BATCHES = {"cpu": (64, 1024)}
_LARGE_BATCHES = (1024, 8192, 65536)
_MATRIX = {"cpu": 1024}  # rows
_LARGE_MATRIX = 8192
_COPIED = 2**26  # bytes

_BYTES = records.Kind("memory", "bytes", None, 0)
_FLOPS = records.Kind("matrix product", "FLOP/s", records.HIGHER, 0)
_COPY = records.Kind("copying 64 MiB", "bytes/s", records.HIGHER, 0)
_LATENCY = records.Kind("a dispatch, with its wait", "s", records.LOWER, 7)
_DIFFERENCE = records.Kind("largest difference of parameters over their largest", "share", None, 9)
_RETURN = records.Kind("return of the final evaluation", "return", records.HIGHER, 3)
_EPISODES = records.Kind("mean return of the newest episodes", "return", records.HIGHER, 2)
_TIME = records.Kind("training, compiling included", "s", records.LOWER, 1)
_STEPS = records.Kind("agent steps taken", "agent steps", None, 0)
_LIMIT = records.Kind("the limit", "s", None, 0)


def benchmark(
    piece: str, repeats: int, batches: Sequence[int] | None, bindings: Sequence[str], seconds: float
) -> records.Result:
    """Measures one of `PIECES` or `LEARNING`.

    Args:
      piece: its name.
      repeats: turns of what is repeated.
      batches: numbers of environments; None to choose by the device.
      bindings: of gin, over the experiments of `sebulba` and `pong`.
      seconds: how long `pong` may train.
    """
    command_line.require_accelerator()
    batches = batches or _by_platform(_BATCHES, _LARGE_BATCHES)
    setting = sebulba_speed.Setting(updates=30, env_steps=600, bindings=bindings)
    pieces: dict[str, Callable[[], records.Result]] = {
        "machine": lambda: _machine(repeats),
        "parity": _parity,
        "sebulba": lambda: sebulba_speed.benchmark_environments(setting, repeats, together=True),
        "memory": _memory,
        "learning": _learning,
        "pong": lambda: _pong(bindings, seconds),
    }
    pieces |= {
        name: functools.partial(ppo_speed.benchmark_batches, name, repeats, batches)
        for name in ("catch", "cartpole", "snake", "breakout")
    }
    load = f"{piece}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before it"
    result = pieces[piece]()
    return dataclasses.replace(result, notes=(*result.notes, load))


def _by_platform(small: dict, otherwise):
    return small.get(jax.default_backend(), otherwise)


def _machine(repeats: int) -> records.Result:
    """Says what the first device does by itself."""
    device, size = jax.devices()[0], _by_platform(_MATRIX, _LARGE_MATRIX)
    rows = []
    for name in ("float32", "bfloat16"):
        matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(name))
        once = measure.seconds(jax.jit(lambda x: x @ x), matrix)
        seconds = np.array([once() for _ in range(repeats)])
        rows.append(_FLOPS.row(2 * size**3 / seconds, of=name))
    host = np.ones(_COPIED, np.uint8)
    there = jax.device_put(host, device)
    # A new array each time: one that was fetched before is kept on the host.
    fresh = jax.jit(lambda x, n: x + n)
    to_host = [jax.block_until_ready(fresh(there, np.uint8(n))) for n in range(repeats + 1)]
    copies = {
        "to the device": measure.seconds(jax.device_put, host, device),
        "to the host": lambda: _timed(lambda: np.array(to_host.pop())),
    }
    for name, once in copies.items():
        rows.append(_COPY.row(_COPIED / np.array([once() for _ in range(repeats)]), of=name))
    small = measure.seconds(jax.jit(lambda x: x + 1), jnp.zeros(()))
    rows.append(_LATENCY.row([small() for _ in range(10 * repeats)], of="a sum"))
    if found := device.memory_stats():
        rows.append(_BYTES.row(found.get("bytes_limit", 0), of="a device"))
    notes = (
        f"{jax.default_backend()}: {', '.join(map(str, jax.devices()))}",
        f"matrices of {size} x {size}, at JAX's default precision",
    )
    return records.Result("What the first device does by itself.", tuple(rows), notes)


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _parity() -> records.Result:
    """Compares both runners, and the device with the CPU, after as many updates from one seed."""
    files, sebulba = ["gin/experiments/catch_ppo.gin"], "gin/runners/sebulba.gin"
    reached = {"Anakin": _after(files), "Sebulba": _after([*files, sebulba], ["Sebulba.lag = 0"])}
    notes = ["PPO on Catch, as shipped; Sebulba with a lag of 0."]
    try:
        if jax.default_backend() != "cpu":
            with parallel.compiling_for(jax.devices("cpu")):
                reached["the CPU"] = _after(files)
    except RuntimeError as error:
        notes.append(f"not compared with the CPU: {errors.first_line(error)}")
    rows = [
        _DIFFERENCE.row(_difference(ours, theirs), **{"to Anakin": name, "updates": updates})
        for name, each in reached.items()
        if name != "Anakin"
        for updates, ours, theirs in zip(_UPDATES, reached["Anakin"], each, strict=True)
    ]
    return records.Result(
        "How far the same updates come apart: under both runners, and on the CPU of this machine. "
        "Programs that are compiled differently round differently, and updates amplify it.",
        tuple(rows),
        tuple(notes),
    )


def _after(files: Sequence[str], bindings: Sequence[str] = ()) -> list[types.PyTree]:
    """Returns the acting parameters after each number of `_UPDATES`, on the host."""
    runner = experiment.load(files, bindings).build().runner
    state, taken, found = runner.init(0), 0, []
    for updates in _UPDATES:
        state, _ = runner.step(state, updates - taken)
        taken = updates
        found.append(jax.device_get(runner.actor_params(state)))
    runner.close()
    return found


def _difference(tree: types.PyTree, other: types.PyTree) -> float:
    leaves, others = (
        [np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (tree, other)
    )
    most = max(float(np.max(np.abs(x))) for x in leaves)
    return max(float(np.max(np.abs(x - y))) for x, y in zip(leaves, others, strict=True)) / most


def _memory() -> records.Result:
    """Says what updates take of a device, as compiled, and what was in use at the most."""
    rows = []
    for name in ("snake_ppo", "cartpole_dqn"):
        runner = experiment.load([f"gin/experiments/{name}.gin"], []).build().runner
        state = runner.init(0)
        for part, size in replay_speed.memory(runner, state).items():
            rows.append(_BYTES.row(size, experiment=name, part=part))
        runner.step(state, 1)
        stats = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            part = "in use at the most so far"
            rows.append(_BYTES.row(stats["peak_bytes_in_use"], experiment=name, part=part))
    about = "Memory of an update of Anakin on each device, as the compiler plans it."
    return records.Result(about, tuple(rows))


def _learning() -> records.Result:
    """Trains IMPALA on Catch to its end under both runners."""
    rows, notes = [], []
    for runner, file in {"Anakin": (), "Sebulba": ("gin/runners/sebulba.gin",)}.items():
        settings = experiment.load(["gin/experiments/catch_impala.gin", *file], [])
        parts, start = settings.build(), time.perf_counter()
        state, report = parts.runner.init(settings.seed), None
        state, report = parts.runner.step(state, parts.num_updates)
        jax.block_until_ready((state, report))
        taken = time.perf_counter() - start
        params = parts.runner.actor_params(state)
        judged = parts.evaluator.run(params, evaluation.run_key(settings.seed))
        parts.runner.close()
        mean = float(np.mean(judged.returns))
        rows += [_RETURN.row(mean, runner=runner), _TIME.row(taken, runner=runner)]
        verdict = "learns" if mean >= _CATCH_LEAST else "DOES NOT LEARN"
        notes.append(f"{runner} {verdict}: {mean:.2f}, where {_CATCH_LEAST} is asked for")
    about = "IMPALA on Catch, as shipped: 500k agent steps, of which the most is a return of 1."
    return records.Result(about, tuple(rows), tuple(notes))


def _pong(bindings: Sequence[str], seconds: float) -> records.Result:
    """Trains PPO on Pong until it plays well, or until the time is over."""
    settings = experiment.load(["gin/experiments/pong_ppo.gin"], bindings)
    parts, start, best, update = settings.build(), time.perf_counter(), -np.inf, 0
    state = parts.runner.init(settings.seed)
    while (taken := time.perf_counter() - start) < seconds and update < parts.num_updates:
        state, best = _period(parts.runner, state, settings.log_period, best)
        update += settings.log_period
        if best >= SOLVED:
            break
    parts.runner.close()
    steps = update * parts.runner.steps_per_update
    rows = [_TIME.row(taken), _LIMIT.row(seconds), _STEPS.row(steps)]
    if np.isfinite(best):
        rows.append(_EPISODES.row(best))
    verdict = f"reached {SOLVED:g}" if best >= SOLVED else f"did not reach {SOLVED:g} in its time"
    about = "PPO on EnvPool's Pong, 84 x 84: until the mean of a log period is 18, or time is over."
    return records.Result(about, tuple(rows), (verdict,))


def _period(
    runner: runner_lib.Runner, state: types.PyTree, updates: int, best: float
) -> tuple[types.PyTree, float]:
    """Takes updates, and returns the best mean return of a period so far."""
    state, report = runner.step(state, updates)
    mean = jax.device_get(report.means["episode/return"])
    return state, max(best, float(mean.total / mean.count)) if mean.count else best


REGISTERED = {
    f"device_{piece}": functools.partial(benchmark, piece) for piece in (*PIECES, *LEARNING)
}
