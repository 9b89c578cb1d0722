"""Searches settings of an experiment with Optuna: podracers-sweep FILE.gin --space space.toml.

  PPO.learning_rate = {log = [1e-5, 1e-2]}
  PPO.epochs = {int = [1, 8]}
  PPO.gamma = {linear = [0.9, 0.999]}
  NUM_ENVS = {choice = [32, 64, 128]}

is a space. Every trial is a run in the study's folder, where best.gin and pictures are written at
the end. The first trial has the experiment's own values, if they are in the space. The same
command, here or on another machine, joins the study or resumes it. `--objective speed` searches the
fastest settings. See docs/sweeps.md.
"""

import argparse
import functools
import importlib.util
import pathlib

from podracers import errors
from podracers.commands import command_line
from podracers.training import gin_names


def main() -> int:
    """Parses the command line, and works on the study."""
    options = _parse()
    if importlib.util.find_spec("optuna") is None:
        raise errors.UserError("podracers-sweep needs optuna: pip install optuna cmaes")
    from podracers.scripts.sweeps import work  # noqa: PLC0415 (optuna is optional)

    return work.run(options)


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add, count = parser.add_argument, command_line.count
    add("gin_file", **command_line.SEVERAL, metavar="FILE.gin")
    add("--gin_bindings", **command_line.SEVERAL, metavar="'NAME = VALUE'")
    add("--runner", metavar="NAME", help="as of podracers-train")
    add("--space", type=pathlib.Path, required=True, metavar="FILE.toml")
    add("--trials", type=count, default=64, metavar="N", help="of the study (default: 64)")
    help_text = "of each trial: one program under Anakin (default: 1)"
    add("--seeds", type=count, default=1, metavar="N", help=help_text)
    help_text = "trials that train in one program, if they differ in floats of the agent alone"
    add("--batch", type=count, default=1, metavar="N", help=help_text)
    help_text = "a logged number (default: evaluation/return), or `speed`"
    add("--objective", default="evaluation/return", metavar="NAME", help=help_text)
    add("--last", type=count, default=3, metavar="N", help="values of it to average (default: 3)")
    add("--direction", choices=("maximize", "minimize"), default="maximize")
    add("--sampler", choices=("tpe", "cmaes", "random", "grid", "gp"), default="tpe")
    add("--sampler_seed", type=int, metavar="N", help="of the worker that begins the study")
    add("--pruner", choices=("none", "hyperband", "median"), default="none")
    help_text = "folder of the study and its runs (default: runs/sweeps/<experiment>)"
    add("--study", type=pathlib.Path, metavar="DIR", help=help_text)
    help_text = "database, such as postgresql+psycopg://HOST/NAME (default: a file in the folder)"
    add("--storage", metavar="URL", help=help_text)
    help_text = "between heartbeats in a database; a worker that misses two is lost"
    add("--heartbeat", type=count, default=60, metavar="SECONDS", help=help_text)
    options = parser.parse_args()
    options.gin_file = command_line.gin_files(options)
    stem = pathlib.Path(gin_names.find(options.gin_file[0])).stem
    options.study = (options.study or pathlib.Path("runs", "sweeps", stem)).resolve()
    return options


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
