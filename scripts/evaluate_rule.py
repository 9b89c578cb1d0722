"""Judges the rule of an LPG run: python scripts/evaluate_rule.py --run_dir DIR [--save RULE.npz].

Agents are born, live in tasks that the rule was learnt in (or in those of --gin_file), and are
compared with the exact optimum of each task: at the beginning, in the middle and at the end of a
lifetime. Beside the rule stand a random one, and the same rule without its predictions.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agents.lpg import meta_training, rule_file
from podracers import command_line, errors, evaluation, lifetime_evaluation, types
from podracers.training import experiment, trained

_RESAMPLES = 2000  # of the bootstrap


def main() -> int:
    """Parses the command line, lets agents live, and prints what they reached."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", required=True)
    parser.add_argument("--gin_file", help="an experiment, in whose tasks the rule is judged")
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    parser.add_argument("--lifetimes", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--save", metavar="RULE.npz", help="also write the rule to a file")
    parser.add_argument("--best", action="store_true", help="the best evaluated checkpoint")
    arguments = parser.parse_args()
    command_line.use_compilation_cache()
    if arguments.lifetimes < 1:
        raise errors.UserError(f"--lifetimes: expected at least 1, got {arguments.lifetimes}")

    policy = trained.load(arguments.run_dir, arguments.best)
    agent = policy.parts.agent
    if not isinstance(agent, meta_training.LPG):
        raise errors.UserError(
            f"the run in '{arguments.run_dir}' is of {type(agent).__name__}, and LPG alone learns "
            "a rule"
        )
    if arguments.save:
        rule_file.save(arguments.save, agent.rule, policy.params.rule)
        print(f"{arguments.save}: the rule after {policy.step:,} lifetime steps")
    lifetimes = policy.parts.environment
    if arguments.gin_file or arguments.gin_bindings:
        files = [arguments.gin_file or f"{arguments.run_dir}/config.gin"]
        lifetimes = experiment.load(files, arguments.gin_bindings).build().environment
    for line in judge(agent, policy.params, lifetimes, policy.settings.seed, arguments.lifetimes):
        print(line)
    return 0


def judge(
    agent: meta_training.LPG, params: types.PyTree, lifetimes: Any, seed: int, count: int
) -> list[str]:
    """Returns lines of a table: shares of the optimum by kind of task, for three rules.

    Args:
      agent: of the rule.
      params: what it acts with.
      lifetimes: in whose tasks agents live, for as long as the longest of them.
      seed: of the tasks and of the random rule.
      count: lifetimes of each rule.
    """
    lifetimes = dataclasses.replace(lifetimes, min_periods=lifetimes.max_periods)
    agent = dataclasses.replace(agent, spec=lifetimes.spec)
    blind = dataclasses.replace(
        agent, sees_predictions=False, prediction_costs=(0.0,) * len(agent.prediction_costs)
    )
    # Tasks that the bandit does not know have the mean of those that it does.
    logits = jnp.mean(params.arm_logits, axis=0, keepdims=True)
    num_tasks = len(lifetimes.tasks.task_names)
    if params.arm_logits.shape[0] != num_tasks:
        params = params._replace(arm_logits=jnp.repeat(logits, num_tasks, axis=0))
    random_rule = params._replace(rule=agent.rule.init(jax.random.key(seed)))
    lines, optimum = [], None
    for name, who, what in [
        ("the rule", agent, params),
        ("a random rule", agent, random_rule),
        ("without predictions", blind, params),
    ]:
        lives = lifetime_evaluation.live(who, lifetimes, what, evaluation.run_key(seed), count)
        optimum = lives.optimum(lifetimes.tasks) if optimum is None else optimum
        shares = lives.returns / optimum[:, None]
        for number, task in enumerate(lifetimes.tasks.task_names):
            of_task = shares[lives.task == number]
            if len(of_task):
                curve = " ".join(f"{np.nanmedian(x):6.2f}" for x in of_task.T)
                low, high = _interval(of_task[:, -1])
                lines.append(
                    f"{name}, {task}: share of the optimum by tenth of a lifetime {curve}; at the "
                    f"end {np.nanmedian(of_task[:, -1]):.2f} [{low:.2f}, {high:.2f}] (median and "
                    f"95% interval over {len(of_task)} lifetimes)"
                )
    return lines


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of a median."""
    rng = np.random.default_rng(0)
    values = values[~np.isnan(values)]
    if not len(values):
        return np.nan, np.nan
    medians = np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)
    return tuple(np.percentile(medians, [2.5, 97.5]))


if __name__ == "__main__":
    command_line.run(main)
