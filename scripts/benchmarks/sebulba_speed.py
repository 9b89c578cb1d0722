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


@dataclasses.dataclass(frozen=True)
class Setting:
    """Size of a measurement."""

    updates: int  # updates a turn
    env_steps: int  # steps of each environment in a turn of the simulators alone
    bindings: Sequence[str] = ()  # gin bindings that override the experiment's

    def build(self) -> experiment.Parts:
        """Returns the parts of the experiment."""
        return measure.build(["gin/experiments/pong_impala.gin"], self.bindings)

    def stepper(self, runner: Any = None) -> measure.Stepper:
        """Returns the measurement of a runner; None for the experiment's runner."""
        return measure.Stepper(runner or self.build().runner, self.updates, measure.LEAD_IN)


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


class _RawPools:
    """The simulators alone, in the batches and with the threads that Sebulba gives them."""

    def __init__(self, setting: Setting):
        parts = setting.build()
        runner, self._steps = parts.runner, setting.env_steps
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


def _actors(setting: Setting) -> measure.Stepper:
    parts = setting.build()
    return setting.stepper(dataclasses.replace(parts.runner, agent=NotLearning(parts.agent)))


def _small_network(setting: Setting) -> measure.Stepper:
    parts = setting.build()
    encoder = _SmallEncoder()
    network = functools.partial(networks.actor_critic, encoder=encoder, separate_critic=False)
    agent = dataclasses.replace(parts.agent, network=network)
    return setting.stepper(dataclasses.replace(parts.runner, agent=agent))


def benchmark_learning(repeats: int, bindings: Sequence[str]) -> records.Result:
    """Compares Sebulba with its parts, each in its own process."""
    makers = {
        "EnvPool alone": _RawPools,
        "actors alone": _actors,
        "Sebulba": Setting.stepper,
    }
    setting = Setting(6, 250, bindings)
    # Built in this process first: errors in bindings are reported once, before any process starts.
    runner = setting.build().runner
    with contender.together(makers, setting) as contenders:
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
    """Compares Sebulba with a negligible network to the simulators' own rate, in this process.

    Only one process can use some devices.
    """
    runner = Setting(1, 1, bindings).build().runner
    setting = Setting(max(4, 960 // runner.num_envs), max(4, 19_200 // runner.num_envs), bindings)
    with contextlib.closing(_small_network(setting)) as small:
        turns = {"EnvPool alone": _RawPools(setting), "small network": small}
        rates = measure.take_turns(turns, repeats)
    return records.Result(
        "Sebulba's rate as a share of that of EnvPool's Pong alone, with a negligible network.",
        (
            *(measure.speed(values, program=name) for name, values in rates.items()),
            measure.ratio(rates, "small network", "EnvPool alone"),
        ),
        tuple(runner.describe()),
    )
