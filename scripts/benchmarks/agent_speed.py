"""Every agent under both runners: speed, compiling, start-up and memory of training."""

import time

import jax
from benchmarks import contender, measure, records, replay, startup

from agents import replay as replay_lib
from podracers.training import experiment

EXPERIMENTS = {
    "ppo": "cartpole_ppo",
    "impala": "cartpole_impala",
    "dqn": "cartpole_dqn",
    "r2d2": "catch_r2d2",
    "sac": "pendulum_sac",
    "muzero": "catch_muzero",
    "alphazero": "catch_alphazero",
}
RUNNERS = {"Anakin": (), "Sebulba": ("gin/runners/sebulba.gin",)}
LEAD_IN = 2  # updates: under Sebulba a rollout or two lie ready
_TURN = 1.0  # seconds, about
_COLD = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
_COMPILING = records.Kind("compiling", "s", records.LOWER, 2)


def files(name: str, runner: str) -> list[str]:
    """Returns the .gin files of an experiment under a runner."""
    return [f"gin/experiments/{name}.gin", *RUNNERS[runner]]


class Training(measure.Stepper):
    """An experiment's runner as a contender, with turns of about a second.

    Args:
      gin_files: of the experiment, from the repository's root.
      bindings: over those of the files.
    """

    def __init__(self, gin_files: list[str], bindings: tuple[str, ...]):
        paths = [str(startup.ROOT / file) for file in gin_files]
        parts = experiment.load(paths, list(bindings)).build()
        began = time.perf_counter()
        state = parts.runner.init(0)
        state, cold = _timed_update(parts.runner, state, began)
        _, warm = _timed_update(parts.runner, state, time.perf_counter())
        self.facts = {"compiling": max(cold - warm, 0.0)}
        super().__init__(parts.runner, max(round(_TURN / warm), 1), LEAD_IN)
        if isinstance(self.state.memory, replay_lib.Memory):  # an agent that learns from replay
            replay.fill(self)
        self.close = parts.runner.close


def _timed_update(runner, state, began: float):
    state, report = runner.step(state, 1)
    jax.block_until_ready((state, report))
    return state, time.perf_counter() - began


def benchmark_agent(agent: str, repeats: int, bindings: tuple[str, ...] = ()) -> records.Result:
    """Measures one agent on one small experiment.

    Args:
      agent: a name in `EXPERIMENTS`.
      repeats: turns of each runner, and starts of its process.
      bindings: over those of the experiment.
    """
    name = EXPERIMENTS[agent]
    experiment.load([str(startup.ROOT / file) for file in files(name, "Anakin")], list(bindings))
    arguments = {runner: (files(name, runner), bindings) for runner in RUNNERS}
    with contender.together(
        dict.fromkeys(RUNNERS, Training), arguments, dict.fromkeys(RUNNERS, _COLD)
    ) as contenders:
        rates = measure.take_turns(contenders, repeats)
        for each in contenders.values():
            each.close()
    starts = {runner: [] for runner in RUNNERS}
    for _ in range(repeats):
        for runner, taken in starts.items():
            named = [part for file in files(name, runner) for part in ("--gin_file", file)]
            bound = [part for binding in bindings for part in ("--gin_bindings", binding)]
            taken.append(startup.first_update([*named, *bound], _COLD))
    rows = []
    for runner, each in contenders.items():
        case = {"agent": agent, "runner": runner}
        rows += [
            measure.SPEED.row(rates[runner], **case),
            _COMPILING.row(each.facts["compiling"], **case),
            startup.STARTUP.row(starts[runner], **case),
            measure.PEAK_MEMORY.row(each.memory, **case),
        ]
    return records.Result(
        "Every agent under both runners, on one small experiment each, so agents do not compare "
        "with one another: speed once the agent learns; compiling (a first update from nothing, "
        "less an update once compiled); start-up from the start of scripts/train.py to the end of "
        "the first update, with nothing compiled before; the most memory that the process held.",
        tuple(rows),
        (f"{agent}: gin/experiments/{name}.gin",),
        group="agents",
    )
