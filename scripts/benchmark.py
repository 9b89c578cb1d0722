"""Measures speed: python scripts/benchmark.py [NAME ...] [--repeats N] [--json FILE].

Rates are warm, in agent steps per second, without compilation, printed as the median and range of
several repeats. Programs that are compared take turns, and ratios are taken turn by turn.
"""

import argparse
import pathlib
import shlex
import sys

from benchmarks import records, registry
from results import reproduction
from tracing import ahead_of_time

from podracers import command_line, errors
from podracers.training import run_directory


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    names, add = [*registry.BENCHMARKS, *registry.GROUPS], parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all but device")
    add("--repeats", type=command_line.count, default=7)
    add("--json", type=pathlib.Path, metavar="FILE")
    several = {"type": command_line.count, "nargs": "+", "metavar": "N"}
    add("--batches", **several, help="environments of catch and device")
    add("--devices", **several, default=[], help="tpu: numbers of chips (default: 1)")
    bindings = {"action": "append", "default": [], "metavar": "'NAME = VALUE'"}
    add("--gin_bindings", **bindings, help="replay, sebulba, lpg, tpu, device: of the experiment")
    compiler = "tpu: folder of the TPU compiler (pip install --no-deps --target DIR libtpu==...)"
    add("--libtpu", type=pathlib.Path, metavar="DIR", help=compiler)
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            raise errors.UserError(f"no benchmark '{name}'{errors.nearest(name, names)}")
    options.by_name = bool(options.names)
    default = [name for name in registry.BENCHMARKS if name not in registry.GROUPS["device"]]
    chosen = [registry.GROUPS.get(name, (name,)) for name in options.names or default]
    options.names = list(dict.fromkeys(name for names in chosen for name in names))
    return options


def main() -> int:
    """Parses the command line, measures, prints and writes JSON."""
    options = _parse()
    command = shlex.join(["scripts/benchmark.py", *sys.argv[1:]])
    cpu = reproduction.processor()
    provenance = run_directory.provenance() | ({"cpu": cpu} if cpu else {})
    results = {}
    for name in options.names:
        try:
            results[name] = registry.BENCHMARKS[name](options)
        except ahead_of_time.NoCompilerError as error:
            if options.by_name:
                raise
            print(f"{name}: skipped: {error}")
            continue
        print(f"{name}: {results[name].about}")
        for row in results[name].rows:
            print(f"  {row.label}: {row.spread} {row.unit}", flush=True)
        if options.json:  # after each, so that a later failure loses nothing
            records.Record(command, results, provenance).write(options.json)
    return 0


if __name__ == "__main__":
    command_line.run(main)
