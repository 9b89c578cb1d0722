"""Sebulba on EnvPool's Pong: the simulators alone, actors alone, actors and learner.

All settings are the shipped experiment's. Programs run alternately.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from agents import networks
from environments import envpool
from podracers import sebulba, types
from podracers.scripts.benchmarks import contender, measure, records
from podracers.training import experiment


def _build(bindings: Sequence[str]) -> experiment.Parts:
    return measure.build(["gin/experiments/pong_impala.gin"], bindings)


def _stepper(runner: Any, updates: int) -> measure.Stepper:
    return measure.Stepper(runner, updates, measure.LEAD_IN)


class _SmallEncoder(nn.Module):
    """One layer on one pixel of 144: its cost is negligible."""

    @nn.compact
    def __call__(self, observation):
        pixels = observation[:, ::12, ::12].reshape(observation.shape[0], -1)
        return nn.relu(nn.Dense(16)(pixels / 255.0))


@dataclasses.dataclass(frozen=True, eq=False)
class NotLearning:
    """An agent that acts as another, with an empty update."""

    agent: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        del rollout, key
        return state, {}


class RawPools:
    """The simulators alone, in the batches and with the threads that Sebulba gives them.

    A measurement takes `steps` steps of each environment.
    """

    def __init__(self, bindings: Sequence[str], steps: int):
        parts = _build(bindings)
        runner, self._steps = parts.runner, steps
        assert isinstance(runner, sebulba.Sebulba)
        assert isinstance(parts.environment, envpool.EnvPool)
        batches = len(runner.placement.actors) * runner.num_batches
        rows = np.split(np.arange(runner.num_envs, dtype=np.int32), batches)
        threads = runner._threads_per_batch
        hosts = [parts.environment.make(jax.random.key(0), row, threads) for row in rows]
        actions, shape = parts.environment.spec.action, (64, runner.num_envs // batches)
        rng = np.random.default_rng(0)
        self._actions = rng.integers(actions.minimum, actions.maximum + 1, shape, actions.dtype)
        self._num_envs = runner.num_envs
        # EnvPool without the adaptor; its public `recv` would also build unused arrays.
        self._pools = [host._pool for host in hosts]
        for pool in self._pools:
            pool.async_reset()

    def __call__(self) -> float:
        """Returns agent steps per second."""
        start = time.perf_counter()
        for step in range(self._steps):
            for pool in self._pools:
                pool._recv()
                pool.send(self._actions[step % len(self._actions)])
        return self._steps * self._num_envs / (time.perf_counter() - start)


def actors(bindings: Sequence[str], updates: int) -> measure.Stepper:
    """Measures actors, with an empty update."""
    parts = _build(bindings)
    return _stepper(dataclasses.replace(parts.runner, agent=NotLearning(parts.agent)), updates)


def whole(bindings: Sequence[str], updates: int) -> measure.Stepper:
    """Measures the experiment."""
    return _stepper(_build(bindings).runner, updates)


def _small_network(bindings: Sequence[str], updates: int) -> measure.Stepper:
    parts = _build(bindings)
    encoder = _SmallEncoder()
    network = functools.partial(networks.actor_critic, encoder=encoder, separate_critic=False)
    agent = dataclasses.replace(parts.agent, network=network)
    return _stepper(dataclasses.replace(parts.runner, agent=agent), updates)


def benchmark_learning(repeats: int, bindings: Sequence[str]) -> records.Result:
    """Compares Sebulba with its parts, each in its own process."""
    # Built in this process first: errors in bindings are reported once, before any process starts.
    runner = _build(bindings).runner
    contenders = {
        "EnvPool alone": contender.Contender.of(RawPools, bindings, 250),
        "actors alone": contender.Contender.of(actors, bindings, 6),
        "Sebulba": contender.Contender.of(whole, bindings, 6),
    }
    with contextlib.ExitStack() as stack:
        for program in contenders.values():
            stack.callback(program.close)
        rates = measure.take_turns(contenders, repeats)
        memory = contenders["Sebulba"].memory()
    return records.Result(
        "IMPALA on EnvPool's Pong: the simulators alone, actors without learning, and Sebulba.",
        (
            *(measure.speed(values, program=name) for name, values in rates.items()),
            measure.ratio(rates, "Sebulba", "EnvPool alone"),
            measure.ratio(rates, "actors alone", "EnvPool alone"),
            records.row("peak memory", "bytes", memory, program="Sebulba"),
        ),
        tuple(runner.describe()),
    )


def benchmark_environments(repeats: int, bindings: Sequence[str]) -> records.Result:
    """Measures Sebulba's share of EnvPool's rate, with a negligible network.

    Programs run in this process: only one can use some devices.
    """
    runner = _build(bindings).runner
    pools = RawPools(bindings, max(4, 19_200 // runner.num_envs))
    with contextlib.closing(_small_network(bindings, max(4, 960 // runner.num_envs))) as network:
        turns = {"EnvPool alone": pools, "small network": network}
        rates = measure.take_turns(turns, repeats)
    return records.Result(
        "Sebulba's rate as a share of that of EnvPool's Pong alone, with a negligible network.",
        (
            *(measure.speed(values, program=name) for name, values in rates.items()),
            measure.ratio(rates, "small network", "EnvPool alone"),
        ),
        tuple(runner.describe()),
    )
