"""Evaluation of learnt update rules (LPG): lifetimes of agents beside other learners.

`R` rules, `H` combinations of hyper-parameters, `S` segments of a lifetime.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.meta import lifetime_evaluation
from agents.meta.lpg import meta_training, tabular_a2c
from environments.meta import lifetimes as lifetimes_lib
from podracers import errors, evaluation, types
from podracers.scripts.results import aggregates, markdown
from podracers.training import trained

RULE = "the rule"
A2C = "A2C, tuned"
BLIND = "the rule without predictions"
RANDOM = "random rule"


class Task(NamedTuple):
    """Results in one kind of task."""

    experiment: str  # its file
    name: str
    # Shares of the optimum, `[R][S]` by contender, means over lifetimes. A2C and the random rules
    # have a repetition for each rule, in the tasks of that rule.
    shares: dict[str, list[list[float]]]
    a2c: tuple[float, float]  # the best learning rate and entropy cost of A2C


class Evaluation(NamedTuple):
    """Results of one command of scripts/evaluate_rule.py."""

    command: str  # arguments of the script
    rules: list[str]  # sources of the rules
    lifetimes: int  # number for each rule and each experiment, in all kinds of tasks
    steps: int | None  # steps of an environment in a lifetime
    tasks: list[Task]


def write(results: Evaluation, path: pathlib.Path) -> None:
    """Writes results as JSON, with four decimal places."""
    exact = json.dumps(results._asdict() | {"tasks": [task._asdict() for task in results.tasks]})
    rounded = json.loads(exact, parse_float=lambda text: round(float(text), 4))
    markdown.write(path, json.dumps(rounded) + "\n")


def read(path: pathlib.Path) -> Evaluation:
    """Returns a file of results; raises errors.UserError if it has another schema."""

    def parse(entries: dict[str, Any]) -> Evaluation:
        return Evaluation(**entries | {"tasks": [Task(**task) for task in entries["tasks"]]})

    return markdown.read_json(path, parse)


def table(results: Evaluation) -> str:
    """Returns shares of the optimum at the end of a lifetime, as Markdown."""
    contenders = list(results.tasks[0].shares)
    lines = []
    for task in results.tasks:
        cells = [f"`{task.name}` of `{pathlib.Path(task.experiment).stem}`"]
        for name in contenders:
            last = [curve[-1] for curve in task.shares[name]]  # one for each rule
            value, interval = aggregates.bootstrap([last], np.median)
            bounds = " [{:.2f}, {:.2f}]".format(*interval) if interval else ""
            cells.append(f"{value:.2f}{bounds}")
        lines.append([*cells, f"{task.a2c[0]:g}, {task.a2c[1]:g}"])
    headings = ["task", *contenders, "A2C's learning rate, entropy cost"]
    return (
        markdown.table(headings, lines)
        + f"\n{len(results.rules)} rule(s), {results.lifetimes} lifetimes each in every "
        f"experiment, of {results.steps:,} steps of each environment: "
        f"`python scripts/evaluate_rule.py {results.command}`.\n"
    )


class Rule(NamedTuple):
    """A rule, and the hyper-parameters of agents that meta-training found."""

    name: str  # its source
    params: types.PyTree
    arm_logits: dict[str, jax.Array]  # [H] by kind of task

    def actor_params(self, tasks: tuple[str, ...]) -> meta_training.ActorParams:
        """Returns the parameters of agents; for an unknown task, with the mean of all logits."""
        mean = jnp.mean(jnp.stack([*self.arm_logits.values()]), axis=0)
        logits = jnp.stack([self.arm_logits.get(task, mean) for task in tasks])
        return meta_training.ActorParams(self.params, logits)


def load(run_dirs: Sequence[str]) -> tuple[meta_training.LPG, list[Rule]]:
    """Returns the rules of runs, and the agent of the first run.

    Raises:
      errors.UserError: a run has another agent, or a rule of another size.
    """
    agents, rules = [], []
    for path in run_dirs:
        policy = trained.load(path)
        agent, environment = policy.parts.agent, policy.parts.environment
        if not isinstance(agent, meta_training.LPG):
            raise errors.UserError(f"'{path}': expected the agent LPG, got {type(agent).__name__}")
        agents.append(agent)
        assert isinstance(environment, lifetimes_lib.Lifetimes)
        if agent.rule != agents[0].rule:
            raise errors.UserError(f"'{path}': expected {agents[0].rule}, got {agent.rule}")
        arms = dict(zip(environment.family.task_names, policy.params.arm_logits))
        rules.append(Rule(f"{path} at step {policy.step:,}", policy.params.rule, arms))
    return agents[0], rules


def evaluate(
    agent: meta_training.LPG, rules: list[Rule], file: str, lifetimes: Any, count: int
) -> list[Task]:
    """Returns shares of the optimum by kind of task, of rules and of other learners.

    `lifetimes`, the environment of an experiment `file`, has the tasks; all lifetimes have the
    longest length. Each repetition has `count` lifetimes.
    """
    lifetimes = dataclasses.replace(lifetimes, min_periods=lifetimes.max_periods)
    trial = _Trial(lifetimes, evaluation.run_key(0), count)
    agent = dataclasses.replace(agent, spec=lifetimes.spec)
    params = [rule.actor_params(trial.names) for rule in rules]
    no_costs = (0.0,) * len(agent.prediction_costs)
    blind = dataclasses.replace(agent, sees_predictions=False, prediction_costs=no_costs)
    shared = (agent.chunk_length, agent.gamma, agent.gae_lambda, agent.critic_step_size)
    a2c = tabular_a2c.TabularA2C(lifetimes.spec, *shared)
    # A2C is tuned on tasks of its own, of the same kind.
    num_tasks, num_arms = len(trial.names), len(a2c.arms)
    arms = [_only(np.full(num_tasks, arm), num_arms) for arm in range(num_arms)]
    candidates = np.stack([trial.shares(a2c, arm, len(params))[:, -1] for arm in arms])
    best = np.argmax(candidates, axis=0)  # [tasks]
    shares = collections.defaultdict(list)
    for number, member in enumerate(params):
        random = member._replace(rule=agent.rule.init(jax.random.key(number)))
        for name, learner, learnt in [
            (RULE, agent, member),
            (A2C, a2c, _only(best, num_arms)),
            (BLIND, blind, member),
            (RANDOM, agent, random),
        ]:
            shares[name].append(trial.shares(learner, learnt, number))
    return [
        Task(
            file,
            name,
            {who: [curves[task].tolist() for curves in runs] for who, runs in shares.items()},
            (float(a2c.arms[best[task]][0]), float(a2c.arms[best[task]][1])),
        )
        for task, name in enumerate(trial.names)
    ]


class _Trial:
    """Lifetimes of agents in the tasks of one experiment; optima are computed once."""

    def __init__(self, lifetimes: Any, key: jax.Array, count: int):
        self.names = lifetimes.family.task_names
        self._lifetimes, self._key, self._count = lifetimes, key, count
        self._optima = {}  # [L], by repetition

    def shares(self, agent: Any, params: types.PyTree, repetition: int) -> np.ndarray:
        """Returns mean shares of the optimum, `[tasks, S]`; each repetition has its own tasks."""
        key = jax.random.fold_in(self._key, repetition)
        lives = lifetime_evaluation.live(agent, self._lifetimes, params, key, self._count)
        if repetition not in self._optima:
            self._optima[repetition] = lives.optimum(self._lifetimes.family)
        for number, name in enumerate(self.names):
            if number not in lives.task:
                raise errors.UserError(f"--lifetimes: none of {self._count} was in task '{name}'")
        shares = lives.returns / self._optima[repetition][:, None]
        return np.stack([np.nanmean(shares[lives.task == n], 0) for n in range(len(self.names))])


def _only(arm: np.ndarray, count: int) -> jax.Array:
    """Returns logits, `[tasks, H]`, that select one arm for each kind of task, `[tasks]`."""
    return jnp.where(np.arange(count) == arm[:, None], 0.0, -jnp.inf)
