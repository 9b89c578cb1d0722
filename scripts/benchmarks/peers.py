"""This project beside other codebases, at equal work, each in its own process and packages."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import jax

from agents import networks, ppo
from agents.networks import encoders
from podracers import anakin, errors
from podracers import runner as runner_lib
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
    "connect_four": Task(
        *("AlphaZero, Connect Four", ("Pgx",), 1, 32768),
        "AlphaZero on Pgx's Connect Four, 128 games, 32 simulations by mctx, two dense layers of "
        "256, a gradient use of each move in batches of 512. Pgx's example plays 256 moves before "
        "it learns, and its network replaces the residual one",
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
_EXPERIMENTS = {  # file and bindings of tasks other than PPO
    "connect_four": (
        *("gin/experiments/connect_four_alphazero.gin", "AlphaZero.replay_ratio = 1.0"),
        *("policy_value.hidden_sizes = ()", "Search.max_depth = 32"),
    ),
    "pong": (
        *("gin/experiments/pong_impala.gin", "IMPALA.num_minibatches = 4"),
        "IMPALA.optimizer = 'rmsprop'",
    ),
}
_PEERS = {  # with their commits
    "PureJaxRL": "PureJaxRL {} with gymnax 0.0.9 and the other packages of this project",
    "rejax": "rejax 0.1.3 with gymnax 0.0.9 and the other packages of this project",
    "Cleanba": "Cleanba {} with jax 0.4.13 and EnvPool 0.8.4",
    "Pgx": "Pgx's example {} with dm-haiku 0.0.17 and the other packages of this project",
}


def start(
    name: str, task: str, folder: pathlib.Path, updates: int | None = None, **variables: str
) -> contender.Contender:
    """Returns a program of another codebase, with more environment variables.

    A measurement takes `updates`, by default those of the task.
    """
    python = folder / "cleanba-env/bin/python" if name == "Cleanba" else sys.executable
    words = [name.lower(), task, updates or TASKS[task].updates, TASKS[task].steps, folder]
    variables = os.environ | {"PYTHONPATH": str(folder / "packages")} | variables
    return contender.Contender(python, peer_programs.__file__, *words, cwd=folder, env=variables)


def ours(name: str, devices: int) -> measure.Stepper:
    """Measures this project at a task of `TASKS`."""
    jax.config.update("jax_num_cpu_devices", devices)
    task, runner = TASKS[name], build(name)
    updates = task.updates * task.steps // runner.steps_per_update
    return measure.Stepper(runner, updates, task.lead_in)


def build(name: str) -> runner_lib.Runner:
    """Returns the runner of a task of `TASKS`."""
    if name in _EXPERIMENTS:
        file, *bindings = _EXPERIMENTS[name]
        return measure.build([file], bindings).runner
    _, num_envs, minibatches, activation = peer_programs.PPO[name]
    environment = ppo_speed.ENVIRONMENTS[name.partition("_")[0]]()
    encoder = encoders.MLP((64, 64), activation)
    network = functools.partial(networks.actor_critic, encoder=encoder)
    agent = ppo.PPO(environment.spec, network=network, num_minibatches=minibatches)
    return anakin.Anakin(agent, environment, num_envs, rollout_length=128)


def benchmark(folder: pathlib.Path, repeats: int, names: Sequence[str] = ()) -> records.Result:
    """Measures this project and its peers in turn, at the named tasks, or at PPO and IMPALA.

    Raises:
      errors.UserError: `scripts/prepare_peers.sh` has not made the folder.
      errors.RunFailure: a peer fails.
    """
    folder = folder.resolve()
    if not all((folder / name).is_dir() for name in ("cleanba-env", "pgx")):
        raise errors.UserError(f"no peers in '{folder}': run scripts/prepare_peers.sh {folder}")
    rows: list[records.Row] = []
    devices, last = {"this project": 1}, "breakout_8192"
    if jax.default_backend() == "cpu":  # Cleanba's packages support nothing else
        # With a device for each core, no operation waits for the threads of another core.
        devices["this project, 2 CPU devices"] = 2
        last = "pong"
    tasks = {name: TASKS[name] for name in names or ("cartpole", "breakout", last)}
    for name, task in tasks.items():
        with contextlib.ExitStack() as stack:
            programs = {
                **{key: contender.Contender.of(ours, name, n) for key, n in devices.items()},
                **{peer: start(peer, name, folder) for peer in task.peers},
            }
            for program in programs.values():
                stack.callback(program.close)
            rates = measure.take_turns(programs, repeats)
            for key, values in rates.items():
                case = {"work": task.name, "program": key}
                rows.append(measure.speed(values, **case))
                rows.append(records.row("peak memory", "bytes", programs[key].memory(), **case))
            pairs = itertools.product(devices, task.peers)
            rows += [measure.ratio(rates, *pair, work=task.name) for pair in pairs]
    measured = dict.fromkeys(peer for task in tasks.values() for peer in task.peers)
    return records.Result(
        "Training speed of this project and of others at equal work, measured alternately, each in "
        "its own process.",
        tuple(rows),
        (
            *(f"{task.about}; {task.updates} updates a turn" for task in tasks.values()),
            *(_PEERS[peer].format(_commit(folder / peer.lower())) for peer in measured),
        ),
    )


def _commit(folder: pathlib.Path) -> str:
    """Returns the commit of a checkout; "" of a package."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
