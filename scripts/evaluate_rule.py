"""Evaluates rules of LPG: podracers-evaluate-rule --run_dir DIR [DIR ...] [--json FILE].

Agents learn by the rules in the tasks of meta-training, or in the tasks of --gin_file. Results are
shares of the exact optimum of each task, in each tenth of a lifetime; the table has the last one.
The rules are compared with

- A2C, tuned: tabular agents with as many environments, steps and updates, with the best learning
  rate and entropy cost of each kind of task, chosen in other tasks;
- the rules without predictions: agents do not learn them, and the rule does not read them;
- random rules, as many as there are rules.

Medians are over rules, of means over lifetimes, with 95% bootstrap intervals. Repetition n of every
learner has the same tasks.
"""

import argparse
import functools
import shlex
import sys

from agents.meta.lpg import rule_file
from podracers import errors
from podracers.commands import command_line
from podracers.scripts.results import rules
from podracers.training import experiment


def main() -> int:
    """Parses the command line, evaluates, and prints the table."""
    options = _parse()
    command_line.use_compilation_cache()
    agent, loaded = rules.load(options.run_dir)
    if options.save:
        if len(loaded) != 1:
            raise errors.UserError(f"--save: expected one rule, got {len(loaded)}")
        rule_file.save(options.save, agent.rule, loaded[0].params)
        print(f"{options.save}: the rule of {loaded[0].name}")
        return 0
    files = options.gin_file or [f"{options.run_dir[0]}/config.gin"]
    experiments = [experiment.load([file], options.gin_bindings) for file in files]
    lifetimes = [settings.build().environment for settings in experiments]
    tasks = []
    for file, environment in zip(files, lifetimes):
        tasks += rules.evaluate(agent, loaded, file, environment, options.lifetimes)
    steps, names = lifetimes[0].spec.max_episode_steps, [rule.name for rule in loaded]
    command = shlex.join(sys.argv[1:])
    evaluation = rules.Evaluation(command, names, options.lifetimes, steps, tasks)
    print(rules.table(evaluation), end="")
    if options.json:
        rules.write(evaluation, options.json)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add, several = parser.add_argument, command_line.SEVERAL
    add("--run_dir", **several, required=True, metavar="DIR", help="runs of LPG")
    file = "an experiment with tasks, or several (default: that of the first run)"
    add("--gin_file", **several, metavar="PATH", help=file)
    add("--gin_bindings", **several, metavar="'NAME = VALUE'")
    lifetimes = "of each rule and experiment (%(default)s)"
    add("--lifetimes", type=command_line.count, default=64, metavar="N", help=lifetimes)
    file, save = command_line.output_file, "write the rule to a file, without evaluation"
    add("--save", type=file, metavar="RULE.npz", help=save)
    add("--json", type=file, metavar="FILE", help="write results")
    return parser.parse_args()


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
