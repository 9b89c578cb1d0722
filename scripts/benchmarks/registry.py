"""Benchmarks by name, as functions of the options of `scripts/benchmark.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks import (
    device,
    lpg_speed,
    ppo_speed,
    records,
    replay_speed,
    sebulba_speed,
    tpu_estimates,
)

_Benchmark = Callable[[Any], records.Result]  # takes the options of the command line


def _sebulba(benchmark: Callable, setting: sebulba_speed.Setting) -> _Benchmark:
    return lambda o: benchmark(dataclasses.replace(setting, bindings=o.gin_bindings), o.repeats)


def _replay(agent: str) -> _Benchmark:
    return lambda o: replay_speed.benchmark_agent(agent, o.repeats, o.gin_bindings)


def _device(piece: str) -> _Benchmark:
    return lambda o: device.benchmark(piece, o.repeats, o.batches, o.gin_bindings)


def _tpu(agent: str) -> _Benchmark:
    return lambda o: tpu_estimates.benchmark_agent(
        agent, o.devices or (1,), o.gin_bindings, o.libtpu
    )


BENCHMARKS: dict[str, _Benchmark] = {
    "cartpole": lambda o: ppo_speed.benchmark_ppo("cartpole", o.repeats),
    "breakout": lambda o: ppo_speed.benchmark_ppo("breakout", o.repeats),
    "catch": lambda o: ppo_speed.benchmark_batches(
        "catch", o.repeats, o.batches or ppo_speed.BATCHES
    ),
    "sebulba_impala": _sebulba(sebulba_speed.benchmark_learning, sebulba_speed.IMPALA),
    "sebulba_environments": _sebulba(
        sebulba_speed.benchmark_environments, sebulba_speed.ENVIRONMENTS
    ),
    "lpg": lambda o: lpg_speed.benchmark_lpg(o.repeats, o.gin_bindings),
    **{agent: _replay(agent) for agent in replay_speed.AGENTS},
    **{f"tpu_{agent}": _tpu(agent) for agent in tpu_estimates.EXPERIMENTS},
    **{f"device_{piece}": _device(piece) for piece in device.PIECES},
}
GROUPS = {
    "sebulba": ("sebulba_impala", "sebulba_environments"),
    "replay": replay_speed.AGENTS,
    "tpu": tuple(f"tpu_{agent}" for agent in tpu_estimates.EXPERIMENTS),
    "device": tuple(f"device_{piece}" for piece in device.PIECES),
}
