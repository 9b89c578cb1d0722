"""Profiles an experiment: python scripts/profiles.py --gin_file PATH --out DIR.

A few updates are traced by the JAX profiler. Under Anakin, the time of the one program is divided
among acting, environments and learning; under Sebulba, that of each thread among its activities.
Both are printed, drawn as DIR/NAME.png, and written as DIR/NAME.json.

With --compile_for v5e:2x2 nothing runs, and no TPU is needed: programs are compiled for one chip
of such a TPU, or for --num_devices, and what the compiler says of their memory and cycles is
printed and written as DIR/NAME.json. The compiler is the package libtpu, in the version that
jax[tpu] asks for, best in a folder of its own: pip install --no-deps --target DIR libtpu==VERSION,
and --libtpu DIR.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys

import jax
from results import markdown, plotting
from tracing import ahead_of_time, pages, pictures, profiling

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
    if options.compile_for:
        ahead_of_time.find_compiler(options.libtpu)
        devices = ahead_of_time.devices(options.compile_for, options.num_devices)
    else:
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
    figure = None
    if options.compile_for:
        record |= {"topology": options.compile_for, "num_devices": options.num_devices}
        found = ahead_of_time.estimate(runner, seed, devices)
        record["estimate"] = ahead_of_time.plain(found)
    elif is_anakin:
        record |= profiling.profile_program(runner, seed, options.warm_up, options.updates or 2)
        figure = pictures.draw_program(record["program"], name)
    else:
        how = (options.warm_up, options.updates or 4, options.lag or [runner.lag])
        record |= profiling.profile_threads(runner, seed, *how)
        figure = pictures.draw_threads(record["threads"], name)
    text = pages.text(record)
    print(text, end="")
    markdown.write(options.out / f"{name}.json", json.dumps(record) + "\n")
    if figure:
        plotting.save(figure, options.out / f"{name}.png")
    if options.page:
        page = markdown.fill(markdown.read(options.page), {name: f"\n{text}\n"})
        markdown.write(options.page, page)


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
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
        "--warm_up",
        type=command_line.count,
        default=20,
        metavar="N",
        help="updates before anything is measured",
    )
    parser.add_argument(
        "--updates",
        type=command_line.count,
        metavar="N",
        help="of each dispatch under Anakin (default: 2), in all under Sebulba (default: 4)",
    )
    parser.add_argument(
        "--lag",
        type=int,
        nargs="+",
        metavar="L",
        help="of Sebulba, one after the other (default: the experiment's)",
    )
    parser.add_argument(
        "--compile_for", metavar="TOPOLOGY", help="estimate for such TPUs, for example v5e:2x2"
    )
    parser.add_argument(
        "--num_devices",
        type=command_line.count,
        default=1,
        metavar="N",
        help="of the topology (default: 1)",
    )
    parser.add_argument(
        "--libtpu",
        type=pathlib.Path,
        metavar="DIR",
        help="where the TPU compiler is; default: an installed one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run(main)
