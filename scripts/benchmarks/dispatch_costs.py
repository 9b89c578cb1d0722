"""What Sebulba's host pays for each dispatch: small environments, a tiny network.

Where simulators and networks cost next to nothing, the rate is that of the host's own work: the
dispatches of an update, what is handed over in them, and the processor's time of an actor's thread.
"""

import collections
import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
from benchmarks import contender, measure, records

from agents import networks, ppo
from agents.networks import encoders
from environments import envpool
from podracers import sebulba

NUM_ENVS = (16, 128)
_LENGTH = 32  # agent steps of each stream in a rollout
_UPDATES = 50  # of a turn
_TRACED = 4  # updates that the profiler looks at
_REST = 2.0  # seconds, after which the actor is as far ahead as it may be
# The profiler's event of one execution of a program, under XLA's names of it.
_EXECUTIONS = ("ExecuteHelperOnSingleDevice", "ExecuteHelper", "PjRtCpuExecutable::ExecuteHelper")

_DISPATCHES = records.Kind("programs run in an update", "programs", records.LOWER, 2)
_LEAVES = records.Kind("arguments of an acting call", "leaves", records.LOWER, 0)
_ON_HOST = records.Kind("arguments of an acting call on the host", "leaves", records.LOWER, 0)
_CALL = records.Kind("thread CPU of an acting call", "us", records.LOWER, 1)
_STEP = records.Kind("actor's thread CPU of a step", "us", records.LOWER, 1)


class _Watched:
    """The acting program, which notes what it is called with and what that takes."""

    def __init__(self, program: Any):
        self._program = program
        self.reset()

    def reset(self) -> None:
        """Forgets what was noted."""
        self._calls, self._seconds = 0, 0.0
        self._began = self._ended = None
        self.leaves: list[Any] = []

    def __call__(self, *arguments: Any) -> Any:
        """Calls the program."""
        before = time.thread_time()
        result = self._program(*arguments)
        self._ended = time.thread_time()
        if self._began is None:
            self._began = self._ended
        else:
            # That of a rollout's first step lies on the device already.
            self.leaves = self.leaves or [type(leaf) for leaf in jax.tree.leaves(arguments)]
            self._calls += 1
            self._seconds += self._ended - before
        return result

    @property
    def microseconds(self) -> tuple[float, float]:
        """The processor's time of a call, and of a whole step of its thread."""
        whole = self._ended - self._began
        return 1e6 * self._seconds / self._calls, 1e6 * whole / self._calls


class Costs(measure.Stepper):
    """A Sebulba of EnvPool's CartPole whose costs are measured.

    Args:
      num_envs: its environments, in one batch.
    """

    def __init__(self, num_envs: int):
        task = envpool.EnvPool("CartPole-v1")
        network = functools.partial(networks.actor_critic, encoder=encoders.MLP((16,)))
        agent = ppo.PPO(task.spec, network, epochs=1, num_minibatches=1)
        runner = sebulba.Sebulba(agent, task, num_envs, _LENGTH, batches_per_actor=1)
        actor, *_ = runner.placement.actors
        programs = runner._programs.on(actor)
        self._act = _Watched(programs.act)
        runner._programs._programs[actor] = programs._replace(act=self._act)
        super().__init__(runner, _UPDATES, measure.LEAD_IN)
        self._times: list[tuple[float, float]] = []

    def __call__(self) -> float:
        """Returns agent steps per second."""
        self._act.reset()
        rate = super().__call__()
        self._times.append(self._act.microseconds)
        return rate

    def costs(self) -> dict[str, Any]:
        """Returns what was noted since the first turn, and what the profiler sees."""
        call, step = zip(*self._times[1:])
        host = [kind for kind in self._act.leaves if not issubclass(kind, jax.Array)]
        return {
            "call": list(call),
            "step": list(step),
            "leaves": len(self._act.leaves),
            "host": len(host),
            "programs": self._executions() / _TRACED,
        }

    def _executions(self) -> int:
        """Returns how many programs ran in `_TRACED` updates."""
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # its events would leave no room for those of XLA
            time.sleep(_REST)
            with jax.profiler.trace(folder, profiler_options=options):
                self._step(_TRACED)
                time.sleep(_REST)
            (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            counts = collections.Counter(
                event.name.rpartition("::")[2]
                for plane in planes
                for line in plane.lines
                for event in line.events
            )
        return max(counts[name] for name in _EXECUTIONS)


def benchmark_dispatches(repeats: int, sizes: Sequence[int] = NUM_ENVS) -> records.Result:
    """Says what a dispatch costs the host, and the rate that this allows."""
    makers = {f"{count}": Costs for count in sizes}
    arguments = {f"{count}": (count,) for count in sizes}
    rows = []
    with contender.together(makers, arguments) as contenders:
        rates = measure.take_turns(contenders, repeats)
        for count in sizes:
            costs = contenders[f"{count}"].ask("costs")
            rows += [
                measure.SPEED.row(rates[f"{count}"], environments=count),
                _STEP.row(costs["step"], environments=count),
                _CALL.row(costs["call"], environments=count),
                _LEAVES.row(costs["leaves"], environments=count),
                _ON_HOST.row(costs["host"], environments=count),
                _DISPATCHES.row(costs["programs"], environments=count),
            ]
    return records.Result(
        f"What dispatches cost: PPO with 16 hidden units on EnvPool's CartPole, {_LENGTH} steps a "
        "rollout, one batch, actor and learner on one device.",
        tuple(rows),
    )
