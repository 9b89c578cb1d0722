"""Judges rules of LPG: python scripts/evaluate_rule.py --run_dir DIR [DIR ...] [--json FILE].

Agents are born, and live in tasks that their rule was learnt in, or in those of --gin_file. What
they reach is a share of the exact optimum of each task: in every tenth of a lifetime, the last one
in the table. Beside the rules stand

- A2C, tuned: tabular agents with as many environments, steps and updates. Each combination of a
  learning rate and an entropy cost lives through as many lifetimes as a rule, in other tasks of the
  same kind, and the best one of each kind of task is judged. A rule is not tuned: its bandit has
  chosen learning rates in meta-training.
- the rules without predictions: agents do not learn them, and the rule does not see them.
- random rules, as many as there are rules.

Rules are the sample: medians over rules of means over lifetimes, with 95% bootstrap intervals.
Repetition n of every contender lives in the same tasks.
"""

import argparse
import dataclasses
import pathlib
import shlex
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from results import rules as results

from agents.meta import lifetime_evaluation
from agents.meta.lpg import meta_training, rule_file, tabular_a2c
from podracers import command_line, errors, evaluation, types
from podracers.training import experiment, trained


class Rule(NamedTuple):
    """A rule, and what meta-training found of hyper-parameters of agents."""

    name: str  # what it was read from
    params: types.PyTree
    arm_logits: dict[str, jax.Array]  # [H] by kind of task; none where a file does not know

    def actor_params(self, tasks: tuple[str, ...], num_arms: int) -> meta_training.ActorParams:
        """Returns what agents live by; of unknown tasks they know the mean of all others."""
        known = list(self.arm_logits.values()) or [jnp.zeros((num_arms,))]
        mean = jnp.mean(jnp.stack(known), axis=0)
        logits = jnp.stack([self.arm_logits.get(task, mean) for task in tasks])
        return meta_training.ActorParams(self.params, logits)


def main() -> int:
    """Parses the command line, lets agents live, and prints what they reached."""
    arguments = _parse()
    command_line.use_compilation_cache()
    files = arguments.gin_file or [f"{path}/config.gin" for path in arguments.run_dir[:1]]
    if not files:
        raise errors.UserError("the file of a rule knows no tasks: name an experiment (--gin_file)")
    experiments = [experiment.load([file], arguments.gin_bindings) for file in files]
    agent, rules = _load(arguments, experiments[0])
    if arguments.save:
        if len(rules) != 1:
            raise errors.UserError(f"--save: expected one rule, got {len(rules)}")
        rule_file.save(arguments.save, agent.rule, rules[0].params)
        print(f"{arguments.save}: the rule of {rules[0].name}")
        return 0
    lifetimes = [each.build().environment for each in experiments]
    tasks = [
        task
        for file, each in zip(files, lifetimes)
        for task in judge(agent, rules, file, each, arguments.seed, arguments.lifetimes)
    ]
    steps = lifetimes[0].spec.max_episode_steps
    command = shlex.join(sys.argv[1:])
    names = [rule.name for rule in rules]
    found = results.Judgement(command, names, arguments.lifetimes, steps, tasks)
    print(results.table(found), end="")
    if arguments.json:
        results.write(found, arguments.json)
    if arguments.picture:
        results.draw(found, arguments.picture)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--run_dir", **several, metavar="DIR", help="runs of LPG")
    parser.add_argument("--rule", **several, metavar="RULE.npz", help="files of rules")
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="PATH",
        help="an experiment, in whose tasks rules are judged; may be given several times "
        "(default: that of the first run)",
    )
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    parser.add_argument(
        "--lifetimes", type=int, default=64, help="of each rule and experiment (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of tasks and of random rules")
    parser.add_argument("--best", action="store_true", help="the best evaluated checkpoint")
    parser.add_argument(
        "--save", metavar="RULE.npz", help="write the rule to a file, and judge nothing"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write results")
    parser.add_argument("--picture", type=pathlib.Path, metavar="FILE.png", help="draw curves")
    arguments = parser.parse_args()
    if arguments.lifetimes < 1:
        raise errors.UserError(f"--lifetimes: expected at least 1, got {arguments.lifetimes}")
    if not arguments.run_dir and not arguments.rule:
        raise errors.UserError("which rules? name runs (--run_dir) or files (--rule)")
    return arguments


def _load(
    arguments: argparse.Namespace, settings: experiment.Experiment
) -> tuple[meta_training.LPG, list[Rule]]:
    """Returns all rules, and what they were learnt by: without a run, that of the experiment."""
    policies = [trained.load(path, arguments.best) for path in arguments.run_dir]
    agents = [policy.parts.agent for policy in policies] or [settings.build().agent]
    for path, agent in zip([*arguments.run_dir, *arguments.gin_file], agents):
        if not isinstance(agent, meta_training.LPG):
            raise errors.UserError(
                f"'{path}' is of {type(agent).__name__}, and LPG alone learns a rule"
            )
        for field in dataclasses.fields(agent):
            mine, first = (getattr(each, field.name) for each in (agent, agents[0]))
            if field.name != "spec" and mine != first:
                raise errors.UserError(
                    f"'{path}' is of another rule than the first one: LPG.{field.name} is "
                    f"{mine!r}, expected {first!r}"
                )
    rules = []
    for path, policy in zip(arguments.run_dir, policies):
        arms = dict(zip(policy.parts.environment.tasks.task_names, policy.params.arm_logits))
        rules.append(Rule(f"{path} at step {policy.step:,}", policy.params.rule, arms))
    for path in arguments.rule:
        rule, params = rule_file.load(path)
        if rule != agents[0].rule:
            raise errors.UserError(
                f"'{path}' is of another rule: expected {agents[0].rule}, got {rule}"
            )
        rules.append(Rule(path, params, {}))
    return agents[0], rules


def judge(
    agent: meta_training.LPG, rules: list[Rule], file: str, lifetimes: Any, seed: int, count: int
) -> list[results.Task]:
    """Returns shares of the optimum by kind of task, of rules and of who is compared with them.

    Args:
      agent: what the rules were learnt by.
      rules: are judged.
      file: the experiment.
      lifetimes: in whose tasks agents live, for as long as the longest of them.
      seed: of tasks and of random rules.
      count: lifetimes of each repetition.
    """
    lifetimes = dataclasses.replace(lifetimes, min_periods=lifetimes.max_periods)
    trial = _Trial(lifetimes, evaluation.run_key(seed), count)
    agent = dataclasses.replace(agent, spec=lifetimes.spec)
    params = [rule.actor_params(trial.names, len(agent.arms)) for rule in rules]
    blind = dataclasses.replace(
        agent, sees_predictions=False, prediction_costs=(0.0,) * len(agent.prediction_costs)
    )
    by_hand = tabular_a2c.TabularA2C(
        lifetimes.spec,
        agent.chunk_length,
        agent.gamma,
        agent.gae_lambda,
        agent.critic_step_size,
    )
    candidates, best = _tune(by_hand, trial, len(params))
    chosen = _only(best, len(by_hand.arms))
    shares = {name: [] for name in results.CONTENDERS}
    for number, each in enumerate(params):
        random = each._replace(rule=agent.rule.init(jax.random.key(seed + number)))
        for name, who, what in [
            (results.RULE, agent, each),
            (results.A2C, by_hand, chosen),
            (results.BLIND, blind, each),
            (results.RANDOM, agent, random),
        ]:
            shares[name].append(trial.shares(who, what, number))
    optimum = np.nanmean([trial.optimum(number) for number in range(len(params))], axis=0)
    return [
        results.Task(
            file,
            name,
            float(optimum[task]),
            {who: [curves[task].tolist() for curves in each] for who, each in shares.items()},
            tuple(map(float, by_hand.arms[best[task]])),
            [(*map(float, arm), float(x)) for arm, x in zip(by_hand.arms, candidates[:, task])],
        )
        for task, name in enumerate(trial.names)
    ]


class _Trial:
    """Lifetimes of agents in the tasks of one experiment; optima are computed once."""

    def __init__(self, lifetimes: Any, key: jax.Array, count: int):
        self.names = lifetimes.tasks.task_names
        self._lifetimes, self._key, self._count = lifetimes, key, count
        self._optima = {}  # [L] by repetition

    def shares(self, agent: Any, params: types.PyTree, repetition: int) -> np.ndarray:
        """Returns the mean share of the optimum `[tasks, S]`; a repetition has tasks of its own."""
        key = jax.random.fold_in(self._key, repetition)
        lives = lifetime_evaluation.live(agent, self._lifetimes, params, key, self._count)
        if repetition not in self._optima:
            self._optima[repetition] = lives.task, lives.optimum(self._lifetimes.tasks)
        for number, name in enumerate(self.names):
            if number not in lives.task:
                raise errors.UserError(
                    f"--lifetimes: none of {self._count} was in the task '{name}'; name more"
                )
        shares = lives.returns / self._optima[repetition][1][:, None]
        return np.stack([np.nanmean(shares[lives.task == n], 0) for n in range(len(self.names))])

    def optimum(self, repetition: int) -> np.ndarray:
        """Returns the mean optimum of each kind of task, of a repetition that was lived."""
        task, optimum = self._optima[repetition]
        return np.array([np.mean(optimum[task == n]) for n in range(len(self.names))])


def _tune(
    agent: tabular_a2c.TabularA2C, trial: _Trial, repetition: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what each combination reaches at the end, `[H, tasks]`, and the best, `[tasks]`."""
    count, tasks = len(agent.arms), len(trial.names)
    reached = [
        trial.shares(agent, _only(np.full(tasks, arm), count), repetition)[:, -1]
        for arm in range(count)
    ]
    return np.stack(reached), np.argmax(reached, axis=0)


def _only(arm: np.ndarray, count: int) -> jax.Array:
    """Returns logits `[tasks, H]` by which one arm is drawn for each kind of task, `[tasks]`."""
    return jnp.where(np.arange(count) == arm[:, None], 0.0, -jnp.inf)


if __name__ == "__main__":
    command_line.run(main)
