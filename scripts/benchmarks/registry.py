"""Which benchmarks there are, and what each takes of the options of `scripts/benchmark.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks import (
    agent_speed,
    device,
    dispatch_costs,
    lpg_speed,
    ppo_speed,
    records,
    replay_speed,
    scaling,
    search_speed,
    sebulba_speed,
    startup,
    tpu_estimates,
)

_REPLAY = ("dqn", "r2d2", "sac", "muzero")
GROUPS = {
    "sebulba": ("sebulba_impala", "sebulba_environments", "sebulba_dispatches"),
    "replay": _REPLAY,
    "agents": tuple(f"agent_{name}" for name in agent_speed.EXPERIMENTS),
    "tpu": tuple(f"tpu_{name}" for name in tpu_estimates.EXPERIMENTS),
    "device": tuple(device.REGISTERED),
    "gpu": (
        *("catch", "cartpole_batches", "snake_batches"),
        *("sebulba_environments", "sebulba_impala"),
    ),
}
_Benchmark = Callable[[Any], records.Result]  # takes the options of the command line


def _batches(name: str) -> _Benchmark:
    return lambda o: ppo_speed.benchmark_batches(
        name, o.repeats, o.batches or ppo_speed.BATCHES, o.devices
    )


def _sebulba(benchmark: Callable, setting: sebulba_speed.Setting) -> _Benchmark:
    return lambda o: benchmark(dataclasses.replace(setting, bindings=o.gin_bindings), o.repeats)


def _agent(benchmark: Callable, name: str) -> _Benchmark:
    return lambda o: benchmark(name, o.repeats, o.gin_bindings)


def _device(piece: Callable) -> _Benchmark:
    return lambda o: piece(o.repeats, o.batches, o.gin_bindings, o.seconds)


def _tpu(name: str) -> _Benchmark:
    return lambda o: tpu_estimates.benchmark_agent(
        name, o.devices or (1,), o.gin_bindings, o.libtpu
    )


BENCHMARKS: dict[str, _Benchmark] = {
    "cartpole": lambda o: ppo_speed.benchmark_ppo("cartpole", o.repeats),
    "breakout": lambda o: ppo_speed.benchmark_ppo("breakout", o.repeats),
    "minatar": lambda o: ppo_speed.benchmark_minatar(o.repeats),
    "breakdown": lambda o: ppo_speed.benchmark_breakdown(o.repeats),
    "overhead": lambda o: ppo_speed.benchmark_overhead(o.repeats),
    "catch": _batches("catch"),
    "cartpole_batches": _batches("cartpole"),
    "snake_batches": _batches("snake"),
    "resets": lambda o: ppo_speed.benchmark_resets(o.repeats),
    "startup": lambda o: startup.benchmark_startup(o.repeats),
    **{
        f"agent_{name}": _agent(agent_speed.benchmark_agent, name)
        for name in agent_speed.EXPERIMENTS
    },
    "scaling": lambda o: scaling.benchmark_devices(
        o.repeats, o.devices or (1, 2, 4, 8), o.gin_bindings
    ),
    "scaling_processes": lambda o: scaling.benchmark_processes(
        o.repeats, o.processes, o.gin_bindings
    ),
    "sebulba_impala": _sebulba(sebulba_speed.benchmark_learning, sebulba_speed.IMPALA),
    "sebulba_environments": _sebulba(
        sebulba_speed.benchmark_environments, sebulba_speed.ENVIRONMENTS
    ),
    "sebulba_dispatches": lambda o: dispatch_costs.benchmark_dispatches(o.repeats),
    "lpg": lambda o: lpg_speed.benchmark_lpg(o.repeats, o.gin_bindings),
    "search": lambda o: search_speed.benchmark_search(o.repeats),
    **{
        name: _agent(replay_speed.benchmark_agent, agent_speed.EXPERIMENTS[name])
        for name in _REPLAY
    },
    **{name: _device(piece) for name, piece in device.REGISTERED.items()},
    **{f"tpu_{name}": _tpu(name) for name in tpu_estimates.EXPERIMENTS},
}
