r"""Searches the fastest settings of an experiment's runner on this machine.

  podracers-tune --gin_file gin/experiments/cartpole_ppo.gin --out tuned.gin

measures settings, each in its own process, and writes the fastest as a file to add after the
experiment's own:

  podracers-train --gin_file gin/experiments/cartpole_ppo.gin --gin_file tuned.gin

The search starts with the experiment's values, and follows one parameter after the other. At the
end the start and the best are measured again, alternately; unless the best wins each time, the file
changes nothing. Settings that do not divide, or use too much memory or time, are skipped. Ctrl-C
keeps the best so far.

num_envs and rollout_length change learning, not only its speed: see docs/evidence.md.
rollout_length is searched only if --parameters names it; name parameters without num_envs to leave
learning unchanged.
"""

import argparse
import dataclasses
import datetime
import functools
import inspect
import shlex
import signal
import sys
import tempfile
import textwrap

from podracers.commands import command_line
from podracers.scripts.results import markdown
from podracers.scripts.tuning import candidates, search, trial
from podracers.training import experiment


def main() -> int:
    """Parses the command line, searches, and writes the file."""
    options = _parse()
    runner = inspect.unwrap(experiment.load(options.gin_file, options.gin_bindings).runner_class())
    assert isinstance(runner, type)
    assert dataclasses.is_dataclass(runner)
    fields = [field.name for field in dataclasses.fields(runner)]
    choices = candidates.parse(options.parameters, fields, runner.__name__)
    name = f"{runner.__module__}.{runner.__qualname__}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    with tempfile.TemporaryDirectory(prefix="tune-") as cache:  # each program compiles once
        result, facts = search.run(options, name, choices, cache)
    markdown.write(options.out, _file(result, facts, runner))
    print("\n".join([*result.verdict(), f"{options.out}: add it after the experiment"]))
    return 0


def _file(result: search.Search, facts: trial.Facts, runner: type) -> str:
    """Returns the .gin file of the chosen settings, with the measurements in comments."""
    record = facts.provenance
    lines = [
        f"Made by: {shlex.join(['podracers-tune', *sys.argv[1:]])}",
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {record['device']}, {facts.num_cores} cores, "
        f"jax {record['versions'].get('jax')}, commit {record['commit']}",
        "For this experiment on this machine; add it after the experiment's own file.",
        "num_envs and rollout_length: other values change learning, and periods.",
    ]
    for settings, outcome in result.measured:
        lines.append(f"  {search.describe(settings, result.start)}: {outcome.text}")
    wrapped = [part for line in [*lines, *result.verdict()] for part in textwrap.wrap(line, 98)]
    package, _, module = runner.__module__.rpartition(".")
    text = "".join(f"# {line}\n" for line in wrapped)
    text += f"from __gin__ import dynamic_registration\n\nfrom {package} import {module}\n\n"
    for field, value in candidates.fields(result.chosen, result.start, facts.num_devices).items():
        text += f"{module}.{runner.__name__}.{field} = {value!r}\n"
    return text


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    parser.add_experiment(required=True)
    add = parser.add_argument
    file = command_line.output_file
    add("--out", type=file, default="tuned.gin", metavar="PATH", help="default: %(default)s")
    add("--minutes", type=command_line.count, default=5, help="limit of the search (default: 5)")
    memory = "limit of a candidate on the host (default: 80%% of its memory)"
    add("--memory", type=float, metavar="GB", help=memory)
    names = f"of {', '.join(candidates.FIELDS)}, with or without values to try"
    add("--parameters", **command_line.SEVERAL, metavar="NAME[=V,V]", help=names)
    options = parser.parse_args()
    options.gin_file = command_line.gin_files(options)
    return options


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
