"""Evaluations of learnt update rules: JSON files and a table.

`N` kinds of tasks, `R` rules, `S` segments of a lifetime.
"""

import dataclasses
import json
import pathlib

import numpy as np
from results import aggregates, markdown

from podracers import errors

RULE = "the rule"
A2C = "A2C, tuned"
BLIND = "the rule without predictions"
RANDOM = "random rule"
CONTENDERS = (RULE, A2C, BLIND, RANDOM)


@dataclasses.dataclass(frozen=True)
class Task:
    """Results in one kind of task.

    Attributes:
      experiment: its file.
      name: of the task.
      optimum: mean over the sampled tasks of the highest expected return.
      shares: shares of the optimum, `[R][S]` by contender, means over lifetimes. A2C and the random
        rules have a repetition for each rule, in the tasks of that rule.
      a2c: the best learning rate and entropy cost of A2C.
      candidates: `(learning rate, entropy cost, share of the optimum at the end)` of all others.
    """

    experiment: str
    name: str
    optimum: float
    shares: dict[str, list[list[float]]]
    a2c: tuple[float, float]
    candidates: list[tuple[float, float, float]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of one command of scripts/evaluate_rule.py.

    Attributes:
      command: arguments of the script.
      rules: sources of the rules.
      lifetimes: of each rule and each experiment, in all kinds of tasks.
      steps: of each environment in a lifetime.
      tasks: results.
    """

    command: str
    rules: list[str]
    lifetimes: int
    steps: int
    tasks: list[Task]


def write(found: Evaluation, path: pathlib.Path) -> None:
    """Writes results as JSON, with four decimal places."""
    entries = dataclasses.asdict(found)
    for task in entries["tasks"]:
        task["optimum"] = round(task["optimum"], 4)
        task["shares"] = {name: np.round(x, 4).tolist() for name, x in task["shares"].items()}
        task["a2c"] = np.round(task["a2c"], 4).tolist()
        task["candidates"] = np.round(task["candidates"], 4).tolist()
    markdown.write(path, json.dumps(entries) + "\n")


def read(path: pathlib.Path) -> Evaluation:
    """Returns a file of results; raises errors.UserError if it has another schema."""
    try:
        entries = json.loads(markdown.read(path))
        tasks = [Task(**(task | {"a2c": tuple(task["a2c"])})) for task in entries.pop("tasks")]
        return Evaluation(**entries, tasks=tasks)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.UserError(
            f"'{path}': expected results of scripts/evaluate_rule.py ({error})"
        ) from error


def table(found: Evaluation) -> str:
    """Returns shares of the optimum at the end of a lifetime, as Markdown."""
    contenders = [name for name in CONTENDERS if name in found.tasks[0].shares]
    lines = []
    for task in found.tasks:
        cells = [f"`{task.name}` of `{pathlib.Path(task.experiment).stem}`"]
        for name in contenders:
            last = [curve[-1] for curve in task.shares[name]]  # of each rule
            each = aggregates.bootstrap([last], np.median)
            bounds = "" if each.interval is None else " [{:.2f}, {:.2f}]".format(*each.interval)
            cells.append(f"{each.value:.2f}{bounds}")
        lines.append([*cells, f"{task.a2c[0]:g}, {task.a2c[1]:g}"])
    headings = ["task", *contenders, "A2C's learning rate, entropy cost"]
    return (
        markdown.table(headings, lines)
        + f"\n{len(found.rules)} rule(s), {found.lifetimes} lifetimes each in every experiment, of "
        f"{found.steps:,} steps of each environment: "
        f"`python scripts/evaluate_rule.py {found.command}`.\n"
    )
