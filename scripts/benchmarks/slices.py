"""What `Sebulba.max_block_ms` does for acting where one device acts and learns, in order.

A CPU runs several programs at once, which accelerators do not. So one lock stands around both: who
asks first is first, and holds it until its program is done.
"""

import functools
import threading
import time
from typing import Any

import jax
from benchmarks import contender, measure, records

from agents import networks, ppo
from agents.networks import encoders
from environments import envpool
from podracers import sebulba

BLOCKS = (None, 20.0, 5.0)  # milliseconds
_NUM_ENVS, _LENGTH, _UPDATES = 16, 128, 4
_WAIT = records.Kind("longest wait of an acting call", "ms", records.LOWER, 1)


class _InOrder:
    """A device that runs what it is given in order, one program after another."""

    def __init__(self):
        self._changed = threading.Condition()
        self._asked = self._served = 0
        self.longest_wait = 0.0  # seconds that an acting call has waited for its turn

    def run(self, is_acting: bool, program: Any, *args: Any) -> Any:
        """Runs a program when it is its turn, to its end."""
        asked = time.perf_counter()
        with self._changed:
            ticket, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._served == ticket)
        if is_acting:
            self.longest_wait = max(self.longest_wait, time.perf_counter() - asked)
        try:
            return jax.block_until_ready(program(*args))
        finally:
            with self._changed:
                self._served += 1
                self._changed.notify_all()


class Locked(measure.Stepper):
    """PPO on EnvPool's CartPole, on a device that runs in order.

    Args:
      max_block_ms: that of `Sebulba`.
    """

    def __init__(self, max_block_ms: float | None):
        task = envpool.EnvPool("CartPole-v1")
        network = functools.partial(networks.actor_critic, encoder=encoders.MLP((256, 256)))
        agent = ppo.PPO(task.spec, network, epochs=4, num_minibatches=8)
        options = {"batches_per_actor": 1, "max_block_ms": max_block_ms}
        runner = sebulba.Sebulba(agent, task, _NUM_ENVS, _LENGTH, (0,), (0,), **options)
        self._device, (actor,) = _InOrder(), runner.placement.actors
        programs, learner = runner._programs.on(actor), runner._learner
        act = functools.partial(self._device.run, True, programs.act)
        runner._programs._programs[actor] = programs._replace(act=act)
        if max_block_ms is None:
            vars(learner)["learn"] = functools.partial(self._device.run, False, learner.learn)
        else:
            learner.learn.run = functools.partial(self._device.run, False)
        self._waits: list[float] = []
        super().__init__(runner, _UPDATES, measure.LEAD_IN)

    def __call__(self) -> float:
        """Returns agent steps per second."""
        self._device.longest_wait = 0.0
        rate = super().__call__()
        self._waits.append(1e3 * self._device.longest_wait)
        return rate

    def waits(self) -> list[float]:
        """Returns the longest wait of each turn but the first, in milliseconds."""
        return self._waits[1:]


def benchmark_slices(repeats: int) -> records.Result:
    """Compares whole updates with slices of them, by the wait of acting and by the rate."""
    names = {block: "whole updates" if block is None else f"{block:g} ms" for block in BLOCKS}
    arguments = {name: (block,) for block, name in names.items()}
    with contender.together(dict.fromkeys(arguments, Locked), arguments) as contenders:
        rates = measure.take_turns(contenders, repeats)
        waits = {name: each.ask("waits") for name, each in contenders.items()}
    whole = rates[names[None]]
    return records.Result(
        "Learning in slices (`Sebulba.max_block_ms`) where one device acts and learns in order, "
        f"for which a lock stands on a CPU: PPO of {_NUM_ENVS} environments, {_LENGTH} steps, 32 "
        "gradient steps an update.",
        (
            *(_WAIT.row(values, slices=name) for name, values in waits.items()),
            *(measure.SPEED.row(values, slices=name) for name, values in rates.items()),
            *(
                measure.RATIO.row(measure.ratios(values, whole), slices=f"{name} / whole updates")
                for name, values in rates.items()
                if values is not whole
            ),
        ),
    )
