"""Measures speed: python scripts/benchmark.py [NAME ...] [--repeats N] [--json FILE].

Every rate is warm, in agent steps per second, with compilation apart; it is printed as a median
with the least and the most of several repeats. Where programs are compared, they take turns, and
the ratio is taken turn by turn: machines drift, ratios do not.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import anakin, replay, search, sebulba

from podracers import command_line, errors, run_directory

_REPLAY = {
    "dqn": "cartpole_dqn_anakin",
    "r2d2": "catch_r2d2_anakin",
    "sac": "pendulum_sac_anakin",
    "muzero": "catch_muzero_anakin",
}
_GROUPS = {
    "sebulba": ("sebulba_impala", "sebulba_ppo", "sebulba_environments"),
    "replay": tuple(_REPLAY),
}


def _catch(options: argparse.Namespace) -> dict[str, Any]:
    if options.devices:
        return anakin.benchmark_catch_on_devices(options.repeats, options.batches, options.devices)
    return anakin.benchmark_catch(options.repeats, options.batches)


def _repeated(benchmark: Callable[[int], dict[str, Any]]):
    return lambda options: benchmark(options.repeats)


def _with_bindings(benchmark, setting: sebulba.Setting):
    def run(options: argparse.Namespace) -> dict[str, Any]:
        bindings = tuple(options.gin_bindings)
        return benchmark(dataclasses.replace(setting, bindings=bindings), options.repeats)

    return run


def _of_agent(name: str):
    def run(options: argparse.Namespace) -> dict[str, Any]:
        return replay.benchmark_agent(name, options.repeats, tuple(options.gin_bindings))

    return run


_BENCHMARKS = {
    "cartpole": _repeated(functools.partial(anakin.benchmark_ppo, "cartpole")),
    "breakout": _repeated(functools.partial(anakin.benchmark_ppo, "breakout")),
    "breakdown": _repeated(anakin.benchmark_breakdown),
    "overhead": _repeated(anakin.benchmark_overhead),
    "catch": _catch,
    "resets": _repeated(anakin.benchmark_resets),
    "startup": _repeated(anakin.benchmark_startup),
    "sebulba_impala": _with_bindings(sebulba.benchmark_learning, sebulba.IMPALA),
    "sebulba_ppo": _with_bindings(sebulba.benchmark_learning, sebulba.PPO),
    "sebulba_environments": _with_bindings(sebulba.benchmark_environments, sebulba.ENVIRONMENTS),
    "search": _repeated(search.benchmark_search),
    **{agent: _of_agent(name) for agent, name in _REPLAY.items()},
}


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*_BENCHMARKS, *_GROUPS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[], help="catch: on these numbers of fake devices"
    )
    parser.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="sebulba, replay: over those of the experiment",
    )
    parser.add_argument("--quiet", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            raise errors.UserError(f"there is no benchmark '{name}'{errors.nearest(name, names)}")
    chosen = [_GROUPS.get(name, (name,)) for name in options.names or _BENCHMARKS]
    options.names = list(dict.fromkeys(name for names in chosen for name in names))
    return options


def main() -> None:
    """Parses the command line, measures, prints and writes JSON."""
    options = _parse()
    results = {}
    for name in options.names:
        results[name] = _BENCHMARKS[name](options)
        if not options.quiet:
            print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    record = {"command": " ".join(["scripts/benchmark.py", *sys.argv[1:]]), "results": results}
    record |= run_directory.provenance()
    if options.quiet:
        print(json.dumps(record))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    command_line.run(main)
