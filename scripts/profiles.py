"""Profiles an experiment: python scripts/profiles.py --gin_file PATH --out DIR.

A few updates are traced by the JAX profiler. Under Anakin, the time of the one program is divided
among acting, environments and learning; under Sebulba, that of each thread among its activities.
Both are printed, drawn as DIR/NAME.png, and written as DIR/NAME.json.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys

import jax
from results import markdown, plotting
from tracing import pages, pictures, profiling

from podracers import anakin, command_line, errors
from podracers.training import experiment, run_directory


def main() -> None:
    """Parses the command line, measures, prints, draws and writes."""
    options = _parse()
    command_line.use_compilation_cache()
    # The names of the parts are metadata: a program from before they were given has others.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    settings = experiment.load(command_line.gin_files(options), options.gin_bindings, print)
    runner_name = settings.runner.__name__.lower()
    name = options.name or f"{pathlib.Path(options.gin_file[0]).stem}_{runner_name}"
    if options.page:  # before it is measured
        markdown.fill(markdown.read(options.page), {name: ""})
    parts = settings.build()
    runner, seed = parts.runner, settings.seed
    is_anakin = isinstance(runner, anakin.Anakin)
    if is_anakin and options.lag:
        raise errors.UserError("--lag is of Sebulba, and this experiment runs under Anakin")
    experiment.check(parts, seed)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"cannot make '{options.out}': {error.strerror}") from error
    record = {
        "command": shlex.join(["python", "scripts/profiles.py", *sys.argv[1:]]),
        "load": os.getloadavg()[0],
        "agent_steps": runner.steps_per_update,
        **run_directory.provenance(),
    }
    if is_anakin:
        how = (options.warm_up, options.updates or 2, options.dispatches)
        record |= profiling.profile_program(runner, seed, *how)
        figure = pictures.draw_program(record["program"], name)
    else:
        how = (options.warm_up, options.updates or 4, options.lag or [runner.lag])
        record |= profiling.profile_threads(runner, seed, *how)
        figure = pictures.draw_threads(record["threads"], name)
    text = pages.text(record)
    print(text, end="")
    markdown.write(options.out / f"{name}.json", json.dumps(record) + "\n")
    plotting.save(figure, options.out / f"{name}.png")
    if options.page:
        page = markdown.fill(markdown.read(options.page), {name: f"\n{text}\n"})
        markdown.write(options.page, page)


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_experiment(required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--name", help="of the files; default: <experiment>_<runner>")
    parser.add_argument(
        "--page",
        type=pathlib.Path,
        metavar="FILE.md",
        help="put the tables there, between <!-- begin: NAME --> and <!-- end: NAME -->",
    )
    parser.add_argument(
        "--warm_up", type=int, default=20, metavar="N", help="updates before anything is measured"
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="of each dispatch under Anakin (default: 2), in all under Sebulba (default: 4)",
    )
    parser.add_argument(
        "--dispatches", type=int, default=3, metavar="N", help="that Anakin's trace is made of"
    )
    parser.add_argument(
        "--lag",
        type=int,
        nargs="+",
        metavar="L",
        help="of Sebulba, one after the other (default: the experiment's)",
    )
    options = parser.parse_args()
    for name in ("warm_up", "updates", "dispatches"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise errors.UserError(f"--{name}: expected at least 1, got {value}")
    return options


if __name__ == "__main__":
    command_line.run(main)
