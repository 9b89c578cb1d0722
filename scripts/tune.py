r"""Finds the settings of an experiment's runner that are fastest on this machine.

  python scripts/tune.py --gin_file gin/experiments/cartpole_ppo.gin --out tuned.gin

measures candidates, each in a process of its own, and writes the fastest as a file to add after the
experiment's own:

  python scripts/train.py --gin_file gin/experiments/cartpole_ppo.gin --gin_file tuned.gin

The search begins with the experiment's own values, and goes along one parameter after the other. At
the end the start and the best are measured again, turn by turn; where the best does not win each
time, the start's values are written. A candidate that does not divide, takes too much memory or too
long is skipped. Ctrl-C keeps the best so far.

num_envs and rollout_length change what is learnt from how many agent steps, not only how fast they
come: see docs/evidence.md. rollout_length is searched only where --parameters names it; name the
parameters without num_envs to leave learning as it is.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re
import shlex
import signal
import sys

import rich.console
from tuning import candidates, tuner

from podracers import command_line, errors
from podracers.training import experiment

_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def main() -> int:
    """Parses the command line, searches, and writes what was found."""
    arguments = _parse()
    console = rich.console.Console(highlight=False, soft_wrap=True)
    runner = experiment.load(arguments.gin_file, arguments.gin_bindings).runner
    fields = [field.name for field in dataclasses.fields(runner)]
    wanted = arguments.parameters or [
        n for n in candidates.available(fields) if n != "rollout_length"
    ]
    choices = [candidates.Choice.parse(text, fields, runner.__name__) for text in wanted]
    if not choices:
        raise errors.UserError(f"{runner.__name__} has none of {', '.join(candidates.PARAMETERS)}")
    # SIGTERM keeps the best so far, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    search = tuner.Tuner(arguments, f"{runner.__module__}.{runner.__qualname__}", choices, console)
    if arguments.dry_run:
        search.list_candidates()
        return 0
    out = pathlib.Path(arguments.out)
    if out.is_dir() or not os.access(out.parent, os.W_OK):  # found before minutes are spent
        raise errors.UserError(f"--out: cannot write '{out}'")
    search.run()
    search.write(out, shlex.join(["python", "scripts/tune.py", *sys.argv[1:]]))
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    parser.add_experiment(required=True)
    parser.add_argument("--out", default="tuned.gin", metavar="PATH", help="default: tuned.gin")
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long (default: 5)")
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="the most that a candidate may take, such as 8GB: of a device that has memory of its "
        "own, else of the host (default: four fifths of the host's)",
    )
    parser.add_argument(
        "--parameters",
        nargs="+",
        metavar="NAME[=V,V]",
        help=f"what to search, of {', '.join(candidates.PARAMETERS)}, perhaps with the values to "
        "try; default: all that the runner has but rollout_length, which, as num_envs does, "
        "changes what is learnt",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="length of a measurement (default: 1)"
    )
    parser.add_argument("--dry_run", action="store_true", help="list what is tried first")
    arguments = parser.parse_args()
    arguments.gin_file = command_line.gin_files(arguments)
    for name in ("minutes", "seconds"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise errors.UserError(f"--{name}: expected more than 0, got {value:g}")
    return arguments


def _bytes(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GB or 500MB, got '{text}'")
    size = _UNITS[found[2]]
    return float(found[1]) * (1024 ** round(math.log(size, 1000)) if found[3] else size)


if __name__ == "__main__":
    command_line.run(main)
