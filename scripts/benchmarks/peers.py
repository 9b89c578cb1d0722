"""This project beside other codebases, at equal work, each in its own process and packages."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from agents import networks, ppo
from agents.networks import encoders
from podracers import anakin, errors
from podracers.scripts.benchmarks import contender, measure, peer_programs, ppo_speed, records


@dataclasses.dataclass(frozen=True)
class Task:
    """Work that is equal for all programs."""

    name: str
    peers: Sequence[str]
    updates: int  # updates a turn
    steps: int  # agent steps an update
    about: str
    lead_in: int = 0  # updates before each turn


_PPO = (
    "PPO on {0}, {1:,} environments x 128 steps, 4 epochs x {2} minibatches, two {3} layers of 64 "
    "for each of policy and value, Adam; actions are not sticky"
)
TASKS = {
    "cartpole": Task(
        *("PPO, CartPole", ("PureJaxRL", "rejax"), 64, 8192),
        _PPO.format("CartPole", 64, 4, "tanh"),
    ),
    "breakout": Task(
        *("PPO, MinAtar Breakout", ("PureJaxRL", "rejax"), 32, 8192),
        _PPO.format("MinAtar's Breakout", 64, 8, "relu"),
    ),
    "breakout_8192": Task(
        *("PPO, MinAtar Breakout, 8,192 environments", ("PureJaxRL", "rejax"), 4, 1 << 20),
        _PPO.format("MinAtar's Breakout", 8192, 8, "relu"),
    ),
    "pong": Task(
        *("IMPALA, Pong", ("Cleanba",), 10, 640),
        "IMPALA on EnvPool's Pong-v5, 32 environments x 20 steps, 4 minibatches, RMSProp, the "
        "network of Mnih et al. 2015 on four frames; 18 sticky actions of policies that are one "
        "update old. Cleanba has a device that acts and one that learns, and two changes that suit "
        "a CPU: its minibatches are a Python loop, and that network replaces its residual one",
        measure.LEAD_IN,
    ),
}


class _Turns:
    """Takes turns of a program, in agent steps per second, and times its start.

    The first `turn` starts the program and takes `first` updates of `steps` agent steps.
    """

    def __init__(self, turn: Callable[[], float], steps: int, first: int):
        self._turn, self._steps, self._updates = turn, steps, first
        self._first = 0.0  # seconds of the first call
        self._rates: list[float] = []

    def __call__(self) -> float:
        start = time.perf_counter()
        self._rates.append(self._turn())
        self._first = self._first or time.perf_counter() - start
        return self._rates[-1]

    def start(self, lead_in: int) -> float:
        """Returns seconds from the start of the process to the end of its first update."""
        update = self._steps / statistics.median(self._rates[1:])
        return self._first - (lead_in + self._updates - 1) * update


class Peer:
    """A program of another codebase, which starts at the first call.

    Attributes:
      steps: agent steps of a call, by default of the task's updates.
    """

    def __init__(
        self,
        name: str,
        task: str,
        folder: pathlib.Path,
        updates: int | None = None,
        variables: Mapping[str, str] = types.MappingProxyType({}),  # environment variables
    ):
        updates = updates or TASKS[task].updates
        self.steps = updates * TASKS[task].steps
        python = folder / "cleanba-env/bin/python" if name == "Cleanba" else sys.executable
        words = [python, peer_programs.__file__, name.lower(), task, updates, folder]
        self._log = folder / f"{name.lower()}-{task}.log"
        self._start: Callable[..., subprocess.Popen[str]] = functools.partial(
            subprocess.Popen,
            [*map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder / "packages"), **variables},
            start_new_session=True,
        )
        self._process: subprocess.Popen[str] | None = None

    def __call__(self) -> float:
        """Returns agent steps per second."""
        if self._process is None:
            with self._log.open("w") as log:
                self._process = self._start(stderr=log)
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(file=self._process.stdin, flush=True)
        seconds = self._process.stdout.readline()
        if not seconds:
            last = self._log.read_text().strip().splitlines() or ["no output"]
            raise errors.RunFailure(f"{last[-1]} ({self._log})")
        return self.steps / float(seconds)

    def memory(self) -> int:
        """Returns the peak of resident bytes."""
        assert self._process is not None
        return contender.peak_memory(self._process.pid)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


def _ours(name: str, devices: int = 1) -> measure.Stepper:
    jax.config.update("jax_num_cpu_devices", devices)
    task = TASKS[name]
    if name == "pong":
        bindings = ["IMPALA.num_minibatches = 4", "IMPALA.optimizer = 'rmsprop'"]
        runner = measure.build(["gin/experiments/pong_impala.gin"], bindings).runner
    else:
        _, num_envs, minibatches, activation = peer_programs.PPO[name]
        environment = ppo_speed.ENVIRONMENTS[name.partition("_")[0]]()
        encoder = encoders.MLP((64, 64), activation)
        network = functools.partial(networks.actor_critic, encoder=encoder)
        agent = ppo.PPO(environment.spec, network=network, num_minibatches=minibatches)
        runner = anakin.Anakin(agent, environment, num_envs, rollout_length=128)
    return measure.Stepper(runner, task.updates, task.lead_in)


def benchmark(folder: pathlib.Path, repeats: int) -> records.Result:
    """Measures this project and its peers in turn.

    Raises:
      errors.UserError: `scripts/prepare_peers.sh` has not made the folder.
      errors.RunFailure: a peer fails.
    """
    folder = folder.resolve()
    if not (folder / "cleanba-env").is_dir():
        raise errors.UserError(f"no peers in '{folder}': run scripts/prepare_peers.sh {folder}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a device
    rows: list[records.Row] = []
    makers, last = {"this project": _ours}, "breakout_8192"
    if jax.default_backend() == "cpu":  # Cleanba's packages support nothing else
        # With a device for each core, no operation waits for the threads of another core.
        makers["this project, 2 CPU devices"] = functools.partial(_ours, devices=2)
        last = "pong"
    tasks = {name: TASKS[name] for name in ("cartpole", "breakout", last)}
    for name, task in tasks.items():
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(contender.together(makers, name))
            programs: dict[str, Any] = {**ours}
            turns = {
                key: _Turns(program, task.steps, 2 * task.updates) for key, program in ours.items()
            }
            for peer in task.peers:
                programs[peer] = Peer(peer, name, folder)
                stack.callback(programs[peer].close)
                turns[peer] = _Turns(programs[peer], task.steps, task.updates)
            rates = measure.take_turns(turns, repeats)
            for program, values in rates.items():
                case = {"work": task.name, "program": program}
                rows.append(measure.speed(values, **case))
                memory = programs[program].memory()
                rows.append(records.row("peak memory", "bytes", memory, **case))
                start = turns[program].start(task.lead_in)
                rows.append(records.row("start to first update", "s", start, **case))
            pairs = itertools.product(ours, task.peers)
            rows += [measure.ratio(rates, *pair, work=task.name) for pair in pairs]
    commits = {name: _commit(folder / name) for name in ("purejaxrl", "cleanba")}
    return records.Result(
        "Training speed of this project and of others at equal work, measured alternately, each in "
        "its own process. The time from its start to the end of the first update includes imports "
        "and compilation.",
        tuple(rows),
        (
            *(f"{task.about}; {task.updates} updates a turn" for task in tasks.values()),
            f"PureJaxRL {commits['purejaxrl']}, and rejax 0.1.3, with gymnax 0.0.9 and the other "
            f"packages of this project; Cleanba {commits['cleanba']} with jax 0.4.13 and "
            "EnvPool 0.8.4",
        ),
    )


def _commit(folder: pathlib.Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
