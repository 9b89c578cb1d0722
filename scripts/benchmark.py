"""Measures speed: python scripts/benchmark.py [NAME ...] [--repeats N] [--json FILE].

Every rate is warm, in agent steps per second, with compilation apart; it is printed as a median
with the least and the most of several repeats. Where programs are compared, they take turns, and
the ratio is taken turn by turn: machines drift, ratios do not.

--compare OLD.json NEW.json says instead what became slower between two files of results. What is
worse by more than the tolerance counts as slower, and the exit code is 1 if anything is; a rate is
worse where it is lower, times and bytes where they are higher, as the files say. Where the repeats
of both files overlap, a difference may be noise, and that is said; --beyond_spread lets it pass.
Exit code 2: the files do not compare.
"""

import argparse
import math
import pathlib
import shlex
import sys

from benchmarks import records, registry, regressions
from results import markdown, reproduction
from tracing import ahead_of_time

from podracers import command_line, errors
from podracers.training import run_directory


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    names, add = [*registry.BENCHMARKS, *registry.GROUPS], parser.add_argument
    add(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all but device"
    )
    add("--repeats", type=command_line.count, default=7)
    add("--json", metavar="FILE")
    several = {"type": command_line.count, "nargs": "+", "metavar": "N"}
    about = "catch, cartpole_batches, snake_batches"
    add("--batches", **several, help=f"{about}, device: environments")
    seconds = "device_pong: how long to train at the most (default: 300)"
    add("--seconds", type=command_line.count, default=300, metavar="N", help=seconds)
    devices = f"{about}, scaling: on these numbers of fake devices; tpu: for 1, 4 or 8 chips"
    add("--devices", **several, default=[], help=devices)
    processes = "scaling_processes: in so many processes"
    add("--processes", **several, default=[1, 2, 4], help=processes)
    bindings = {"action": "append", "default": [], "metavar": "'NAME = VALUE'"}
    add(
        "--gin_bindings",
        **bindings,
        help="agents, replay, scaling, sebulba, tpu: over the experiment",
    )
    where = "tpu: where the TPU compiler is (see scripts/profiles.py --help); skipped without one"
    add("--libtpu", type=pathlib.Path, metavar="DIR", help=where)
    add("--compare", nargs=2, metavar=("OLD.json", "NEW.json"), help="measure nothing")
    add("--tolerance", type=_share, default=0.1, help="--compare: a share of the old median")
    spread = "--compare: count as slower only what is beyond the spread of repeats, where known"
    add("--beyond_spread", action="store_true", help=spread)
    add("--anyway", action="store_true", help="--compare: though the hardware differs")
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            raise errors.UserError(f"there is no benchmark '{name}'{errors.nearest(name, names)}")
    all_names = [name for name in registry.BENCHMARKS if name not in registry.GROUPS["device"]]
    chosen = [registry.GROUPS.get(name, (name,)) for name in options.names or all_names]
    options.chosen = bool(options.names)
    options.names = list(dict.fromkeys(name for names in chosen for name in names))
    return options


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a share of at least 0, got '{text}'")
    return value


def main() -> int:
    """Parses the command line; measures, prints and writes JSON, or compares."""
    options = _parse()
    if options.compare:
        old, new = options.compare
        how = (options.tolerance, options.beyond_spread, options.anyway)
        return int(regressions.compare((old, new), *how))
    command = shlex.join(["scripts/benchmark.py", *sys.argv[1:]])
    cpu = reproduction.processor()
    provenance = run_directory.provenance() | ({"cpu": cpu} if cpu else {})
    results = {}
    for name in options.names:
        try:
            results[name] = registry.BENCHMARKS[name](options)
        except ahead_of_time.NoCompilerError as error:
            if options.chosen:
                raise
            print(f"{name}: skipped: {error}")
            continue
        print(f"{name}: {results[name].about}")
        for row in results[name].rows:
            print(f"  {row.label}: {row.spread} {row.unit}", flush=True)
        # After each, for what was measured is not to be lost with what fails later.
        if options.json:
            record = records.Record(command, results, provenance)
            markdown.write(pathlib.Path(options.json), record.text())
    return 0


if __name__ == "__main__":
    command_line.run(main)
