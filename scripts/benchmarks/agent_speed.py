"""Every agent under both runners: speed, compiling, start-up and memory of training."""

from collections.abc import Sequence

from benchmarks import contender, measure, records, startup
from results import training_process

from podracers.training import experiment

EXPERIMENTS = {
    "ppo": "cartpole_ppo",
    "impala": "cartpole_impala",
    "dqn": "cartpole_dqn",
    "pqn": "cartpole_pqn",
    "r2d2": "catch_r2d2",
    "sac": "pendulum_sac",
    "muzero": "catch_muzero",
    "alphazero": "catch_alphazero",
    "lpg": "lpg_small",
}
RUNNERS = {"Anakin": (), "Sebulba": ("gin/runners/sebulba.gin",)}
_COMPILING = records.Kind("compiling", "s", records.LOWER, 2)


def files(name: str, runner: str) -> list[str]:
    """Returns the .gin files of an experiment under a runner."""
    return [f"gin/experiments/{name}.gin", *RUNNERS[runner]]


def benchmark_agent(agent: str, repeats: int, bindings: Sequence[str] = ()) -> records.Result:
    """Measures one agent on one small experiment.

    Args:
      agent: a name in `EXPERIMENTS`.
      repeats: turns of each runner, and starts of its process.
      bindings: over those of the experiment.
    """
    name = EXPERIMENTS[agent]
    experiment.load(files(name, "Anakin"), bindings)  # a mistake is met before anything starts
    arguments = {runner: (files(name, runner), bindings) for runner in RUNNERS}
    makers, cold = dict.fromkeys(RUNNERS, measure.Training), dict.fromkeys(RUNNERS, startup.COLD)
    with contender.together(makers, arguments, cold) as contenders:
        rates = measure.take_turns(contenders, repeats)
        compiling = {runner: each.ask("compiling") for runner, each in contenders.items()}
        memory = {runner: each.memory() for runner, each in contenders.items()}
    flags = {runner: training_process.flags(*named) for runner, named in arguments.items()}
    starts = [{r: startup.first_update(flags[r]) for r in RUNNERS} for _ in range(repeats)]
    rows = []
    for runner in RUNNERS:
        case = {"agent": agent, "runner": runner}
        rows += [
            measure.SPEED.row(rates[runner], **case),
            _COMPILING.row(compiling[runner], **case),
            startup.STARTUP.row([each[runner] for each in starts], **case),
            measure.PEAK_MEMORY.row(memory[runner], **case),
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
