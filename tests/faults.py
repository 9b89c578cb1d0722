"""Host environments that misbehave when they are told to; configuration files can name them."""

import ctypes
import dataclasses
import pathlib
import subprocess
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np

from podracers import environment as environment_lib
from podracers import errors, types
from podracers.sebulba import jax_host

# Where a fault may strike.
MAKE, RESET, SEND, RECV, CLOSE = "make", "reset", "send", "recv", "close"
# What happens there.
RAISE, MISTAKE, HANG, SLOW, NAN = "raise", "mistake", "hang", "slow", "nan"
SEIZE = "seize"  # hangs, and lets no other thread run Python


plans: weakref.WeakSet["Plan"] = weakref.WeakSet()  # all of this process


class SimulatorError(Exception):
    """The error of a broken simulator."""


@dataclasses.dataclass(eq=False)
class Plan:
    """What goes wrong; it may be changed while environments run.

    Attributes:
      what: one of the above, or "" for nothing.
      where: one of the above.
      step: from which step on, counted for each batch from its reset.
      stream: only batches with the environment of this index; -1 for all.
      who: "actor", "evaluation", or "" for both.
      seconds: how long what is slow takes.
      marker: a file that is made when it first goes wrong.
    """

    what: str = ""
    where: str = RECV
    step: int = 0
    stream: int = -1
    who: str = "actor"
    seconds: float = 0.1
    marker: str = ""
    over: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self):
        plans.add(self)

    def set(self, what: str = "", **options: Any) -> None:
        """Changes the plan; what is not named gets its default."""
        self.__dict__.update(vars(Plan(**options, over=self.over)))
        self.what = what  # last, for threads look at any moment

    def strikes(self, where: str, step: int, env_id: np.ndarray) -> bool:
        """Returns whether something goes wrong now."""
        return (
            bool(self.what)
            and where == self.where
            and step >= self.step
            and (self.stream < 0 or self.stream in env_id)
            and threading.current_thread().name.startswith(self.who)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Faulty:
    """A recipe for environments that are those of another one, until something goes wrong.

    Attributes:
      inner: a recipe for host environments, or a JAX environment.
      what, where, step, stream, who, seconds, marker: see `Plan`.
      child: whether each batch has a process of its own, which it ends when it is closed.
    """

    inner: Any
    what: str = ""
    where: str = RECV
    step: int = 0
    stream: int = -1
    who: str = "actor"
    seconds: float = 0.1
    marker: str = ""
    child: bool = False
    made: list["FaultyBatch"] = dataclasses.field(default_factory=list, init=False)
    plan: Plan = dataclasses.field(init=False)

    def __post_init__(self):
        names = ("what", "where", "step", "stream", "who", "seconds", "marker")
        object.__setattr__(self, "plan", Plan(**{name: getattr(self, name) for name in names}))
        if not environment_lib.is_host(self.inner):
            object.__setattr__(self, "inner", jax_host.JaxHostEnvironment(self.inner))

    @property
    def spec(self) -> environment_lib.EnvironmentSpec:
        return self.inner.spec

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> "FaultyBatch":
        _strike(self.plan, MAKE, 0, env_id)
        inner = self.inner.make(key, env_id, num_threads)
        batch = FaultyBatch(self.plan, inner, env_id, self.child)
        self.made.append(batch)
        return batch


class FaultyBatch:
    """See `Faulty`."""

    def __init__(
        self, plan: Plan, inner: environment_lib.HostEnvironment, env_id: np.ndarray, child: bool
    ):
        self._plan, self._inner, self._env_id = plan, inner, env_id
        self._child = subprocess.Popen(["sleep", "1000"]) if child else None
        self._step = 0
        self.closed = 0

    @property
    def num_envs(self) -> int:
        return self._inner.num_envs

    def reset(self) -> types.TimeStep:
        _strike(self._plan, RESET, 0, self._env_id)
        return self._inner.reset()

    def send(self, action: np.ndarray) -> None:
        _strike(self._plan, SEND, self._step, self._env_id)
        self._inner.send(action)

    def recv(self) -> types.TimeStep:
        timestep = self._inner.recv()
        self._step += 1
        if _strike(self._plan, RECV, self._step, self._env_id):
            return timestep._replace(reward=np.full_like(timestep.reward, np.nan))
        return timestep

    def close(self) -> None:
        self.closed += 1
        self._inner.close()
        _strike(self._plan, CLOSE, self._step, self._env_id)
        if self._child:
            self._child.kill()
            self._child.wait()


def _strike(plan: Plan, where: str, step: int, env_id: np.ndarray) -> bool:
    """Does what is planned for this moment; returns whether the reward is to be NaN."""
    if not plan.strikes(where, step, env_id):
        return False
    if plan.marker:
        pathlib.Path(plan.marker).touch()
    if plan.what == RAISE:
        raise SimulatorError(f"the simulator broke in {where} at step {step}")
    if plan.what == MISTAKE:
        raise errors.UserError("the simulator has no such option")
    if plan.what == HANG:
        plan.over.wait()
    if plan.what == SEIZE:
        ctypes.PyDLL(None).sleep(1000)
    if plan.what == SLOW:
        time.sleep(plan.seconds)
    return plan.what == NAN
