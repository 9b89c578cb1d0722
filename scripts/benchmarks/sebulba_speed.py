"""Sebulba's speed on EnvPool: the simulators alone, actors alone, actors and learner, and others.

Everything is taken from the experiments as they are shipped, so this is what a user gets. Each
contender has a process of its own, and they take turns.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from benchmarks import contender, measure, records, single_file_sebulba

from agents import networks
from podracers import environment, errors, types
from podracers.sebulba import actor
from podracers.training import experiment

Measured = dict[str, list[float]]

_EXPERIMENT = "gin/experiments/pong_impala.gin"
_TRANSFER = records.Kind("to the device for each agent step", "bytes", records.LOWER, 1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured."""

    updates: int  # how many a turn takes
    # How many come before it and are not counted: while it was others' turn, an actor had the time
    # to fill the queue with a rollout, and to collect another one.
    lead_in: int = 2
    env_steps: int = 250  # steps of each environment that a turn of the simulators alone takes
    bindings: Sequence[str] = ()  # of gin, over the experiment's own

    def build(self) -> experiment.Parts:
        """Returns the parts of the experiment."""
        return experiment.load([_EXPERIMENT], self.bindings).build()


IMPALA = Setting(updates=6)
ENVIRONMENTS = Setting(updates=30, env_steps=600)


class _Glance(nn.Module):
    """An encoder that costs next to nothing: one layer on one pixel of 144."""

    @nn.compact
    def __call__(self, observation):
        pixels = observation[:, ::12, ::12].reshape(observation.shape[0], -1)
        return nn.relu(nn.Dense(16)(pixels / 255.0))


@dataclasses.dataclass(frozen=True, eq=False)
class _NotLearning:
    """An agent that acts as another, and learns nothing."""

    agent: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Returns the state as it is."""
        del rollout, key
        return state, {}


class _RawPools:
    """The simulators alone, in as many batches and on as many threads as Sebulba has of them."""

    def __init__(self, setting: Setting):
        parts = setting.build()
        runner, self._steps = parts.runner, setting.env_steps
        batches = len(runner.placement.actors) * runner.num_batches
        rows = np.split(np.arange(runner.num_envs, dtype=np.int32), batches)
        threads = runner._threads_per_batch
        hosts = [parts.environment.make(jax.random.key(0), row, threads) for row in rows]
        rng = np.random.default_rng(0)
        actions = parts.environment.spec.action
        shape = (64, runner.num_envs // batches)
        self._actions = rng.integers(actions.minimum, actions.maximum + 1, shape, actions.dtype)
        self._agent_steps = self._steps * runner.num_envs
        # EnvPool itself, without the adaptor, and at its best: its public `recv` also makes arrays
        # of what nobody reads.
        self._pools = [host._pool for host in hosts]
        for pool in self._pools:
            pool.async_reset()

    def __call__(self) -> float:
        """Returns agent steps per second."""
        return measure.rate(self._step, self._agent_steps)

    def _step(self) -> None:
        for step in range(self._steps):
            for pool in self._pools:
                pool._recv()
                pool.send(self._actions[step % len(self._actions)])


def _stepper(setting: Setting, runner: Any) -> measure.Stepper:
    return measure.Stepper(runner, setting.updates, setting.lead_in)


def _sebulba(setting: Setting) -> measure.Stepper:
    return _stepper(setting, setting.build().runner)


def _actors(setting: Setting) -> measure.Stepper:
    parts = setting.build()
    return _stepper(setting, dataclasses.replace(parts.runner, agent=_NotLearning(parts.agent)))


def _small_network(setting: Setting) -> measure.Stepper:
    parts = setting.build()
    network = functools.partial(networks.actor_critic, encoder=_Glance(), separate_critic=False)
    agent = dataclasses.replace(parts.agent, network=network)
    return _stepper(setting, dataclasses.replace(parts.runner, agent=agent))


def _make_baseline(setting: Setting) -> single_file_sebulba.SingleFileSebulba:
    parts = setting.build()
    agent, runner, task = parts.agent, parts.runner, parts.environment
    if agent.num_minibatches != 1:
        raise errors.UserError("the baseline learns from all streams at once")
    settings = single_file_sebulba.Settings(runner.num_envs, runner.rollout_length)
    options = {**task.options, "max_episode_steps": task.max_episode_steps}
    return single_file_sebulba.SingleFileSebulba(task.task_id, options, settings)


def _baseline(setting: Setting) -> measure.Stepper:
    return _stepper(setting, _make_baseline(setting))


def benchmark_learning(setting: Setting, repeats: int) -> records.Result:
    """Compares Sebulba with the published design at equal work, and with its own parts."""
    makers = {
        "EnvPool alone": _RawPools,
        "actors alone": _actors,
        "Sebulba": _sebulba,
        "baseline": _baseline,
    }
    # Built here too, where a mistake in a binding is met once, and before anything is started.
    runner, baseline = setting.build().runner, _make_baseline(setting)
    rates, memory = _measure(makers, setting, repeats)
    transfer = {
        "Sebulba": bytes_per_step(runner.environment.spec),
        "baseline": baseline.bytes_to_device_per_step,
    }
    return records.Result(
        "IMPALA on EnvPool's Pong: the simulators alone, actors that learn "
        "nothing, Sebulba, and our own straightforward version of the published design, at equal "
        "work.",
        (
            *(measure.SPEED.row(values, program=name) for name, values in rates.items()),
            _ratio(rates, "Sebulba", "baseline"),
            _ratio(rates, "Sebulba", "EnvPool alone"),
            _ratio(rates, "actors alone", "EnvPool alone"),
            *(_TRANSFER.row(number, program=name) for name, number in transfer.items()),
            *(measure.PEAK_MEMORY.row(memory[name], program=name) for name in transfer),
        ),
        tuple(runner.describe()),
    )


def benchmark_environments(
    setting: Setting, repeats: int, together: bool = False
) -> records.Result:
    """Says how near to the simulators' own rate Sebulba comes where the network costs nothing.

    Args:
      setting: what is measured.
      repeats: turns of each.
      together: both in this process, as where no two may have the device.
    """
    makers = {"EnvPool alone": _RawPools, "small network": _small_network}
    runner = setting.build().runner
    if together:
        with contextlib.closing(_small_network(setting)) as network:
            turns = {"EnvPool alone": _RawPools(setting), "small network": network}
            rates = measure.take_turns(turns, repeats)
    else:
        rates, _ = _measure(makers, setting, repeats)
    return records.Result(
        "How near Sebulba comes to the rate of EnvPool's Pong alone, with a network small enough "
        "not to matter.",
        (
            *(measure.SPEED.row(values, program=name) for name, values in rates.items()),
            _ratio(rates, "small network", "EnvPool alone"),
        ),
        tuple(runner.describe()),
    )


def _measure(
    makers: dict[str, Callable[[Setting], measure.Turn]], setting: Setting, repeats: int
) -> tuple[Measured, dict[str, int]]:
    """Returns the rates of all contenders, and the most memory that each had, in bytes."""
    with contender.together(makers, (setting,)) as contenders:
        rates = measure.take_turns(contenders, repeats)
        return rates, {name: each.memory() for name, each in contenders.items()}


def _ratio(rates: Measured, above: str, below: str) -> records.Row:
    ratios = measure.ratios(rates[above], rates[below])
    return measure.RATIO.row(ratios, program=f"{above} / {below}")


def bytes_per_step(spec: environment.EnvironmentSpec) -> float:
    """Returns what crosses to the device for one agent step: one time step.

    That which ends a rollout crosses once, though the next rollout begins with it.
    """
    observation = jax.tree.map(lambda x: np.asarray(x)[None], spec.zero_observation())
    scalars = (np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int8))
    arrival = actor.Arrival.of(types.TimeStep(observation, *scalars))
    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(arrival)))
