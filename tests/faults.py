"""Host environments that fail on demand; configuration files can name them."""

import ctypes
import dataclasses
import os
import signal
import subprocess
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np

from podracers import environment as environment_lib
from podracers import types
from podracers.sebulba import jax_host

MAKE, RESET, RECV, CLOSE = "make", "reset", "recv", "close"  # values of `Faulty.where`
# Values of `Faulty.what`. SEIZE hangs, and lets no other thread run Python; the name of a signal
# sends it once, and then is SLOW.
RAISE, HANG, SEIZE, SLOW, NAN = "raise", "hang", "seize", "slow", "nan"
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

factories: weakref.WeakSet["Faulty"] = weakref.WeakSet()  # all of this process


class SimulatorError(Exception):
    """The error of a broken simulator."""


@dataclasses.dataclass(eq=False)
class Faulty:
    """Makes environments of another factory, with a fault; it may change while they run.

    Attributes:
      inner: a factory of host environments, or a JAX environment.
      what: one of the above, or "" for nothing.
      where: one of the above.
      step: the first step with the fault, counted for each batch from its reset.
      stream: only batches with the environment of this index fail; -1 for all.
      who: beginning of the names of the threads that fail, "actor" or "evaluation".
      child: whether each batch has a process of its own, which it ends when it is closed.
    """

    inner: Any
    what: str = ""
    where: str = RECV
    step: int = 0
    stream: int = -1
    who: str = "actor"
    child: bool = False
    batches: list["FaultyBatch"] = dataclasses.field(default_factory=list, init=False)
    over: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)

    def __post_init__(self):
        factories.add(self)
        if not environment_lib.is_host(self.inner):
            self.inner = jax_host.JaxHostEnvironment(self.inner)

    def set(self, what: str = "", where: str = RECV, step: int = 0, stream: int = -1) -> None:
        """Changes the fault."""
        self.where, self.step, self.stream = where, step, stream
        self.what = what  # last, because threads read it at any moment

    @property
    def spec(self) -> environment_lib.EnvironmentSpec:
        return self.inner.spec

    def make(self, key: jax.Array, env_id: np.ndarray, num_threads: int) -> "FaultyBatch":
        self.strike(MAKE, 0, env_id)
        self.batches.append(FaultyBatch(self, self.inner.make(key, env_id, num_threads), env_id))
        return self.batches[-1]

    def strike(self, where: str, step: int, env_id: np.ndarray) -> bool:
        """Executes the fault, if it is due; returns whether the reward is to be NaN."""
        if (
            where != self.where
            or step < self.step
            or (self.stream >= 0 and self.stream not in env_id)
            or not threading.current_thread().name.startswith(self.who)
        ):
            return False
        if self.what == RAISE:
            raise SimulatorError(f"the simulator broke in {where} at step {step}")
        if self.what == HANG:
            self.over.wait()
        if self.what == SEIZE:
            ctypes.PyDLL(None).sleep(1000)
        if self.what in SIGNALS:
            number, self.what = getattr(signal, self.what), SLOW
            os.kill(os.getpid(), number)
        if self.what == SLOW:
            time.sleep(0.2)
        return self.what == NAN


class FaultyBatch:
    """See `Faulty`."""

    def __init__(self, factory: Faulty, inner: environment_lib.HostEnvironment, env_id: np.ndarray):
        self._factory, self._inner, self._env_id = factory, inner, env_id
        self._child = subprocess.Popen(["sleep", "1000"]) if factory.child else None
        self._step = self.closed = 0
        self.num_envs, self.send = inner.num_envs, inner.send

    def reset(self) -> types.TimeStep:
        self._factory.strike(RESET, 0, self._env_id)
        return self._inner.reset()

    def recv(self) -> types.TimeStep:
        timestep = self._inner.recv()
        self._step += 1
        if self._factory.strike(RECV, self._step, self._env_id):
            return timestep._replace(reward=np.full_like(timestep.reward, np.nan))
        return timestep

    def close(self) -> None:
        self.closed += 1
        self._inner.close()
        self._factory.strike(CLOSE, self._step, self._env_id)
        if self._child:
            self._child.kill()
            self._child.wait()
